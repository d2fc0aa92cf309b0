"""The order in which logits stages run."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.worker.logits_stages.allowed_tokens import AllowedTokens
from pd_cluster.worker.logits_stages.bad_words import BadWords
from pd_cluster.worker.logits_stages.bias import Bias
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from pd_cluster.worker.logits_stages.min_tokens import MinTokens
from pd_cluster.worker.logits_stages.penalties import Penalties

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext


# Temperature, top k, top p and min p come after all stages, with the draw
ORDER: tuple[type[LogitsStage], ...] = (Penalties, Bias, MinTokens, BadWords, AllowedTokens)
_PARTS = ("is_late", "check", "start", "prepare", "apply", "note")
_PARTS_OF = {"LogitsStage": _PARTS, "LateStage": (*_PARTS, "absent", "is_unready", "take_failures")}


def find_stage(path: str) -> type[LogitsStage]:
    """The class at an import path "package.module:Class". Raises StartupError when that is no LogitsStage."""
    module, _, name = path.partition(":")
    try:
        if not (module and name):
            raise ValueError("write package.module:Class")
        kind: type[LogitsStage] = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is foreign and may raise anything
        raise StartupError(f"--logits-stage {path}: {error}") from error
    _check_parts(path, kind)
    try:
        inspect.signature(kind.check).bind(None)
    except (TypeError, ValueError) as error:
        raise StartupError(f"--logits-stage {path}: check must be a static method ({error})") from error
    return kind


def _check_parts(path: str, stage: object) -> None:
    """Raise StartupError when a class, or a stage that may set `is_late` itself, lacks parts of its kind."""
    wanted = "LateStage" if getattr(stage, "is_late", False) else "LogitsStage"
    if missing := [part for part in _PARTS_OF[wanted] if not hasattr(stage, part)]:
        raise StartupError(f"--logits-stage {path} is not a {wanted}: it lacks {', '.join(missing)}")


def refuse_late(path: str, stage: object) -> None:
    """Raise StartupError when a class, or a stage, may leave rows out of a draw: see `Request.may_sit_out`."""
    if getattr(stage, "is_late", False):
        raise StartupError(f"--logits-stage {path}: a LateStage is not served for a model that keeps states")


def make_stages(
    context: StageContext, import_paths: Sequence[str] = (), *, keeps_states: bool = False
) -> tuple[LogitsStage, ...]:
    """Make a worker's stages: the built-in ones, then those at `import_paths`, then the masks of grammars.

    Raises StartupError when a stage cannot be imported or constructed, or is late where the model `keeps_states`.
    """
    stages = [kind(context) for kind in ORDER]
    for path in import_paths:
        kind = find_stage(path)
        try:
            stages.append(kind(context))
        except Exception as error:  # as above
            raise StartupError(f"--logits-stage {path}: {error}") from error
        _check_parts(path, stages[-1])
        if keeps_states:
            refuse_late(path, stages[-1])
    return (*stages, GrammarMasks(context))
