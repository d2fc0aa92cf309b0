"""Where each pair of neighbouring tokens stands: in a text that stays as it is, and in an output that grows.

A *place* is the index of the token after a pair, so of the first token that may be drafted.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

# Places of a pair that are found, in a text and in an output: one of punctuation may stand in a thousand, and what an
# output goes on with is near its end
NUM_TRIED, NUM_NEAR = 16, 8
PIECE = 4096  # tokens between which other threads may have the interpreter's lock: 0.1 ms
TOKEN_BYTES = 12  # of an index, for each token


class TokenIndex:
    """The pairs of a text. To make it takes 0.13 us a token, a look 1 us in 60,000 tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """`token_ids`: below 2**31. More may be appended meanwhile: those are not in the index."""
        num_tokens = len(token_ids)
        ids = np.empty(num_tokens, np.int64)
        for at in range(0, num_tokens, PIECE):
            end = min(at + PIECE, num_tokens)
            ids[at:end] = np.fromiter(token_ids[at:end], np.int64, end - at)
            time.sleep(0)  # lets go of the lock, which a thread that computes keeps for 5 ms
        pairs = ids[:-1] << 32 | ids[1:]
        order = np.argsort(pairs, kind="stable")
        # An array's element takes three times as long, and a list of ints has 36 bytes for each
        self._pairs = pairs[order].data
        self._places = (order + 2).astype(np.int32).data

    def places(self, first: int, second: int, last: int = 0) -> list[int]:
        """The newest places after these two tokens, newest first. `last`: see `OutputIndex.places`."""
        pair = first << 32 | second
        end = bisect_right(self._pairs, pair)
        if not end or self._pairs[end - 1] != pair:  # as most often, where nothing matches
            return []
        begin = bisect_left(self._pairs, pair, max(0, end - NUM_TRIED), end)
        return self._places[begin:end].tolist()[::-1]


class OutputIndex:
    """The pairs of a sequence's tokens from the first of its output on. A token takes 0.2 us, and 150 bytes."""

    def __init__(self, num_before: int) -> None:
        """`num_before`: tokens before the output, at least one."""
        self._offset = num_before + 1  # the first place
        self._newest: dict[int, int] = {}  # by pair
        self._before: list[int] = []  # by place: the place before it after the same pair; 0: none

    def take(self, last: int, token_ids: Sequence[int]) -> None:
        """Add the next tokens, after the token `last`."""
        newest, before = self._newest, self._before
        for place, token in enumerate(token_ids, self._offset + len(before)):
            pair = last << 32 | token
            before.append(newest.get(pair, 0))
            newest[pair] = place
            last = token

    def places(self, first: int, second: int, last: int = 0) -> list[int]:
        """The newest places after these two tokens, newest first.

        last: the place after all tokens, which is left out, because nothing follows there: so what is found does not
        depend on whether the last token was taken. 0: none is left out.
        """
        place, found = self._newest.get(first << 32 | second, 0), list[int]()
        if place == last and last:
            place = self._before[place - self._offset]
        while place and len(found) < NUM_NEAR:
            found.append(place)
            place = self._before[place - self._offset]
        return found
