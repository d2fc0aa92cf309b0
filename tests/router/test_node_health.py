"""Nodes that go, fall ill and come back, under traffic through a live router, from every source of nodes.

Gone means: no new request once the source has told it. Ill means: out with the next health check, and back after one
good answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from pd_router.nodes.node_report import report
from pd_router.sources.kubernetes import KubernetesPods
from tests.http.answer import COMPLETIONS, PROMPT, post
from tests.router import fake_nodes as fakes
from tests.router.fake_kubernetes import kubernetes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving, signed, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from pd_router.nodes.node import Node
    from pd_router.nodes.upstream import Answer

pytestmark = [pytest.mark.anyio, pytest.mark.long, pytest.mark.usefixtures("sure_checks")]

INTERVAL_S = 0.05  # of the health check here
SOURCES = ("flags", "file", "posted", "kubernetes")


class Traffic:
    """One request after the other, until it is closed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._num_sent = 0
        self._last: dict[str, int] = {}  # number of the last request that a node answered
        self.statuses: set[int] = set()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self._num_sent += 1
            answer = await post(self._router, COMPLETIONS, PROMPT, stream=True)
            self.statuses.add(answer.status)
            self._last[answer.decoded_by] = self._num_sent

    async def hears_from(self, node: FakeNode) -> None:
        """Until `node` has served a request that was sent after this call."""
        sent = self._num_sent
        await until(lambda: self._last.get(node.node_id, 0) > sent)

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@contextlib.asynccontextmanager
async def named_by(
    source: str, nodes: list[FakeNode], tmp_path: Path
) -> AsyncIterator[tuple[Router, Callable[[FakeNode], Awaitable[None]]]]:
    """A router that knows decode nodes by `source`, and what takes one away there."""
    settings: dict[str, Any] = {"health_interval_s": INTERVAL_S, "start_empty": True}
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


def healthy(router: Router) -> list[object]:
    return [node["node_id"] for node in report(router.services.table) if node["healthy"]]


def port_of(node: FakeNode) -> int:
    return int(node.url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def served(
    source: str, nodes: list[FakeNode], tmp_path: Path
) -> AsyncIterator[tuple[Router, Traffic, Callable[[FakeNode], Awaitable[None]]]]:
    """Two nodes that both get requests."""
    async with running(*nodes), named_by(source, nodes, tmp_path) as (router, remove):
        await until(lambda: healthy(router) == ["d-0", "d-1"])
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
async def test_a_node_that_is_gone_gets_nothing_new(source: str, nodes: list[FakeNode], tmp_path: Path) -> None:
    """How soon a source tells it: test_sources_file, test_sources_kubernetes."""
    async with served(source, nodes, tmp_path) as (router, traffic, remove):
        await remove(nodes[0])
        await until(lambda: "d-0" not in healthy(router))
        seen = len(nodes[0].seen)
        for _ in range(8):
            await traffic.hears_from(nodes[1])
        assert len(nodes[0].seen) <= seen + 1  # one may have been on its way
        assert traffic.statuses == {200}  # no client noticed


@pytest.mark.parametrize(
    ("illness", "source"),
    [
        *(("says 503", source) for source in SOURCES),
        *(pytest.param("says nothing", source, marks=[pytest.mark.slow] * (source != "flags")) for source in SOURCES),
    ],
)
async def test_an_ill_node_is_out_at_once_and_back_after_one_good_answer(
    source: str, illness: str, nodes: list[FakeNode], tmp_path: Path
) -> None:
    async with served(source, nodes, tmp_path) as (router, traffic, _):
        ill, well = nodes
        ill.is_up, ill.is_silent = illness != "says 503", illness == "says nothing"
        checks = ill.num_checks
        await until(lambda: "d-0" not in healthy(router) or ill.num_checks > checks + 2)  # one may have been answered
        assert "d-0" not in healthy(router)
        seen = len(ill.seen)
        for _ in range(4):
            await traffic.hears_from(well)
        assert len(ill.seen) <= seen + 1  # one may have been on its way
        ill.is_up, ill.is_silent = True, False
        checks = ill.num_checks
        await until(lambda: "d-0" in healthy(router) or ill.num_checks > checks + 2)
        assert "d-0" in healthy(router)
        await traffic.hears_from(ill)
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

        monkeypatch.setattr(upstream, "get", broken)
        await until(lambda: healthy(router) == ["d-1"])
        nodes[1].is_up = False
        await until(lambda: healthy(router) == [])
        nodes[1].is_up = True
        monkeypatch.undo()
        await until(lambda: healthy(router) == ["d-0", "d-1"])
