"""The logits stage for grammars: it bans the tokens with which a sequence's output would leave its grammar."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.draw_places import mask_words
from pd_cluster.worker.logits_stages.draft_masks import DraftRoot, seek_forced, try_drafts
from pd_cluster.worker.logits_stages.stage import CapturedStage, LateStage
from pd_cluster.worker.mask_threads import Pace
from pd_cluster.worker.verification import NO_TOKEN
from pd_kernels.sampling_limits import allowed
from pd_kernels.values import TokenMasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    import numpy.typing as npt
    import torch

    from pd_cluster.errors import PdError
    from pd_cluster.scheduling.batch import SequenceStart
    from pd_cluster.worker.draw_places import DrawChanges, Mask
    from pd_cluster.worker.grammars import Grammars, GrammarState
    from pd_cluster.worker.logits_stages.stage import StageContext
    from pd_kernels.values import Ints

# A step waits for a mask until so long after the token before it was read. Rows without one sit out the draw. The draw
# is asked for just before the forward pass ends: after one of 4 ms a step does not wait
MASK_WAIT_S = 0.002
# And at least so long, because a row that sits out waits a whole step. The plan is due half of its own time early.
# Masks after drafts have no such time: without them a run is shorter, and slow ones would hold each step
LEAST_WAIT_S = 0.0005
# Draws that a row sits out before steps leave it out. Most masks are late by less than a step, and are there when the
# row's last token has been computed again; without it the row would wait for two steps
MOST_MISSED = 2


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one row, and how far its output has come. It is a task of `MaskThreads`: one at a time.

    The step loop writes it while it `is_ready`, and a thread until then.
    """

    grammars: Grammars
    grammar: str
    seq_id: int
    num_prompt: int
    output: list[int]
    first_end: int  # length of the sequence before which it must not end while the grammar lets it go on
    ends: Mask | None  # the tokens that end it; None: it may end anywhere
    # Of the next token once it is ready, and of those after drafts as they come
    masks: dict[tuple[int, ...], Mask] = field(default_factory=dict)
    compiled: Future[Any] = field(init=False)  # see `Grammars.prepare`
    is_own: bool = False  # no other row has copies of `compiled`
    state: GrammarState | None = None  # None: no mask was computed yet
    num_taken: int = 0  # tokens of the output that the state has taken
    drafts: tuple[int, ...] = ()  # after the output, of the launched step. The step loop writes them at any time
    root: DraftRoot = field(default_factory=DraftRoot)
    tried: Future[None] | None = None  # see `DraftedRow`
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
    def is_trying(self) -> bool:
        """Whether masks after drafts of the launched step are being computed."""
        return bool(self.drafts) and self.tried is not None and not self.tried.done()

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for a mask. One that takes 0.1 s must not cost each of ten steps MASK_WAIT_S."""
        is_hopeless = self.pace is Pace.SLOW or self.has_failed or self.num_missed > 0
        return not is_hopeless and (self.is_trying or not self.is_ready)

    def begin(self, compiled: Future[Any]) -> None:
        """Compute the mask after the whole output as soon as the grammar is compiled."""
        self.compiled, self.begun_s = compiled, time.monotonic()
        self.state, self.num_taken = None, 0
        self.pace, self.is_lone = Pace.SUSPECT, True  # it may take long: many tokens may be after it
        # The future keeps its callbacks, and they must not keep the row: an own lexer of a hostile grammar has 20 MB
        threads, waiting = self.grammars.mask_threads, [self]
        compiled.add_done_callback(lambda _: threads.begin([waiting.pop()], compute_masks))

    def take_pending(self) -> tuple[GrammarState, list[int]]:
        """The state, and the tokens that it takes next. Raises any exception."""
        self.state = self.state or self.grammars.state(self.compiled)
        pending = self.output[self.num_taken :]
        self.num_taken = len(self.output)
        return self.state, pending

    def ends_with(self, error: str) -> bool:
        """Note why the row cannot go on. -> whether the error is its own.

        It may be that of another row while they share a lexer. Then the row begins again with a matcher of its own,
        once.
        """
        if not self.is_own:
            self.is_own = True
            self.begin(self.grammars.restart(self.grammar, self.compiled))
            return False
        self.error = f"the grammar cannot be followed: {error}"
        return True


def compute_masks(constraints: Sequence[Constraint]) -> list[Constraint]:
    """Compute the masks of a group of rows after their pending tokens: see `MaskThreads`. -> those that have ended.

    The others begin again: see `Constraint.ends_with`.
    """
    errors, masks = dict[Constraint, str](), dict[Constraint, "Mask"]()
    taken: dict[Constraint, tuple[GrammarState, list[int]]] = {}
    for one in constraints:
        try:
            taken[one] = one.take_pending()
        except BaseException as error:
            errors[one] = _said(error)
    try:  # llguidance may raise anything, panics too, and a row must not wait for its deadline
        found = constraints[0].grammars.masks_after(list(taken.values())) if taken else []
    except BaseException as error:
        found = [_said(error)] * len(taken)
    for one, mask in zip(taken, found, strict=True):
        if isinstance(mask, str):
            errors[one] = mask
        else:
            masks[one], one.masks = mask, {(): mask}
    try_drafts(masks)
    seek_forced(masks)
    return [one for one in constraints if one in masks or one.ends_with(errors[one])]


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__  # "" would say that there is none


class GrammarMasks(CapturedStage, LateStage):
    """Sets the logits of all tokens that a sequence's grammar does not allow to -inf.

    It runs after all other stages, because none of them may allow what the grammar bans. The grammar also decides
    where the output ends: `min_tokens` bans the end only where another token is allowed. A row that cannot go on fails
    alone, and is drawn without a mask in that step.

    The mask of a row is computed from its start on, and again from each of its tokens on, while the device computes.
    Where it is not ready when the step is drawn:

        the row           sits out the draw; a later step computes its last token again, and draws with the same seed
                          and position, so the same token. After MOST_MISSED draws, and while the grammar is compiled,
                          steps leave the row out
        the other rows    wait until MASK_WAIT_S after its token, at least LEAST_WAIT_S, once for each mask, and never
                          after a slow mask
        the mask          is finished meanwhile, because it follows from the tokens, which do not change
        at the latest     the scheduler ends its request after UNREADY_DEADLINE_S (`pd_cluster/scheduling/unready.py`)
    """

    def __init__(self, context: StageContext) -> None:
        self._grammars = context.grammars
        self._vocab_size = context.vocab_size
        self._eos_token_ids = frozenset(one for one in context.eos_token_ids if one < context.vocab_size)
        self._move = context.move
        self._all = np.full_like(self._mask_of(()), -1)
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
                start.seq_id,
                num_prompt,
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
            are_begun, one.drafts = own == one.drafts[: len(own)], own  # of a draw that was sat out
            if is_known and one.is_ready and not are_begun:  # or else the thread that computes the mask finds them
                begun.append(one)
        try_drafts(begun)

    def absent(self, rows: Ints) -> set[int]:
        waiting = {row: one for row in rows.tolist() if not (one := self._constraint(row)).is_ready or one.is_trying}
        awaited = [one for one in waiting.values() if one.is_awaited]
        if awaited:
            assert self._grammars is not None
            threads = self._grammars.mask_threads
            wait_s = max(one.begun_s for one in awaited) + MASK_WAIT_S - time.monotonic()
            least_s = 0.0 if all(one.is_ready for one in awaited) else LEAST_WAIT_S

            def is_none_left() -> bool:
                while awaited and awaited[-1].is_ready and not awaited[-1].is_trying:
                    awaited.pop()
                are_ready = all(one.is_ready for one in reversed(awaited))
                return are_ready and threads.followed not in [one.tried for one in awaited if one.is_trying]

            threads.wait(is_none_left, max(wait_s, least_s))
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
            after = tuple(drafts[: drafts.index(NO_TOKEN)] if NO_TOKEN in drafts else drafts)
            if (mask := self._mask(row, length, after)) is None:
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
                constraint.tried = None
                noted.append(constraint)
        if noted:
            assert self._grammars is not None
            self._grammars.mask_threads.begin(noted, compute_masks)

    def take_failures(self) -> dict[int, PdError]:
        failures, self._failures = self._failures, {}
        return failures

    def _mask(self, row: int, length: int, after: tuple[int, ...] = ()) -> Mask | None:
        """The mask of a row after drafts, without the end before its `min_tokens`. None: a draft is refused, or late.

        A row that cannot go on fails, and is free.
        """
        constraint = self._constraint(row)
        constraint.drafts = ()
        if constraint.error and not constraint.has_failed:
            constraint.has_failed = True
            self._failures[row] = InvalidRequest(constraint.error, code="grammar_failed")
        if constraint.has_failed:
            return None if after else self._all
        if (mask := constraint.masks.get(after)) is None:
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
