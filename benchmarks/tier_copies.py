"""Times the copies of KV blocks beside steps, where an engine in this process launches them."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pd_cluster.worker.kv_cache import KVCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_kernels.backends import Kernels


@dataclass(slots=True)
class CopyClock:
    """Times every launch of copies beside steps, on the host and on the device."""

    host_s: list[float] = field(default_factory=list)
    events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # blocks, begin, end

    @contextmanager
    def installed(self) -> Iterator[None]:
        runs = {name: getattr(KVCache, name) for name in ("save", "load")}

        def timed(name: str) -> Callable[[KVCache, Sequence[tuple[int, int, int]], Kernels], None]:
            def run(cache: KVCache, copies: Sequence[tuple[int, int, int]], kernels: Kernels) -> None:
                if not copies:
                    return
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                started_s = time.perf_counter()
                begin.record()
                runs[name](cache, copies, kernels)
                end.record()
                self.host_s.append(time.perf_counter() - started_s)
                self.events.append((len(copies), begin, end))

            return run

        for name in runs:
            setattr(KVCache, name, timed(name))
        try:
            yield
        finally:
            for name, run in runs.items():
                setattr(KVCache, name, run)

    def take(self, block_bytes: int) -> dict[str, float]:
        """GB/s and host microseconds a block, the medians since the last call."""
        torch.cuda.synchronize()
        gb_s = [num * block_bytes / begin.elapsed_time(end) / 1e6 for num, begin, end in self.events]
        host_us = [s / num * 1e6 for s, (num, _, _) in zip(self.host_s, self.events, strict=True)]
        self.events.clear()
        self.host_s.clear()
        return {"gb_s": statistics.median(gb_s), "host_us_a_block": statistics.median(host_us)}
