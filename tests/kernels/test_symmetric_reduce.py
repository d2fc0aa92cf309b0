"""Which sums go to the kernel and which to the process group; the start without symmetric memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

pytest.importorskip("triton", reason="the Triton kernels need triton")

from pd_cluster.worker import symmetric_reduce
from pd_cluster.worker.symmetric_reduce import SymmetricReduce, open_peers, start_symmetric_reduce
from pd_kernels import reference
from pd_kernels.triton_reduce import PeerBuffers
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU, WIDTH, BLOCKS, EPS = torch.device("cpu"), 16, 32, 1e-5


class RecordingGroup:
    """A process group of one rank that notes its sums; `others_agree`: what the other ranks say."""

    def __init__(self, others_agree: bool = True, told: int | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.others_agree = others_agree
        self.told = told  # what rank 0 broadcasts; None: this is rank 0

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        self.calls.append(("add", len(partial)))
        return partial

    def add_norm(self, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        self.calls.append(("add_norm", len(partial)))
        normed, total = reference.add_rms_norm(partial, residual, norm, eps)
        residual.copy_(total)
        return normed

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def best(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids

    def broadcast(self, values: torch.Tensor) -> None:
        if self.told is not None:
            values.fill_(self.told)

    def agree(self, is_ready: bool) -> bool:
        return is_ready and self.others_agree


def peers_of_one(width: int = WIDTH, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> PeerBuffers:
    addresses, turns = torch.zeros(1, dtype=torch.int64), torch.zeros(BLOCKS, dtype=torch.int32)
    return PeerBuffers(0, addresses, turns, width, dtype)


class Timer:
    """Says that the kernel is faster up to some rows; runs the smallest of what it times."""

    def __init__(self, faster_up_to: int) -> None:
        self.faster_up_to = faster_up_to
        self.sizes: list[int] = []

    def __call__(self, run: Callable[[], None]) -> float:
        reduce, partial = run.args[0], run.args[1]  # type: ignore[attr-defined]
        if len(partial) == 1:
            run()
        self.sizes.append(len(partial))
        return 10.0 if isinstance(reduce, RecordingGroup) else 5.0 if len(partial) <= self.faster_up_to else 20.0


def started(group: RecordingGroup, faster_up_to: int, lines: list[str]) -> SymmetricReduce:
    timer = Timer(faster_up_to)
    reduce = start_symmetric_reduce(
        group, WIDTH, torch.float32, CPU, lines.append, half_rows=2, connect=peers_of_one, measure=timer
    )
    assert timer.sizes == [size for size in (1, 2, 4, 8, 16, 32) for _ in range(2)]
    assert isinstance(reduce, SymmetricReduce)
    return reduce


def kernel_sums(reduce: SymmetricReduce, group: RecordingGroup, rows: int) -> bool:
    """Whether the kernel makes both sums of `rows` rows. They are right, whatever makes them."""
    group.calls.clear()
    partial, residual = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    norm, before = torch.full((WIDTH,), 0.5), residual.clone()
    expected, total = reference.add_rms_norm(partial, before, norm, EPS)
    assert torch.equal(reduce.add(partial.clone()), partial)
    found = reduce.add_norm(partial.clone(), residual, norm, EPS)
    assert torch.equal(residual, total)
    is_kernel = not group.calls
    assert is_kernel or group.calls == [("add", rows), ("add_norm", rows)]
    assert isinstance(found, HalfNormed) == (is_kernel and rows <= 2)
    normed = found.normed() if isinstance(found, HalfNormed) else found
    assert (normed - expected).abs().max() < 4e-6
    return is_kernel


def test_rows_that_the_kernel_adds_faster_go_to_the_kernel() -> None:
    group, lines = RecordingGroup(), list[str]()
    reduce = started(group, 8, lines)
    assert [rows for rows in (1, 2, 3, 8, 9, 32, 33) if kernel_sums(reduce, group, rows)] == [1, 2, 3, 8]
    assert "up to 8 rows" in lines[0]
    group.calls.clear()
    reduce.add(torch.zeros(1, WIDTH + 1))  # another width, another type
    reduce.add(torch.zeros(1, WIDTH).half())
    assert len(group.calls) == 2


def test_all_ranks_take_what_rank_0_measured() -> None:
    """A rank that counts otherwise would wait in a sum that the others do not make."""
    group = RecordingGroup(told=2)
    reduce = started(group, 32, [])
    assert [rows for rows in (1, 2, 3, 32) if kernel_sums(reduce, group, rows)] == [1, 2]


def test_the_kernel_may_never_be_faster() -> None:
    group = RecordingGroup()
    reduce = started(group, 0, [])
    assert not kernel_sums(reduce, group, 1)


def test_no_norm_in_float16_is_left_half() -> None:
    """x = residual * weight overflows where the norm does not."""
    reduce = SymmetricReduce(peers_of_one(dtype=torch.float16), RecordingGroup(), BLOCKS, half_rows=2)
    partial, residual = torch.zeros(1, WIDTH).half(), torch.full((1, WIDTH), 40000.0).half()
    found = reduce.add_norm(partial, residual, torch.full((WIDTH,), 2.0).half(), EPS)
    assert isinstance(found, torch.Tensor)
    assert (found == 2).all()


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, TypeError])  # TypeError: other arguments in this torch
@pytest.mark.parametrize("others_agree", [True, False])
def test_without_symmetric_memory_on_every_rank_the_group_adds_all(others_agree: bool, kind: type[Exception]) -> None:
    def fail(width: int, dtype: torch.dtype, device: torch.device) -> PeerBuffers:
        raise kind("no peer access\nat some line")

    group, lines = RecordingGroup(others_agree), list[str]()
    connect = fail if others_agree else peers_of_one
    found = start_symmetric_reduce(group, WIDTH, torch.float32, CPU, lines.append, connect=connect)
    assert found is group
    reason = "no peer access" if others_agree else "another rank has none"
    assert lines == [f"sums over ranks by the process group: no symmetric memory ({reason})"]
    assert group.calls == []


@pytest.fixture
def process_group() -> Iterator[HashStore]:
    """A process group of this process alone."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def test_a_device_without_symmetric_memory_is_a_reason(process_group: HashStore) -> None:
    """torch's own error: there is none for CPUs."""
    group, lines = RecordingGroup(), list[str]()
    assert start_symmetric_reduce(group, WIDTH, torch.float32, CPU, lines.append) is group
    assert "cpu" in lines[0]


def test_a_rank_that_does_not_come_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's limit, 30 minutes in an engine, is another one during the rendezvous."""
    monkeypatch.setattr(symmetric_reduce, "RENDEZVOUS_S", 0.05)
    store = HashStore()
    before = store.timeout  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError), symmetric_reduce._limited_waits(store):
        store.get("what another rank would set")
    assert store.timeout == before  # type: ignore[attr-defined]


def test_more_ranks_than_flags_are_refused(monkeypatch: pytest.MonkeyPatch, process_group: HashStore) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 9)
    with pytest.raises(RuntimeError, match="9 ranks"):
        open_peers(WIDTH, torch.float32, CPU)
