"""Whether draws follow a distribution: Pearson's test, without a table."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MIN_EXPECTED = 5.0  # of a cell; rarer outcomes are counted together


def deviation(drawn: Mapping[int, int], probabilities: Sequence[float]) -> float:
    """Standard deviations that chi-square lies above its mean (Wilson and Hilferty, 1931). Drawn by index."""
    total = sum(drawn.values())
    often = [index for index, probability in enumerate(probabilities) if probability * total >= MIN_EXPECTED]
    cells = [(drawn.get(index, 0), probabilities[index] * total) for index in often]
    rest = total - sum(expected for _, expected in cells)
    if rest >= MIN_EXPECTED:
        cells.append((total - sum(found for found, _ in cells), rest))
    freedom = len(cells) - 1
    if freedom < 1:
        return 0.0
    statistic = sum((found - expected) ** 2 / expected for found, expected in cells)
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / sqrt(spread))
