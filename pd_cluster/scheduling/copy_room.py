"""How much a step may copy in one direction."""

from __future__ import annotations

LEAST_COPIES = 4  # blocks of a step, whatever they take
ISSUE_S = 20e-6  # a block takes no less: the host issues each copy in 10 us, and those of both directions


class CopyRoom:
    """Bounds a step's copies by seconds and by blocks. The first LEAST_COPIES may take longer."""

    def __init__(self, seconds: float, bytes_per_s: float, most: int) -> None:
        self._seconds, self._bytes_per_s, self._most = seconds, bytes_per_s, most
        self._num, self._taken_s = 0, 0.0
        self.num_bytes = 0  # of what was taken
        self.share = 1.0  # of all, that may be taken by now

    def take(self, num_bytes: int, *, is_due: bool = False) -> bool:
        """Count a block, if there is room for it, or if it is due: then it may take longer. Returns whether it does."""
        taken_s, share = self._taken_s + max(num_bytes / self._bytes_per_s, ISSUE_S), self.share
        is_within = is_due or self._num < share * LEAST_COPIES or taken_s <= share * self._seconds
        if not is_within or self._num >= share * self._most:
            return False
        self._num, self._taken_s = self._num + 1, taken_s
        self.num_bytes += num_bytes
        return True
