"""Nodes that go, fall ill and come back, under traffic through a live router, from every source of nodes.

Gone means: no new request after a second at most. Ill means: out within the health check's interval and timeout, and
back after one good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from pd_router.sources.kubernetes import KubernetesPods
from tests.router import fake_nodes as fakes
from tests.router.fake_kubernetes import kubernetes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, signed, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from pd_router.node_table import Node
    from pd_router.upstream import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.long]

GONE_S = 1.0  # the promise
INTERVAL_S, TIMEOUT_S = 0.2, 0.4  # of the health check here
SLACK_S = 2.0  # what a busy machine may add
BODY = {"model": "demo", "prompt": "x", "stream": True}
SOURCES = ("flags", "file", "posted", "kubernetes")


class Traffic:
    """One request after the other, until it is closed; `last` says when each node last got one (monotonic seconds)."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.last: dict[str, float] = {}
        self.statuses: set[int] = set()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        session, url = self._router.session, self._router.url + "/v1/completions"
        while True:
            sent_at = time.monotonic()
            async with session.post(url, json=BODY) as answer:
                self.statuses.add(answer.status)
                self.last[answer.headers.get("x-pd-decode", "")] = sent_at
                await answer.read()

    async def hears_from(self, node: FakeNode) -> None:
        """Until `node` has served a request that was sent after this call."""
        now = time.monotonic()
        await until(lambda: self.last.get(node.node_id, 0.0) > now)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def named_by(
    source: str, nodes: list[FakeNode], tmp_path: Path
) -> AsyncIterator[tuple[Router, Callable[[FakeNode], Awaitable[None]]]]:
    """A router that knows decode nodes by `source`, and what takes one away there."""
    settings: dict[str, Any] = {"health_interval_s": INTERVAL_S, "health_timeout_s": TIMEOUT_S, "start_empty": True}
    if source == "flags":  # a flag cannot be taken back: the node's process is gone
        async with serving(decode=nodes, **settings) as router:
            yield router, FakeNode.stop
    elif source == "file":
        path = tmp_path / "nodes.json"

        async def rewrite(gone: FakeNode | None) -> None:
            draft = path.with_suffix(".new")
            draft.write_text(json.dumps([{"url": n.url, "role": "decode"} for n in nodes if n is not gone]))
            draft.rename(path)

        await rewrite(None)
        async with serving(nodes_file=str(path), **settings) as router:
            yield router, rewrite
    elif source == "posted":
        async with serving(**settings) as router:
            for node in nodes:
                async with router.session.post(
                    f"{router.url}/nodes", headers=signed("add", node.url, "decode")
                ) as answer:
                    assert answer.status == 201

            async def remove(node: FakeNode) -> None:
                name = node.url.removeprefix("http://")
                headers = signed("remove", name)
                async with router.session.delete(f"{router.url}/nodes/{name}", headers=headers) as answer:
                    assert answer.status == 200

            yield router, remove
    else:
        async with kubernetes() as (api_server, api):
            for node in nodes:
                await api_server.put(node.node_id, port=port_of(node))

            async def terminate(node: FakeNode) -> None:
                await api_server.put(node.node_id, port=port_of(node), terminating=True)

            pods = KubernetesPods(api_server.namespace, {"pd-cluster/part": "node"}, api)
            async with serving(sources=[pods], **settings) as router:
                await api_server.until_watches(1)
                yield router, terminate


def port_of(node: FakeNode) -> int:
    return int(node.url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def served(
    source: str, nodes: list[FakeNode], tmp_path: Path
) -> AsyncIterator[tuple[Router, Traffic, Callable[[FakeNode], Awaitable[None]]]]:
    """Two nodes that both get requests."""
    async with running(*nodes), named_by(source, nodes, tmp_path) as (router, remove):
        await until(lambda: [node["healthy"] for node in router.services.table.report()] == [True, True])
        traffic = Traffic(router)
        try:
            for node in nodes:
                await traffic.hears_from(node)
            yield router, traffic, remove
        finally:
            await traffic.close()


@pytest.fixture
def nodes() -> list[FakeNode]:
    return [FakeNode("decode", fakes.decode, node_id=name) for name in ("d-0", "d-1")]


@pytest.mark.parametrize("source", SOURCES)
async def test_a_node_that_is_gone_gets_nothing_new_within_a_second(
    source: str, nodes: list[FakeNode], tmp_path: Path
) -> None:
    async with served(source, nodes, tmp_path) as (_, traffic, remove):
        removed_at = time.monotonic()
        await remove(nodes[0])
        while time.monotonic() < removed_at + 1.5 * GONE_S:
            await traffic.hears_from(nodes[1])
        assert traffic.last["d-0"] < removed_at + GONE_S
        assert traffic.statuses == {200}  # no client noticed


@pytest.mark.parametrize(
    ("illness", "source"),
    [
        *(("says 503", source) for source in SOURCES),
        *(pytest.param("says nothing", source, marks=[pytest.mark.slow] * (source != "flags")) for source in SOURCES),
    ],
)
async def test_an_ill_node_is_out_in_time_and_back_after_one_good_answer(
    source: str, illness: str, nodes: list[FakeNode], tmp_path: Path
) -> None:
    async with served(source, nodes, tmp_path) as (router, traffic, _):
        ill, well = nodes

        def is_out() -> bool:
            return [node["healthy"] for node in router.services.table.report() if node["node_id"] == "d-0"] == [False]

        ill.is_up, ill.is_silent = illness != "says 503", illness == "says nothing"
        fell_ill_at = time.monotonic()
        await until(is_out)
        assert time.monotonic() - fell_ill_at < INTERVAL_S + TIMEOUT_S + SLACK_S
        seen = len(ill.seen)
        for _ in range(4):
            await traffic.hears_from(well)
        assert len(ill.seen) <= seen + 1  # one may have been on its way
        ill.is_up, ill.is_silent = True, False
        got_well_at = time.monotonic()
        await traffic.hears_from(ill)
        assert time.monotonic() - got_well_at < INTERVAL_S + TIMEOUT_S + SLACK_S
        assert traffic.statuses == {200}


async def test_a_bug_about_one_node_stops_no_look_at_another(
    nodes: list[FakeNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served("flags", nodes, tmp_path) as (router, _, _):
        upstream = router.services.upstream
        get = upstream.get

        async def broken(node: Node, *rest: Any) -> Answer:
            if node.node_id == "d-0":
                raise RuntimeError("a bug")
            return await get(node, *rest)

        def healthy() -> list[object]:
            return [node["healthy"] for node in router.services.table.report()]

        monkeypatch.setattr(upstream, "get", broken)
        await until(lambda: healthy() == [False, True])
        nodes[1].is_up = False
        await until(lambda: healthy() == [False, False])
        nodes[1].is_up = True
        monkeypatch.undo()
        await until(lambda: healthy() == [True, True])
