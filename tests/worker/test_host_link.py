"""The link to host memory is measured within bounds, and what is counted on follows it."""

from __future__ import annotations

import pytest
import torch

from pd_cluster.scheduling.host_tier import HOST_GB_S
from pd_cluster.worker.host_link import COPIES, LEAST_BYTES, MEASURE_S, MOST_ROUNDS, measure_host_gb_s, shortest_s
from tests.scheduling.kv_groups import full_manager


class TimedLink:
    """A copy takes so long, the first one more, and each second round twice as long."""

    def __init__(self, copy_s: float, first_s: float = 0.0) -> None:
        self.copy_s, self.first_s, self.now_s, self.rounds = copy_s, first_s, 0.0, list[int]()

    def copy(self, num: int) -> None:
        self.now_s += num * self.copy_s * (1 + len(self.rounds) % 2) + (0 if self.rounds else self.first_s)
        self.rounds.append(num)

    def measured(self) -> float:
        return shortest_s(self.copy, lambda: self.now_s)


def test_the_shortest_round_counts_but_not_the_first_copy() -> None:
    link = TimedLink(1e-4, first_s=1e-3)
    assert link.measured() == pytest.approx(1e-4)
    assert link.rounds == [1] + [COPIES] * MOST_ROUNDS


def test_a_slow_link_is_measured_once() -> None:
    """8 MiB at 1 GB/s: the bound of 50 ms holds with pinning in it only for this many copies."""
    link = TimedLink(0.0084)
    link.measured()
    assert link.rounds == [1, COPIES]
    assert MEASURE_S + COPIES * 0.0084 < 0.045


def test_a_device_without_a_link_is_not_measured() -> None:
    assert measure_host_gb_s(torch.zeros(4 * LEAST_BYTES, dtype=torch.uint8)) == 0.0


@pytest.mark.parametrize(("measured", "counted"), [(0.0, HOST_GB_S), (53.0, 25.0), (10.6, 5.0)])
def test_what_is_counted_on_follows_the_link(measured: float, counted: float) -> None:
    """For each rank; loads and what routers are told are priced by it."""
    blocks = full_manager(8, 16, num_host_blocks=4)
    for num_ranks in (1, 2):
        blocks.host.set_link(measured, num_ranks)
        assert blocks.host.gb_s == pytest.approx(num_ranks * counted)
        wait_s, num_bytes = blocks.copies.wait_s, 1e9
        assert blocks.copies.load_s(num_bytes, has_streams=False) - wait_s == pytest.approx(1 / num_ranks / counted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_link_is_faster_than_a_gigabyte_a_second() -> None:
    memory = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
    assert 1 < measure_host_gb_s(memory) < 1000
