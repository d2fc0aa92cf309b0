"""Records functions as CUDA graphs, and measures the time of such graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

SPARE_BYTES = 1 << 30  # left free when graphs are captured
NUM_REPLAYS = 4  # replays of a graph to measure its time
Outputs = TypeVar("Outputs")


class Recorder(Protocol):
    """Records the device work of a function, so that the work can be repeated on the same memory."""

    @property
    def free_bytes(self) -> int:
        """The device's free memory."""

    def has_room(self) -> bool:
        """True while enough memory is free to record another function."""

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run and record `run`. -> (replay, the outputs that a replay writes)."""


class CudaRecorder:
    """Captures graphs that share one pool of memory. Two of them must not run at the same time."""

    def __init__(self, device: torch.device, agree: Callable[[bool], bool] | None = None) -> None:
        """`agree`: whether every rank says yes. Ranks that record other steps than their peers would hang in them."""
        self._device = device
        self._agree = agree
        # torch's NCCL watchdog asks for events from its own thread meanwhile, which a "global" capture forbids
        self._mode = "thread_local" if dist.is_available() and dist.is_initialized() else "global"
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # the default one cannot capture

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def has_room(self) -> bool:
        has_room = self.free_bytes > SPARE_BYTES
        return has_room if self._agree is None else self._agree(has_room)

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Runs the function once before the capture, so that the capture compiles and loads nothing.

        `torch.cuda.graph` is not used: it collects garbage and empties the allocator's cache every time, which is too
        slow for hundreds of graphs.
        """
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode=self._mode)
            try:
                outputs = run()
            finally:
                graph.capture_end()
        return graph.replay, outputs


class GraphTimer:
    """Measures the time of a function's work on the device: it replays the work as a graph.

    So the time does not contain the host's launches.
    """

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
