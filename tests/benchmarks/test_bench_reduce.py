"""What checks the sums of `benchmarks reduce`, and how its ranks end, on CPUs."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.multiprocessing.spawn import start_processes

from benchmarks import reduce
from pd_cluster.errors import StartupError
from pd_kernels.backends import TORCH
from pd_kernels.values import HalfNormed
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

CPU = torch.device("cpu")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def right(partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return TORCH.add_rms_norm(partial, residual, norm, eps)[0]


def half(partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
    residual += partial
    return HalfNormed(residual * norm, residual.float().pow(2).sum(-1)[None], eps)


def without_residual(partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    return TORCH.rms_norm(partial + residual, norm, eps)


def without_norm(partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    residual += partial
    return residual


def test_wrong_sums_are_found(one_rank: None) -> None:
    for add in (right, half):
        reduce.check("one kernel", add, 5, 96, CPU)
    reduce.check("NCCL, then norm", right, 5, 96, CPU)
    with pytest.raises(StartupError, match="one kernel, 5 rows: not the sum in rank order"):
        reduce.check("one kernel", without_residual, 5, 96, CPU)
    with pytest.raises(StartupError, match="not the norm of the sum"):
        reduce.check("one kernel", without_norm, 5, 96, CPU)


def test_without_gpus_there_is_nothing_to_measure() -> None:
    if torch.cuda.device_count() < 2:
        with pytest.raises(StartupError, match="torch finds"):
            reduce.main([])


def fail_on_rank_1(rank: int, num_ranks: int, port: int, namespace: Namespace) -> None:
    """Rank 0 waits for rank 1, as in a sum. The store is open to this address only."""
    store = TCPStore(reduce.HOST, port, num_ranks, is_master=False)
    store.set(f"rank {rank} runs", "")
    if rank:
        store.get("rank 0 runs")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=HANG_S)
        raise StartupError(f"rank {rank} of {namespace.rows}: the ranks differ")
    store.get("what rank 1 would set")


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # Python 3.12: torch has threads
def test_a_rank_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(reduce, "run_rank", fail_on_rank_1)
    monkeypatch.setattr(reduce, "spawn", partial(start_processes, start_method="fork"))  # no second import of torch
    with pytest.raises(StartupError, match=r"rank 1 of \[1, 32, 128\]: the ranks differ"):
        reduce.main([])
