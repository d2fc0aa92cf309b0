"""Host memory that a device copies from by itself, pinned in pieces by a thread beside the step loop.

Pinning takes up to a second a GiB, most of it for finding pages, and every launch waits for the driver's locks
meanwhile. So pages are filled first, a piece is small, and there is a pause after each. A copy may not go over two
pieces.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pd_cluster.large_pages import large_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 2 << 20  # a large page; a multiple of each number's bytes
PAUSE_S = 0.001  # between pieces, in which launches get the driver's locks


def pin(address: int, num_bytes: int) -> None:
    """Raises RuntimeError."""
    torch.cuda.check_error(driver().cudaHostRegister(address, num_bytes, 0))


def driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class AdapterPages:
    """Memory of one adapter: `fill` it, `pin` it, copy its `pieces`. Another one of as many bytes may take it next."""

    def __init__(self, num_numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises OSError."""
        self.numbers = torch.frombuffer(large_pages(num_numbers * dtype.itemsize), dtype=dtype)
        self._device, self._pinned = device, list[int]()
        self._copied: torch.cuda.Event | None = None

    def pieces(self) -> Iterator[torch.Tensor]:
        """All numbers, in order."""
        step = PIECE_BYTES // self.numbers.itemsize
        for start in range(0, len(self.numbers), step):
            yield self.numbers[start : start + step]

    def note_copied(self) -> None:
        """Copies of it are under way on the current stream."""
        if self._device.type == "cuda":
            self._copied = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        """Until the copies have ended: it may then be written."""
        if self._device.type == "cuda":  # else a thread's first call takes memory of the first device
            torch.cuda.set_device(self._device)
        if self._copied is not None:
            self._copied.synchronize()

    def pin(self) -> None:
        """Call it when all is written, on a thread. Raises RuntimeError."""
        if self._device.type != "cuda" or self._pinned:
            return
        torch.cuda.set_device(self._device)
        for piece in self.pieces():
            pin(piece.data_ptr(), piece.nbytes)
            self._pinned.append(piece.data_ptr())
            time.sleep(PAUSE_S)

    def close(self, pause_s: float = PAUSE_S) -> None:
        """Give the memory back. Raises RuntimeError. `pause_s`: as in `pin`, beside the step loop."""
        self.wait()
        while self._pinned:
            torch.cuda.check_error(driver().cudaHostUnregister(self._pinned.pop()))
            time.sleep(pause_s)
