"""How many of the offered drafts a step should verify: as many as give the most tokens a second.

A draft takes time, and gives a token only if it is right and all drafts before it are. So those of all sequences are
taken in the order of that chance, and their number k is the one with the most

    (decodes + sum of the k best chances) / (seconds of the step with k drafts + gap, if k > 0)

There are none where that is hardly more than without. The gap is the time in which the device waits for the host: no
step is launched after one with drafts before its end.

Streams without a right draft gain nothing and wait for the longer step. The *credit* of each stream bounds it,
in steps without drafts: a stream begins with some, earns with each token, and gains by its accepted drafts. Each step
with drafts takes from it what that is longer. So a stream of n tokens of which no draft is accepted takes at most
1 + EARNED + FIRST_CREDIT / n times as long as without, whatever is offered for it: 1.2 with 10 tokens, 1.15 with many.
A stream with one useless draft is no exception: it once paid 0.7 steps at every step without end. A bound for each step
alone, of 1.25, let 32 streams never begin: the host's time after a step with drafts is longer than that.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from pd_cluster.drafting.offer import DraftOffer

    Chances = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.int64]

# By which drafts are expected to raise the rate, at least: prices and chances are wrong by some percent. With 1.05
# 32 streams of code had 0.994 of the tokens a second without drafts, with it 1.001, and JSON as many (simulated)
LEAST_GAIN = 1.15
# Of what a step of any length would gain, at least: credit that is spent on less is not there when a step with more can
# be had (32 streams of mixed tasks, simulated with a fast host: 1.24 times the tokens a second without, with it 1.59)
LEAST_SHARE = 0.8
# Steps without drafts that a stream may wait for drafts: at first, for each token, and at a time. Steps that are tried
# take it below 0: never below the least, or else one at a wrong price would stop all drafts for long
FIRST_CREDIT, EARNED, MOST_CREDIT, LEAST_CREDIT = 0.5, 0.15, 4.0, -1.0


class StepPrice(NamedTuple):
    """What the drafts of a step cost."""

    num_decodes: int  # in the step, with or without drafts
    knots: Sequence[int]  # numbers of drafts, ascending from 0 to the most that the step may have
    seconds: Sequence[float]  # of the step with so many drafts. They are linear between the knots
    step_s: float = 0.0  # further ones of a step with any draft
    sequence_s: float = 0.0  # further ones for each sequence with drafts
    most_s: float = inf  # of the step
    most_shared_s: float = inf  # the same while a stream has no draft, whatever credits say; inf: they decide
    least_credit: float = 0.0  # of all streams

    def prolonged(self, counts: Sequence[int]) -> float:
        """How many times as long as without drafts the step takes with so many of each offer."""
        return self.seconds_with(counts) / self.seconds[0]

    def seconds_with(self, counts: Sequence[int]) -> float:
        """Of the step with so many drafts of each offer."""
        knots, known = self.knots, self.seconds
        if not (num_drafts := sum(counts)):
            return known[0]
        at = bisect_left(knots, num_drafts)  # of the knot after them; `interp` takes six times as long
        assert at < len(knots), "more drafts than are priced"
        share = (num_drafts - knots[at - 1]) / (knots[at] - knots[at - 1])
        seconds = known[at - 1] + share * (known[at] - known[at - 1])
        return seconds + self.step_s + self.sequence_s * (len(counts) - counts.count(0))


def most_worth(offers: Sequence[DraftOffer], price: StepPrice) -> list[int]:
    """How many drafts of each offer the step should have, in the order of the offers."""
    sizes = [len(offer.chances) for offer in offers]
    starts = np.array([0, *accumulate(sizes[:-1])])
    # Chances below 0, so that the best ones are first when they are sorted
    chances = np.concatenate([offer.chances for offer in offers])
    chances *= np.array([-offer.trust for offer in offers], np.float32).repeat(sizes)
    best, firsts = chances.copy(), chances[starts]
    best.sort()  # of 1,024 in fp32: 7 us
    firsts.sort()
    best = best[: price.knots[-1]]
    counts = np.arange(1, len(best) + 1)
    alone_s = price.seconds[0]
    seconds = np.interp(counts, price.knots, price.seconds)
    num_served = np.minimum(firsts.searchsorted(best, "right"), counts)  # streams with drafts
    seconds += price.step_s + price.sequence_s * num_served
    rates = (price.num_decodes - best.cumsum(dtype=np.float64)) / seconds
    if price.most_s < inf:
        rates[seconds.searchsorted(price.most_s, "right") :] = 0
    plain = price.num_decodes / alone_s
    least = LEAST_GAIN * plain
    credit_s = alone_s * (1.0 + price.least_credit)
    at = int(rates.argmax())
    if price.most_shared_s == inf:
        least = max(least, plain + LEAST_SHARE * (float(rates[at]) - plain))
    else:
        num_shared = len(best)  # up to so many drafts a stream has none
        if len(offers) == price.num_decodes:
            worst = firsts[-1]
            num_shared = int(np.count_nonzero(chances < worst) + np.count_nonzero(firsts == worst)) - 1
        rates[:num_shared][seconds[:num_shared] > price.most_shared_s] = 0
        at = int(rates.argmax())
        credit_s = max(credit_s, price.most_shared_s)
    if seconds[at] > credit_s:
        num_within = int(seconds.searchsorted(credit_s, "right"))  # seconds never fall
        at = int(rates[:num_within].argmax()) if num_within else 0
    if seconds[at] > credit_s or rates[at] <= least:
        return [0] * len(offers)
    return _counts(chances, starts, best[at], at + 1)


def _counts(chances: Chances, starts: Ints, last: np.float32, num_drafts: int) -> list[int]:
    """The best drafts by offer. `last`: the chance of the last of them. Of equals first ones go first."""
    counts = np.add.reduceat(chances <= last, starts, dtype=int)
    if num_drafts < counts.sum():
        equals = np.add.reduceat(chances == last, starts, dtype=int)
        counts -= equals
        num_left = num_drafts - int(counts.sum())
        firsts = np.flatnonzero((counts == 0) & (equals > 0))[:num_left]
        counts[firsts] += 1
        equals[firsts] -= 1
        rest = num_left - len(firsts) - (np.cumsum(equals) - equals)
        counts += np.minimum(np.maximum(rest, 0), equals)  # `clip` takes five times as long
    found: list[int] = counts.tolist()
    return found
