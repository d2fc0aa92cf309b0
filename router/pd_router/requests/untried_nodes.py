"""The nodes that one leg of a request may still try. Pure: reads nodes, changes none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pd_router.nodes.node import Node

Choose = Callable[[Iterable[Node], float], Node | None]


@dataclass(slots=True, eq=False)
class UntriedNodes:
    """Returns each node once: the planned ones, then others of the role that have become healthy since (`_found`).

    `_limit`: number of tries; 0: no limit, so a request may try every healthy node.
    """

    _left: Sequence[Node]  # the planned ones that are not tried yet
    _found: Callable[[], Iterable[Node]]
    _choose: Choose
    _limit: int
    _clock: Callable[[], float]
    _tried: list[Node] = field(default_factory=list)

    @property
    def has_next(self) -> bool:
        """Whether `take` would return a node."""
        return self._next() is not None

    def take(self) -> Node | None:
        """The best node not tried yet. None: there is none, or the limit is reached."""
        node = self._next()
        if node is not None:
            self._tried.append(node)
            self._left = [one for one in self._left if one is not node]
        return node

    def _next(self) -> Node | None:
        if self._limit and len(self._tried) >= self._limit:
            return None
        now_s = self._clock()
        if (node := self._choose(self._left, now_s)) is not None:
            return node
        return self._choose([one for one in self._found() if one not in self._tried], now_s)
