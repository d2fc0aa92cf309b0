"""How many of the offered drafts a step should verify: as many as give the most tokens a second.

A draft takes time, and gives a token only if it is right and all drafts before it are. So those of all sequences are
taken in the order of that chance, and their number k is the one with the most

    (decodes + sum of the k best chances) / (seconds of the step with k drafts + gap, if k > 0)

There are none where that is hardly more than without. The gap is the time in which the device waits for the host: no
step is launched after one with drafts before its end.

Streams without a draft gain nothing and wait for the longer step. While there is one, the step is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd_cluster.drafting.offer import DraftOffer

    Chance = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.int64]

# By which drafts are expected to raise the rate, at least: prices of steps are wrong by a few parts in a hundred
LEAST_GAIN = 1.05
PROLONGED = 1.25  # of the step without drafts, while a stream has none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """What the drafts of a step cost."""

    num_decodes: int  # in the step, with or without drafts
    seconds_of: Callable[[int], float]  # of the step with so many drafts
    knots: Sequence[int] = ()  # numbers of drafts at which the price of one more changes, ascending
    step_s: float = 0.0  # further ones of a step with any draft
    sequence_s: float = 0.0  # further ones for each sequence with drafts
    gap_s: float = 0.0
    most: int = 1 << 30  # drafts
    most_s: float = inf  # of the step
    most_shared_s: float = inf  # the same while a stream has no draft; inf: PROLONGED decides


def most_worth(offers: Sequence[DraftOffer], price: StepPrice) -> list[int]:
    """How many drafts of each offer the step should have, in the order of the offers."""
    chances = np.concatenate([offer.chances for offer in offers])
    starts = np.cumsum([0, *(len(offer.tokens) for offer in offers[:-1])])
    best = np.sort(chances)[::-1][: max(0, price.most)]  # of 1,024 in fp32: 7 us
    num = len(best)
    asked = [0, *(knot for knot in price.knots if 0 < knot < num), num]
    seconds = np.interp(np.arange(num + 1), asked, [price.seconds_of(count) for count in asked])
    most_shared_s = PROLONGED * seconds[0] if price.most_shared_s == inf else price.most_shared_s
    begun = np.searchsorted(np.sort(-chances[starts]), -best, side="right")  # sequences with one of the best drafts
    seconds[1:] += price.gap_s + price.step_s + price.sequence_s * np.minimum(begun, np.arange(1, num + 1))
    num_shared = num  # up to so many drafts a stream has none
    if len(offers) == price.num_decodes:
        firsts = chances[starts]
        worst = firsts.min()
        num_shared = int(np.count_nonzero(chances > worst) + np.count_nonzero(firsts == worst)) - 1
    rates = np.full(num + 1, price.num_decodes, np.float64)
    rates[1:] += np.cumsum(best, dtype=np.float64)
    rates /= seconds
    rates[1 : num_shared + 1][seconds[1 : num_shared + 1] > most_shared_s] = 0
    rates[1:][seconds[1:] > price.most_s] = 0
    rates[0] *= LEAST_GAIN
    count = int(rates.argmax())
    return _counts(chances, starts, float(best[count - 1]), count) if count else [0] * len(offers)


def _counts(chances: Chance, starts: Ints, least: float, count: int) -> list[int]:
    """The `count` best drafts by offer. `least`: the chance of the last of them. Of equals first ones go first."""
    counts, equals = (np.add.reduceat(found, starts, dtype=int) for found in (chances > least, chances == least))
    num_left = count - int(counts.sum())
    firsts = np.flatnonzero((counts == 0) & (equals > 0))[:num_left]
    counts[firsts] += 1
    equals[firsts] -= 1
    rest = num_left - len(firsts) - (np.cumsum(equals) - equals)
    counts += np.minimum(np.maximum(rest, 0), equals)  # `clip` takes five times as long
    found: list[int] = counts.tolist()
    return found
