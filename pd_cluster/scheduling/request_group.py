"""The requests of one HTTP request on this node, which share turns (see `turns`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from pd_cluster.scheduling.ordered_queue import Item, OrderedQueue

Claim = tuple[int, int, int, int, int]

LEAST_EXCESS = 2  # a group yields a slot to another if it holds at least this many more


@dataclass(slots=True, eq=False)
class RequestGroup(Generic[Item]):
    """A group: the engine's requests that come from one HTTP request and have not ended."""

    name: str
    num_requests: int = 0
    num_queued: int = 0  # requests of which nothing has run yet
    num_slots: int = 0  # held by its running sequences
    is_shared: bool = False  # it has, or had, more than one sequence
    last_turn: tuple[int, int] = (-1, 0)  # (the last arrival before it, as `Request.since`; its serial number)
    waiting: OrderedQueue[Item] = field(default_factory=OrderedQueue)  # sequences that wait for a slot

    def owes(self, other: RequestGroup[Item]) -> bool:
        """Whether this group must yield a slot to the other group."""
        return self.num_slots >= other.num_slots + LEAST_EXCESS

    def claim(self, precedence: tuple[int, ...]) -> Claim:
        """The claim of a waiting sequence, or of a request, with this precedence. Smaller goes first."""
        priority, turn, arrival = precedence[:3]
        if not self.is_shared:
            return (priority, 0, turn, 0, arrival)
        return (priority, self.num_slots, *max((turn, 0), self.last_turn), arrival)
