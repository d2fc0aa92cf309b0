"""A model's directory. Imports no torch: the API process uses it for the tokenizer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pd_cluster
from pd_cluster.errors import StartupError

BUNDLED = ("demo_model", "tool_model")  # they come with the package; the first is the default
_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def model_directory(model: str) -> Path:
    """The directory of `model`: a path, a hub id (downloaded when not cached), or the name of a bundled model.

    Raises StartupError when `model` is none of these, or cannot be downloaded.
    """
    path = Path(os.path.expanduser(model or BUNDLED[0]))  # a Path raises without a home
    if model and path.is_dir():
        return path
    if str(path) in BUNDLED:
        return Path(pd_cluster.__file__).parent / path
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise StartupError(f"model {model!r} is neither a directory nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(
            f"model {model!r} is not a directory and cannot be downloaded from the hub: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises StartupError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StartupError(f"{path.parent} has no {path.name}: is it a Hugging Face model directory?") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} does not hold a JSON object")
    return content
