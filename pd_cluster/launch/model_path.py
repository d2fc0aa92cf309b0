"""Resolves `--model` to a directory and to the model's name in the API."""

from __future__ import annotations

import os
from pathlib import Path

import pd_cluster
from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory
from pd_cluster.models.model_files import directory_problem, file_problem

DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"


def resolve_model(model: str) -> Path:
    """The absolute directory of `model` ("": the demo model). Raises StartupError."""
    if model and (file := Path(model).expanduser()).is_file():
        raise StartupError(file_problem(file))
    path = model_directory(model)
    if problem := directory_problem(path):
        raise StartupError(problem)
    return path.resolve()


def served_name(model: str, path: Path) -> str:
    """The API's name for the model: a hub id as given, else the directory's name."""
    return model if model and not os.path.isdir(os.path.expanduser(model)) else path.name
