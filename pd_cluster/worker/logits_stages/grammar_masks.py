"""The logits stage for grammars: it bans the tokens with which a sequence's output would leave its grammar."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.draw_places import mask_words
from pd_cluster.worker.grammars import NO_WAY_ON
from pd_cluster.worker.logits_stages.stage import CapturedStage, LateStage
from pd_cluster.worker.mask_threads import Pace
from pd_cluster.worker.verification import NO_TOKEN
from pd_kernels.sampling_limits import allowed
from pd_kernels.values import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt
    import torch

    from pd_cluster.errors import PdError
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges, Mask
    from pd_cluster.worker.grammars import Grammars, GrammarState
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints


logger = logging.getLogger(__name__)

# A step waits for a mask until so long after the token before it was read. Rows without one sit out the draw. The draw
# is asked for just before the forward pass ends: behind one of 4 ms a step does not wait
MASK_WAIT_S = 0.002
# And at least so long, because a row that sits out waits a whole step. The plan is due half of its own time early
LEAST_WAIT_S = 0.0005
# Draws that a row sits out before steps leave it out. Most masks are late by less than a step, and are there when the
# row's last token has been computed again; without it the row would wait for two steps
MOST_MISSED = 2
FIRST_WORDS = 32  # of a mask: most masks allow one of these tokens, which takes a tenth of the time of all words to see


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one row, and how far its output has come. It is a task of `MaskThreads`: one at a time.

    The step loop writes it while it `is_ready`, and a thread until then.
    """

    grammars: Grammars
    grammar: str
    eos_token_ids: frozenset[int]
    eos: Mask  # the same
    masks: dict[tuple[int, ...], Mask]  # once they are ready: of the next token, and of those behind drafts
    output: list[int]
    first_end: int  # length of the sequence before which it must not end while the grammar lets it go on
    ends: Mask | None  # the tokens that end it; None: it may end anywhere
    compiled: Future[Any] = field(init=False)  # see `Grammars.prepare`
    is_own: bool = False  # no other row has copies of `compiled`
    state: GrammarState | None = None  # None: no mask was computed yet
    num_taken: int = 0  # tokens of the output that the state has taken
    drafts: tuple[int, ...] = ()  # behind the output, of the launched step. The step loop writes them at any time
    is_ready: bool = False
    pace: Pace = Pace.SUSPECT
    cost_s: float = 0.0
    num_calm: int = 0
    is_lone: bool = True
    error: str = ""  # why the row cannot go on
    has_failed: bool = False  # the error has been told
    begun_s: float = 0.0  # when the next mask was begun
    num_missed: int = 0  # draws that it sat out for this mask

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for the mask. One that takes 0.1 s must not cost each of ten steps MASK_WAIT_S."""
        return not (self.pace is Pace.SLOW or self.has_failed) and not self.num_missed

    def allows(self, drafts: tuple[int, ...]) -> bool:
        """Whether the mask before the last of the drafts allows it. A state that is given another one has an error."""
        word, bit = divmod(drafts[-1], 32)
        return bool(self.masks[drafts[:-1]][word] >> bit & 1)

    def begin(self, compiled: Future[Any]) -> None:
        """Compute the mask behind the whole output as soon as the grammar is compiled."""
        self.compiled, self.begun_s = compiled, time.monotonic()
        self.state, self.num_taken = None, 0
        self.pace, self.is_lone = Pace.SUSPECT, True  # it may take long: many tokens may be behind it
        # The future keeps its callbacks, and they must not keep the row: an own lexer of a hostile grammar has 20 MB
        threads, waiting = self.grammars.mask_threads, [self]
        compiled.add_done_callback(lambda _: threads.begin([waiting.pop()], compute_masks))

    def take_pending(self) -> tuple[GrammarState, list[int]]:
        """The state, and the tokens that it takes next. Raises any exception."""
        self.state = state = self.state or self.grammars.state(self.compiled)
        pending = self.output[self.num_taken :]
        self.num_taken = len(self.output)
        return state, pending

    def error_at(self, state: GrammarState, *, allows_more: bool) -> str:
        """Why the row cannot go on; "" if it can. `allows_more`: the mask allows a token that ends no output."""
        if error := state.error:
            return error
        goes_on = allows_more or state.is_accepting or state.ends_by(self.eos_token_ids)
        return "" if goes_on else NO_WAY_ON  # only the end is allowed, where the output must not end

    def ends_with(self, error: str) -> bool:
        """Note why the row cannot go on. -> whether the error is its own.

        It may be another row's while they share a lexer. Then the row begins again with a matcher of its own, once.
        """
        if not self.is_own:
            self.is_own = True
            try:
                self.begin(self.grammars.restart(self.grammar, self.compiled))
                return False
            except RuntimeError:  # `Grammars` is being closed
                pass
        self.error = f"the grammar cannot be followed: {error}"
        return True


def compute_masks(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Compute the masks of a group of rows behind their pending tokens: see `MaskThreads`. -> those that have ended.

    The others begin again: see `Constraint.ends_with`.
    """
    errors = dict[Constraint, str]()
    taken: dict[Constraint, tuple[GrammarState, list[int]]] = {}
    for one in constraints:
        try:
            taken[one] = one.take_pending()
            one.masks = {}
        except BaseException as error:
            errors[one] = _said(error)
    errors |= _advance(taken, dict.fromkeys(taken, ()))
    drafted = {one: one.drafts for one in taken if one.drafts and not errors[one]}
    try:
        _try_drafts(drafted)
    except BaseException as error:  # llguidance may raise anything; the runs are shorter then
        logger.warning("no masks behind drafts: %s", _said(error))
    return [one for one in constraints if not errors[one] or one.ends_with(errors[one])]


def _advance(
    taken: Mapping[Constraint, tuple[GrammarState, Sequence[int]]], behind: Mapping[Constraint, tuple[int, ...]]
) -> dict[Constraint, str]:
    """Advance the states of some rows by their tokens, and note their masks under `behind`. -> errors; "": none."""
    if not taken:
        return {}
    constraints, states = list(taken), [state for state, _ in taken.values()]
    grammars, others = constraints[0].grammars, ~constraints[0].eos
    masks = np.empty((len(constraints), len(others)), np.int32)
    try:  # llguidance may raise anything, panics too, and a row must not wait for its deadline
        grammars.advance(list(taken.values()))
        grammars.fill(dict(enumerate(states)), masks)
    except BaseException as error:
        return dict.fromkeys(constraints, _said(error))
    allow_more = np.any(masks[:, :FIRST_WORDS] & others[:FIRST_WORDS], axis=1).tolist()
    errors = {}
    for one, state, mask, allows_more in zip(constraints, states, masks, allow_more, strict=True):
        errors[one] = one.error_at(state, allows_more=allows_more or bool((mask & others).any()))
        if not errors[one]:
            one.masks[behind[one]] = mask
    return errors


def _try_drafts(drafts: Mapping[Constraint, tuple[int, ...]]) -> None:
    """Compute the masks behind drafts, on copies of the states, as far as the masks before them allow the drafts."""
    states = {one: one.state.copy() for one in drafts if one.state is not None}
    for count in range(1, 1 + max(map(len, drafts.values()), default=0)):
        behind = {one: drafts[one][:count] for one in states if len(drafts[one]) >= count}
        taken = {one: (states[one], all_[-1:]) for one, all_ in behind.items() if one.allows(all_)}
        errors = _advance(taken, behind)
        states = {one: states[one] for one, error in errors.items() if not error}


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__  # "" would say that there is none


class GrammarMasks(CapturedStage, LateStage):
    """Sets the logits of all tokens that a sequence's grammar does not allow to -inf.

    It runs behind all other stages, because none of them may allow what the grammar bans. The grammar also decides
    where the output ends: `min_tokens` bans the end only where another token is allowed. A row that cannot go on fails
    alone, and is drawn without a mask in that step.

    The mask of a row is computed from its start on, and again from each of its tokens on, while the device computes.
    Where it is not ready when the step is drawn:

        the row           sits out the draw; a later step computes its last token again, and draws with the same seed
                          and position, so the same token. Behind MOST_MISSED draws, and while the grammar is compiled,
                          steps leave the row out
        the other rows    wait until MASK_WAIT_S after its token, at least LEAST_WAIT_S, once for each mask, and never
                          behind a slow mask
        the mask          is finished meanwhile, because it follows from the tokens, which do not change
        at the latest     the scheduler ends its request behind UNREADY_DEADLINE_S (`pd_cluster/scheduling/unready.py`)
    """

    def __init__(self, context: StageContext) -> None:
        self._grammars = context.grammars
        self._vocab_size = context.vocab_size
        self._eos_token_ids = frozenset(one for one in context.eos_token_ids if one < context.vocab_size)
        self._move = context.move
        self._eos = self._mask_of(self._eos_token_ids)
        self._all = np.full_like(self._eos, -1)
        self._rows: list[Constraint | None] = [None] * context.num_rows
        self._failures: dict[int, PdError] = {}

    def start(self, row: int, start: SequenceStart) -> bool:
        params, num_prompt = start.sampling, start.num_prompt_tokens
        self._rows[row] = None
        if params.grammar:
            assert self._grammars is not None
            constraint = Constraint(
                self._grammars,
                params.grammar,
                self._eos_token_ids,
                self._eos,
                {},
                list(start.token_ids[num_prompt:]),
                num_prompt + params.min_tokens,
                self._mask_of(params.stop_ids(self._eos_token_ids)) if params.min_tokens else None,
            )
            self._rows[row] = constraint
            constraint.begin(self._grammars.prepare(params.grammar))  # again, if it was dropped since the admission
        return bool(params.grammar)

    def expect(self, rows: Ints, drafts: Sequence[tuple[int, ...]], are_known: npt.NDArray[np.bool_]) -> None:
        begun = []
        for row, own, is_known in zip(rows.tolist(), drafts, are_known.tolist(), strict=True):
            one = self._constraint(row)
            if one.pace is Pace.SLOW or own == one.drafts[: len(own)]:
                continue  # no draft is worth its time; a draw that was sat out has had them computed
            one.drafts = own
            if is_known and one.is_ready and not one.error:  # or else the thread that computes the mask finds them
                one.is_ready, one.begun_s = False, time.monotonic()
                begun.append(one)
        if begun:
            begun[0].grammars.mask_threads.begin(begun, compute_masks)

    def absent(self, rows: Ints) -> set[int]:
        waiting = {row: one for row in rows.tolist() if not (one := self._constraint(row)).is_ready}
        awaited = [one for one in waiting.values() if one.is_awaited]
        if awaited:
            assert self._grammars is not None
            wait_s = max(one.begun_s for one in awaited) + MASK_WAIT_S - time.monotonic()

            def is_none_left() -> bool:
                while awaited and awaited[-1].is_ready:
                    awaited.pop()
                return not awaited

            self._grammars.mask_threads.wait(is_none_left, max(wait_s, LEAST_WAIT_S))
        late = {row for row, one in waiting.items() if not (one.is_ready or one.has_failed)}
        for row in late:
            waiting[row].num_missed += 1
        return late

    def is_unready(self, row: int) -> bool:
        one = self._constraint(row)
        is_late = one.num_missed >= MOST_MISSED or not one.compiled.done()
        return is_late and not (one.is_ready or one.has_failed)

    def prepare(self, rows: Ints, lengths: Ints) -> TokenMasks | None:
        return self.prepare_behind(rows, lengths, np.empty((len(rows), 0), np.int64))

    def prepare_behind(self, rows: Ints, lengths: Ints, before: Ints) -> TokenMasks | None:
        masks: list[Mask] = []
        void, mask_of_row = list[int](), np.full(len(rows), -1)
        for at, (row, length, drafts) in enumerate(zip(rows.tolist(), lengths.tolist(), before.tolist(), strict=True)):
            if self._rows[row] is None:
                continue
            behind = tuple(drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts)
            if (mask := self._mask(row, length, behind)) is None:
                void.append(at)
            else:
                mask_of_row[at] = len(masks)
                masks.append(mask)
        if not masks:
            return None
        moved = self._move(np.stack(masks)), self._move(mask_of_row)
        return TokenMasks(*moved, self._move(np.array(void)) if void else None)

    def fold(self, rows: Ints, lengths: Ints, changes: DrawChanges) -> bool:
        chosen = [at for at, row in enumerate(rows.tolist()) if self._rows[row] is not None]
        masks = [self._mask(int(rows[at]), int(lengths[at])) for at in chosen]
        changes.mask(chosen, [mask for mask in masks if mask is not None])  # each has one: there is no draft
        return True

    def apply(self, logits: torch.Tensor, inputs: TokenMasks) -> None:
        logits.copy_(allowed(logits, inputs))

    def note(self, rows: Ints, token_ids: torch.Tensor) -> None:
        noted, now_s = list[Constraint](), time.monotonic()
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            constraint = self._rows[row]
            if constraint is not None and not constraint.has_failed:
                constraint.output.append(token_id)
                if noted and noted[-1] is constraint:
                    continue  # the rest of a run
                assert constraint.is_ready, "a row without its mask is not drawn"
                constraint.is_ready, constraint.begun_s, constraint.num_missed = False, now_s, 0
                noted.append(constraint)
        if noted:
            assert self._grammars is not None
            self._grammars.mask_threads.begin(noted, compute_masks)

    def take_failures(self) -> dict[int, PdError]:
        failures, self._failures = self._failures, {}
        return failures

    def _mask(self, row: int, length: int, behind: tuple[int, ...] = ()) -> Mask | None:
        """The mask of a row behind drafts, without the end before its `min_tokens`. None: a draft is refused, or late.

        A row that cannot go on fails, and is free.
        """
        constraint = self._constraint(row)
        constraint.drafts = ()
        if constraint.error and not constraint.has_failed:
            constraint.has_failed = True
            self._failures[row] = InvalidRequest(constraint.error, code="grammar_failed")
        if constraint.has_failed:
            return None if behind else self._all
        if (mask := constraint.masks.get(behind)) is None:
            return None
        if constraint.ends is not None and length < constraint.first_end and (rest := mask & ~constraint.ends).any():
            return rest
        return mask

    def _constraint(self, row: int) -> Constraint:
        constraint = self._rows[row]
        assert constraint is not None
        return constraint

    def _mask_of(self, token_ids: Iterable[int]) -> Mask:
        is_allowed = np.zeros(self._vocab_size, bool)
        is_allowed[list(token_ids)] = True
        return mask_words(is_allowed)
