"""Functions recorded as CUDA graphs, and timed as such."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SPARE_BYTES = 1 << 30  # left free when graphs are captured
NUM_REPLAYS = 4  # of a graph that is timed
Outputs = TypeVar("Outputs")


class Recorder(Protocol):
    """Turns a function into one that repeats what it did, on the same memory."""

    @property
    def free_bytes(self) -> int:
        """The device's free memory."""

    def has_room(self) -> bool:
        """True while enough memory is free to record another function."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run and record `run`. -> (replay, the outputs that a replay writes)."""


class CudaRecorder:
    """Captures graphs that share one pool of memory. Two of them must not run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default one cannot capture

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def has_room(self) -> bool:
        return self.free_bytes > SPARE_BYTES

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Runs the function once before the capture, so that the capture compiles and loads nothing.

        `torch.cuda.graph` collects garbage and empties the allocator's cache every time: too slow for hundreds.
        """
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return graph.replay, outputs


class GraphTimer:
    """Times a function's work on the device, without the host's launches: it replays the function as a graph."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder
        self._first: Callable[[], None] | None = None  # while one graph lives, the next ones reuse the pool's memory

    def __call__(self, run: Callable[[], None]) -> float:
        """Milliseconds of the shortest of `NUM_REPLAYS` replays. Raises RuntimeError when the capture fails."""
        replay, _ = self._recorder(run)
        if self._first is None:
            self._first = replay
        times: list[float] = []
        for _ in range(NUM_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)
