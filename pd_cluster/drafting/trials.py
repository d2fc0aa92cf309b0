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
    from pd_cluster.drafting.worth import StepPrice

# Steps that are decided alike. Two of 258 without their drafts cost 0.8% of the most that drafts can gain
MOST_WITH = 256
NUM_PLAIN = 2  # at a time: where steps overlap the first one after drafts holds its launch, and teaches nothing
# Steps without drafts before two have some. At 32 and 128 streams those take 1.4 times as long (one H200), so that they
# cost 0.25%. From 32 on, twice as many each time, 128 streams that match nothing had 0.990 of the tokens a second
MOST_WITHOUT, NUM_TRIED = 320, 2


class Trials:
    """Counts the steps of which drafts were worth it, and those in a row of which none was.

    One without drafts teaches little where the next one has some: only NUM_PLAIN of them do, so it resets no count.
    """

    def __init__(self) -> None:
        self._num_with = self._num_without = 0

    def decided(self, counts: list[int], offers: Sequence[DraftOffer], price: StepPrice) -> list[int]:
        """The drafts of each offer that a step has, where `counts` are worth it. A trial heeds no credit."""
        if any(counts):
            self._num_without = 0
            self._num_with += 1
            if self._num_with <= MOST_WITH:
                return counts
            if self._num_with == MOST_WITH + NUM_PLAIN:
                self._num_with = 0
            return [0] * len(counts)
        self._num_without += 1
        if self._num_without <= MOST_WITHOUT:
            return counts
        if self._num_without == MOST_WITHOUT + NUM_TRIED:
            self._num_without = 0
        best = max(offers, key=lambda one: one.trust * one.chances[0])
        num = min(len(best.chances), price.knots[-1])
        while num and price.seconds_with([num]) > price.most_s:
            num -= 1
        return [num if one is best else 0 for one in offers]
