"""Router tests run on the event loop that the router uses."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from pd_router.nodes.node import Node

T = TypeVar("T")
LOOK_S = 0.002


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def sure_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of /health give up those nodes that are silent by order, at once, and no other on a busy machine."""
    from pd_router.watch.health import HealthPoller  # not above: the process that starts workers imports this file too
    from tests.router.fake_nodes import SILENT

    looked_at: ContextVar[str] = ContextVar("looked_at")
    poll = HealthPoller.poll

    async def poll_one(self: HealthPoller, node: Node) -> None:
        looked_at.set(node.url)
        await poll(self, node)

    async def heard(work: Coroutine[None, None, T], _limit_s: float) -> T:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if looked_at.get() in SILENT:
                    raise TimeoutError
                await asyncio.sleep(LOOK_S)
            return task.result()
        finally:
            task.cancel()

    monkeypatch.setattr(HealthPoller, "poll", poll_one)
    monkeypatch.setattr("pd_router.watch.health.patiently", heard)
