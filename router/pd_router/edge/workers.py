"""All processes that serve one router's port, seen from one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pd_router.sources.node_change import NodeChange
    from pd_router.sources.posted import PostedNodes


class Workers(Protocol):
    """What a worker needs of the others. `number`: of this one; None: there are no others."""

    number: int | None

    async def commit(self, change: NodeChange) -> None:
        """Return when every worker has made the change. Raises HandingOver, Stopping."""

    async def ask(self, topic: str) -> dict[int, Any]:
        """What the other workers tell about `topic`, by number. None: no answer in time. Raises Stopping."""


class OnlyWorker:
    """The process that is the whole router."""

    number: int | None = None

    def __init__(self, posted: PostedNodes) -> None:
        self._posted = posted

    async def commit(self, change: NodeChange) -> None:
        self._posted.adopt(self._posted.restart_state().changed(change))

    async def ask(self, topic: str) -> dict[int, Any]:
        return {}
