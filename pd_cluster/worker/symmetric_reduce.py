"""Small sums over the GPUs of a host by one kernel over symmetric memory, large ones by the process group."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from functools import partial as bound
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from pd_cluster.models.reduce import Reduce
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

    from pd_kernels.triton_reduce import PeerBuffers
    from pd_kernels.values import HalfNormed

# Of a sum of one launch. Two ranks move as many bytes as by any other way. With more ranks each part goes to every
# peer, and published kernels of this kind lose to others between 1 and 2 MB
MOST_BYTES, MOST_BYTES_OF_TWO = 2 << 20, 64 << 20
MOST_SIZES = 12  # are measured
RENDEZVOUS_S = 20.0
_CALLS = 10  # sums of a measurement


class RankGroup(Reduce, Protocol):
    """The Reduce over the process group of all ranks."""

    def agree(self, is_ready: bool) -> bool:
        """Whether every rank is ready."""


class SymmetricReduce:
    """The Reduce that adds up to `most_rows` rows by a kernel of Triton, and does all else by the process group.

    `half_rows`: rows up to which `add_norm` returns a HalfNormed, never in float16; no more than the products of few
    rows take.
    """

    def __init__(self, peers: PeerBuffers, group: Reduce, most_rows: int, half_rows: int = 0) -> None:
        from pd_kernels import triton_reduce  # its import takes seconds, and is of no use on CPUs

        self._kernels = triton_reduce
        self._peers, self._group = peers, group
        # In float16 a residual times the norm's weight may overflow before the division
        self._most_rows, self._half_rows = most_rows, 0 if peers.dtype is torch.float16 else half_rows
        self.gather, self.best, self.broadcast = group.gather, group.best, group.broadcast

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        if self._is_small(partial):
            return self._kernels.reduce_sum(self._peers, partial)
        return self._group.add(partial)

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor | HalfNormed:
        if not self._is_small(partial):
            return self._group.add_norm(partial, residual, norm, eps)
        if len(partial) <= self._half_rows:
            return self._kernels.reduce_add_half_norm(self._peers, partial, residual, norm, eps)
        return self._kernels.reduce_add_norm(self._peers, partial, residual, norm, eps)

    def _is_small(self, partial: torch.Tensor) -> bool:
        return len(partial) <= self._most_rows and self._peers.takes(partial)


def start_symmetric_reduce(
    group: RankGroup,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
    half_rows: int = 0,
    *,
    connect: Callable[[int, torch.dtype, torch.device], PeerBuffers] | None = None,
    measure: Callable[[Callable[[], None]], float] | None = None,
) -> Reduce:
    """A SymmetricReduce for rows of `width` columns; `group` itself where symmetric memory cannot be had.

    All ranks call this together. It waits up to RENDEZVOUS_S for a rank that does not rendezvous, and measures on the
    device. `connect` and `measure` (milliseconds of a function's device work) are others in tests.
    """
    peers, reason = None, "another rank has none"
    try:
        peers = (connect or open_peers)(width, dtype, device)
    except (RuntimeError, ImportError, AttributeError, TypeError, OSError) as error:  # torch's functions are not public
        reason = str(error).partition("\n")[0]
    if not group.agree(peers is not None) or peers is None:
        progress(f"sums over ranks by the process group: no symmetric memory ({reason})")
        return group
    if measure is None:
        measure = GraphTimer(CudaRecorder(device))
    every = SymmetricReduce(peers, group, peers.num_blocks, half_rows)
    rows, times = _measured_rows(every, group, peers, device, measure)
    progress(f"sums over ranks in one kernel up to {rows} rows; ms of it and of the process group: {times}")
    return SymmetricReduce(peers, group, rows, half_rows)


def open_peers(width: int, dtype: torch.dtype, device: torch.device) -> PeerBuffers:
    """Map the buffers of all ranks of the process group. Raises RuntimeError, also for a rank that does not come."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed._symmetric_memory import rendezvous
    from torch.distributed.distributed_c10d import _get_default_group, _get_process_group_store

    from pd_kernels.triton_reduce import MOST_RANKS, PeerBuffers

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # the kernel does not use it, and it can stop a shared host
    group = _get_default_group()
    num_ranks = dist.get_world_size()
    num_blocks = max((MOST_BYTES_OF_TWO if num_ranks == 2 else MOST_BYTES) // (width * dtype.itemsize), 1)
    if num_ranks > MOST_RANKS:
        raise RuntimeError(f"{num_ranks} ranks, at most {MOST_RANKS}")
    size = PeerBuffers.num_bytes(num_ranks, num_blocks, width, dtype)
    memory = _SymmetricMemory.empty_strided_p2p((size,), [1], torch.uint8, device, group.group_name)
    memory.zero_()
    torch.cuda.synchronize(device)  # a peer may write as soon as it has the address
    with _limited_waits(_get_process_group_store(group)):
        handle = rendezvous(memory, group.group_name)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    turns = torch.zeros(num_blocks, dtype=torch.int32, device=device)
    return PeerBuffers(dist.get_rank(), addresses, turns, width, dtype, (memory, handle))


@contextmanager
def _limited_waits(store: Store) -> Iterator[None]:
    """Waits for the store end after RENDEZVOUS_S. No thread could end them: torch holds the interpreter's lock."""
    before = store.timeout  # type: ignore[attr-defined]  # the stub lacks it
    store.set_timeout(timedelta(seconds=RENDEZVOUS_S))
    try:
        yield
    finally:
        store.set_timeout(before)


def _measured_rows(
    every: SymmetricReduce,
    group: RankGroup,
    peers: PeerBuffers,
    device: torch.device,
    measure: Callable[[Callable[[], None]], float],
) -> tuple[int, str]:
    """Rows up to which the kernel is faster, as rank 0 measured it, and this rank's times for the progress line."""
    norm = torch.ones(peers.width, dtype=peers.dtype, device=device)
    faster, is_faster, times = 0, True, []
    for rows in sorted({max(peers.num_blocks >> shift, 1) for shift in range(MOST_SIZES)}):
        partial, residual = torch.zeros(2, rows, peers.width, dtype=peers.dtype, device=device)
        # Every size is measured: all ranks must add the same sums
        ours, theirs = (measure(bound(_add_some, reduce, partial, residual, norm)) for reduce in (every, group))
        times.append(f"{rows} {ours / _CALLS:.4f} {theirs / _CALLS:.4f}")
        is_faster = is_faster and ours <= theirs
        faster = rows if is_faster else faster
    agreed = torch.tensor([faster], dtype=torch.int64, device=device)
    group.broadcast(agreed)
    return int(agreed.item()), ", ".join(times)


def _add_some(reduce: Reduce, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor) -> None:
    for _ in range(_CALLS):
        reduce.add_norm(partial, residual, norm, 1e-5)
