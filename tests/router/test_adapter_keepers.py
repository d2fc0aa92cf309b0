"""What keepers do about nodes that lack adapters, or have old ones; bounds of orders and of names."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest

from pd_cluster.adapters import adapter_bytes
from pd_cluster.server.node import node_adapters
from pd_connectors.protocol import adapters
from pd_connectors.protocol.adapters import IN_HOST, ON_DEVICE, ON_FILE, AdapterRecord, AdapterState
from pd_connectors.protocol.feed import NodeLoad
from pd_router.config import RouterConfig
from pd_router.edge import cluster_adapters
from pd_router.nodes.adapter_table import LOAD_S, AdapterTable, load_s
from pd_router.nodes.node import Node, Role
from pd_router.nodes.node_table import NodeTable
from pd_router.watch import adapter_keeper
from pd_router.watch.adapter_keeper import AdapterKeeper
from tests.router.router_process import serving, until
from tests.router.test_cluster_adapters import a_node, a_pair, ask, followed, order
from tests.server.test_node_adapters import written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from pd_router.nodes.upstream import Upstream
    from tests.router.router_process import Router
    from tests.server.live_server import Node as LiveNode

pytestmark = pytest.mark.anyio
ONE, TWO = "1" * 32, "2" * 32


@pytest.fixture(autouse=True)
def eager_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_keeper, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(adapter_keeper, "RETRY_S", 0.01)
    monkeypatch.setattr(adapter_keeper, "MAX_RETRY_S", 0.03)


@pytest.mark.long
async def test_a_node_that_cannot_load_is_asked_less_and_less_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path / "one" / "a")
    written(tmp_path / "two" / "a", "changed")
    async with a_pair(tmp_path / "one") as (router, p, d), a_node(tmp_path / "two", "d2") as late:
        await order(router, "tuned", "a")
        async with serving(prefill=[p], decode=[d, late]) as second:
            await followed(second, p, d, late)
            await until(lambda: sum("again in" in one for one in caplog.messages) >= 4)
            waits = [one.partition("again in ")[2].partition(" s")[0] for one in caplog.messages if "again in" in one]
            assert waits[:4] == ["0.01", "0.02", "0.03", "0.03"]
            async with second.session.get(second.url + "/nodes") as answer:
                rows = {row["node_id"]: row["adapter_errors"] for row in (await answer.json())["nodes"]}
            assert "the same files" in rows["d2"]["tuned"]
            assert rows["d"] == {}
            shutil.copytree(tmp_path / "one" / "a", tmp_path / "two" / "a", dirs_exist_ok=True)
            node = next(node for node in second.services.table.nodes if node.node_id == "d2")
            await until(lambda: late.state.adapters.digest_of("tuned") and not node.adapter_errors)


async def test_a_node_that_serves_no_adapters_any_more_has_no_errors_of_them() -> None:
    node = Node("http://127.0.0.1:1", Role.DECODE, "d", reachable=True, epoch=1, adapter_errors={"tuned": "no files"})
    keeper = AdapterKeeper(cast("NodeTable", None), cast("Upstream", None), b"", lambda: 0.0)
    following = asyncio.create_task(keeper.follow(node))
    try:
        await asyncio.sleep(0)  # it has seen the boot that has the error
        node.epoch = 2
        await until(lambda: not node.adapter_errors)
    finally:
        following.cancel()


@pytest.mark.long
async def test_orders_do_not_wait_without_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_adapters, "MAX_ORDERS", 0)
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, _, _):
        found = await asyncio.gather(*(order(router, name, "a") for name in ("one", "two", "three")))
        assert sorted(status for status, _ in found) == [200, 503, 503]
        assert (await order(router, "four", "a"))[0] == 200


@pytest.mark.long
async def test_too_many_adapters_and_a_slow_disk_are_named_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, _, d):
        assert (await order(router, "tuned", "a"))[0] == 200
        monkeypatch.setattr(d.engine, "adapter_error", None)  # its ranks have not read the files
        for module, about, value, told in (
            (node_adapters, "MAX_RECORDS", 1, "this node has 1 adapters, the most allowed"),
            (adapter_bytes, "READ_DEADLINE_S", 0.0, "the disk is too slow"),
            (node_adapters, "ENGINE_DEADLINE_S", 0.0, "the engine has not loaded it within 0 s"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, about, value)
                status, answer = await order(router, "more", "a" if about != "ENGINE_DEADLINE_S" else "b")
            assert (status, told in answer["error"]["message"]) == (400, True), answer
            assert (await ask(router, "tuned"))[0] == 200
            assert (await ask(router, "more"))[0] == 404
            written(tmp_path / "b", "two")
        monkeypatch.setattr(d.engine, "adapter_error", "")
        assert (await order(router, "more", "b"))[0] == 200, "nothing is left of them"


@asynccontextmanager
async def two_decodes(root: Path) -> AsyncIterator[tuple[Router, LiveNode, LiveNode]]:
    async with (
        a_node(root, "d") as first,
        a_node(root, "d2") as second,
        serving(decode=[first, second], admin_endpoints="open") as router,
    ):
        await followed(router, first, second)
        yield router, first, second


@pytest.mark.long
async def test_a_node_with_the_adapter_of_before_gets_no_request_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still during the order. While no node has the new one, those of before answer."""
    written(tmp_path / "a")
    async with two_decodes(tmp_path) as (router, d, stale):
        _, done = await order(router, "tuned", "a")
        table = router.services.table
        newer = AdapterRecord("tuned", "a", done["digest"], 1 << 62)
        monkeypatch.setattr(AdapterTable, "lacking", lambda table, adapters: ())  # no keeper tells it meanwhile
        monkeypatch.setattr(NodeTable, "tell_adapters", lambda *_, **__: None)  # nor do feeds, of the one loaded before
        first, second = table.nodes
        table.adapters.learn(newer)
        assert {len(table.current(list(table.nodes), name)) for name in ("tuned", "demo")} == {2}
        first.adapters = {"tuned": AdapterState(newer)}
        for told in (second.adapters, None):  # None: it answers again, and its feed is not read yet
            second.adapters = told
            for _ in range(4):
                assert (await ask(router, "tuned"))[0] == 200
        assert (len(d.engine.requests), len(stale.engine.requests)) == (8, 0)


@pytest.mark.long
async def test_an_unloaded_adapter_is_not_served_by_a_node_that_was_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still during the unload, so it lists the name and would answer."""
    written(tmp_path / "a")
    async with two_decodes(tmp_path) as (router, _, stale):
        assert (await order(router, "tuned", "a"))[0] == 200
        table = router.services.table
        kept, second = dict(table.nodes[1].adapters or {}), table.nodes[1]
        monkeypatch.setattr(AdapterTable, "lacking", lambda table, adapters: ())  # no keeper tells it meanwhile
        second.reachable = False
        assert (await order(router, "tuned"))[0] == 200
        assert stale.state.adapters.digest_of("tuned"), "it was not told"
        second.reachable = True
        assert table.healthy([Role.DECODE], "demo") == list(table.nodes)
        for again in ("as before", "its list of models is read again", "its feed is read again"):
            if again == "its list of models is read again":
                table.tell_adapters(second, None)
                table.set_models(second, frozenset(("demo", "tuned")), frozenset(("tuned",)))
            elif again == "its feed is read again":
                table.tell_adapters(second, kept.values(), is_whole=True)
            assert (await ask(router, "tuned"))[0] == 404, again
            assert table.known_name("tuned") == "", again
        assert not stale.engine.requests
        assert (await order(router, "tuned", "a"))[0] == 200
        for _ in range(4):
            assert (await ask(router, "tuned"))[0] == 200
        assert stale.engine.requests, "it was told of the new one"


def test_a_model_may_have_the_name_of_an_adapter_that_was_unloaded() -> None:
    table = NodeTable(RouterConfig(decode=("http://127.0.0.1:1",)), lambda: 0.0)
    (node,) = table.nodes
    table.set_models(node, frozenset(("demo", "tuned")), frozenset(("tuned",)))
    table.learn(AdapterRecord("tuned", stamp=5))
    assert node.models == frozenset(("demo",))
    table.set_models(node, frozenset(("demo", "tuned")))
    assert node.models == frozenset(("demo", "tuned"))


def test_a_name_that_was_forgotten_as_unloaded_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node was away when it was unloaded, and more names after it than a router keeps."""
    monkeypatch.setattr(adapters, "MAX_RECORDS", 2)
    table, away = AdapterTable(), AdapterRecord("away", "a", ONE, 5)
    table.learn(away)
    for stamp, name in enumerate(("away", "b", "c"), 6):
        table.learn(AdapterRecord(name, stamp=stamp))
    assert "away" not in {one.name for one in table.records}
    table.learn(away)
    assert table.find("away") is None
    told = {"away": AdapterState(away), "own": AdapterState(AdapterRecord("own", "b", TWO, 0))}
    assert [one for one in table.lacking(told) if one.name in told] == [AdapterRecord("away", stamp=6)]
    table.learn(AdapterRecord("away", "a", TWO, table.next_stamp(0.0)))
    assert table.find("away") is not None, "a new order gives it a meaning again"


def test_a_router_that_has_just_started_takes_no_loaded_name_for_a_forgotten_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hears first of a node that could not load them, and that knows as many unloaded names as a router keeps."""
    monkeypatch.setattr(adapters, "MAX_RECORDS", 4)
    table = AdapterTable()
    for stamp in range(10, 14):
        table.learn(AdapterRecord(f"unloaded {stamp}", stamp=stamp))
    told = {name: AdapterState(AdapterRecord(name, "a", ONE, stamp)) for name, stamp in (("old", 5), ("older", 4))}
    for state in told.values():
        table.learn(state.record)
    assert [name for name in told if table.find(name) is None] == []
    assert list(table.lacking(told)) == []


def test_seconds_to_load_are_those_that_the_node_has_measured() -> None:
    states = [AdapterState(AdapterRecord("a", "a", ONE, 5), tier) for tier in (ON_DEVICE, IN_HOST, ON_FILE, 7)]
    assert [load_s(one) for one in states] == [*LOAD_S, LOAD_S[-1]]
    assert [load_s(one, NodeLoad(adapter_s=2.0)) for one in states[:3]] == [0.0, LOAD_S[1], LOAD_S[1] + 2.0]
