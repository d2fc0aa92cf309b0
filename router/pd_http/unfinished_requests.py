"""The memory of requests that have not arrived whole, over all connections. Fed sizes and time; no sockets."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

Key = TypeVar("Key", bound="Hashable")
# Requests up to this size are read on, however little memory is left: nearly all are smaller, and clients with
# common requests do not wait for those with the largest.
SMALL_BYTES = 64 * 1024
READ_BYTES = 256 * 1024  # what uvloop reads at once


class UnfinishedRequests(Generic[Key]):
    """Bounds the sum of what is held to `max_bytes`, or to the one request that is left when it is larger.

    From three quarters of that on only the oldest request and small ones are read; the others stay in the kernel's
    buffers, so that a burst of honest clients arrives one after the other and all of it is served. The oldest then has
    `patience_s` to arrive: what does not is ended. When the sum passes `max_bytes` all the same, the largest is ended.
    """

    def __init__(self, max_bytes: int, patience_s: float = 5.0) -> None:
        self._max_bytes = max_bytes
        self._crowded_bytes = max_bytes * 3 // 4
        self._patience_s = patience_s
        self._held: dict[Key, int] = {}  # bytes, oldest request first
        self._oldest_by_s = inf  # until when the oldest may take, while others must wait for it
        self._oldest: Key | None = None
        self.num_bytes = 0

    def hold(self, key: Key, num_bytes: int) -> None:
        """The unfinished request of `key` has that many bytes now. 0: it has none."""
        before = self._held.pop(key, 0) if not num_bytes else self._held.get(key, 0)
        if num_bytes:
            self._held[key] = num_bytes
        self.num_bytes += num_bytes - before

    @property
    def is_crowded(self) -> bool:
        """Whether large requests must wait for each other."""
        return self.num_bytes > self._crowded_bytes

    def may_read(self, key: Key) -> bool:
        """Whether more of the request of `key` is to be read now."""
        if not self.is_crowded or self._held.get(key, 0) <= SMALL_BYTES:
            return True
        return next(iter(self._held)) == key

    def readers(self, stopped: Collection[Key]) -> list[Key]:
        """Those of `stopped` that are to be read again, oldest first: as many as there is room for, one at least."""
        room = (self._crowded_bytes - self.num_bytes) // READ_BYTES  # that much comes before one can be stopped again
        return [key for key in self._held if key in stopped and self.may_read(key)][: max(1, room)]

    def excess(self, now_s: float) -> Key | None:
        """A request to be ended now. Call it again when that is done."""
        if self.num_bytes > self._max_bytes and len(self._held) > 1:
            return max(self._held, key=self._held.__getitem__)
        oldest = next(iter(self._held), None) if self.is_crowded and len(self._held) > 1 else None
        if oldest is None or oldest != self._oldest:
            self._oldest, self._oldest_by_s = oldest, now_s + self._patience_s
            return None
        return oldest if now_s >= self._oldest_by_s else None
