"""How much a step may copy in one direction."""

from __future__ import annotations

LEAST_COPIES = 4  # blocks of a step, whatever they take
ISSUE_S = 20e-6  # a block takes no less: the host issues each copy in 10 us, and those of both directions


class CopyRoom:
    """Bounds a step's copies by seconds and by blocks. The first LEAST_COPIES may take longer."""

    def __init__(self, seconds: float, bytes_per_s: float, most: int) -> None:
        self._rest_s, self._bytes_per_s, self._most = seconds, bytes_per_s, most
        self._num = self.num_bytes = 0  # of the blocks that were taken
        self.is_full = False  # one was refused

    def take(self, num_bytes: int) -> bool:
        """Count a block, if there is room for it. Returns whether there is."""
        seconds = max(num_bytes / self._bytes_per_s, ISSUE_S)
        if self._num >= self._most or (self._num >= LEAST_COPIES and seconds > self._rest_s):
            self.is_full = True
            return False
        self._rest_s -= seconds
        self._num += 1
        self.num_bytes += num_bytes
        return True
