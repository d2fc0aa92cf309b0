"""Has a step tried the other way now and then: the prices of drafts are learned from steps with drafts alone.

A node with four slow first steps would never have drafted again, with 1.75 times as many tokens a second to gain. And
one that drafts in each step never learns what its decodes take: taught three times too much, it had 305 tokens a second
in place of 800.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.drafting.offer import DraftOffer

# Steps that are decided alike. Two of 258 without their drafts cost 0.8% of the most that drafts can gain
MOST_ALIKE = 256
NUM_PLAIN = 2  # at a time: where steps overlap the first one after drafts holds its launch, and teaches nothing
# Steps without drafts before they are first tried, twice as many each time that they are not worth it then: prices that
# were measured too high at start left 193 steps of 32 streams without a draft, where one in six was right. Two steps
# of 34, which take a quarter longer, cost 0.5% in the first 200
LEAST_ALIKE, NUM_TRIED = 32, 2


class Trials:
    """Counts the steps of which drafts were worth it, and those in a row of which none was.

    One without drafts teaches little where the next one has some: only NUM_PLAIN of them do, so it resets no count.
    """

    def __init__(self) -> None:
        self._num_with = self._num_without = 0
        self._most_without = LEAST_ALIKE

    def decided(self, counts: list[int], offers: Sequence[DraftOffer], most: int) -> list[int]:
        """The drafts of each offer that a step has, where `counts` are worth it. `most`: of a step, above 0."""
        if any(counts):
            self._num_without, self._most_without = 0, LEAST_ALIKE
            self._num_with += 1
            if self._num_with <= MOST_ALIKE:
                return counts
            if self._num_with == MOST_ALIKE + NUM_PLAIN:
                self._num_with = 0
            return [0] * len(counts)
        self._num_without += 1
        if self._num_without <= self._most_without:
            return counts
        if self._num_without == self._most_without + NUM_TRIED:
            self._num_without, self._most_without = 0, min(2 * self._most_without, MOST_ALIKE)
        best = max(offers, key=lambda one: one.trust * one.chances[0])
        return [min(len(one.chances), most) if one is best else 0 for one in offers]
