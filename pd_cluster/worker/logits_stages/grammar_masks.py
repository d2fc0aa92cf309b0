"""The logits stage for grammars: it bans the tokens with which a sequence's output would leave its grammar."""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.grammars import COMPILE_DEADLINE_S, NO_TOKEN
from pd_cluster.worker.logits_stages.stage import LogitsStage

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

    import numpy.typing as npt

    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.grammars import GrammarState
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

    Mask = npt.NDArray[np.int32]  # [W], W = ceil(V / 32): bit i of word j allows token 32 j + i


# Of an allowed token. A stage from outside may have banned all of these: the draw is then among them all the same.
# Divided by the least temperature it is finite
LEAST_LOGIT = -1e30


@dataclass(slots=True)
class Constraint:
    """The grammar of one row, and how far its output has come."""

    compiled: Future[Any]  # see `Grammars.prepare`
    pending: list[int]  # output tokens that the state has not taken, until there is one
    first_end: int  # length of the sequence before which it must not end while the grammar lets it go on
    ends: Mask | None  # the tokens that end it; None: it may end anywhere
    state: GrammarState | None = None  # None: the compilation has not been waited for
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class MaskInputs:
    """One step's masks, for P of its R logits rows."""

    places: torch.Tensor  # int64 [P] into R
    sources: torch.Tensor  # int64 [P] into M: the first tokens of one request's sequences share a mask
    masks: torch.Tensor  # int32 [M, W], see Mask


class GrammarMasks(LogitsStage):
    """Sets the logits of all tokens that a sequence's grammar does not allow to -inf.

    It runs behind all other stages, because none of them may allow what the grammar bans. The grammar also decides
    where the output ends: `min_tokens` bans the end only where another token is allowed. A row that cannot go on fails
    alone, and is drawn without a mask in that step.
    """

    is_late = True

    def __init__(self, context: StageContext) -> None:
        self._grammars = context.grammars
        self._vocab_size = context.vocab_size
        self._eos_token_ids = frozenset(one for one in context.eos_token_ids if one < context.vocab_size)
        self._move = context.move
        self._eos = self._mask_of(self._eos_token_ids)
        self._rows: list[Constraint | None] = [None] * context.num_rows
        self._failures: dict[int, str] = {}
        self._shifts = torch.arange(8, dtype=torch.uint8, device=context.device)

    def start(self, row: int, start: SequenceStart) -> bool:
        params, num_prompt = start.sampling, start.num_prompt_tokens
        self._rows[row] = None
        if params.grammar:
            ends = self._mask_of(params.stop_ids(self._eos_token_ids)) if params.min_tokens else None
            output = list(start.token_ids[num_prompt:])
            assert self._grammars is not None
            compiled = self._grammars.prepare(params.grammar)  # again, if it was dropped since the admission
            self._rows[row] = Constraint(compiled, output, num_prompt + params.min_tokens, ends)
        return bool(params.grammar)

    def prepare(self, rows: Ints, lengths: Ints) -> MaskInputs | None:
        assert self._grammars is not None
        places = np.array([at for at, row in enumerate(rows.tolist()) if self._rows[row] is not None])
        chosen, firsts, sources = np.unique(rows[places], return_index=True, return_inverse=True)
        masks = np.full((len(chosen), len(self._eos)), -1, np.int32)
        self._await_compilations(chosen)
        live = {at: state for at, row in enumerate(chosen.tolist()) if (state := self._state(row)) is not None}
        if live:
            self._grammars.fill(live, masks)
        for at, state in live.items():
            self._finish(int(chosen[at]), state, masks[at], int(lengths[places[firsts[at]]]))
        return MaskInputs(self._move(places), self._move(sources), self._move(masks))

    def apply(self, logits: torch.Tensor, inputs: MaskInputs) -> None:
        # byte by byte, which takes a quarter of the memory of shifting words: 8 MB for 64 rows of 128,000 tokens
        bits = (inputs.masks.view(torch.uint8)[:, :, None] >> self._shifts) & 1
        is_banned = bits.flatten(1)[:, : self._vocab_size] == 0
        rows = logits[inputs.places].clamp_min_(LEAST_LOGIT)
        logits[inputs.places] = rows.masked_fill_(is_banned[inputs.sources], -torch.inf)

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            constraint = self._rows[row]
            if constraint is not None:
                constraint.pending.append(token_id)

    def take_failures(self) -> dict[int, str]:
        failures, self._failures = self._failures, {}
        return failures

    def _await_compilations(self, rows: Ints) -> None:
        """Wait until the grammars of rows without a state are compiled, at most COMPILE_DEADLINE_S for all of them."""
        constraints = [self._rows[row] for row in rows.tolist()]
        new = [one.compiled for one in constraints if one is not None and one.state is None and not one.has_failed]
        if new:
            wait(new, COMPILE_DEADLINE_S)

    def _state(self, row: int) -> GrammarState | None:
        """The state of a row behind all of its output; None once the row has failed."""
        constraint = self._rows[row]
        assert constraint is not None
        assert self._grammars is not None
        if constraint.has_failed:
            return None
        try:
            state = constraint.state or self._grammars.state(constraint.compiled)
        except InvalidRequest as error:
            self._fail(row, str(error))
            return None
        state.advance(constraint.pending)
        constraint.state, constraint.pending = state, []
        return state

    def _finish(self, row: int, state: GrammarState, mask: Mask, length: int) -> None:
        """Keep the row from an end before its `min_tokens`. Free a row that cannot go on, and note why it cannot."""
        constraint = self._rows[row]
        assert constraint is not None
        allows_end_only = not state.is_accepting and not (mask & ~self._eos).any()
        is_dead_end = allows_end_only and not state.ends_by(self._eos_token_ids)
        if error := state.error or NO_TOKEN * is_dead_end:
            self._fail(row, f"the grammar cannot be followed: {error}")
            mask[:] = -1
        elif constraint.ends is not None and length < constraint.first_end and (rest := mask & ~constraint.ends).any():
            mask[:] = rest

    def _fail(self, row: int, why: str) -> None:
        constraint = self._rows[row]
        assert constraint is not None
        constraint.has_failed = True
        self._failures[row] = why

    def _mask_of(self, token_ids: Iterable[int]) -> Mask:
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        allowed[list(token_ids)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)
