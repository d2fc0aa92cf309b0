"""The memory of requests that have not arrived whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_http.unfinished_requests import READ_BYTES, SMALL_BYTES, UnfinishedRequests

MB = 1_000_000


def test_when_it_is_crowded_the_oldest_and_the_small_are_read() -> None:
    held: UnfinishedRequests[str] = UnfinishedRequests(40 * MB)
    held.hold("oldest", 10 * MB)
    held.hold("large", 15 * MB)
    assert held.may_read("large")
    held.hold("larger", 8 * MB)
    assert held.excess(0.0) is None
    assert [held.may_read(key) for key in ("oldest", "large", "larger", "new")] == [True, False, False, True]
    held.hold("small", SMALL_BYTES)
    assert held.may_read("small")
    held.hold("oldest", 0)
    assert held.may_read("larger")


def test_readers_come_back_oldest_first_as_there_is_room() -> None:
    held: UnfinishedRequests[int] = UnfinishedRequests(40 * MB)
    for key in range(8):
        held.hold(key, 4 * MB)
    assert held.readers({7, 3, 1, 0}) == [0]
    held.hold(0, 0)
    held.hold(2, 5 * MB - READ_BYTES)
    assert held.readers({7, 3, 1}) == [1, 3, 7]
    held.hold(2, 5 * MB + READ_BYTES)
    assert held.readers({7, 3, 1}) == [1, 3]


def test_the_oldest_has_its_time_while_others_wait() -> None:
    held: UnfinishedRequests[str] = UnfinishedRequests(40 * MB, patience_s=5.0)
    for key in ("a", "b"):
        held.hold(key, 16 * MB)
    assert held.excess(10.0) is None
    assert held.excess(14.9) is None
    assert held.excess(15.0) == "a"
    held.hold("a", 0)
    assert held.excess(15.0) is None
    held.hold("c", 16 * MB)
    assert held.excess(16.0) is None
    assert held.excess(21.0) == "b"


def test_a_single_request_may_be_larger_than_all() -> None:
    held: UnfinishedRequests[str] = UnfinishedRequests(40 * MB)
    held.hold("a", 60 * MB)
    assert held.may_read("a")
    assert held.excess(0.0) is None
    held.hold("b", 1)
    assert held.excess(0.0) == "a"


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), max_size=60))
def test_the_sum_is_bounded_once_the_excess_is_ended(steps: list[tuple[int, int]]) -> None:
    held: UnfinishedRequests[int] = UnfinishedRequests(40)
    sizes: dict[int, int] = {}
    for key, size in steps:
        held.hold(key, size)
        sizes[key] = size
        while (excess := held.excess(0.0)) is not None:
            held.hold(excess, 0)
            sizes[excess] = 0
        assert held.num_bytes == sum(sizes.values())
        assert held.num_bytes <= max(40, *sizes.values())
