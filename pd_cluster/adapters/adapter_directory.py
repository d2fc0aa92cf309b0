"""Where the files of an adapter are, as the command line names it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.adapters.adapter_bytes import CONFIG, WEIGHTS
from pd_cluster.errors import StartupError
from pd_http.names import MAX_NAME_CHARS, is_name

if TYPE_CHECKING:
    from collections.abc import Iterable


def named_directories(given: Iterable[str]) -> dict[str, Path]:
    """The directories of `--lora NAME=DIR ...`, by name; a hub id is downloaded. Raises StartupError."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, directory = text.partition("=")
        if not (equals and directory and is_name(name)):
            raise StartupError(f"--lora {text}: write NAME=DIR, with a name of up to {MAX_NAME_CHARS} ASCII characters")
        if name in found:
            raise StartupError(f"--lora: the name {name} is given twice")
        path = Path(os.path.expanduser(directory))
        found[name] = path.resolve() if path.is_dir() else _download(directory)
    return found


def _download(hub_id: str) -> Path:
    if hub_id.startswith((".", "/", "~")) or hub_id.count("/") != 1:
        raise StartupError(f"--lora: {hub_id!r} is neither a directory nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=[CONFIG, WEIGHTS])).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ImportError, ValueError) as error:
        why = " ".join(str(error).split())
        raise StartupError(
            f"--lora: {hub_id!r} is not a directory and cannot be downloaded from the hub: {why}"
        ) from error
