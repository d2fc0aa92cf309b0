"""How many tokens answers have, learned from what nodes report of those that have ended."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

USUAL_OUTPUT = 256.0  # tokens, before any answer has ended
MEMORY = 64  # answers that decide a mean: a newer one weighs a part in so many
MOST = 4.0  # means that one answer counts at most: 64 of 30,000 tokens in a row would be the length of all that follow


class AnswerLengths:
    """By the name that requests give a model, if a node serves it; "": they give none. Means, of one sequence."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def note(self, model: str, num_tokens: float, most: float = inf) -> None:
        """Note the tokens of an answer that has ended. One that its client's limit `most` cut says only that it would
        have been longer."""
        mean = self.expected(model)
        if most <= num_tokens < mean:
            return
        self._means[model] = mean + (min(num_tokens, MOST * mean) - mean) / MEMORY

    def expected(self, model: str) -> float:
        """Tokens that the next answer has, at least 1."""
        return max(1.0, self._means.get(model, USUAL_OUTPUT))

    def keep(self, served: Collection[str]) -> None:
        """Forget models that no node serves any more."""
        for model in self._means.keys() - {"", *served}:
            del self._means[model]
