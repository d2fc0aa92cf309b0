"""What other servers' tools ask of a node, and signed orders to it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster import __version__
from pd_cluster.protocol.orders import ResetCache, StartProfile, StopProfile
from pd_cluster.server.app import create_app
from pd_cluster.server.routes import order_routes, status_routes
from pd_connectors.protocol.ticket import ALL_NODES, NodeOrder, Offer, sign
from pd_http.endpoints import NODE_ACTIONS
from tests.deadlines import HANG_S
from tests.server.fake_engine import FAR, FakeEngine, Line, says
from tests.server.live_server import KEY, make_state, running, serving

if TYPE_CHECKING:
    import aiohttp

pytestmark = pytest.mark.anyio


def order(action: str, node: str = "node", *, key: bytes = KEY, lives_s: float = 30.0) -> dict[str, str]:
    signed = sign(key, NodeOrder(action=action, node=node, expires_at_s=time.time() + lives_s))  # type: ignore[arg-type]
    return {"x-pd-order": signed}


async def call(session: aiohttp.ClientSession, method: str, url: str, **kwargs: Any) -> tuple[int, Any]:
    async with session.request(method, url, **kwargs) as response:
        return response.status, await response.json()


async def test_facts_without_paths() -> None:
    async with running(FakeEngine(says([5]))) as node:
        answers = {}
        for path in ("version", "load", "ping", "server_info", "get_server_info", "get_model_info", "health_generate"):
            status, answers[path] = await call(node.session, "GET", f"{node.url}/{path}")
            assert status == 200, path
        assert (await call(node.session, "POST", f"{node.url}/ping"))[0] == 200
        async with node.session.delete(f"{node.url}/ping") as response:
            assert response.status == 405
            assert {one.strip() for one in response.headers["allow"].split(",")} == {"GET", "HEAD", "POST"}
        async with node.session.head(f"{node.url}/health") as response:
            assert (response.status, await response.read()) == (200, b""), "as a router answers it"
        assert node.state.config.model.model not in str(answers)
    assert answers["version"] == {"version": __version__}
    assert answers["load"] == {"server_load": 0}
    assert answers["server_info"]["served_model_name"] == ["demo"]
    assert answers["get_model_info"]["is_generation"] is True
    assert answers["health_generate"]["status"] == "ok"
    assert [request.sampling.max_tokens for request in node.engine.requests] == [1]


async def test_a_node_that_generates_nothing_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(line: Line) -> None:
        await line.heard()

    monkeypatch.setattr(status_routes, "PROBE_DEADLINE_S", 0.01)
    async with running(FakeEngine(silent)) as node:
        status, answer = await call(node.session, "GET", f"{node.url}/health_generate")
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
        await node.engine.aborts.get()


@pytest.mark.parametrize("path", NODE_ACTIONS)
async def test_only_a_signed_order_for_this_node_and_action_is_obeyed(path: str) -> None:
    action = NODE_ACTIONS[path]
    other = next(one for one in NODE_ACTIONS.values() if one != action)
    wrong: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"x-pd-order": "x"}, 401),
        ({"x-pd-order": sign(KEY, Offer(("http://p:1",), FAR))}, 401),
        (order(action, key=b"x" * 32), 401),
        (order(action, lives_s=-1), 401),
        (order(action, "other"), 400),
        (order(action, ALL_NODES), 400),
        (order(other), 400),
    ]
    async with running(FakeEngine(says([5]))) as node:
        for headers, status in wrong:
            assert (await call(node.session, "POST", f"{node.url}{path}", headers=headers))[0] == status
        assert node.engine.sent == []
        status, answer = await call(node.session, "POST", f"{node.url}{path}", headers=order(action))
        if action == "reset_cache":
            assert (status, node.engine.sent) == (200, [ResetCache()])
        else:
            assert (status, answer["error"]["code"], node.engine.sent) == (400, "no_profile_dir", [])


async def test_a_record_that_is_forgotten_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(says([5]))
    state = make_state(engine)
    state.config = replace(state.config, server=replace(state.config.server, profile_dir="d"))
    async with running(FakeEngine(says([5]))) as other, serving(create_app(state)) as url:
        for action in ("start_profile", "stop_profile", "start_profile"):
            if engine.sent:  # the last one ends by itself
                monkeypatch.setattr(order_routes, "MAX_PROFILE_S", 0.01)
            assert (await call(other.session, "POST", f"{url}/{action}", headers=order(action)))[0] == 200
        async with asyncio.timeout(HANG_S):
            while len(engine.sent) < 4:  # noqa: ASYNC110 - the timer has no event
                await asyncio.sleep(0)
    assert engine.sent == [StartProfile(), StopProfile("d")] * 2


async def test_starting_again_does_not_put_off_the_end_of_a_record() -> None:
    """A record grows in memory, so a caller that starts it each minute must not keep it open."""
    engine = FakeEngine(says([5]))
    state = make_state(engine)
    state.config = replace(state.config, server=replace(state.config.server, profile_dir="d"))
    profiling, loop = order_routes._Profiling(state), asyncio.get_running_loop()
    before_s = loop.time()
    profiling.obey("start_profile")
    end = profiling._end
    profiling.obey("start_profile")
    assert end is not None
    assert profiling._end is end
    assert end.when() <= loop.time() + order_routes.MAX_PROFILE_S
    assert end.when() >= before_s + order_routes.MAX_PROFILE_S
    assert not end.cancelled()
    end._run()
    assert engine.sent[-1] == StopProfile("d")
    profiling.obey("start_profile")
    assert profiling._end is not None
    assert profiling._end is not end, "a new record has an end of its own"
    profiling.obey("stop_profile")
    state.tokenizer.close()
