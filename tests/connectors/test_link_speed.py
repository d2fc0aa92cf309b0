"""A link's bandwidth is that of the reads, and not of the time between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.link_speed import LONG_BYTES, LONG_S, MIN_BYTES, LinkSpeed

GB = 10**9


def read(link: LinkSpeed, start: float, seconds: float, num_bytes: int, *, is_good: bool = True) -> None:
    link.posted(("load", 0), num_bytes, start)
    link.ended(("load", 0), start + seconds, is_good=is_good)


def test_a_read_is_measured_and_the_wait_before_it_is_not() -> None:
    link = LinkSpeed()
    read(link, 0.0, 0.01, GB)
    assert link.bytes_per_s == 100 * GB
    read(link, 50.0, 0.01, GB)
    assert abs(link.bytes_per_s - 100 * GB) < 1
    assert not link.is_slow


def test_small_and_failed_reads_say_nothing_about_the_link() -> None:
    link = LinkSpeed()
    read(link, 0.0, 0.01, MIN_BYTES - 1)
    read(link, 1.0, 3.0, GB, is_good=False)
    assert (link.bytes_per_s, link.is_slow) == (0.0, False)
    link.ended(("another endpoint's", 0), 9.0, is_good=True)
    read(link, 10.0, 1.0, GB)
    assert (link.bytes_per_s, link.is_slow) == (GB, True)


def test_small_reads_one_after_another_are_not_added_up() -> None:
    link = LinkSpeed()
    for number in range(100):
        read(link, float(number), 0.1, MIN_BYTES // 2)
    assert link.bytes_per_s == 0.0


def test_overlapping_reads_share_the_link() -> None:
    link = LinkSpeed()
    link.posted(("a", 0), GB, 0.0)
    link.posted(("b", 0), GB, 0.5)
    link.ended(("a", 0), 1.0, is_good=True)
    assert link.bytes_per_s == 0.0, "others are in flight: wait for them"
    link.ended(("b", 0), 2.0, is_good=True)
    assert link.bytes_per_s == GB


def test_a_link_that_is_never_idle_is_measured_too() -> None:
    link = LinkSpeed()
    link.posted(("a", 0), LONG_BYTES, 0.0)
    link.posted(("a", 1), LONG_BYTES, 0.0)
    link.ended(("a", 0), 2.0, is_good=True)
    assert link.bytes_per_s == LONG_BYTES / 2


@pytest.mark.long
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(1e-6, 9), st.integers(1, GB), st.booleans()), max_size=20))
def test_no_order_of_reads_gives_more_than_the_fastest_of_them(reads: list[tuple[float, float, int, bool]]) -> None:
    """With reads one after another, any average lies between the slowest and the fastest that were measured."""
    link, now, rates = LinkSpeed(), 0.0, []
    for gap, seconds, num_bytes, is_good in reads:
        now += gap
        read(link, now, seconds, num_bytes, is_good=is_good)
        if is_good and (num_bytes >= MIN_BYTES or now + seconds - now >= LONG_S):
            rates.append(num_bytes / seconds)
        now += seconds
    if rates:
        assert 0.999 * min(rates) <= link.bytes_per_s <= 1.001 * max(rates)
    else:
        assert link.bytes_per_s == 0.0
