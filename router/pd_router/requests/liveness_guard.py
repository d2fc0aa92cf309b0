"""Waits for a node that end when it is judged down: for a client's first byte, or for more of a stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_router.nodes.upstream import LegFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pd_router.nodes.liveness import Down
    from pd_router.nodes.node import Node


class LivenessGuard:
    """While entered, cancels the current task if `node` is judged down and `can_move()` is true; raises LegFailed then.

    Like `asyncio.timeout`, it can be nested with other scopes that cancel. If the request cannot move, the wait
    continues: the node may recover.
    """

    __slots__ = ("_can_move", "_cancelling", "_down", "_node", "_num_cancelled", "_task")

    def __init__(self, node: Node, can_move: Callable[[], bool]) -> None:
        self._node = node
        self._can_move = can_move
        self._down: Down | None = None
        self._cancelling: asyncio.Handle | None = None

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._num_cancelled = task.cancelling()
        self._node.liveness.enter(self)

    def receive(self, down: Down) -> None:
        """Take a judgement that the node is down."""
        if self._down is None and self._can_move():
            self._down = down
            # Not now: a standing judgement is reported on entry, and a task that ends the scope before it waits cannot
            # take its own cancellation back (before Python 3.13).
            self._cancelling = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._cancelling = None
        self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.liveness.leave(self)
        if self._down is None:
            return
        if self._cancelling is not None:
            self._cancelling.cancel()
            return
        others = self._task.uncancel() > self._num_cancelled
        if kind is asyncio.CancelledError and not others:
            raise LegFailed(self._node, self._down.kind, self._down.why) from error
