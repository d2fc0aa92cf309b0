"""A kernel's time beside the limits of the machine, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class KernelCeilings:
    """Measured limits of this machine."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class KernelTime:
    """A measurement."""

    name: str
    seconds: float
    num_bytes: float
    flops: float

    def ratio(self, ceilings: KernelCeilings) -> float:
        """Share of the limit that applies."""
        floor = max(self.num_bytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)
        return floor / self.seconds

    def text(self, ceilings: KernelCeilings) -> str:
        rate = f"{self.flops / self.seconds / 1e12:7.0f} TFLOP/s" if self.flops else " " * 15
        return (
            f"{self.name:38} {self.seconds * 1e6:10.1f} us {self.num_bytes / self.seconds / 1e12:7.2f} TB/s {rate} "
            f"{self.ratio(ceilings):6.1%}\n"
        )


def seconds_of(calls: Sequence[Callable[[], object]], rounds: int = 5) -> float:
    """Median seconds of one call, all captured in one graph, over rounds of 20 ms after 60 ms to warm up.

    Without the warm-up the first measurement after an allocation is 10% too long.
    """
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    repeats = 1
    times: list[float] = []
    for index in range(rounds + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1e3 / repeats
        if not index:
            repeats = max(int(0.02 / seconds), 1)
        times.append(seconds / len(calls))
    return sorted(times[3:])[rounds // 2]


def measure_ceilings() -> KernelCeilings:
    source = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copied = 4 * source.numel() / seconds_of([partial(torch.neg, source, out=target)] * 3)
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return KernelCeilings(copied, 2 * 8192**3 / seconds_of([partial(torch.matmul, left, right)] * 10))
