"""A model's directory. Imports no torch: the API process uses it for the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pd_cluster
from pd_cluster.errors import StartupError
from pd_cluster.models.hub import download
from pd_cluster.models.json_files import read_json

__all__ = ["BUNDLED", "model_directory", "read_json"]

BUNDLED = ("demo_model", "tool_model")  # they come with the package; the first is the default


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
        raise StartupError(
            f"model {model!r} is neither a directory nor a hub id of the form owner/name: there is no such path"
        )
    return download(model)
