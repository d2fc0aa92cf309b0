"""Where the files of an adapter are: as the command line names it, or an order, which may only go below a directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.adapters.adapter_bytes import CONFIG, WEIGHTS
from pd_cluster.errors import BadAdapter, StartupError
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


def directory_below(root: str, given: str) -> Path:
    """The directory `given` below `root`, where neither `..` nor a link leads out. `read_adapter` looks at its files.

    Raises BadAdapter. It tells a client nothing of what is outside.
    """
    try:
        top = Path(root).resolve(strict=True)
        if not Path(os.path.realpath(top / given)).is_relative_to(top):  # whatever is there, or is not
            raise BadAdapter(f"{given!r} leads out of --lora-dir: only what is below it can be loaded")
        return (top / given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # the last two: a NUL in the path, links in a circle
        raise BadAdapter(f"there is no directory {given!r} below --lora-dir") from error


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
