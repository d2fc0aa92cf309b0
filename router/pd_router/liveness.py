"""The judgement of health checks on a node, and the waits that end when a node goes down. Pure: no IO, no clock.

the node ...                                 judged     requests that wait for its first byte
answers /health with 200                     up         continue to wait
does not answer within `health_timeout_s`    frozen     move, if another node can take them
answers that its engine is frozen            frozen     the same
refuses connections, or answers "dead"       died       the same, counted against the request
answers with another boot epoch              died       the same; requests sent from now on are not affected
answers that it starts or drains             not judged continue to wait: the node finishes what it has
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_router.upstream import FailureKind, LegFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pd_router.node_table import Node


@dataclass(frozen=True, slots=True)
class Down:
    """A judgement that a node is down."""

    kind: FailureKind  # FROZEN or DIED
    why: str


class NodeLiveness:
    """Of one node. The health poller judges; guarded waits end then."""

    __slots__ = ("_guards", "down")

    def __init__(self) -> None:
        self.down: Down | None = None
        self._guards: set[FirstByteGuard] = set()

    def judge(self, down: Down | None) -> None:
        """Store the newest judgement. A node that stays down is judged at each poll: a wait that could not move before
        may be able to move now."""
        self.down = down
        if down is not None:
            for guard in list(self._guards):
                guard.hear(down)

    def restarted(self, why: str) -> None:
        """The node is up, but has lost the requests that it had."""
        self.judge(Down(FailureKind.DIED, why))
        self.judge(None)

    def enter(self, guard: FirstByteGuard) -> None:
        """Tell `guard` judgements until it leaves, and a standing one at once."""
        self._guards.add(guard)
        if self.down is not None:
            guard.hear(self.down)

    def leave(self, guard: FirstByteGuard) -> None:
        self._guards.discard(guard)


class FirstByteGuard:
    """While entered, cancels the current task if `node` is judged down and `can_move()` is true; raises LegFailed then.

    Only for waits before the client's first byte. Like `asyncio.timeout`, it can be nested with other scopes that
    cancel. If the request cannot move, the wait continues: the node may recover.
    """

    __slots__ = ("_can_move", "_down", "_node", "_num_cancelled", "_task")

    def __init__(self, node: Node, can_move: Callable[[], bool]) -> None:
        self._node = node
        self._can_move = can_move
        self._down: Down | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancelled = task.cancelling()
        self._node.liveness.enter(self)

    def hear(self, down: Down) -> None:
        """The node was judged down."""
        if self._down is None and self._can_move():
            self._down = down
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.liveness.leave(self)
        if self._down is None:
            return
        others = self._task.uncancel() > self._num_cancelled
        if kind is asyncio.CancelledError and not others:
            raise LegFailed(self._node, self._down.kind, self._down.why) from error
