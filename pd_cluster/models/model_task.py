"""What a model is served for: generating text, vectors of texts, or scores of documents. Imports no torch.

A model's own files say it, as sentence-transformers writes them: `modules.json` lists the steps after the decoder.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.directory import read_json
from pd_cluster.models.wrapper import text_config

if TYPE_CHECKING:
    from pathlib import Path

GENERATE, EMBED, SCORE = "generate", "embed", "score"
_SERVED_MODULES = ("Transformer", "Pooling", "Normalize", "LogitScore")
_LAST_TOKEN = "lasttoken"


@dataclass(frozen=True, slots=True)
class ModelTask:
    """The task, and what the model's files say about it."""

    name: str = GENERATE
    hidden_size: int = 0  # EMBED: of a vector
    is_normed: bool = True  # EMBED: vectors have length 1
    yes_id: int | None = None  # SCORE: the token that means a relevant document; None: the files do not say
    no_id: int | None = None  # and the one that means the opposite; None: `yes_id` alone counts, if that is known


def read_task(wanted: str, directory: Path) -> ModelTask:
    """`wanted`: the setting `task`. Raises StartupError, UnservedModel for steps that are not served."""
    modules = _modules(directory)
    found = GENERATE
    if "Pooling" in modules:
        found = EMBED
    elif "LogitScore" in modules:
        found = SCORE
    task = found if wanted == "auto" else wanted
    size = int(text_config(directory, read_json(directory / "config.json")).get("hidden_size", 0))
    if task == GENERATE or task != found:  # the files say nothing about it
        return ModelTask(task, size)
    if others := modules.keys() - set(_SERVED_MODULES):
        raise UnservedModel(f"{directory}/modules.json has {', '.join(sorted(others))}: not served for --task {task}")
    if task == EMBED:
        _check_pooling(directory, read_json(directory / modules["Pooling"] / "config.json"))
        return ModelTask(task, size, is_normed="Normalize" in modules)
    tokens = read_json(directory / modules["LogitScore"] / "config.json")
    return ModelTask(task, size, yes_id=tokens.get("true_token_id"), no_id=tokens.get("false_token_id"))


def _modules(directory: Path) -> dict[str, str]:
    """Folder by class name, of the steps that sentence-transformers runs. Empty: there is no list."""
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    try:
        listed: Any = json.loads(path.read_text(encoding="utf-8"))
        return {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in listed}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(f"cannot read {path}: {error!r}") from error


def _check_pooling(directory: Path, config: dict[str, Any]) -> None:
    """Raises UnservedModel unless the last token's state is the vector."""
    modes = {name.removeprefix("pooling_mode_") for name, value in config.items() if value is True}
    modes |= {str(config.get("pooling_mode", ""))}
    modes -= {"", "include_prompt"}
    if modes not in ({_LAST_TOKEN}, {"lasttoken", "last"}):
        raise UnservedModel(
            f"{directory} pools by {', '.join(sorted(modes)) or 'an unknown mode'}; only the last token is served. "
            "--task generate serves it as a text model"
        )
