"""Which drafts of a step are right. The draw of a place depends on seed, position and the tokens before it alone.

So a draft is accepted exactly if the draw of its own place gives it, and the tokens are those of steps without drafts.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_kernels.values import Ints

NO_TOKEN = -1  # in place of a token: there is none, or it was not drawn
NO_DRAFT = -2  # in place of a draft: equal to no draw


class RunPlaces(NamedTuple):
    """Which of a step's rows of logits gave the next tokens of its N sequences: a run of rows for each."""

    begins: Ints  # [N]
    lens: Ints  # [N]: one, and one for each accepted draft


class ExpectedRows:
    """The drafts of a step by row of logits. To be made while the step runs."""

    def __init__(self, drafts: Sequence[Sequence[int]], counts: Sequence[int]) -> None:
        """counts: rows of each sequence. One with drafts has 1 + len(drafts): for the certain token, and each draft."""
        ends, lens = np.cumsum(counts), np.array([len(one) for one in drafts])
        self.begins: Ints = ends - np.array(counts)
        flat = [*chain.from_iterable(drafts)]
        self._expected = np.full(ends[-1], NO_DRAFT)
        self._expected[np.arange(len(flat)) + np.repeat(self.begins - np.cumsum(lens) + lens, lens)] = flat

    def runs(self, drawn: Ints) -> RunPlaces:
        """drawn [R]: by row, so a sequence's are those after its certain token, and after each of its drafts.

        The draw after a refused draft is of no use. NO_TOKEN: it was not drawn, so the run ends before it; the first of
        a sequence was.
        """
        are_right = drawn == self._expected
        are_right[:-1] &= drawn[1:] != NO_TOKEN
        wrong = np.flatnonzero(~are_right)  # each sequence's last row is
        return RunPlaces(self.begins, wrong[wrong.searchsorted(self.begins)] - self.begins + 1)


def tokens_before(drafts: Sequence[Sequence[int]]) -> Ints:
    """The drafts before each row of logits, of sequences with 1 + len(drafts) rows each. -> int64 [R, K]

    Row j of a sequence has its first j drafts, and NO_TOKEN after them.
    """
    before = np.full((sum(1 + len(one) for one in drafts), max(map(len, drafts), default=0)), NO_TOKEN)
    row = 0
    for one in drafts:
        for count in range(1 + len(one)):
            before[row, :count] = one[:count]
            row += 1
    return before
