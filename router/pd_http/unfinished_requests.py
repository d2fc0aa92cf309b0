"""The memory of incomplete requests over all connections. Takes sizes and times; no sockets."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable

Key = TypeVar("Key", bound="Hashable")
# Requests up to this size are always read: nearly all requests are smaller, so common requests do not wait for the
# largest ones.
SMALL_BYTES = 64 * 1024
READ_BYTES = 256 * 1024  # what uvloop reads at once


class UnfinishedRequests(Generic[Key]):
    """Bounds the bytes of incomplete requests to `max_bytes`; a single request may exceed the bound.

    Above three quarters of `max_bytes` only the oldest request and small ones are read. The others stay in the kernel's
    buffers, so a burst of large requests arrives one after the other and all of them are served. The oldest request
    must then arrive within `patience_s`, else it is ended. If the sum exceeds `max_bytes`, the largest is ended.
    """

    def __init__(self, max_bytes: int, patience_s: float = 5.0) -> None:
        self._max_bytes = max_bytes
        self._crowded_bytes = max_bytes * 3 // 4
        self._patience_s = patience_s
        self._held: dict[Key, int] = {}  # bytes, oldest request first
        self._oldest_by_s = inf  # deadline of the oldest request while others wait for it
        self._oldest: Key | None = None
        self.num_bytes = 0

    def hold(self, key: Key, num_bytes: int) -> None:
        """Set the bytes of the incomplete request of `key`. 0: there is none."""
        before = self._held.pop(key, 0) if not num_bytes else self._held.get(key, 0)
        if num_bytes:
            self._held[key] = num_bytes
        self.num_bytes += num_bytes - before

    @property
    def is_crowded(self) -> bool:
        """Whether large requests are read one after the other."""
        return self.num_bytes > self._crowded_bytes

    def may_read(self, key: Key) -> bool:
        """Whether to read more of the request of `key` now."""
        if not self.is_crowded or self._held.get(key, 0) <= SMALL_BYTES:
            return True
        return next(iter(self._held)) == key

    def readers(self, stopped: Collection[Key]) -> list[Key]:
        """The keys of `stopped` to read again, oldest first: as many as there is room for, at least one."""
        room = (self._crowded_bytes - self.num_bytes) // READ_BYTES  # what arrives before reading stops again
        return [key for key in self._held if key in stopped and self.may_read(key)][: max(1, room)]

    def excess(self, now_s: float) -> Key | None:
        """A request to end now, if any. Call it again after ending it."""
        if self.num_bytes > self._max_bytes and len(self._held) > 1:
            return max(self._held, key=self._held.__getitem__)
        oldest = next(iter(self._held), None) if self.is_crowded and len(self._held) > 1 else None
        if oldest is None or oldest != self._oldest:
            self._oldest, self._oldest_by_s = oldest, now_s + self._patience_s
            return None
        return oldest if now_s >= self._oldest_by_s else None
