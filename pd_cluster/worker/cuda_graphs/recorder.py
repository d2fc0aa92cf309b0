"""From functions to CUDA graphs."""

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
        """Of the device."""

    def has_room(self) -> bool:
        """Whether another may be recorded."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """-> (replay, the outputs that it writes)."""


class CudaRecorder:
    """Captures graphs that share one pool of memory, so that none may run while another does."""

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
        """Runs it once before, so that nothing is compiled or loaded amid the capture.

        `torch.cuda.graph` would collect garbage and empty the allocator's cache every time: too slow for hundreds.
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
    """Times what a function does on the device, without the time to launch it: as a graph, replayed."""

    def __init__(self, recorder: CudaRecorder) -> None:
        self._recorder = recorder
        self._first: Callable[[], None] | None = None  # while one graph lives, the next ones reuse the pool's memory

    def __call__(self, run: Callable[[], None]) -> float:
        """Milliseconds, the shortest of some replays. Raises RuntimeError."""
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
