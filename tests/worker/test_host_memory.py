"""Host memory for blocks grows by pieces beside everything else, and ends where the machine's does."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.errors import StartupError
from pd_cluster.worker import host_memory, host_pages
from pd_cluster.worker.host_memory import HostMemory
from pd_cluster.worker.host_room import HOST_RESERVE_BYTES
from pd_cluster.worker.kv_cache import KVCache
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.backends import TORCH
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
MUCH = 1 << 50
# Blocks of 5 KiB and 2 KiB: of neither a whole number fills a page
LAYOUT = BlockLayout(
    (
        KVGroup(KVKind.WINDOW, (0, 1, 2, 3, 4), (1, 5, 2, 16, 8), "float32", 16, 40),
        KVGroup(KVKind.FULL, (5, 6), (1, 2, 2, 16, 8), "float32", 16),
    )
)
SHAPES = [group.shape for group in LAYOUT.groups]
DTYPES = [torch.float32, torch.float32]
PER_PIECE = 4  # blocks of each group that end with a page


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 1)


@dataclass
class Gate:
    """In place of the machine's free memory: the thread waits here before each piece."""

    free: int = MUCH
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    num_waits: int = 0

    def __call__(self) -> int:
        self.num_waits += 1
        assert self.may_go.acquire(timeout=HANG_S)
        return self.free


def blocks_of(gate: Gate, num_blocks: int = 3 * PER_PIECE + 1) -> HostMemory:
    return HostMemory(SHAPES, DTYPES, num_blocks, CPU, gate)


def test_pieces_are_ready_one_after_the_other() -> None:
    gate = Gate()
    blocks = blocks_of(gate)
    assert [tuple(tensor.shape) for tensor in blocks.tensors] == [(13, *shape) for shape in SHAPES]
    assert (blocks.num_ready, blocks.num_blocks, blocks.num_filled) == (0, 13, 0)
    blocks.fill(PER_PIECE + 1)
    assert (blocks.num_ready, blocks.num_filled) == (2 * PER_PIECE, PER_PIECE + 1), "without asking what is free"
    blocks.start()
    blocks.start()
    for ready in (8, 12):
        wait_until(lambda ready=ready: gate.num_waits == ready // PER_PIECE - 1)  # type: ignore[misc]
        assert blocks.num_ready == ready
        gate.may_go.release()
    wait_until(lambda: blocks.num_ready == 13)
    blocks.close()
    blocks.close()
    assert gate.num_waits == 2
    assert blocks.tensors == ()


def test_a_unit_has_so_many_blocks_of_each_group() -> None:
    """They become ready together: those of a group with ids below its share of the ready units."""
    per_unit, gate = (1, 3), Gate()
    blocks = HostMemory(SHAPES, DTYPES, 2 * PER_PIECE, CPU, gate, per_unit)
    assert [tuple(tensor.shape) for tensor in blocks.tensors] == [(8, *SHAPES[0]), (24, *SHAPES[1])]
    for tensor in blocks.tensors:
        tensor.fill_(1)
    blocks.fill(1)
    assert blocks.num_ready == PER_PIECE
    for tensor, count in zip(blocks.tensors, per_unit, strict=True):
        assert not tensor[: count * PER_PIECE].any(), "zeroed as it became ready"
        assert tensor[count * PER_PIECE :].all()
    blocks.close()


def test_no_blocks_need_no_thread() -> None:
    blocks = HostMemory(SHAPES, DTYPES, 0, CPU, Gate())
    blocks.start()
    assert blocks._thread is None
    assert [tuple(tensor.shape) for tensor in blocks.tensors] == [(0, *shape) for shape in SHAPES]
    blocks.close()


@pytest.mark.parametrize("why", ["no memory is free", "the driver refuses"])
def test_a_piece_that_cannot_be_had_leaves_the_pool_as_it_is(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    blocks = blocks_of(gate)
    blocks.start()
    gate.may_go.release()
    wait_until(lambda: gate.num_waits == 2)
    assert blocks.num_ready == PER_PIECE
    if why == "no memory is free":
        gate.free = HOST_RESERVE_BYTES
    else:
        monkeypatch.setattr(ctypes, "memset", fail)
    with caplog.at_level(logging.INFO, "pd_cluster.host"):
        gate.may_go.release()
        assert blocks._thread is not None
        blocks._thread.join(HANG_S)
    [line] = caplog.messages
    assert line.startswith("host memory ends at 4 of 13 blocks (0.00 GB): ")
    assert line.endswith("4.0 GB are free" if why == "no memory is free" else "out of memory (2)")
    assert (blocks.num_ready, gate.num_waits) == (PER_PIECE, 2)
    blocks.tensors[0][PER_PIECE - 1] = 1
    blocks.close()


def fail(*arguments: Any) -> None:
    raise RuntimeError("out of memory (2)")


def test_what_a_start_needs_and_cannot_have_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(Gate())
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "memset", fail)
        with pytest.raises(StartupError, match=r"cannot pin 0.00 GB: out of memory"):
            blocks.fill(2)
    assert blocks.tensors == ()
    with pytest.raises(StartupError, match=r"cannot reserve .* GB of host memory"):
        HostMemory(SHAPES, DTYPES, 1 << 55, CPU)


def test_the_end_waits_for_a_piece_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    blocks = blocks_of(gate)
    blocks.start()
    wait_until(lambda: gate.num_waits == 1)
    monkeypatch.setattr(host_memory, "STOP_S", 0.01)
    blocks.close()
    assert "host memory is still being pinned after 0.01 s, and stays" in caplog.messages
    assert blocks.tensors, "a piece may be written yet"
    gate.may_go.release()
    assert blocks._thread is not None
    blocks._thread.join(HANG_S)
    assert (blocks.num_ready, gate.num_waits) == (PER_PIECE, 1), "the thread ends after its piece"
    blocks.close()
    assert blocks.tensors == ()


@dataclass
class FakeDriver:
    """In place of CUDA's runtime: notes the ranges that are pinned. A page is pinned once at a time."""

    ranges: dict[int, int] = field(default_factory=dict)
    devices: list[torch.device] = field(default_factory=list)  # that threads have set
    most: int = 1000

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if len(self.ranges) == self.most:
            return 2
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == flags == 0
        for begin, size in self.ranges.items():
            assert address + num_bytes <= begin or begin + size <= address
        self.ranges[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0

    @staticmethod
    def check(error: int) -> None:
        if error:
            raise RuntimeError(f"out of memory ({error})")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver = FakeDriver()
    cuda = SimpleNamespace(cudart=lambda: driver, check_error=driver.check, set_device=lambda device: None)
    for module in (host_memory, host_pages):
        monkeypatch.setattr(module, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    yield driver
    assert driver.ranges == {}


def test_no_block_is_copied_over_two_pinned_pieces(driver: FakeDriver) -> None:
    blocks = HostMemory(SHAPES, DTYPES, 3 * PER_PIECE, torch.device("cuda"), lambda: MUCH)
    blocks.fill(2 * PER_PIECE)
    blocks.start()
    wait_until(lambda: blocks.num_ready == 3 * PER_PIECE)
    assert len(driver.ranges) == 6
    for tensor in blocks.tensors:
        for block in tensor:
            begin, end = block.data_ptr(), block.data_ptr() + block.nbytes
            assert sum(at <= begin and end <= at + size for at, size in driver.ranges.items()) == 1
    blocks.close()


def test_what_the_driver_refuses_is_given_back_at_the_end(driver: FakeDriver) -> None:
    driver.most = 3  # the second group's part of the second piece is refused
    blocks = HostMemory(SHAPES, DTYPES, 3 * PER_PIECE, torch.device("cuda"), lambda: MUCH)
    blocks.start()
    assert blocks._thread is not None
    blocks._thread.join(HANG_S)
    assert (blocks.num_ready, len(driver.ranges)) == (PER_PIECE, 3)
    blocks.close(0.0)
    assert len(driver.ranges) == 3, "of a device that has failed nothing is asked"
    assert blocks.tensors, "the driver may know the pages yet"
    blocks.close()
    assert blocks.tensors == ()


def test_copies_reach_blocks_of_every_piece_and_group() -> None:
    """Blocks of both groups, at the ends of pieces, beside blocks that are NaN."""
    slabs = KvSlabs.of_blocks(LAYOUT, 6)
    cache = KVCache.allocate(LAYOUT, slabs, PER_PIECE, CPU, num_later=2 * PER_PIECE)
    cache.host.start()
    wait_until(lambda: cache.host.num_ready == 3 * PER_PIECE)
    for tensor in (cache.memory.view(torch.float32), *cache.hosts):
        tensor.fill_(torch.nan)
    windows, full = range(slabs.per_slab[0] * 3), range(slabs.per_slab[1] * 3, slabs.num_blocks(1))
    places = [PER_PIECE - 1, PER_PIECE, 3 * PER_PIECE - 1]
    for group, blocks in enumerate((windows, full)):
        for place in range(3):
            cache.tensors[group][blocks[place]] = 10 * group + place
    saved = tuple((g, blocks[i], places[i]) for i in range(3) for g, blocks in enumerate((windows, full)))
    cache.save(saved, TORCH)
    cache.memory.view(torch.float32).fill_(torch.nan)
    back = tuple((g, places[i], blocks[2 - i]) for i in range(3) for g, blocks in enumerate((windows, full)))
    cache.load(back, TORCH)
    for group, blocks in enumerate((windows, full)):
        for i in range(3):
            assert set(cache.tensors[group][blocks[i]].flatten().tolist()) == {10 * group + 2 - i}
        assert cache.tensors[group][blocks[3]].isnan().all()
        assert cache.hosts[group][places[0] - 1].isnan().all()
    cache.host.close()
