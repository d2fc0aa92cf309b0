"""What a number of tokens costs in all, where the price of one more changes at knots."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Ladder:
    """`prices`: of one more token, in seconds, between the knots and beyond. The first knot is 0."""

    def __init__(self, knots: tuple[int, ...], prices: Sequence[float]) -> None:
        self._knots, self._prices = knots, prices
        lengths = (high - low for low, high in pairwise(knots))
        self._sums: list[float] = [0.0, *accumulate(map(mul, lengths, prices))]  # up to each knot

    def seconds(self, num_tokens: int) -> float:
        """Seconds of the first `num_tokens`."""
        index = bisect_right(self._knots, num_tokens) - 1
        return self._sums[index] + (num_tokens - self._knots[index]) * self._prices[index]


def segments(knots: tuple[int, ...], start: int, end: int, first: int) -> list[tuple[int, int]]:
    """The parts of [start, end) in each segment of a ladder that it meets: (first + segment, length)."""
    bounds = zip(knots, (*knots[1:], end), strict=True)
    lengths = [(index, min(high, end) - max(low, start)) for index, (low, high) in enumerate(bounds, start=first)]
    return [(index, length) for index, length in lengths if length > 0]
