"""The logits stage for `min_tokens`: it bans the tokens that would end a sequence too early."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.logits_stages.stage import CapturedStage
from pd_cluster.worker.logits_stages.token_lists import RowLists

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_cluster.worker.logits_stages.token_lists import ListInputs
    from pd_kernels.values import Ints


class MinTokens(CapturedStage):
    """Bans EOS and the request's stop ids from the first `min_tokens` tokens.

    Of a request with a grammar `GrammarMasks` does this, because the grammar may allow nothing but the end.
    """

    def __init__(self, context: StageContext) -> None:
        # A partial, because a method would make a cycle: the buffers of a runner that only measured would live until a
        # garbage collection, on a GPU too
        self._lists = RowLists(context, partial(_banned, context.eos_token_ids))
        self._until = np.zeros(context.num_rows, np.int64)  # sequence length from which the row's list is allowed

    def start(self, row: int, start: SequenceStart) -> bool:
        params = start.sampling
        is_active = self._lists.start(row, params, is_wanted=params.min_tokens > 0 and not params.grammar)
        self._until[row] = start.num_prompt_tokens + params.min_tokens if is_active else 0
        return is_active

    def prepare(self, rows: Ints, lengths: Ints) -> ListInputs | None:
        return self._lists.prepare(rows, np.flatnonzero(lengths < self._until[rows]))

    def apply(self, logits: torch.Tensor, inputs: ListInputs) -> None:
        if (entries := inputs.entries) is not None:
            logits[entries.rows, entries.tokens] = -torch.inf
        for shift in inputs.shifts:
            shift.apply(logits)

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        return self._lists.fold(rows, np.flatnonzero(lengths < self._until[rows]), changes)


def _banned(eos_token_ids: frozenset[int], params: SamplingParams) -> dict[int, float]:
    return dict.fromkeys(sorted(params.stop_ids(eos_token_ids)), -np.inf)
