"""By which factors the prices of terms are wrong: least squares of the relative errors of steps. Pure."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST = 0.01  # of a factor, so that predictions stay above 0
EXACT = 1e-5  # a solution is found when a sweep changes no factor by a larger share


class TermFactors:
    """One factor a term. `aims`: the factors at first, to which they are pulled."""

    def __init__(self, aims: Sequence[float]) -> None:
        num_terms, self.values, self._aims = len(aims), list(aims), tuple(aims)
        self._products = [[0.0] * num_terms for _ in range(num_terms)]  # of terms' shares of steps, summed up
        self._sums = [0.0] * num_terms  # of the shares

    def add(self, parts: Sequence[tuple[int, float]], seconds: float, rest_s: float = 0.0) -> None:
        """Note a step of so many seconds. parts: (term, predicted seconds). rest_s: what has no term."""
        wanted = 1.0 - rest_s / seconds
        shares = [(index, part / self.values[index] / seconds) for index, part in parts]
        for index, share in shares:
            self._sums[index] += share * wanted
            row = self._products[index]
            for other, others in shares:
                row[other] += share * others

    def fade(self, memory: float) -> None:
        """Let the steps so far count `memory` times as much."""
        self._products = [[memory * product for product in row] for row in self._products]
        self._sums = [memory * total for total in self._sums]

    def solve(self, pulls: Sequence[float], sweeps: int) -> None:
        """Find the factors with the least squared error: sum(share * factor) is to be 1 - rest in each step.

        pulls: of the terms to their aims, in steps. sweeps: of a solution at most.
        """
        factors = self.values
        for _ in range(sweeps):
            before = factors[:]
            for index, (row, pull, aim) in enumerate(zip(self._products, pulls, self._aims, strict=True)):
                own = row[index]
                rest = self._sums[index] + pull * aim - sum(map(mul, row, factors)) + own * factors[index]
                factors[index] = max(LEAST, rest / (own + pull))
            if all(abs(new - old) < EXACT * new for new, old in zip(factors, before, strict=True)):
                break
