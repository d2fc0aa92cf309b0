"""How much steps may copy in one direction."""

from __future__ import annotations

ISSUE_S = 20e-6  # a block takes no less: the host issues each copy in 10 us, and those of both directions


class CopyRoom:
    """Bounds the copies of each step by seconds and by blocks.

    The seconds of steps that have none for a first block are saved up until it fits: at 25 GB/s a state of 65 MB takes
    2.6 ms, and half of a step of 2.8 ms is 1.4. So the steps of any time copy for no longer than they may, and a block.
    """

    def __init__(self) -> None:
        self._seconds = self._taken_s = 0.0
        self._waits = False  # a first block for which there is no room: no other one takes its seconds

    def begin(self, seconds: float, bytes_per_s: float, most: int) -> None:
        """Begin a step."""
        self._seconds = seconds + (max(0.0, self._seconds - self._taken_s) if self._waits else 0.0)
        self._bytes_per_s, self._most = bytes_per_s, most
        self._num, self._taken_s, self._waits = 0, 0.0, False
        self.num_bytes = 0  # of what was taken
        self.share = 1.0  # of all, that may be taken by now

    @property
    def waits(self) -> bool:
        """Whether the first block that was asked for waits for a later step."""
        return self._waits

    def take(self, num_bytes: int, *, is_due: bool = False) -> bool:
        """Count a block, if there is room for it, or if it is due: then it may take longer. Returns whether it does."""
        taken_s = self._taken_s + max(num_bytes / self._bytes_per_s, ISSUE_S)
        if self._num >= self.share * self._most:
            return False
        if not is_due and (self._waits or taken_s > self.share * self._seconds):
            self._waits = self._waits or not self._num
            return False
        self._num, self._taken_s = self._num + 1, taken_s
        self.num_bytes += num_bytes
        return True
