"""How fast the link to a peer is, by the reads of its KV. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_connectors.transport import ReadId

MIN_BYTES = 16 << 20  # of a measurement: fewer take no longer than posting them and learning of their end
LONG_S = 1.0  # reads that take so long are measured whatever they read: a slow link reads no more
LONG_BYTES = 1 << 30  # reads that always overlap are measured after so many
SLOW_BYTES_PER_S = 5e9  # NVLink and RDMA adapters give 20e9 and more, UCX over TCP at most 3e9
CAUSES = "on one host: separate PID namespaces, or a GPU that the other side does not see; between hosts: TCP, not RDMA"


class LinkSpeed:
    """Bytes of the reads over one endpoint, divided by the time in which at least one of them was in flight.

    The time in which D waits for P to compute does not count. `bytes_per_s`: 0 until it is known. Times are of the
    control thread's clock.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.best_bytes_per_s = 0.0  # the most that it was
        self._in_flight: dict[ReadId, int] = {}  # bytes
        self._since = 0.0  # valid while reads are in flight
        self._bytes = 0

    @property
    def is_slow(self) -> bool:
        return 0 < self.bytes_per_s < SLOW_BYTES_PER_S

    def posted(self, read_id: ReadId, num_bytes: int, now: float) -> None:
        if not self._in_flight:
            self._since, self._bytes = now, 0
        self._in_flight[read_id] = num_bytes

    def ended(self, read_id: ReadId, now: float, *, is_good: bool) -> None:
        """Note the end of a read. Reads of another endpoint change nothing."""
        if (num_bytes := self._in_flight.pop(read_id, None)) is None:
            return
        self._bytes += num_bytes if is_good else 0
        took_s = now - self._since
        is_over = not self._in_flight and (self._bytes >= MIN_BYTES or (took_s >= LONG_S and self._bytes > 0))
        if (is_over or self._bytes >= LONG_BYTES) and took_s > 0:
            rate = self._bytes / took_s
            self.bytes_per_s = (self.bytes_per_s + rate) / 2 if self.bytes_per_s else rate
            self.best_bytes_per_s = max(self.best_bytes_per_s, self.bytes_per_s)
            self._since, self._bytes = now, 0

    def forget_reads(self) -> None:
        """Their endpoint is given up: no end of them counts."""
        self._in_flight.clear()
