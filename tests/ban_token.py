"""A logits stage from outside, as `--logits-stage tests.ban_token:BanToken` loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_kernels.values import Ints


class BanToken(LogitsStage):
    """Bans the token that a request names."""

    def __init__(self, context: StageContext) -> None:
        self._banned = np.full(context.num_rows, -1)
        self._move = context.move
        self.num_rows = 0

    @staticmethod
    def check(sampling: SamplingParams) -> None:
        if not isinstance(sampling.logits_args.get("ban", 0), int):
            raise ValueError("ban must be a token id")

    def start(self, row: int, start: SequenceStart) -> bool:
        self._banned[row] = start.sampling.logits_args.get("ban", -1)
        return bool(self._banned[row] >= 0)

    def prepare(self, rows: Ints, lengths: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.flatnonzero(self._banned[rows] >= 0)
        self.num_rows += len(at)
        return self._move(at), self._move(self._banned[rows[at]])

    def apply(self, logits: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
        logits[inputs] = -torch.inf
