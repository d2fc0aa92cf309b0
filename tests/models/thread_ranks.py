"""Ranks of a tensor-parallel model as threads of one process, with sums over ranks at a barrier."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from pd_cluster.models.model_share import ModelShare
from pd_cluster.models.shard import Shard
from pd_kernels import reference
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")
DEADLINE_S = 120  # of a meeting: a rank that makes another call than the others must not hang the test


class Meeting:
    """Where the threads of `size` ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self._parts: list[tuple[str, torch.Tensor]] = [("", torch.empty(0))] * size

    def exchange(self, rank: int, call: str, part: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks. Every rank must make the same call with tensors of one shape and dtype."""
        self._parts[rank] = call, part.clone()
        self.barrier.wait()
        parts = list(self._parts)
        self.barrier.wait()
        assert len({(call, other.shape, other.dtype) for call, other in parts}) == 1, [call for call, _ in parts]
        return [other for _, other in parts]


@dataclass(frozen=True)
class ThreadReduce:
    """A Reduce over the threads of a Meeting."""

    meeting: Meeting
    rank: int
    leaves_half: bool = False  # `add_norm` returns HalfNormed, whatever the number of rows
    calls: list[str] = field(default_factory=list)

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        return self._sum("add", partial)

    def add_norm(
        self, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> torch.Tensor | HalfNormed:
        residual += self._sum("add_norm", partial)
        if not self.leaves_half:
            return reference.rms_norm(residual, norm, eps)
        return HalfNormed(residual * norm, residual.pow(2).sum(-1)[None], eps)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, "gather", part), -1)

    def best(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("models do not draw")

    def broadcast(self, values: torch.Tensor) -> None:
        values.copy_(self.meeting.exchange(self.rank, "broadcast", values)[0])

    def _sum(self, call: str, partial: torch.Tensor) -> torch.Tensor:
        self.calls.append(call)
        first, *others = self.meeting.exchange(self.rank, call, partial)
        for other in others:
            first = first + other
        return first


def shares(size: int, *, leaves_half: bool = False) -> list[ModelShare]:
    """The shares of all ranks, which meet each other."""
    if size == 1:
        return [ModelShare()]
    meeting = Meeting(size)
    return [ModelShare(Shard(rank, size), ThreadReduce(meeting, rank, leaves_half)) for rank in range(size)]


def run_ranks(size: int, work: Callable[[ModelShare], Result], *, leaves_half: bool = False) -> list[Result]:
    """The results of `work` for each of `size` ranks, in their order. Raises the error of the first that fails."""
    results, errors = dict[int, Result](), list[Exception]()

    def run(share: ModelShare) -> None:
        try:
            results[share.shard.rank] = work(share)
        except Exception as error:
            errors.append(error)
            if isinstance(share.reduce, ThreadReduce):
                share.reduce.meeting.barrier.abort()

    threads = [
        threading.Thread(target=run, args=(share,), daemon=True) for share in shares(size, leaves_half=leaves_half)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[rank] for rank in range(size)]
