"""Reads JSON files of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path


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
