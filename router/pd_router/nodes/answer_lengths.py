"""How many tokens answers have, learned from what nodes report of those that have ended."""

from __future__ import annotations

USUAL_OUTPUT = 256.0  # tokens, before any answer has ended
MEMORY = 64  # answers that decide a mean: a newer one weighs a part in so many


class AnswerLengths:
    """By the name that requests give a model, if a node serves it; "": they give none. Means, of one sequence."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def note(self, model: str, num_tokens: float) -> None:
        """Note the tokens of an answer that has ended."""
        mean = self.expected(model)
        self._means[model] = mean + (num_tokens - mean) / MEMORY

    def expected(self, model: str) -> float:
        """Tokens that the next answer has, at least 1."""
        return max(1.0, self._means.get(model, USUAL_OUTPUT))
