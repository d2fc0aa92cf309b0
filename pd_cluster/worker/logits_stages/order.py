"""The order in which logits stages run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError
from pd_cluster.worker.logits_stages.bias import Bias
from pd_cluster.worker.logits_stages.min_tokens import MinTokens
from pd_cluster.worker.logits_stages.penalties import Penalties

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext

# Temperature, top k, top p and min p come after all stages, with the draw
ORDER: tuple[Callable[[StageContext], LogitsStage], ...] = (Penalties, Bias, MinTokens)


def make_stages(context: StageContext, import_paths: Sequence[str] = ()) -> tuple[LogitsStage, ...]:
    """A worker's stages: the built-in ones, then those at `import_paths` ("package.module:Class").

    Raises StartupError when a path names no stage, or its class cannot be called with the context.
    """
    return (*(make(context) for make in ORDER), *(_load(path, context) for path in import_paths))


def _load(path: str, context: StageContext) -> LogitsStage:
    module, colon, name = path.partition(":")
    try:
        if not (module and colon and name):
            raise ValueError("write package.module:Class")
        stage: LogitsStage = getattr(importlib.import_module(module), name)(context)
    except Exception as error:  # the module is foreign and may raise anything
        raise StartupError(f"--logits-stage {path}: {error}") from error
    missing = [part for part in ("start", "prepare", "apply", "note", "is_late") if not hasattr(stage, part)]
    if missing:
        raise StartupError(f"--logits-stage {path} is not a LogitsStage: it lacks {', '.join(missing)}")
    return stage
