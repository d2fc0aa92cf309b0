"""When a link counts as slow, by what it gives and by what it gave."""

from __future__ import annotations

import pytest

from pd_connectors.link_speed import LONG_S, MIN_BYTES, LinkSpeed
from pd_connectors.slow_link import why_slow
from tests.connectors.test_link_speed import GB, read


@pytest.mark.parametrize(
    ("bytes_per_s", "best", "is_gpu", "is_one_host", "word"),
    [
        (0.0, 100 * GB, True, True, ""),  # nothing is known
        (1.0 * GB, 100 * GB, False, False, ""),  # a hundredth is not less than one
        (0.99 * GB, 100 * GB, False, False, "1% of the 1e+02 GB/s"),
        (0.0099 * GB, 1 * GB, False, True, "1% of the 1 GB/s"),
        (1.9 * GB, 1.9 * GB, True, True, "2 GB/s between GPUs of one host"),
        (2.0 * GB, 2.0 * GB, True, True, ""),
        (1.9 * GB, 1.9 * GB, True, False, ""),  # TCP between hosts
        (1.9 * GB, 1.9 * GB, False, True, ""),  # host memory
    ],
)
def test_what_is_slow(bytes_per_s: float, best: float, is_gpu: bool, is_one_host: bool, word: str) -> None:
    why = why_slow(bytes_per_s, best, is_gpu=is_gpu, is_one_host=is_one_host)
    assert (word in why) if word else not why


def test_a_link_that_stalls_is_measured_by_the_little_that_it_reads() -> None:
    """Its loads fail before 16 MiB have come: the gauge would tell of the good days for ever."""
    link = LinkSpeed()
    read(link, 0.0, 0.01, GB)
    for number in range(9):
        read(link, 10.0 * (1 + number), 2 * LONG_S, MIN_BYTES // 2)
    assert link.best_bytes_per_s == 100 * GB
    assert why_slow(link.bytes_per_s, link.best_bytes_per_s, is_gpu=False, is_one_host=False)


def test_one_slow_read_makes_no_slow_link() -> None:
    link = LinkSpeed()
    read(link, 0.0, 0.01, GB)
    read(link, 10.0, 60.0, GB)  # while a network was cut
    assert not why_slow(link.bytes_per_s, link.best_bytes_per_s, is_gpu=False, is_one_host=False)


def test_reads_of_an_endpoint_that_was_given_up_do_not_count() -> None:
    link = LinkSpeed()
    link.posted(("a", 0), MIN_BYTES // 2, 0.0)
    link.ended(("a", 0), 0.1, is_good=True)
    link.posted(("b", 0), GB, 1.0)
    link.forget_reads()
    link.ended(("b", 0), 99.0, is_good=True)
    assert link.bytes_per_s == 0.0
