"""Chooses what computes a model: a family of ours, or transformers' modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import UnservedModel
from pd_cluster.models.registry import resolve_spec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pd_cluster.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Implementation:
    """What computes a model. `line` says it for a log, with the reason; "": a family of ours."""

    spec: ModelSpec
    line: str = ""


def choose_implementation(directory: Path, config: Mapping[str, Any], wanted: str) -> Implementation:
    """Choose what computes the model of a parsed `config.json`. `wanted`: see ModelConfig.model_impl.

    Raises StartupError when the wanted one, or for "auto" neither, can serve the model.
    """
    if wanted == "transformers":
        return _modules(directory, config, "--model-impl transformers")
    try:
        return Implementation(resolve_spec(directory, config))
    except UnservedModel as native:
        reason = str(native)
    try:
        found = _modules(directory, config, reason)
    except UnservedModel as error:
        raise UnservedModel(f"{reason}; {error}") from error
    if wanted == "native":
        raise UnservedModel(f"{reason}; --model-impl transformers would serve it")
    return found


def _modules(directory: Path, config: Mapping[str, Any], reason: str) -> Implementation:
    # torch and transformers take seconds to import: the API process reads configs of our families without them
    from pd_cluster.models.transformers_spec import read_modules_spec

    spec = read_modules_spec(directory, config)
    why = reason.partition(";")[0]  # without the list of what is served
    return Implementation(spec, f"{spec.architecture} by transformers' modules: right, not fast ({why})")
