"""Memory of a process under a soak: what it holds each minute, and whether that grows after warm-up."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.soak_traffic import Breach

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAK_BYTES = 4 << 20  # growth of GPU memory that workspaces of libraries explain
HOST_LEAK_BYTES = 1 << 30  # growth of the process's peak; on a CPU without bounds on oneDNN's programs 0.6 GB are those
LEAST_SAMPLES = 8  # of a trend: with fewer its bound says nothing


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory in use by an idle engine."""

    gpu_bytes: int
    peak_host_bytes: int
    resident_bytes: int = 0  # without what the allocator keeps
    python_blocks: int = 0  # of Python's allocator
    heap_bytes: int = 0  # of the C allocator, in use

    @classmethod
    def now(cls) -> Footprint:
        gpu_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        resident_bytes = num_pages * resource.getpagesize()
        return cls(gpu_bytes, peak_bytes, resident_bytes, sys.getallocatedblocks(), _heap_bytes(libc))

    def check_growth_to(self, later: Footprint) -> None:
        """Raises Breach."""
        for name, before, after, limit in (
            ("GPU memory", self.gpu_bytes, later.gpu_bytes, LEAK_BYTES),
            ("host memory", self.peak_host_bytes, later.peak_host_bytes, HOST_LEAK_BYTES),
        ):
            if after - before > limit:
                raise Breach(f"{name} grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB after warm-up")


@dataclass(frozen=True, slots=True)
class Trend:
    """The straight line through samples of a size, by least squares."""

    num_samples: int
    mean: float  # of the sizes
    a_second: float  # by which the size grows
    bound: float  # of that: two standard errors, as if samples were independent; inf: too few samples

    @classmethod
    def of(cls, samples: Sequence[tuple[float, float]]) -> Trend:
        """`samples`: (seconds, size)."""
        num = len(samples)
        mean_s, mean = (sum(sample[axis] for sample in samples) / max(1, num) for axis in (0, 1))
        spread = sum((at - mean_s) ** 2 for at, _ in samples)
        if num < LEAST_SAMPLES or not spread:
            return cls(num, mean, 0.0, inf)
        slope = sum((at - mean_s) * (size - mean) for at, size in samples) / spread
        rest = sum((size - mean - slope * (at - mean_s)) ** 2 for at, size in samples)
        return cls(num, mean, slope, 2 * sqrt(rest / (num - 2) / spread))

    def text(self, name: str, unit: float = 1.0, suffix: str = "") -> str:
        """`unit`: what the sizes are told in."""
        return (
            f"{name} {self.mean / unit:.1f}{suffix} in the mean of {self.num_samples} samples, "
            f"{3600 * self.a_second / unit:+.1f} +- {3600 * self.bound / unit:.1f} an hour"
        )


@dataclass(frozen=True, slots=True)
class MemorySample:
    """At the end of a round, or within one."""

    elapsed_s: float
    footprint: Footprint
    num_requests: int
    num_cached: int = 0  # blocks of the tier in host memory
    num_saved: int = 0
    num_loaded: int = 0

    @property
    def row(self) -> list[float]:
        """As in ROW."""
        own = self.footprint
        sizes = round(own.resident_bytes / 1e6, 1), round(own.heap_bytes / 1e6, 1), own.python_blocks
        return [round(self.elapsed_s), self.num_requests, *sizes, self.num_cached, self.num_saved, self.num_loaded]


ROW = ("s", "requests", "resident MB", "heap MB", "Python's blocks", "cached", "saved", "loaded")


class MemoryCurve:
    """The samples of a soak, of which the first `warm_up_s` are its warm-up."""

    def __init__(self, warm_up_s: float) -> None:
        self.warm_up_s = warm_up_s
        self.samples: list[MemorySample] = []

    def trends(self) -> dict[str, Trend]:
        """After warm-up, by what grows."""
        later = [sample for sample in self.samples if sample.elapsed_s > self.warm_up_s]
        return {
            "resident_bytes": Trend.of([(one.elapsed_s, one.footprint.resident_bytes) for one in later]),
            "python_blocks": Trend.of([(one.elapsed_s, one.footprint.python_blocks) for one in later]),
        }

    def text(self) -> str:
        """What grew after warm-up."""
        resident, blocks = self.trends().values()
        told = resident.text("resident", 1e6, " MB"), blocks.text("Python's blocks")
        return f"after {self.warm_up_s:.0f} s of warm-up: {'; '.join(told)}"

    @property
    def fields(self) -> dict[str, Any]:
        """Of a record."""
        return {
            "warm_up_s": self.warm_up_s,
            "trends": {
                name: {"samples": one.num_samples, "mean": round(one.mean), "an_hour": round(3600 * one.a_second),
                       "bound": round(3600 * one.bound) if one.bound < inf else None}
                for name, one in self.trends().items()
            },
            "columns": list(ROW),
            "samples": [sample.row for sample in self.samples],
        }  # fmt: skip


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


def _heap_bytes(libc: ctypes.CDLL) -> int:
    """0: an allocator that does not tell."""
    tell = getattr(libc, "mallinfo2", None)
    if tell is None:
        return 0
    tell.restype = _MallInfo
    info = tell()
    return int(info.uordblks + info.hblkhd)
