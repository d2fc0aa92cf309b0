"""The sizes of steps that follow from times of steps."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.scheduling.step_cost import (
    LEAST_GAIN,
    MOST_PROLONGED,
    PROLONGED,
    SIZES_BESIDE,
    tokens_beside_decodes,
    tokens_of_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BUDGETS = (2048, 4096, 8192)
# Milliseconds of steps on one H200, by their tokens; the first are decodes of about 1k alone. See benchmarks/LOG.md
DENSE_8B = {32: 5.4, 128: 6.2, 192: 7.1, 256: 8.1, 384: 11.1}
DENSE_06B = {32: 1.82, 128: 2.23, 192: 2.36, 256: 2.44, 384: 2.7, 512: 2.91, 768: 3.45, 1024: 3.88}
MIXTURE_30B = {32: 13.5, 128: 15.7, 192: 16.3, 256: 16.7, 384: 18.7, 512: 19.0, 768: 21.9, 1024: 24.9}


def roofline_of_a_mixture(tokens: int) -> float:
    """Qwen3-30B-A3B on one H200: reading the experts that are hit and the rest, then 2 x 3.3G FLOPs a token."""
    experts_hit = 128 * (1 - (15 / 16) ** tokens)
    return (experts_hit * 48 * 9.44e6 + 3.5e9 + 32 * 98_304 * 1024) / 4.3e12 + tokens * 6.6e9 / 600e12


@pytest.mark.parametrize(("table", "expected"), [(DENSE_8B, 192), (DENSE_06B, 256), (MIXTURE_30B, 512)])
def test_recorded_steps(table: dict[int, float], expected: int) -> None:
    cost = tokens_beside_decodes(min(table), SIZES_BESIDE, table.__getitem__)
    assert cost.tokens == expected
    assert cost.seconds == table, "larger steps than twice as long ones are not measured"


def test_a_mixture_has_larger_steps() -> None:
    """A step of decodes reads nearly all experts already."""
    assert tokens_beside_decodes(32, SIZES_BESIDE, roofline_of_a_mixture).tokens >= 384
    assert tokens_of_prompts(BUDGETS, roofline_of_a_mixture).tokens == 8192


def test_the_measured_times_are_told() -> None:
    assert tokens_of_prompts(BUDGETS, lambda tokens: tokens / 1e5).text == "2,048: 20.5 ms, 4,096: 41.0 ms"


def test_steps_that_all_cost_too_much_leave_the_smallest() -> None:
    assert tokens_beside_decodes(32, SIZES_BESIDE, lambda tokens: float(tokens)).tokens == SIZES_BESIDE[0]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((46.3, 45.9, 44.9), 2048),  # 8B
        ((66.2, 73.8, 81.1), 8192),  # Qwen3-30B-A3B
        ((60.0, 70.0, 74.0), 4096),
        ((60.0, 62.0, 80.0), 2048),  # the first size without gain ends the search
    ],
)
def test_prompts_are_read_in_the_smallest_steps_that_are_nearly_as_fast(
    rates: tuple[float, ...], expected: int
) -> None:
    seconds = {size: size / rate for size, rate in zip(BUDGETS, rates, strict=True)}
    assert tokens_of_prompts(BUDGETS, seconds.__getitem__).tokens == expected


def noted(times: list[float], calls: list[int]) -> Callable[[int], float]:
    def measure(size: int) -> float:
        calls.append(size)
        return times[len(calls) - 1]

    return measure


@pytest.mark.long
@given(times=st.lists(st.floats(1e-4, 1.0), min_size=8, max_size=8))
def test_whatever_is_measured_the_steps_of_the_chosen_size_are_within_the_bound(times: list[float]) -> None:
    calls: list[int] = []
    cost = tokens_beside_decodes(32, SIZES_BESIDE, noted(times, calls))
    assert calls == list(cost.seconds) == [32, *SIZES_BESIDE[: len(calls) - 1]]
    later = {size: seconds for size, seconds in cost.seconds.items() if size > cost.tokens}
    assert all(seconds > PROLONGED * times[0] for seconds in later.values())
    assert cost.tokens == SIZES_BESIDE[0] or cost.seconds[cost.tokens] <= MOST_PROLONGED * times[0]
    calls.clear()
    cost = tokens_of_prompts(BUDGETS, noted(times, calls))
    assert calls == list(cost.seconds)
    speeds = [size / cost.seconds[size] for size in calls if size <= cost.tokens]
    assert all(later >= LEAST_GAIN * sooner for sooner, later in pairwise(speeds))
