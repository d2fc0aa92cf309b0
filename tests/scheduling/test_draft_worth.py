"""How many drafts a step has, beside a search of all numbers in plain Python."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.worth import LEAST_GAIN, LEAST_SHARE, StepPrice, most_worth

KNOTS = (3, 8, 15, 40)
CHANCES = st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=7)
TRUSTS = st.sampled_from([1.0, 1.0, 0.5, 0.3])


def offer_of(chances: list[float], trust: float = 1.0) -> DraftOffer:
    """`chances`: each given those before it."""
    return DraftOffer([*range(len(chances))], np.cumprod(chances).astype(np.float32), trust=trust)


def price_of(prices: list[float], num_decodes: int, most: int = 1000, **more: Any) -> StepPrice:
    """`prices`: of a draft between the knots and beyond. The step takes 10 s without drafts."""
    knots, seconds = [0, *(knot for knot in KNOTS if knot < most), most], [10.0]
    for price, (low, high) in zip(prices, pairwise(knots), strict=False):
        seconds.append(seconds[-1] + price * (high - low))
    return StepPrice(num_decodes, knots, seconds, **{"least_credit": 0.25} | more)


def best_counts(offers: list[DraftOffer], price: StepPrice) -> list[int]:
    """By offer, the drafts of the best number of all: none, unless that raises the rate by enough.

    The best drafts go first. Of equal ones, those that are the first of their offer, then in the order of the offers.
    """
    every = sorted(
        (-float(np.float32(offer.trust) * chance), at > 0, owner, at)
        for owner, offer in enumerate(offers)
        for at, chance in enumerate(offer.chances)
    )
    firsts = [float(np.float32(offer.trust) * offer.chances[0]) for offer in offers]
    alone_s = price.seconds[0]
    credit_s = alone_s * (1.0 + price.least_credit)
    plain = price.num_decodes / alone_s
    best, best_rate, expected, free_rate = 0, LEAST_GAIN * plain, 0.0, 0.0
    for num in range(1, min(len(every), price.knots[-1]) + 1):
        chance = -every[num - 1][0]
        expected += chance
        num_begun = min(num, sum(first >= chance for first in firsts))
        seconds = float(np.interp(num, price.knots, price.seconds)) + price.step_s + price.sequence_s * num_begun
        has_all = len({owner for _, _, owner, _ in every[:num]}) == price.num_decodes
        rate = (price.num_decodes + expected) / seconds
        free_rate = max(free_rate, rate if seconds <= price.most_s else 0.0)
        shared_s = price.most_shared_s
        if shared_s == inf:
            may = seconds <= credit_s
        else:
            may = seconds <= shared_s or (has_all and seconds <= credit_s)
        if seconds <= price.most_s and may and rate > best_rate:
            best, best_rate = num, rate
    if price.most_shared_s == inf and best_rate <= plain + LEAST_SHARE * (free_rate - plain):
        best = 0
    return [sum(one[2] == owner for one in every[:best]) for owner in range(len(offers))]


@pytest.mark.long
@given(
    st.lists(st.tuples(CHANCES, TRUSTS), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0625, 0.5, 1.0, 3.0]), min_size=5, max_size=5),
    st.integers(0, 3), st.sampled_from([0.0, 0.5, 4.0]), st.sampled_from([0.0, 0.25]), st.sampled_from([1, 2, 9, 1000]),
    st.sampled_from([inf, 11.0, 14.0]), st.sampled_from([inf, 10.0, 12.0]),
    st.sampled_from([-0.5, 0.0, 0.125, 0.5, 2.0, 4.0]),
)  # fmt: skip
def test_the_drafts_are_those_with_the_most_tokens_a_second(
    offered: list[tuple[list[float], float]], prices: list[float], num_others: int, step_s: float, sequence_s: float,
    most: int, most_s: float, most_shared_s: float, least_credit: float,
) -> None:  # fmt: skip
    """Which ones, not only how many. All seconds are exact in binary, so both find the same among equals."""
    offers = [offer_of(*one) for one in offered]
    limits: dict[str, Any] = {"most_s": most_s, "most_shared_s": most_shared_s, "least_credit": least_credit}
    price = price_of(prices, len(offers) + num_others, most, step_s=step_s, sequence_s=sequence_s, **limits)
    assert most_worth(offers, price) == best_counts(offers, price)


def test_a_stream_without_drafts_waits_for_as_much_as_it_may() -> None:
    offers = [offer_of([1.0] * 16)]
    prices = [1.0] * 5
    assert most_worth(offers, price_of(prices, 1, least_credit=4.0)) == [16]
    shared: dict[str, Any] = {"most_shared_s": 12.5}
    assert most_worth(offers, price_of(prices, 2, **shared)) == [2]
    assert most_worth(offers, price_of(prices, 2, step_s=1.0, **shared)) == [1]
    assert most_worth(offers, price_of(prices, 2, step_s=3.0, **shared)) == [0]


def test_credit_is_saved_for_a_step_that_gains_most_of_what_any_could() -> None:
    """Of sixteen drafts that cost a second each: 18 tokens in 26 s in place of 2 in 10."""
    offers, prices = [offer_of([1.0] * 16)], [1.0] * 5
    counts = [most_worth(offers, price_of(prices, 2, least_credit=credit)) for credit in (0.25, 0.75, 1.125, 2.0)]
    assert counts == [[0], [0], [11], [16]]


def test_how_many_times_as_long_a_step_with_drafts_takes() -> None:
    price = price_of([1.0] * 5, 4, step_s=2.0, sequence_s=0.5)
    assert price.prolonged([0, 0]) == 1.0
    assert price.prolonged([3, 0]) == 1.55
    assert price.prolonged([2, 1]) == 1.6
