"""Orders about adapters, from a client to real nodes' HTTP sides over scripted engines, through one router or two."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.config import LoraConfig
from pd_cluster.protocol.messages import EngineNews, EngineStats, KvStats
from pd_cluster.protocol.orders import LoadAdapter, UnloadAdapter
from pd_cluster.server.node import node_adapters
from pd_connectors.protocol.adapters import ON_DEVICE, ON_FILE, AdapterRecord, AdapterState
from pd_connectors.protocol.feed import NodeLoad
from pd_connectors.protocol.ticket import ALL_NODES, ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import LOAD_PATH, UNLOAD_PATH
from pd_http.errors import ModelNotFound
from pd_router.watch import adapter_keeper
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode
from tests.router.fake_nodes import running as running_fakes
from tests.router.router_process import KEY, Router, serving, until
from tests.router.test_admission import SECRETS, line
from tests.server.fake_engine import FakeEngine, decodes, says
from tests.server.live_server import Node, running
from tests.server.test_node_adapters import DIALECTS, listed, written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.long]
BODY = {"prompt": [5] * 40, "max_tokens": 1}


@pytest.fixture(autouse=True)
def eager_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_keeper, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(adapter_keeper, "RETRY_S", 0.01)


@asynccontextmanager
async def a_node(root: Path, node_id: str, *, slots: int = 4) -> AsyncIterator[Node]:
    """It answers for itself, and as a decode node asks a prefill node."""
    engine = FakeEngine(says([7]) if node_id.startswith("p") else decodes([7]), engine_id=node_id)
    config = LoraConfig(lora_dir=str(root) if slots else "", lora_slots=slots)
    async with running(engine, node_id=node_id, lora=config) as node:
        node.state.role.change("prefill" if node_id.startswith("p") else "decode")
        engine.stats = None  # so that one flush of the feed says all
        engine.sent.clear()
        yield node


@asynccontextmanager
async def a_pair(root: Path, **settings: Any) -> AsyncIterator[tuple[Router, Node, Node]]:
    settings = {"admin_endpoints": "open"} | settings
    async with (
        a_node(root, "p") as p,
        a_node(root, "d") as d,
        serving(prefill=[p], decode=[d], **settings) as router,
    ):
        await followed(router, p, d)
        yield router, p, d


@asynccontextmanager
async def two_routers(root: Path) -> AsyncIterator[tuple[Router, Router, Node, Node]]:
    """Before one pair, with the files of two adapters."""
    written(root / "a")
    written(root / "b", "two")
    async with a_pair(root) as (router, p, d), serving(prefill=[p], decode=[d], admin_endpoints="open") as second:
        await followed(second, p, d)
        yield router, second, p, d


async def followed(router: Router, *nodes: Node) -> None:
    """Return when the router reads the feeds of these nodes: their engines say their load."""
    for node in nodes:
        feed = node.state.feed
        await until(lambda feed=feed: feed.is_on)  # type: ignore[misc]
        news = node.engine.news
        load = NodeLoad(num_slots=48, block_size=16, free_blocks=1000, num_blocks=1000)
        news.take(EngineNews(len(node.engine.requests), load, serial=news._serial))
    table = router.services.table
    await until(lambda: all(node.adapters is not None for node in table.nodes if node.lora_slots))


async def order(router: Router, name: str, path: str = "", *, signed: Any = None, **more: Any) -> tuple[int, Any]:
    """Of a client with the peers' bodies, or signed."""
    body = {"lora_name": name} | ({"lora_path": path} if path else {}) | more
    where = router.url + (LOAD_PATH if path else UNLOAD_PATH)
    async with router.session.post(where, headers=signed or {}, json=body) as answer:
        return answer.status, await answer.json()


def paper(name: str, path: str = "", digest: str = "", *, key: bytes = KEY, is_forced: bool = False) -> dict[str, str]:
    action: Any = "load_adapter" if path else "unload_adapter"
    record = AdapterRecord(name, path, digest)
    return {
        ORDER_HEADER: sign(key, NodeOrder(action, ALL_NODES, time.time() + 30, adapter=record, is_forced=is_forced))
    }


async def ask(router: Router, model: str, path: str = "/v1/completions") -> tuple[int, Any]:
    async with router.session.post(router.url + path, json=DIALECTS[path] | {"model": model}) as answer:
        return answer.status, await answer.json()


def loads(node: Node) -> list[str]:
    return [one.digest for one in node.engine.sent if isinstance(one, LoadAdapter)]


async def test_an_adapter_is_loaded_by_the_peers_body_and_answers_by_its_name(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, p, d):
        status, told = await order(router, "tuned", "a")
        assert (status, told["nodes"]) == (200, {"p": told["digest"], "d": told["digest"]})
        assert loads(p) == loads(d) == [told["digest"]]
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, answer = await ask(router, "tuned", path)
            assert (status, answer["model"]) == (200, "tuned")
        assert {request.adapter for request in (*p.engine.requests, *d.engine.requests)} == {told["digest"]}
        assert p.engine.requests, "a prefill node has read"
        async with router.session.get(router.url + "/v1/models") as answer:
            cards = {card["id"]: card["parent"] for card in (await answer.json())["data"]}
        assert cards == {"demo": None, "tuned": "demo"}
        async with router.session.get(router.url + "/nodes") as answer:
            for row in (await answer.json())["nodes"]:
                assert row["adapters"]["tuned"]["digest"] == told["digest"]
        assert (await order(router, "tuned"))[0] == 200
        for path in DIALECTS:
            assert (await ask(router, "tuned", path))[0] == 404, path
        for node in (p, d):
            assert node.engine.sent.count(UnloadAdapter(told["digest"])) == 1


async def test_a_decode_node_asks_a_prefill_node_for_the_adapter(tmp_path: Path) -> None:
    """D-first: D's own leg names the adapter; else P would give a ticket of the base, which D refuses."""
    written(tmp_path / "a")
    async with a_pair(tmp_path, route="d-first") as (router, p, d):
        _, told = await order(router, "tuned", "a")
        async with router.session.post(router.url + "/v1/completions", json=BODY | {"model": "tuned"}) as answer:
            assert answer.status == 200
            assert answer.headers["x-pd-prefill"] == "p"
        assert [one.adapter for one in p.engine.requests] == [told["digest"]]
        assert d.metric('pd_handoff_fallbacks_total{reason="peer_bad_answer"}') == 0


async def test_a_name_that_is_known_is_replaced_only_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_adapters, "REPLACED_S", 0.0)
    written(tmp_path / "a")
    written(tmp_path / "b", "two")
    async with a_pair(tmp_path) as (router, p, d):
        _, first = await order(router, "tuned", "a")
        assert (await order(router, "tuned", "b"))[0] == 400
        status, second = await order(router, "tuned", "b", load_inplace=True)
        assert (status, second["digest"] != first["digest"]) == (200, True)
        for node in (p, d):
            assert loads(node) == [first["digest"], second["digest"]]
            await until(lambda node=node: UnloadAdapter(first["digest"]) in node.engine.sent)  # type: ignore[misc]
            assert node.state.adapters.digest_of("tuned") == second["digest"]


async def test_what_one_node_cannot_load_no_node_has(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, p, d):
        d.engine.adapter_error = "rank 1: rank 128 is more than --max-lora-rank 16"
        status, answer = await order(router, "tuned", "a")
        assert status == 400
        assert "d: rank 1: rank 128" in answer["error"]["message"]
        for node in (p, d):
            assert await listed(node) == {"demo": None}
        assert UnloadAdapter(loads(p)[0]) in p.engine.sent
        assert (await ask(router, "tuned"))[0] == 404
        d.engine.adapter_error = ""
        assert (await order(router, "tuned", "a"))[0] == 200, "nothing of the first order is left"


async def test_nodes_with_other_files_under_the_path_are_named(tmp_path: Path) -> None:
    written(tmp_path / "p" / "a")
    written(tmp_path / "d" / "a", "two")
    async with (
        a_node(tmp_path / "p", "p") as p,
        a_node(tmp_path / "d", "d") as d,
        serving(prefill=[p], decode=[d], admin_endpoints="open") as router,
    ):
        await followed(router, p, d)
        status, answer = await order(router, "tuned", "a")
        assert status == 400
        assert "other files" in answer["error"]["message"]
        assert await listed(p) == await listed(d) == {"demo": None}
        written(tmp_path / "d" / "a")
        assert (await order(router, "tuned", "a"))[0] == 200


async def test_signed_orders_bind_name_path_and_digest(tmp_path: Path) -> None:
    written(tmp_path / "a")
    written(tmp_path / "b", "two")
    async with a_pair(tmp_path, admin_endpoints="signed") as (router, p, _):
        assert (await order(router, "tuned", "a"))[0] == 401
        assert (await order(router, "tuned", "a", signed=paper("tuned", "a", key=b"x" * 32)))[0] == 401
        assert (await order(router, "tuned", "a", signed=paper("tuned")))[0] == 400, "an order to unload"
        for wrong in (paper("other", "a"), paper("tuned", "b"), paper("tuned", "a", is_forced=True)):
            assert (await order(router, "tuned", "a", signed=wrong))[0] == 400
        status, answer = await order(router, "tuned", "a", signed=paper("tuned", "a", "0" * 32))
        assert (status, "not 0000" in answer["error"]["message"]) == (400, True)
        assert not loads(p)
        status, told = await order(router, "tuned", "a", signed=paper("tuned", "a"))
        assert (status, loads(p)) == (200, [told["digest"]])
        naming = paper("tuned", digest=told["digest"])  # of what is there: it is unloaded all the same
        status, told = await order(router, "tuned", signed=naming)
        assert (status, set(told["nodes"].values())) == (200, {"unloaded"})
        assert await listed(p) == {"demo": None}


async def test_names_and_bodies_that_no_order_may_have(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, p, d):
        for name, path, status in (
            ("demo", "a", 400), ("tuned", "../a", 400), ("absent", "", 404), ("", "a", 400), ("n" * 60_000, "a", 400),
            ("tuned", "a" * 60_000, 400), ("\u00e4", "a", 400),
        ):  # fmt: skip
            assert (await order(router, name, path))[0] == status, name[:20]
        deep = b'{"lora_name": "a", "lora_path": "a", "more": ' + b"[" * 60_000
        for raw in (b"", b"[]", b'{"lora_name": 5}', b'{"lora_name": null}', b"\xff", b"{" * 70_000, deep):
            async with router.session.post(router.url + LOAD_PATH, data=raw) as answer:
                assert answer.status in (400, 413), raw[:20]
        assert not loads(p)
        assert not loads(d)


async def test_two_orders_at_once_for_one_name_end_in_one_state(tmp_path: Path) -> None:
    """Through two routers, with other files each: at most one wins, and all nodes have what it loaded."""
    async with two_routers(tmp_path) as (router, second, p, d):
        answers = await asyncio.gather(order(router, "tuned", "a"), order(second, "tuned", "b"))
        won = [told["digest"] for status, told in answers if status == 200]
        assert sorted(status for status, _ in answers) in ([200, 409], [409, 409])
        digests = [node.state.adapters.digest_of("tuned") for node in (p, d)]
        assert digests == ([won[0]] * 2 if won else ["", ""])
        again = await order(second, "tuned", "b", load_inplace=True)
        assert again[0] == 200, "no order is left over"


async def test_a_name_that_a_router_does_not_know_yet_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second order comes before the feeds tell its router of the first one."""
    async with two_routers(tmp_path) as (router, second, p, d):
        with monkeypatch.context() as patch:
            patch.setattr(second.services.table.adapters, "learn", lambda record: False)
            _, told = await order(router, "tuned", "a")
            status, answer = await order(second, "tuned", "b")
        assert (status, "loaded already" in answer["error"]["message"]) == (409, True)
        assert [node.state.adapters.digest_of("tuned") for node in (p, d)] == [told["digest"]] * 2
        status, other = await order(second, "tuned", "b", load_inplace=True)
        assert (status, other["digest"] != told["digest"]) == (200, True)
        assert [node.state.adapters.digest_of("tuned") for node in (p, d)] == [other["digest"]] * 2


async def test_a_node_that_joins_or_restarts_gets_what_the_others_have(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, p, d), a_node(tmp_path, "d2") as late:
        _, told = await order(router, "tuned", "a")
        async with serving(prefill=[p], decode=[d, late]) as second:  # a router that took no order
            await followed(second, p, d, late)
            await until(lambda: late.state.adapters.digest_of("tuned"))
            assert late.state.adapters.digest_of("tuned") == told["digest"]
            assert await listed(late) == {"demo": None, "tuned": "demo"}
            assert (await order(router, "tuned"))[0] == 200  # by the router that does not know the third node
            await until(lambda: not late.state.adapters.digest_of("tuned"))


async def test_a_router_that_died_between_two_nodes_is_completed_by_another(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, p, d):
        record = AdapterRecord("tuned", "a", stamp=5)
        found = await p.state.adapters.prepare(record)
        await p.state.adapters.hold(found)  # and the router that ordered it is gone
        await until(lambda: d.state.adapters.digest_of("tuned") == found.digest)
        assert (await ask(router, "tuned"))[0] == 200


async def test_a_node_with_changed_files_stays_without_and_gets_no_request_of_the_name(tmp_path: Path) -> None:
    written(tmp_path / "one" / "a")
    written(tmp_path / "two" / "a", "changed")
    async with a_pair(tmp_path / "one") as (router, p, d), a_node(tmp_path / "two", "d2") as late:
        await order(router, "tuned", "a")
        async with serving(prefill=[p], decode=[d, late]) as second:
            await followed(second, p, d, late)
            for _ in range(4):
                assert (await ask(second, "tuned"))[0] == 200
            assert not any(request.adapter for request in late.engine.requests)
            assert not loads(late)


async def test_an_older_node_and_one_without_slots_are_never_sent_an_adapters_request(tmp_path: Path) -> None:
    written(tmp_path / "a")
    older = FakeNode("decode", fakes.decode, node_id="older")
    older.models = ("demo",)
    async with (
        a_node(tmp_path, "d") as d,
        a_node(tmp_path, "d2", slots=0) as bare,
        running_fakes(older),
        serving(decode=[older, bare, d], admin_endpoints="open") as router,
    ):
        await followed(router, bare, d)
        status, told = await order(router, "tuned", "a")
        assert (status, told["nodes"]["d"]) == (200, told["digest"])
        router.services.table.nodes[0].models = None  # as of one that gave no list of its models
        for _ in range(6):
            assert (await ask(router, "tuned"))[0] == 200
        assert not older.seen
        assert not bare.engine.requests
        assert len(d.engine.requests) == 6


async def test_a_node_that_has_lost_the_name_answers_409_and_the_router_goes_on(tmp_path: Path) -> None:
    written(tmp_path / "a")
    async with (
        a_node(tmp_path, "p") as p,
        a_node(tmp_path, "d") as d,
        a_node(tmp_path, "d2") as other,
        serving(prefill=[p], decode=[d, other], admin_endpoints="open") as router,
    ):
        await followed(router, p, d, other)
        await order(router, "tuned", "a")
        d.state.adapters._records.clear()  # the router does not know it yet
        for _ in range(4):
            assert (await ask(router, "tuned"))[0] == 200
        assert len(other.engine.requests) == 4
        other.state.adapters._records.clear()
        assert (await ask(router, "tuned"))[0] == 404


async def test_without_a_node_that_takes_adapters_the_order_says_so(tmp_path: Path) -> None:
    """No retry can succeed."""
    async with a_node(tmp_path, "d", slots=0) as d, serving(decode=[d], admin_endpoints="open") as router:
        status, answer = await order(router, "tuned", "a")
        assert (status, "--lora-slots" in answer["error"]["message"]) == (400, True)
        assert not loads(d)
        router.services.table.nodes[0].reachable = False
        assert (await order(router, "tuned", "a"))[0] == 503


async def test_an_answer_to_an_order_says_nothing_of_other_adapters_nor_of_tiers(tmp_path: Path) -> None:
    """The feed may have said before it that the adapter is on the device, and does not say so again."""
    written(tmp_path / "a")
    async with a_pair(tmp_path) as (router, _, _):
        _, told = await order(router, "tuned", "a")
        table = router.services.table
        node = table.nodes[0]
        assert node.adapters is not None
        node.adapters["tuned"] = AdapterState(node.adapters["tuned"].record, ON_DEVICE)
        table.tell_answer(node, node.adapters["tuned"].record)
        assert node.adapters["tuned"].tier == ON_DEVICE
        older = msgspec.structs.replace(node.adapters["tuned"].record, digest="0" * 32, stamp=1)
        table.tell_answer(node, older)
        assert node.adapters["tuned"].record.digest == told["digest"]
        table.tell_adapters(node, None)  # the feed broke
        table.tell_answer(node, AdapterRecord("other", "a", told["digest"], 2))
        assert node.models is not None
        assert node.models >= {"demo", "tuned", "other"}


async def test_a_key_sees_and_uses_its_own_adapters_only(tmp_path: Path) -> None:
    written(tmp_path / "a")
    keys = tmp_path / "keys"
    keys.write_text(line("one", adapters=["mine"]) + line("two"))
    async with a_pair(tmp_path, api_keys=str(keys)) as (router, p, d):
        headers = {name: {"authorization": f"Bearer {SECRETS[name]}"} for name in ("one", "two")}
        for name in ("mine", "other"):
            async with router.session.post(
                router.url + LOAD_PATH, json={"lora_name": name, "lora_path": "a"}, headers=headers["two"]
            ) as answer:
                assert answer.status == 200
        for path, body in DIALECTS.items():
            for name, key, found in (("other", "one", False), ("mine", "one", True), ("other", "two", True)):
                await followed(router, p, d)  # that those before have ended
                where, asked = router.url + path, body | {"model": name}
                async with router.session.post(where, json=asked, headers=headers[key]) as answer:
                    assert (answer.status != 404) is found, (path, name, key)
                    assert answer.status != 429, "it had its turn"
        for key, names in (("one", {"demo", "mine"}), ("two", {"demo", "mine", "other"})):
            async with router.session.get(router.url + "/v1/models", headers=headers[key]) as answer:
                assert {card["id"] for card in (await answer.json())["data"]} == names
            async with router.session.get(router.url + "/v1/models/other", headers=headers[key]) as answer:
                assert answer.status == (200 if "other" in names else 404)
        admission = router.services.admission
        assert admission is not None
        limited = admission.find([(b"authorization", headers["one"]["authorization"].encode())]).key
        admission.check_model(limited, "demo")
        with pytest.raises(ModelNotFound):  # it may be loaded while the request waits for its turn
            admission.check_model(limited, "later")


async def test_an_adapter_that_is_on_the_device_is_worth_its_load(tmp_path: Path) -> None:
    """Of two idle nodes the one that need not read files is asked."""
    written(tmp_path / "a")
    async with (
        a_node(tmp_path, "d") as d,
        a_node(tmp_path, "d2") as ready,
        serving(decode=[d, ready], admin_endpoints="open") as router,
    ):
        await followed(router, d, ready)
        _, told = await order(router, "tuned", "a")
        stats = EngineStats(KvStats(1, 1, 0, 0, 0, 0), 0, 0, 0, {}, {}, adapters={told["digest"]: ON_DEVICE})
        ready.engine.stats = stats
        ready.state.adapters.on_change()
        table = router.services.table
        await until(lambda: [one.tier for one in table.having("tuned").values()] == [ON_FILE, ON_DEVICE])
        assert (await ask(router, "tuned"))[0] == 200
        assert (len(d.engine.requests), len(ready.engine.requests)) == (0, 1), "not the first in turn"
