"""Which drafts of a step are right. The draw of a place depends on seed, position and the tokens before it alone.

So a draft is accepted exactly if the draw of its own place gives it, and the tokens are those of steps without drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_kernels.values import Ints

NO_TOKEN = -1  # in place of a token: there is none, or it was not drawn


def run_length(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of the tokens that were drawn for a sequence are its next ones: the accepted drafts, and one more.

    drawn [1 + len(drafts)]: the token after the certain one, and after each draft. The draw after a refused draft is
    of no use. NO_TOKEN: it was not drawn, so the run ends before it; the first was.
    """
    length = 1
    for draft, before, token_id in zip(drafts, drawn[:-1], drawn[1:], strict=True):
        if before != draft or token_id == NO_TOKEN:
            break
        length += 1
    return length


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
