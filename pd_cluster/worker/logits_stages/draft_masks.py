"""Masks after the drafts of rows. Where one is missing a run of tokens ends; no row waits for them to go on.

Copies of a state of llguidance share a lexer, which one thread uses at a time: a row's own token would wait for a mask
after its drafts, up to 38 ms. So drafts have states and lexers of their own, which one thread uses. Drafts that
exhaust a lexer end no row. Then the drafts of its rows rest for CALM tokens, and begin again with another lexer.
The same thread finds what a grammar forces after a row's drafts. Where the mask of a row without any allows one token
it searches when no masks after drafts wait; those that come meanwhile wait for one call. No mask of a row waits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pd_cluster.drafting.forced import ForcedTokens
from pd_cluster.worker.grammars import FIRST_WORDS
from pd_cluster.worker.mask_threads import CALM, SLOW_GROUP_S, SLOW_S, Pace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from pd_cluster.worker.draw_places import Mask
    from pd_cluster.worker.grammars import Grammars, GrammarState

logger = logging.getLogger(__name__)

MOST_FORCED = 64  # tokens that are told at a time: those of a few steps
FORCED_S = 0.001  # of the mask before: to find thousands takes as long, with the interpreter's lock; of few 10 us


@dataclass(slots=True, eq=False)
class DraftRoot:
    """The place in a row's grammar from which its drafts go on. The thread of drafts writes it."""

    state: GrammarState | None = None  # None: it is at the beginning
    num_taken: int = 0  # tokens of the output that the state has taken
    is_lone: bool = True  # its masks may be slow: they are not computed in one call with those of other rows
    rests_until: int = 0  # length of the output from which on drafts are tried
    seeks_from: int = 1  # the same for what is forced. A node that hands a prompt over draws the first token alone


class DraftedRow(Protocol):
    """A row that may have drafts."""

    grammars: Grammars
    grammar: str
    seq_id: int
    num_prompt: int
    output: list[int]
    num_taken: int  # tokens of the output before the row's own mask
    masks: dict[tuple[int, ...], Mask]  # of the next token, and of those after drafts; another one for each place
    drafts: tuple[int, ...]  # after the output
    root: DraftRoot
    tried: Future[None] | None  # the end of the masks after drafts; None: none are computed at this place
    pace: Pace
    error: str  # why the row cannot go on


@dataclass(slots=True, eq=False)
class DraftBranch:
    """The drafts after one place of a row's output."""

    one: DraftedRow
    masks: dict[tuple[int, ...], Mask]
    drafts: tuple[int, ...]
    place: int  # length of the output
    state: GrammarState = field(init=False)

    def goes_to(self, count: int) -> bool:
        """Whether the mask before the last of `count` drafts allows it. A state that takes another one has an error."""
        if not count:  # of a branch that has none
            return not self.drafts and self.one.masks is self.masks and not self.state.error
        mask = self.masks.get(self.drafts[: count - 1])
        if mask is None or len(self.drafts) < count or self.one.masks is not self.masks:
            return False  # after an error, at the end, or the row has gone on
        word, bit = divmod(self.drafts[count - 1], 32)
        return bool(mask[word] >> bit & 1)

    def tell_forced(self, mask: Mask, took_s: float) -> None:
        """Tell what the grammar leaves no choice about after all of the drafts.

        mask, took_s: of that place. A search that finds nothing, or would take long, rests for CALM tokens.
        """
        one, forced = self.one, list[int]()
        if not one.grammars.seeks_forced or not allows_one(mask):
            return
        if took_s < FORCED_S:
            try:
                forced = self.state.forced[:MOST_FORCED]
            except BaseException as error:  # another version of llguidance, or a panic
                one.grammars.seek_no_more(error)
        if forced:
            place = one.num_prompt + self.place
            one.grammars.forced.append(ForcedTokens(one.seq_id, place, (*self.drafts, *forced)))
        if not self.drafts:  # or else it is so only if these are right
            one.root.seeks_from = self.place + (len(forced) or CALM)

    def begin_again(self) -> None:
        """Drop these drafts, rest, and then follow the output from its beginning with another lexer."""
        self.drafts = ()
        self.one.grammars.forget_drafts(self.one.grammar)
        self.one.root = DraftRoot(rests_until=self.place + CALM)


def allows_one(mask: Mask) -> bool:
    """Whether a mask allows exactly one token."""
    if np.count_nonzero(mask[:FIRST_WORDS]) > 1 or np.count_nonzero(mask) != 1:
        return False
    return (int(mask[mask != 0][0]) & 0xFFFFFFFF).bit_count() == 1


def try_drafts(rows: Iterable[DraftedRow]) -> None:
    """Begin to compute the masks after the drafts of some rows, which have their own masks.

    Not of slow rows: no draft is worth the time.
    """
    drafted = [DraftBranch(one, one.masks, one.drafts, one.num_taken) for one in rows if one.drafts]
    for group in _groups(drafted):
        tried = group[0].one.grammars.mask_threads.follow(partial(_compute_after, group))
        for branch in group:
            branch.one.tried = tried


def seek_forced(rows: Iterable[DraftedRow]) -> None:
    """Have it found where rows without drafts have no choice, when their masks are ready. Of slow rows nothing is."""
    places = [(one, one.masks, one.num_taken) for one in rows if not one.drafts and one.grammars.seeks_forced]
    if places:
        places[0][0].grammars.mask_threads.seek(partial(_seek, places))


def _seek(places: Sequence[tuple[DraftedRow, dict[tuple[int, ...], Mask], int]]) -> None:
    """Find what is forced at the places of rows, given with their masks; no more once masks after drafts wait."""
    branches = [
        DraftBranch(one, masks, (), place)
        for one, masks, place in places
        if one.masks is masks and place >= one.root.seeks_from and allows_one(masks[()])
    ]
    for group in _groups(branches):
        grammars = group[0].one.grammars
        if grammars.mask_threads.followed is not None:
            break
        if group[0].one.root.state is not None or grammars.may_seek(group[0].one.grammar):
            _compute_after(group)


def _groups(branches: Iterable[DraftBranch]) -> list[list[DraftBranch]]:
    """Those that are computed in one call each."""
    groups, together = list[list[DraftBranch]](), list[DraftBranch]()
    for branch in branches:
        one = branch.one
        if not one.error and one.pace is not Pace.SLOW and branch.place >= one.root.rests_until:
            if one.root.is_lone:
                groups.append([branch])
            else:
                together.append(branch)
    return [*groups, together] if together else groups


def _branch_off(branches: Sequence[DraftBranch]) -> None:
    """Let the roots take the outputs up to the places of the branches, and give each branch with drafts a copy.

    Raises any exception.
    """
    taken = list[tuple["GrammarState", "Sequence[int]"]]()
    for branch in branches:
        one, root = branch.one, branch.one.root
        root.state = branch.state = root.state or one.grammars.draft_state(one.grammar)
        taken.append((root.state, one.output[root.num_taken : branch.place]))
        root.num_taken = branch.place
    branches[0].one.grammars.advance(taken)
    for branch in branches:
        if branch.state.error:  # the lexer's: the row has a mask after the same output
            branch.begin_again()
        elif branch.drafts:
            branch.state = branch.state.copy()


def _compute_after(branches: Sequence[DraftBranch]) -> None:
    """Compute the masks after drafts, as far as the masks before them allow the drafts, up to a slow call.

    After the last one, see what is forced: of branches without drafts that is the mask of their place.
    The rows of a slow call are alone in the next ones. One that is slow alone rests for CALM tokens: the drafts of all
    rows wait for this thread.
    """
    limit_s, clock = (SLOW_S, time.thread_time) if len(branches) == 1 else (SLOW_GROUP_S, time.perf_counter)
    try:
        num_drafts = [len(branch.drafts) for branch in branches]
        _branch_off(branches)
        for count in range(min(1, *num_drafts), 1 + max(num_drafts)):
            going, started_s = [branch for branch in branches if branch.goes_to(count)], clock()
            if not going:
                continue
            states = [(branch.state, branch.drafts[count - 1 : count]) for branch in going]
            found = going[0].one.grammars.masks_after(states)
            is_slow = (took_s := clock() - started_s) > limit_s
            for branch, mask in zip(going, found, strict=True):
                branch.one.root.is_lone = is_slow
                if not isinstance(mask, str):
                    branch.masks.setdefault(branch.drafts[:count], mask)
                    if count == len(branch.drafts):
                        branch.tell_forced(mask, took_s / len(going))
            if is_slow:
                if len(branches) == 1:
                    branches[0].one.root.rests_until = branches[0].place + CALM
                break
    except BaseException as error:  # llguidance may raise anything; the runs are shorter then
        logger.warning("no masks after drafts: %r", error)
        for branch in branches:  # its root may have taken some of the tokens
            branch.begin_again()
