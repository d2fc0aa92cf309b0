"""Requests that wait at the router, and which one is next. Pure: no clock, no IO.

Each key has a counter of the cost that it was served, divided by its weight. Of the keys that wait with the best
priority the one with the lowest counter is next (the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models", OSDI 2024). A key that comes back starts at the counter of the key served last: it neither saves up
turns nor waits for those that others took meanwhile.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class Turn(Generic[Item]):
    """One request that waits. `cost`: tokens expected; `sequences`: that it generates; `num_bytes`: of its body."""

    item: Item
    key: str
    weight: float
    priority: int
    cost: float
    sequences: int = 1
    num_bytes: int = 0


@dataclass(slots=True)
class _Line:
    """What one key has waiting with one priority, oldest first."""

    turns: deque[Turn] = field(default_factory=deque)  # type: ignore[type-arg]
    cost: float = 0.0
    sequences: int = 0


class FairQueue(Generic[Item]):
    """`pop` serves in proportion to the weights of the keys that wait, whatever each of them sends."""

    def __init__(self, may_go: Callable[[Turn[Item]], bool] = lambda turn: True) -> None:
        """`may_go`: whether the turn's key may have one more under way. Others pass a turn that may not."""
        self._may_go = may_go
        self._served: dict[str, float] = {}
        self._floor = 0.0  # the highest counter at which a key was served
        self._lines: dict[tuple[int, str], _Line] = {}
        self._count = 0
        self.num_bytes = 0  # of the bodies that wait

    def __len__(self) -> int:
        return self._count

    @property
    def has_ready(self) -> bool:
        """Whether a turn waits for others, and not for its own key."""
        return any(self._may_go(line.turns[0]) for line in self._lines.values())

    def serve(self, turn: Turn[Item]) -> None:
        """Count a request that is served, whether it has waited or not."""
        before = max(self._served.get(turn.key, 0.0), self._floor if not self._waits(turn.key) else 0.0)
        self._floor = max(self._floor, before)
        self._served[turn.key] = before + turn.cost / turn.weight

    def correct(self, key: str, weight: float, excess: float) -> None:
        """Note that a request that was served cost so much more than expected."""
        if key in self._served:
            self._served[key] += excess / weight

    def push(self, turn: Turn[Item]) -> None:
        if not self._waits(turn.key):
            self._served[turn.key] = max(self._served.get(turn.key, 0.0), self._floor)
        line = self._lines.setdefault((turn.priority, turn.key), _Line())
        line.turns.append(turn)
        line.cost += turn.cost
        line.sequences += turn.sequences
        self._count += 1
        self.num_bytes += turn.num_bytes

    def pop(self, fits: Callable[[Turn[Item]], bool]) -> Turn[Item] | None:
        """Take and count the next turn that fits; None: there is none. Of one key and priority the oldest is first."""
        for _, line in sorted(self._lines.items(), key=lambda entry: (entry[0][0], self._served[entry[0][1]])):
            turn: Turn[Item] = line.turns[0]
            if not self._may_go(turn):  # it does not wait for others, so it saves up no turns
                self._served[turn.key] = max(self._served[turn.key], self._floor)
            elif fits(turn):
                self.serve(turn)
                self.remove(turn)
                return turn
        return None

    def remove(self, turn: Turn[Item]) -> None:
        """Take a turn out of the queue, if it is there. Not counted: its client left, or it waited too long."""
        line = self._lines.get((turn.priority, turn.key))
        if line is None or turn not in line.turns:
            return
        line.turns.remove(turn)
        line.cost -= turn.cost
        line.sequences -= turn.sequences
        self._count -= 1
        self.num_bytes -= turn.num_bytes
        if not line.turns:
            del self._lines[turn.priority, turn.key]

    def last(self) -> Turn[Item]:
        """The newest turn of the line that would be served last."""
        entry = max(self._lines.items(), key=lambda one: (one[0][0], self._end(one[1])))
        newest: Turn[Item] = entry[1].turns[-1]
        return newest

    def ahead(self, turn: Turn[Item]) -> tuple[float, float]:
        """(cost, sequences) of what is served before a turn that is pushed now, estimated."""
        own = self._lines.get((turn.priority, turn.key))
        start = max(self._served.get(turn.key, 0.0), self._floor if not self._waits(turn.key) else 0.0)
        start = start if own is None else self._end(own)
        cost = sequences = 0.0
        for (priority, key), line in self._lines.items():
            first = line.turns[0]
            if priority > turn.priority or not line.cost or not self._may_go(first):
                continue
            share = 1.0 if priority < turn.priority else (start - self._served[key]) * first.weight / line.cost
            share = min(1.0, max(0.0, share))
            cost += share * line.cost
            sequences += share * line.sequences
        return cost, sequences

    def _end(self, line: _Line) -> float:
        """The counter of the line's key when all of the line is served."""
        first: Turn[Item] = line.turns[0]
        return self._served[first.key] + line.cost / first.weight

    def _waits(self, key: str) -> bool:
        return bool(self._lines) and any(name == key for _, name in self._lines)
