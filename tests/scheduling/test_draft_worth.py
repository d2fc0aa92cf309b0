"""How many drafts a step has, beside a search of all numbers."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.worth import LEAST_GAIN, PROLONGED, StepPrice, most_worth

KNOTS = (3, 8, 15, 40)
CHANCES = st.lists(st.sampled_from([0.05, 0.3, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=7)


def offer_of(chances: list[float]) -> DraftOffer:
    """`chances`: each given those before it."""
    return DraftOffer([*range(len(chances))], np.cumprod(chances).astype(np.float32))


def price_of(prices: list[float], num_decodes: int, base_s: float = 10.0, **more: float) -> StepPrice:
    def seconds_of(num: int) -> float:
        bounds = (0, *KNOTS, 10**6)
        ranges = zip(prices, pairwise(bounds), strict=True)
        return base_s + sum(one * max(0, min(high, num) - low) for one, (low, high) in ranges)

    return StepPrice(num_decodes=num_decodes, seconds_of=seconds_of, knots=KNOTS, **more)  # type: ignore[arg-type]


def best_rate(offers: list[DraftOffer], price: StepPrice) -> float:
    """Of all numbers of drafts, tokens a second; without any if that is hardly less.

    Equal chances are taken where they come first in a run.
    """
    every = sorted(
        ((-float(one), at, owner) for owner, offer in enumerate(offers) for at, one in enumerate(offer.chances))
    )
    rates = [price.num_decodes / price.seconds_of(0)]
    for num in range(1, min(len(every), price.most) + 1):
        owners = {owner for _, _, owner in every[:num]}
        seconds = price.seconds_of(num) + price.gap_s
        shared_s = price.seconds_of(0) * PROLONGED if price.most_shared_s == inf else price.most_shared_s
        limit_s = price.most_s if len(owners) == price.num_decodes else min(price.most_s, shared_s)
        if seconds <= limit_s:
            rates.append((price.num_decodes - sum(chance for chance, *_ in every[:num])) / seconds)
    return max(rates) if max(rates) > LEAST_GAIN * rates[0] else rates[0]


@given(
    st.lists(CHANCES, min_size=1, max_size=6), st.lists(st.sampled_from([0.05, 0.4, 1.0, 3.0]), min_size=5, max_size=5),
    st.integers(0, 3), st.sampled_from([0.0, 0.5, 4.0]), st.sampled_from([0, 2, 9, 1000]),
    st.sampled_from([inf, 11.0, 14.0]), st.sampled_from([inf, 10.0, 12.0]),
)  # fmt: skip
def test_no_number_of_drafts_gives_more_tokens_a_second(
    chances: list[list[float]], prices: list[float], num_others: int, gap_s: float, most: int, most_s: float,
    most_shared_s: float,
) -> None:  # fmt: skip
    offers = [offer_of(one) for one in chances]
    price = price_of(
        prices, len(offers) + num_others, gap_s=gap_s, most=most, most_s=most_s, most_shared_s=most_shared_s
    )
    counts = most_worth(offers, price)
    num = sum(counts)
    assert num <= most
    assert all(count <= len(offer.tokens) for count, offer in zip(counts, offers, strict=True))
    expected = price.num_decodes + sum(
        float(offer.chances[:count].sum()) for count, offer in zip(counts, offers, strict=True)
    )
    found = expected / (price.seconds_of(num) + gap_s * bool(num))
    assert found == pytest.approx(best_rate(offers, price), rel=1e-5)


def test_drafts_are_asked_about_at_few_numbers_only() -> None:
    asked = list[int]()

    def seconds_of(num: int) -> float:
        asked.append(num)
        return 5e-3 + 8e-6 * num

    offers = [offer_of([0.9] * 16) for _ in range(64)]
    price = StepPrice(num_decodes=64, seconds_of=seconds_of, knots=(-5, 0, 64, 192, 448, 2000))
    assert sum(most_worth(offers, price)) > 64
    assert asked == [0, 64, 192, 448, 1024]


def test_a_stream_without_drafts_waits_for_a_quarter_of_its_step_at_most() -> None:
    offers = [offer_of([1.0] * 16)]
    prices = [1.0] * 5
    assert most_worth(offers, price_of(prices, 1)) == [16]
    assert most_worth(offers, price_of(prices, 2)) == [2]
    assert most_worth(offers, price_of(prices, 2, gap_s=1.0)) == [1]
    assert most_worth(offers, price_of(prices, 2, gap_s=3.0)) == [0]
