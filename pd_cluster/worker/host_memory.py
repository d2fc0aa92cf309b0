"""Blocks of KV in host memory, pinned piece by piece on a thread while the node serves.

Pinning takes up to a second a GiB, so a node would start minutes later with all of it. The addresses are reserved at
once, and take no memory before a piece is filled: a block has its place in a tensor from the start, and only how many
blocks are ready changes.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from math import gcd, inf, prod
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.large_pages import large_pages
from pd_cluster.worker.host_pages import driver, pin
from pd_cluster.worker.host_room import HOST_RESERVE_BYTES, free_host_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger("pd_cluster.host")

PIECE_BYTES = 64 << 20  # a piece holds the driver's locks, and the end of the thread waits for one
STOP_S = 2.0  # for the piece that is being pinned when the memory is given back
UNPIN_S = 3.0  # at the end of a node: all of it has 8 s


class HostMemory:
    """A pool of blocks of each KV group. Not thread-safe, apart from `num_ready`."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[torch.dtype],
        num_blocks: int,
        device: torch.device,
        free_bytes: Callable[[], int] = free_host_bytes,
        per_unit: Sequence[int] = (),
    ) -> None:
        """Reserve addresses for `num_blocks` blocks of every group, given by shape and dtype of one block.

        device: it copies from and to the memory, which is pinned for it; for a CPU it is only filled. free_bytes: of
        this machine, before each piece that the thread takes. per_unit: by group, the blocks for which one counts here;
        (): each. Raises StartupError.
        """
        per_unit = per_unit or (1,) * len(shapes)
        self.num_blocks, self._device, self._free_bytes = num_blocks, device, free_bytes
        self._sizes = [
            count * prod(shape) * dtype.itemsize for count, shape, dtype in zip(per_unit, shapes, dtypes, strict=True)
        ]
        # Pieces end with a page in every group: a page cannot be pinned twice, nor a block be copied over two pieces
        whole = max(mmap.PAGESIZE // gcd(mmap.PAGESIZE, size) for size in self._sizes)
        most = max(1, min(PIECE_BYTES // sum(self._sizes), num_blocks))
        self.per_piece = whole * -(-most // whole)
        self._memory = [self._reserve(size) for size in self._sizes]
        self.tensors = tuple(
            memory[: num_blocks * size].view(dtype).view(num_blocks * count, *shape)
            for memory, size, count, shape, dtype in zip(
                self._memory, self._sizes, per_unit, shapes, dtypes, strict=True
            )
        )
        self.num_filled = 0  # by `fill`, so on every rank
        self._num_pieces = 0
        self._pinned: list[int] = []  # addresses
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def num_ready(self) -> int:
        """Blocks of each group that may be used: those with ids below it. It never falls."""
        return min(self.num_blocks, self._num_pieces * self.per_piece)

    def fill(self, num_blocks: int) -> None:
        """Make at least so many blocks ready. Raises StartupError."""
        try:
            while self.num_ready < num_blocks:
                self._add_piece()
        except (RuntimeError, MemoryError) as error:
            self.close()
            raise StartupError(f"cannot pin {num_blocks * sum(self._sizes) / 1e9:.2f} GB: {error}") from error
        self.num_filled = num_blocks

    def start(self) -> None:
        """Make the rest ready on a thread. If a piece cannot be had, the pool stays as large as it is."""
        if self._thread is None and self.num_ready < self.num_blocks:
            self._thread = threading.Thread(target=self._fill_all, name="host-memory", daemon=True)
            self._thread.start()

    def close(self, unpin_s: float = inf) -> None:
        """End the thread and give the memory back, after the last copy. Idempotent.

        unpin_s: for that; what is pinned then stays until the process ends, which takes the driver as long.
        """
        self._ends.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.error("host memory is still being pinned after %g s, and stays", STOP_S)
                return
        until_s = time.monotonic() + unpin_s
        while self._pinned and time.monotonic() < until_s:
            torch.cuda.check_error(driver().cudaHostUnregister(self._pinned.pop()))
        if not self._pinned:
            self._memory, self.tensors = [], ()

    def _reserve(self, size: int) -> torch.Tensor:
        """Bytes for whole pieces of one group's blocks. Raises StartupError."""
        num_bytes = -(-self.num_blocks // self.per_piece) * self.per_piece * size
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            return torch.frombuffer(large_pages(num_bytes), dtype=torch.uint8)
        except (OSError, ValueError, OverflowError) as error:
            raise StartupError(f"cannot reserve {num_bytes / 1e9:.2f} GB of host memory: {error}") from error

    def _fill_all(self) -> None:
        started_s, first = time.monotonic(), self.num_ready
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self.num_ready < self.num_blocks and not self._ends.is_set():
                piece_bytes, free = self.per_piece * sum(self._sizes), self._free_bytes()
                if free - piece_bytes < HOST_RESERVE_BYTES:
                    raise MemoryError(f"{free / 1e9:.1f} GB are free")
                self._add_piece()
        except Exception as error:  # of the driver, for instance: the node serves without the rest
            logger.warning("host memory ends at %s: %s", self._amount(self.num_ready), error)
        else:
            taken_s = time.monotonic() - started_s
            logger.info("host memory: %s ready after %.1f s", self._amount(self.num_ready - first), taken_s)

    def _amount(self, num_blocks: int) -> str:
        return f"{num_blocks} of {self.num_blocks} blocks ({num_blocks * sum(self._sizes) / 1e9:.2f} GB)"

    def _add_piece(self) -> None:
        """Raises RuntimeError."""
        for memory, size in zip(self._memory, self._sizes, strict=True):
            num_bytes = self.per_piece * size
            address = memory.data_ptr() + self._num_pieces * num_bytes
            # First, and without the interpreter's lock: what the driver has to find pages for, it finds under its own
            ctypes.memset(address, 0, num_bytes)
            if self._device.type == "cuda":
                pin(address, num_bytes)
                self._pinned.append(address)
        self._num_pieces += 1
