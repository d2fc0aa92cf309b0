"""Waits for a client's first byte, which end when their node is judged down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_router.upstream import LegFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pd_router.liveness import Down
    from pd_router.node_table import Node


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
        """Take a judgement that the node is down."""
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
