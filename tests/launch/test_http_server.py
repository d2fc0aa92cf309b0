"""The end of a node's HTTP server."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pd_cluster.launch import http_server
from pd_cluster.launch.http_server import HttpServer
from pd_cluster.server.app import create_app
from pd_http.reply import Reply
from tests.deadlines import HANG_S
from tests.server.fake_engine import FakeEngine, Line
from tests.server.live_server import make_state

if TYPE_CHECKING:
    from pd_http.errors import PdError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_the_port_closes_after_the_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that is refused a connection takes the node for dead, with all that it has not read."""

    async def silent(_: Line) -> None:
        await asyncio.Event().wait()

    state = make_state(FakeEngine(silent))
    monkeypatch.setattr(http_server, "_build_app", lambda *_: (create_app(state), state))
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(state.config, listener, state.engine)
    order: list[str] = []
    fail, stop_accepting = Reply.fail, HttpServer.stop_accepting

    async def slow_fail(reply: Reply, error: PdError) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        order.append("words")
        await fail(reply, error)

    def noted_stop(server: HttpServer) -> None:
        order.append("port")
        stop_accepting(server)

    monkeypatch.setattr(Reply, "fail", slow_fail)
    monkeypatch.setattr(HttpServer, "stop_accepting", noted_stop)
    run = asyncio.create_task(server.run())

    async def ask(session: aiohttp.ClientSession) -> tuple[int, Any]:
        async with session.post(f"{server.url}/v1/completions", json={"prompt": "a"}) as answer:
            return answer.status, (await answer.json())["error"]["code"]

    async with asyncio.timeout(HANG_S), aiohttp.ClientSession() as session:
        await server.up.wait()
        asked = [asyncio.create_task(ask(session)) for _ in range(3)]
        while state.num_in_flight < len(asked):  # noqa: ASYNC110 (the requests are on their way)
            await asyncio.sleep(0)
        await server.cut(run, HANG_S)
        assert await asyncio.gather(*asked) == [(503, "engine_unavailable")] * len(asked)
    assert order == ["words"] * len(asked) + ["port"]
    assert run.done()
