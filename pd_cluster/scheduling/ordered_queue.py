"""A queue ordered by precedence. Precedences are unique and never change while queued."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator


class Ordered(Protocol):
    """Anything with a precedence: smaller goes first."""

    @property
    def precedence(self) -> tuple[int, ...]: ...


Item = TypeVar("Item", bound=Ordered)


def _precedence(item: Ordered) -> tuple[int, ...]:
    return item.precedence


class OrderedQueue(Generic[Item]):
    """A sorted list: O(log n) to find, a memmove to insert or remove (queues hold a thousand at most)."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Item]:
        return reversed(self._items)

    def __contains__(self, item: Item) -> bool:
        index = bisect_left(self._items, item.precedence, key=_precedence)
        return index < len(self._items) and self._items[index] is item

    @property
    def first(self) -> Item | None:
        return self._items[0] if self._items else None

    @property
    def last(self) -> Item | None:
        return self._items[-1] if self._items else None

    def add(self, item: Item) -> None:
        insort(self._items, item, key=_precedence)

    def discard(self, item: Item) -> bool:
        """Remove the item. Returns whether it was in the queue."""
        index = bisect_left(self._items, item.precedence, key=_precedence)
        if index < len(self._items) and self._items[index] is item:
            del self._items[index]
            return True
        return False
