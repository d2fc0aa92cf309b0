"""Returns the memory of large requests to the operating system."""

from __future__ import annotations

import ctypes

# Freed between two returns. A return takes 0.1 to 8 ms, by the number of free pieces.
RETURN_BYTES = 16 << 20


class FreedMemory:
    """Counts the bytes of requests that are freed.

    glibc keeps freed memory below any piece that is still used: after 16 MB of unfinished requests 0 to 13 MB stayed
    resident, after 64 MB at times more than 32.
    """

    def __init__(self) -> None:
        self._num_bytes = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only

    def note(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Return what is free, if RETURN_BYTES were freed since the last time."""
        if self._num_bytes >= RETURN_BYTES and self._trim is not None:
            self._num_bytes = 0
            self._trim(0)
