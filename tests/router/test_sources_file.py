"""Nodes from a file: what is read, what is refused, and how changes are followed."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.config import RouterConfig
from pd_router.nodes.node import Node, NodeSpec, Role
from pd_router.nodes.node_report import report
from pd_router.nodes.node_table import NodeTable
from pd_router.sources.base import NamedNode, Roster
from pd_router.sources.discovery import Discovery
from pd_router.sources.file import NodesFile, parse_nodes
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from pd_router.sources.base import NodeSource

P, D = NodeSpec("http://p:1", Role.PREFILL), NodeSpec("http://d:2", Role.DECODE)


def listing(*specs: NodeSpec) -> str:
    return json.dumps([{"url": spec.url, "role": spec.role} for spec in specs])


class Turns:
    """A sleep that lasts until the test says so."""

    def __init__(self) -> None:
        self.asleep = asyncio.Event()
        self._go = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        assert seconds <= 1.0, "a change must be seen within a second"
        self.asleep.set()
        await self._go.wait()
        self._go.clear()

    async def next(self) -> None:
        """One more look, to its end."""
        self.asleep.clear()
        self._go.set()
        await asyncio.wait_for(self.asleep.wait(), fakes.WAIT_S)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("", "not a JSON list"),
        ("[", "not a JSON list"),
        ('{"url": "http://a:1"}', "not a JSON list"),
        ('[{"url": "http://a:1"}]', "role"),
        ('[{"url": "http://a:1", "role": "decode", "weight": 2}]', "weight"),
        ('[{"url": "http://a:1", "role": "encode"}]', "encode"),
        ('[{"url": "a:1", "role": "decode"}]', "http://host:port"),
        (listing(D, NodeSpec("http://d:2/", Role.MIXED)), "twice"),
    ],
)
def test_a_broken_file_says_what_is_wrong(content: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_nodes(content.encode())


@pytest.mark.anyio
async def test_changes_are_followed_and_broken_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(listing(P, D))
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    turns = Turns()
    source: NodeSource = NodesFile(str(path), turns)
    discovery = Discovery([source], table)
    following = asyncio.ensure_future(discovery.run())
    try:
        await discovery.received_all(fakes.WAIT_S)
        p, d = table.nodes
        assert [(n.url, n.role, n.node_id) for n in (p, d)] == [
            ("http://p:1", Role.PREFILL, "p:1"),
            ("http://d:2", Role.DECODE, "d:2"),
        ]
        for broken in (lambda: path.write_text("[{"), path.unlink):
            caplog.clear()
            broken()
            await asyncio.wait_for(turns.asleep.wait(), fakes.WAIT_S)
            await turns.next()
            await turns.next()  # the same fault is told once
            assert table.nodes == (p, d)
            assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
        path.write_text(listing(D))
        await turns.next()
        assert table.nodes == (d,)
        assert (p.gone, d.gone) == (True, False)
        path.write_text("[]")
        await turns.next()
        assert not table.nodes
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.anyio
async def test_a_source_that_breaks_down_is_begun_again_and_its_nodes_stay() -> None:
    class Shaky:
        name = "shaky"
        begun = 0

        async def watch(self) -> AsyncGenerator[Roster, None]:
            self.begun += 1
            yield Roster((NamedNode(D),))
            raise RuntimeError("a bug")

    source, turns = Shaky(), Turns()
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    following = asyncio.ensure_future(Discovery([source], table, turns).run())
    try:
        await asyncio.wait_for(turns.asleep.wait(), fakes.WAIT_S)
        (node,) = table.nodes
        await turns.next()
        assert source.begun == 2
        assert table.nodes == (node,)
    finally:
        following.cancel()
        await asyncio.wait([following])


@pytest.mark.anyio
async def test_a_silent_source_holds_up_the_start_only_so_long(caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        name = "silent"

        def watch(self) -> AsyncGenerator[Roster, None]:
            raise AssertionError("not begun")

    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    await Discovery([Silent()], table).received_all(0.0)
    assert "silent" in caplog.text


SPECS = st.lists(st.sampled_from([NodeSpec(f"http://h:{i}", role) for i in range(1, 4) for role in Role]), max_size=4)


@pytest.mark.long
@given(said=st.lists(st.tuples(st.sampled_from("ab"), SPECS, st.booleans()), max_size=8))
def test_the_table_is_what_the_sources_say_last(said: list[tuple[str, list[NodeSpec], bool]]) -> None:
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    last: dict[str, list[NodeSpec]] = {}
    ever: set[Node] = set()
    for source, specs, busy in said:
        table.apply(source, specs)
        last[source] = specs
        ever.update(table.nodes)
        assert len({n.url for n in table.nodes}) == len(table.nodes)
        assert {n.url for n in table.nodes} == {spec.url for told in last.values() for spec in told}
        assert all(n.gone != (n in table.nodes) for n in ever)
        for node in table.nodes:
            node.reachable = True
            node.decode_sequences = int(busy)
            assert (node.url, node.role) in [(s.url, s.role) for told in last.values() for s in told]
            assert table.source_of(node) in last
        assert not any(n.is_healthy(0.0) for n in ever if n.gone)
        still = {(n.url, n.role) for n in ever if n.gone and not n.is_idle}
        told = {(r["url"], r["role"]) for r in report(table) if r["state"] == "leaving"}
        assert told == {(url, role.value) for url, role in still}


@pytest.mark.long
@pytest.mark.anyio
async def test_a_node_that_leaves_the_file_gets_nothing_more_and_finishes_what_it_has(tmp_path: Path) -> None:
    old, new = FakeNode("decode", fakes.decode_until_told), FakeNode("decode", fakes.decode)
    path = tmp_path / "nodes.json"
    body = {"model": "demo", "prompt": "x", "stream": True}
    async with running(old, new):
        path.write_text(listing(NodeSpec(old.url, Role.DECODE)))
        async with serving(nodes_file=str(path)) as router:
            table = router.services.table

            def healthy() -> list[str]:
                return [n.url for n in table.nodes if n.is_healthy(table.clock())]

            assert healthy() == [old.url]  # before the first request
            async with router.session.post(router.url + "/v1/completions", json=body) as first:
                assert await first.content.readany() == fakes.chunk("a")
                path.write_text(listing(NodeSpec(new.url, Role.DECODE)))
                await until(lambda: healthy() == [new.url])
                (leaving,) = [n for n in report(table) if n["state"] == "leaving"]
                assert (leaving["url"], leaving["outstanding"]) == (old.url, {"prefill_bytes": 0, "sequences": 1})
                async with router.session.post(router.url + "/v1/completions", json=body) as second:
                    assert (await second.read()).endswith(b"data: [DONE]\n\n")
                assert (len(old.seen), len(new.seen)) == (1, 1)
                old.go_on.set()
                assert (await first.read()).endswith(b"data: [DONE]\n\n")
            await router.idle()
            assert [n["state"] for n in report(table)] == ["active"]
