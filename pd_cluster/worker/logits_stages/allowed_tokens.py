"""The logits stage for `allowed_token_ids`: it bans all tokens that a request does not list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.worker.draw_places import mask_words
from pd_cluster.worker.logits_stages.stage import CapturedStage

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges, Mask
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

LEAST_LOGIT = -1e30  # of an allowed token that another stage has banned; divided by the least temperature it is finite


@dataclass(frozen=True, slots=True)
class BannedInputs:
    """The banned tokens of one step, for P of its R logits rows."""

    places: torch.Tensor  # int64 [P] into R
    are_banned: tuple[torch.Tensor, ...]  # P times bool [vocab_size]


@dataclass(frozen=True, slots=True)
class AllowedList:
    """The tokens that one request allows."""

    words: Mask  # see TokenMasks
    is_banned: torch.Tensor  # bool [vocab_size], on the device


class AllowedTokens(CapturedStage):
    """Sets the logits of all other tokens to -inf. The rows of one request share a list: a byte for each token.

    It runs after the stages that ban tokens. Where they have banned all of a request's tokens, one of these is drawn.
    """

    def __init__(self, context: StageContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = context.device
        self._move = context.move
        self._params: list[SamplingParams | None] = [None] * context.num_rows
        self._lists: list[AllowedList | None] = [None] * context.num_rows

    def start(self, row: int, start: SequenceStart) -> bool:
        params = start.sampling
        self._params[row] = self._lists[row] = None
        if params.allowed_token_ids:
            twin = next((other for other, known in enumerate(self._params) if known is params), None)
            self._params[row] = params
            self._lists[row] = self._make(params.allowed_token_ids) if twin is None else self._lists[twin]
        return self._lists[row] is not None

    def prepare(self, rows: Ints, lengths: Ints) -> BannedInputs | None:
        found = self._found(rows)
        return BannedInputs(self._move(np.array([at for at, _ in found])), tuple(one.is_banned for _, one in found))

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        found = self._found(rows)
        changes.mask([at for at, _ in found], [one.words for _, one in found])
        return True

    def apply(self, logits: torch.Tensor, inputs: BannedInputs) -> None:
        rows = logits[inputs.places].clamp_min_(LEAST_LOGIT)
        logits[inputs.places] = rows.masked_fill_(torch.stack(inputs.are_banned), -torch.inf)

    def _found(self, rows: Ints) -> list[tuple[int, AllowedList]]:
        """The lists of `rows`, each with its place."""
        return [(at, one) for at, row in enumerate(rows.tolist()) if (one := self._lists[row]) is not None]

    def _make(self, token_ids: tuple[int, ...]) -> AllowedList:
        is_allowed = np.zeros(self._vocab_size, bool)
        is_allowed[list(token_ids)] = True
        is_banned = torch.from_numpy(~is_allowed).to(self._device, non_blocking=True)
        return AllowedList(mask_words(is_allowed), is_banned)
