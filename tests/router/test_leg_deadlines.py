"""Which deadline each wait for a node has: test_leg_failures shows that it ends the wait, here it has no other one."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pd_router.nodes.node_connection import NodeExchange
from tests.deadlines import HANG_S
from tests.http.answer import CHAT, HI, post
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from pd_router.nodes.node_connection import NodeConnection

pytestmark = pytest.mark.anyio
IDLE_S, TICKET_S, FIRST_BYTE_S, RESPONSE_S = 1_000.0, 10_000.0, 20_000.0, 30_000.0
FLAGS: dict[str, Any] = {
    "idle_timeout_s": IDLE_S, "ticket_timeout_s": TICKET_S, "first_byte_timeout_s": FIRST_BYTE_S,
    "response_timeout_s": RESPONSE_S,
}  # fmt: skip


@pytest.mark.parametrize(
    ("order", "stream", "waits"),
    [
        ("p-first", True, [TICKET_S, TICKET_S, FIRST_BYTE_S, FIRST_BYTE_S, RESPONSE_S, inf]),
        ("p-first", False, [IDLE_S, TICKET_S, TICKET_S, RESPONSE_S, RESPONSE_S]),
        ("d-first", True, [FIRST_BYTE_S, FIRST_BYTE_S, inf]),
        ("d-first", False, [IDLE_S, RESPONSE_S]),
    ],
)
async def test_each_wait_has_the_deadline_of_its_flag(
    order: str, stream: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    limit = NodeExchange.limit

    def noted(exchange: NodeExchange, seconds: float) -> None:
        limits.append(seconds)
        limit(exchange, seconds)

    p, d = FakeNode("prefill", fakes.prefill), FakeNode("decode", fakes.decode)
    async with running(p, d), serving([p], [d], **FLAGS) as router:
        await router.idle()
        monkeypatch.setattr(NodeExchange, "limit", noted)
        assert (await post(router, CHAT, HI, {"x-pd-route": order}, stream=stream)).status == 200
    assert sorted(limits) == pytest.approx(waits, abs=HANG_S)  # a deadline of several waits counts from its begin


def test_a_limit_counts_from_now() -> None:
    watched: list[float] = []
    connection = cast("NodeConnection", SimpleNamespace(watch=watched.append))
    exchange = NodeExchange(connection, cast("AbstractEventLoop", SimpleNamespace(time=lambda: 50.0)))
    exchange.limit(TICKET_S)
    assert (exchange.expires_s, watched) == (50.0 + TICKET_S, [50.0 + TICKET_S])
