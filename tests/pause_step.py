"""Logits stages that hold up steps, as `--logits-stage tests.pause_step:PauseStep` loads them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext

if TYPE_CHECKING:
    import torch

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_kernels.values import Ints


class PauseStep(LogitsStage):
    """Pauses the first step that draws for a request by as many seconds as the request says."""

    def __init__(self, context: StageContext) -> None:
        self._pauses_s = np.zeros(context.num_rows)

    @staticmethod
    def check(sampling: SamplingParams) -> None:
        if not isinstance(sampling.logits_args.get("pause_s", 0.0), float):
            raise ValueError("pause_s must be a number of seconds")

    def start(self, row: int, start: SequenceStart) -> bool:
        self._pauses_s[row] = start.sampling.logits_args.get("pause_s", 0.0)
        return bool(self._pauses_s[row])

    def prepare(self, rows: Ints, lengths: Ints) -> float:
        pause_s = float(self._pauses_s[rows].max(initial=0.0))
        self._pauses_s[rows] = 0.0
        return pause_s

    def apply(self, logits: torch.Tensor, inputs: float) -> None:
        time.sleep(inputs)


class SlowPrompts(PauseStep):
    """Prolongs the last step of each prompt that is computed here by PD_TEST_TOKEN_S seconds for each of its tokens.

    PD_TEST_TOKEN_S is in the node's environment.
    """

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        self._token_s = float(os.environ.get("PD_TEST_TOKEN_S", "0"))

    def start(self, row: int, start: SequenceStart) -> bool:
        is_new = len(start.token_ids) == start.num_prompt_tokens
        self._pauses_s[row] = self._token_s * start.num_prompt_tokens if is_new else 0.0
        return bool(self._pauses_s[row])
