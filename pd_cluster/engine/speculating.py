"""What an engine guesses tokens with."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd_cluster.drafting.lookup_drafter import LookupDrafter
from pd_cluster.scheduling.drafts import Speculation
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import NodeConfig
    from pd_cluster.engine.pipeline import Pipeline
    from pd_cluster.scheduling.drafts import Drafter
    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.worker.executor import Executor

logger = logging.getLogger("pd_cluster.engine")


def make_speculation(
    config: NodeConfig, drafter: Drafter | None, executor: Executor, model: StepModel, pipeline: Callable[[], Pipeline]
) -> Speculation | None:
    """None: nothing is drafted. `drafter`: in place of the config's; `pipeline`: it is made later."""
    if drafter is None and config.scheduler.speculation == "none":
        return None
    # A wrong draft would stay in a running state, and a stage from outside draws one token of a sequence in a step
    is_state_kept = any(group.kind is KVKind.STATE for group in executor.layout.groups)
    if is_state_kept or config.model.logits_stages:
        logger.warning("nothing is drafted: %s", "the model keeps states" if is_state_kept else "--logits-stage")
        return None
    limits, is_captured = config.scheduler, config.scheduler.cuda_graphs and executor.model.device != "cpu"
    most_rows = limits.most_captured_rows if is_captured else None
    return Speculation(
        drafter or LookupDrafter(),
        model,
        gap_s=lambda: pipeline().gap_s,
        is_priced=lambda: model.is_fitted,
        forced=executor.take_forced,
        most_rows=most_rows,
        is_late=lambda: pipeline().is_late,
    )
