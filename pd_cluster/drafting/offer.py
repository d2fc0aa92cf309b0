"""What may follow the tokens of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    import numpy as np
    import numpy.typing as npt


class DraftOffer(NamedTuple):
    """Tokens that the next draws may give, at least one: as many as there are chances.

    A step has two or three of sixteen, so neither the tokens nor the chances are copied for it.
    """

    text: Sequence[int]  # nothing is appended while the step is planned
    # [i]: the chance that the first i + 1 are drawn, after what running steps are expected to draw. It never rises
    chances: npt.NDArray[np.float32]
    start: int = 0  # of the first of the tokens, in the text
    trust: float = 1.0  # by which all chances are multiplied, at most 1

    def first(self, num_tokens: int) -> tuple[int, ...]:
        """So many of the tokens."""
        return tuple(self.text[self.start : self.start + num_tokens])

    def until(self, ends: AbstractSet[int]) -> DraftOffer:
        """The offer without what is after the first of these tokens."""
        tokens = self.text[self.start : self.start + len(self.chances)]
        if ends.isdisjoint(tokens):
            return self
        return self._replace(chances=self.chances[: 1 + next(at for at, one in enumerate(tokens) if one in ends)])
