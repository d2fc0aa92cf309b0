"""What health checks say of a node, and the waits that end when it goes down. Pure: no IO, no clock.

the node ...                                 judged     waits for its first byte
answers /health with 200                     up         go on
does not answer within `health_timeout_s`    frozen     move, if another node can take them
answers that its engine is frozen            frozen     the same
refuses connections, or answers "dead"       died       the same, counted against the request
answers with another boot epoch              died       the same; what it is sent from now on is not concerned
answers that it starts or drains             not asked  go on: what it has, it finishes
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
    """A judgement."""

    kind: FailureKind  # FROZEN or DIED
    why: str


class NodeLiveness:
    """Of one node. The health poller judges, guarded waits hear of it."""

    __slots__ = ("_guards", "down")

    def __init__(self) -> None:
        self.down: Down | None = None
        self._guards: set[FirstByteGuard] = set()

    def judge(self, down: Down | None) -> None:
        """The newest word. A node that stays down is judged again with each check: a wait that could not move then may
        be able to now."""
        self.down = down
        if down is not None:
            for guard in list(self._guards):
                guard.hear(down)

    def restarted(self, why: str) -> None:
        """The node is up, but what was sent to it before is lost."""
        self.judge(Down(FailureKind.DIED, why))
        self.judge(None)

    def enter(self, guard: FirstByteGuard) -> None:
        """`guard` hears of judgements until it leaves. Of one that stands it hears at once."""
        self._guards.add(guard)
        if self.down is not None:
            guard.hear(self.down)

    def leave(self, guard: FirstByteGuard) -> None:
        self._guards.discard(guard)


class FirstByteGuard:
    """While entered, the current task is cancelled when `node` is judged down and `can_move` agrees.

    Outside this shows as LegFailed. Only for waits in which the client has been shown no byte. Like `asyncio.timeout`,
    it can be nested with other scopes that cancel. Without an alternative the wait goes on: the node may recover.
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
        """The node is down."""
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
