"""The logits stage for `logit_bias`: it adds a request's biases to the logits of some tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.logits_stages.stage import CapturedStage
from pd_cluster.worker.logits_stages.token_lists import RowLists

if TYPE_CHECKING:
    import torch

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_cluster.worker.logits_stages.token_lists import ListInputs
    from pd_kernels.values import Ints


class Bias(CapturedStage):
    """Adds each request's biases to its logits."""

    def __init__(self, context: StageContext) -> None:
        self._lists = RowLists(context, lambda params: params.logit_bias)

    def start(self, row: int, start: SequenceStart) -> bool:
        return self._lists.start(row, start.sampling, is_wanted=bool(start.sampling.logit_bias))

    def prepare(self, rows: Ints, lengths: Ints) -> ListInputs | None:
        return self._lists.prepare(rows, np.arange(len(rows)))

    def apply(self, logits: torch.Tensor, inputs: ListInputs) -> None:
        if (entries := inputs.entries) is not None:
            logits.index_put_((entries.rows, entries.tokens), entries.amounts, accumulate=True)
        for shift in inputs.shifts:
            shift.apply(logits)

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        return self._lists.fold(rows, np.arange(len(rows)), changes)
