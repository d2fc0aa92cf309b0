"""The judgement of health checks on a node, and the waits that end when a node goes down. Pure: no IO, no clock.

the node ...                                 judged     requests that wait for its first byte
answers /health with 200                     up         continue to wait
does not answer within `health_timeout_s`    frozen     move, if another node can take them (`deaths` counts)
answers that its engine is frozen            frozen     the same
refuses connections, or answers "dead"       died       the same, counted against the request
answers with another boot epoch              died       the same; requests sent from now on are not affected
either, and it had said that it drains       left       move, not counted against the request
answers that it starts or drains             not judged continue to wait: the node finishes what it has
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from pd_http.node_answers import FailureKind


@dataclass(frozen=True, slots=True)
class Down:
    """A judgement that a node is down."""

    kind: FailureKind  # FROZEN, DIED or LEFT
    why: str


def is_freeze(down: Down | None) -> bool:
    return down is not None and down.kind is FailureKind.FROZEN


class DownListener(Protocol):
    """A wait that a judgement may end."""

    def receive(self, down: Down) -> None:
        """Take a judgement that the node is down."""


class NodeLiveness:
    """Judgements of one node. When the health poller judges it to be down, guarded waits for it end."""

    __slots__ = ("_guards", "doubted", "down", "frozen_at", "leaving_epoch", "num_polls")

    def __init__(self) -> None:
        self.down: Down | None = None
        self.num_polls = 0  # of /health that have begun
        self.frozen_at = 0  # number of the poll that first found the newest freeze
        self.leaving_epoch: int | None = None  # of the newest boot that has said that it ends by order
        self.doubted = asyncio.Event()  # set: /health is to be polled now
        self._guards: set[DownListener] = set()

    def doubt(self) -> None:
        """Have the node judged now, if it is not judged frozen already."""
        if not is_freeze(self.down):
            self.doubted.set()

    def judge(self, down: Down | None) -> None:
        """Store the newest judgement. A node that stays down is judged at each poll: a wait that could not move before
        may be able to move now."""
        if is_freeze(down) and not is_freeze(self.down):
            self.frozen_at = self.num_polls
        self.down = down
        if down is not None:
            for guard in list(self._guards):
                guard.receive(down)

    def restarted(self, down: Down) -> None:
        """Note that the node is up but has lost the requests that it had. `down`: how."""
        self.judge(down)
        self.judge(None)

    def has_left(self, epoch: int | None) -> bool:
        """Whether the boot `epoch` has said that it ends by order: that it is gone is then no death."""
        return epoch is not None and epoch == self.leaving_epoch

    def enter(self, guard: DownListener) -> None:
        """Tell `guard` judgements until it leaves, and a standing one at once."""
        self._guards.add(guard)
        if self.down is not None:
            guard.receive(self.down)

    def leave(self, guard: DownListener) -> None:
        self._guards.discard(guard)
