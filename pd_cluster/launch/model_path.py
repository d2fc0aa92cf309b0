"""Which directory a `--model` means."""

from __future__ import annotations

from pathlib import Path

import pd_cluster
from pd_cluster.errors import StartupError

DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no .bin: pickles can run code


def resolve_model(model: str) -> Path:
    """The directory of `model`: the demo model for "", a directory as given, else a hub id (downloaded, or cached).

    Raises StartupError saying what to change.
    """
    path = Path(model).expanduser() if model else DEMO_MODEL
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(f"{path} is no model directory: it has no config.json")
        return path.resolve()
    if not model or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise StartupError(f"there is no model directory {path} (a hub id looks like `organisation/name`)")
    return _download(model)


def served_name(model: str, path: Path) -> str:
    """The API's name for the model: a hub id as given, else the directory's name."""
    return model if model and not Path(model).expanduser().is_dir() else path.name


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except RepositoryNotFoundError as error:
        raise StartupError(f"{model} is neither a directory here nor a model on the hub that you may read") from error
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"{model} is no directory here, is not in the hub cache, and the hub cannot be reached: "
            "give --model a directory, or download the model where there is a network"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise StartupError(f"downloading {model} failed: {error}") from error
