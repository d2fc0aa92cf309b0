"""How fast the link between a device and pinned host memory is, measured at start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

MEASURED_BYTES, LEAST_BYTES = 8 << 20, 1 << 20  # of a copy: a block of an 8B model's KV; less says nothing of a link
COPIES = 4  # of a round each way: a round of one would take an eighth longer, for its launch and its end
MOST_ROUNDS = 4
MEASURE_S = 0.01  # after so long no further round begins


def measure_host_gb_s(memory: torch.Tensor) -> float:
    """GB/s each way while both ways copy, and nothing else runs. 0: not on a GPU, or no memory to measure with.

    `memory`: uint8 [n] of the device, of which the beginning is overwritten. It takes 3 ms at 53 GB/s and 42 at 1,
    after 15 to pin 16 MiB, which torch keeps for later copies of its own.
    """
    size = min(MEASURED_BYTES, len(memory) // 2)
    if memory.device.type != "cuda" or size < LEAST_BYTES:
        return 0.0
    try:
        host = torch.zeros(2, size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # the machine gives no more
        return 0.0
    own = memory[: 2 * size].view(2, size)
    streams = tuple(torch.cuda.Stream(memory.device) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(memory.device)

    def copy(num: int) -> None:
        for stream, target, source in zip(streams, (host[0], own[1]), (own[0], host[1]), strict=True):
            with torch.cuda.stream(stream):
                for _ in range(num):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    return size / shortest_s(copy) / 1e9


def shortest_s(copy: Callable[[int], None], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one of so many copies, in the shortest of a few rounds, of which there is one where it takes long.

    The first copy does not count: it also sets up what copies need.
    """
    start_s = clock()
    copy(1)
    took_s: list[float] = []
    now_s = clock()
    while not took_s or (len(took_s) < MOST_ROUNDS and now_s - start_s < MEASURE_S):
        before_s = now_s
        copy(COPIES)
        now_s = clock()
        took_s.append((now_s - before_s) / COPIES)
    return min(took_s)
