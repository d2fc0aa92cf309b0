"""The logits stage for `allowed_token_ids`: it bans all tokens that a request does not list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.logits_stages.stage import LogitsStage

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints


LEAST_LOGIT = -1e30  # of an allowed token that another stage has banned; divided by the least temperature it is finite


@dataclass(frozen=True, slots=True)
class BannedInputs:
    """The banned tokens of one step, for P of its R logits rows."""

    places: torch.Tensor  # int64 [P] into R
    are_banned: tuple[torch.Tensor, ...]  # P times bool [vocab_size]


class AllowedTokens(LogitsStage):
    """Sets the logits of all other tokens to -inf. The rows of one request share a mask: a byte for each token.

    It runs behind the stages that ban tokens. Where they have banned all of a request's tokens, one of these is drawn.
    """

    def __init__(self, context: StageContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._move = context.move
        self._params: list[SamplingParams | None] = [None] * context.num_rows
        self._masks: list[torch.Tensor | None] = [None] * context.num_rows

    def start(self, row: int, start: SequenceStart) -> bool:
        params = start.sampling
        self._params[row] = self._masks[row] = None
        if params.allowed_token_ids:
            twin = next((other for other, known in enumerate(self._params) if known is params), None)
            self._params[row] = params
            self._masks[row] = self._mask(params.allowed_token_ids) if twin is None else self._masks[twin]
        return self._masks[row] is not None

    def prepare(self, rows: Ints, lengths: Ints) -> BannedInputs | None:
        found = [(at, mask) for at, row in enumerate(rows.tolist()) if (mask := self._masks[row]) is not None]
        return BannedInputs(self._move(np.array([at for at, _ in found])), tuple(mask for _, mask in found))

    def apply(self, logits: torch.Tensor, inputs: BannedInputs) -> None:
        rows = logits[inputs.places].clamp_min_(LEAST_LOGIT)
        logits[inputs.places] = rows.masked_fill_(torch.stack(inputs.are_banned), -torch.inf)

    def _mask(self, token_ids: tuple[int, ...]) -> torch.Tensor:
        is_banned = np.ones(self._vocab_size, bool)
        is_banned[list(token_ids)] = False
        return torch.from_numpy(is_banned).to(self._device, non_blocking=True)
