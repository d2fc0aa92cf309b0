"""Which prefill and decode nodes the router pairs: those with an equal KV version, over tables and over fake nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.ticket import Offer, verify
from pd_router.config import HandoffOrder
from pd_router.nodes.node import Node, Role
from pd_router.watch.health import HealthPoller
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import KEY, Router, serving
from tests.router.test_choice import NOW_S, chosen, keep_busy, learned, table

if TYPE_CHECKING:
    from pd_router.nodes.node_table import NodeTable

BODY = {"model": "demo", "prompt": "x" * 400, "stream": True}


def fleet(prefills: str, decodes: str) -> NodeTable:
    """One node a letter: its KV version. "-": of another engine."""
    nodes = table(len(prefills), len(decodes))
    for node, version in zip(nodes.nodes, prefills + decodes, strict=True):
        node.kv_version = version.strip("-")
    return nodes


def is_crossed(one: Node, other: Node) -> bool:
    return bool(one.kv_version and other.kv_version) and one.kv_version != other.kv_version


def test_a_pair_has_one_version_and_the_cheapest_pair_is_taken() -> None:
    nodes = fleet("AB", "AB")
    p_a, p_b, d_a, d_b = nodes.nodes
    with keep_busy(p_a, 0.5):
        choice = chosen(nodes)
        assert choice.prefills == (p_b,)
        assert (choice.best(nodes.nodes[2:], NOW_S), choice.text) == (d_b, "p-first; reason=default")
    learned(p_b, 25_000)
    with keep_busy(p_b, 0.5):
        choice = chosen(nodes)
        assert (choice.prefills, choice.best(nodes.nodes[2:], NOW_S)) == ((p_a,), d_a)
    d_a.reachable = False
    with keep_busy(p_b, 0.5):
        assert chosen(nodes, prefill_on_decode="never").prefills == (p_b,), "P without a D of its version is no choice"


@pytest.mark.parametrize("turn", range(3))
def test_a_node_without_a_version_decides_nothing_about_it(turn: int) -> None:
    """It pairs with all: so of two pairings with equal sums, the one with the better node of its own is taken."""
    nodes = fleet("-AB", "AB")
    p, p_a, p_b, *_ = nodes.nodes
    with keep_busy(p_a, 10.0), keep_busy(p_b, 0.1):
        choice = chosen(nodes, turn=turn)
        assert (choice.kv_version, choice.prefills) == ("B", (p, p_b))


def test_where_no_version_has_both_a_decode_node_serves_alone() -> None:
    for prefills, decodes in (("A", "B"), ("AA", "BC")):
        nodes = fleet(prefills, decodes)
        choice = chosen(nodes, asked=HandoffOrder.P_FIRST)
        assert (choice.text, choice.prefills) == ("direct; reason=no-pair", ())
        assert choice.best(choice.decodes, NOW_S) is not None
    assert chosen(fleet("A", "-")).text == chosen(fleet("-", "B")).text == "p-first; reason=default"


def test_a_prompt_may_be_read_by_a_decode_node_of_any_version() -> None:
    nodes = fleet("A", "AB")
    p, d_a, d_b = nodes.nodes
    learned(d_b, 25_000)
    with keep_busy(p, 2.0), keep_busy(d_a, 2.0):
        choice = chosen(nodes)
        assert choice.text == "direct; reason=prefill-busy"
        assert choice.best(choice.decodes, NOW_S) is d_b
        handoff = choice.otherwise
    assert handoff is not None
    assert handoff.best(handoff.decodes, NOW_S) is d_a


def test_a_node_with_the_whole_prompt_cached_is_not_told_to_ask_a_foreign_version() -> None:
    nodes = fleet("A", "AB")
    p, _, d_b = nodes.nodes
    with keep_busy(p, 2.0):
        assert chosen(nodes, cached={d_b: 1000}).text == "direct; reason=cached"
        d_b.kv_version = "A"
        assert chosen(nodes, cached={d_b: 1000}).text == "d-first; reason=cached"


def test_a_node_that_changes_its_version_after_the_choice_is_left_out() -> None:
    nodes = fleet("AA", "AA")
    p0, p1, d0, d1 = nodes.nodes
    choice = chosen(nodes)
    p0.kv_version = d0.kv_version = "B"
    assert choice.best_prefill((p0, p1), NOW_S) is p1
    assert choice.offered(NOW_S) == [p1]
    assert choice.best((d0, d1), NOW_S) is d1
    assert choice.best_alone((d0, d1), NOW_S) is d0


VERSIONS = st.text("AB-", min_size=1, max_size=4)


@pytest.mark.long
@given(VERSIONS, VERSIONS, st.booleans(), st.integers(0, 5), st.lists(st.integers(0, 2000), min_size=8, max_size=8))
def test_no_plan_crosses_versions_and_a_pair_is_found_if_there_is_one(
    prefills: str, decodes: str, d_first: bool, turn: int, work: list[int]
) -> None:
    nodes = fleet(prefills, decodes)
    for node, tokens in zip(nodes.nodes, work, strict=False):
        keep_busy(node, tokens / 25_000)
    order = HandoffOrder.D_FIRST if d_first else HandoffOrder.P_FIRST
    choice = chosen(nodes, turn=turn, asked=order)
    ps, ds = nodes.nodes[: len(prefills)], nodes.nodes[len(prefills) :]
    possible = any(not is_crossed(p, d) for p in ps for d in ds)
    assert choice.text == (f"{order.value}; reason=header" if possible else "direct; reason=no-pair")
    if not possible:
        return
    takers = [d for d in ds if choice.best([d], NOW_S)]
    assert takers
    for p in choice.offered(NOW_S):
        assert choice.best_prefill([p], NOW_S) is p
        known = {d.kv_version for d in takers} | {p.kv_version}
        assert len(known - {""}) <= 1, known


# --- over fake nodes


def a_node(role: str, script: Any, fingerprint: str, **fields: Any) -> FakeNode:
    node = FakeNode(role, script, node_id=f"{role}-{fingerprint}", **fields)
    node.facts["fingerprint"] = fingerprint
    return node


def roll(node: FakeNode, fingerprint: str) -> None:
    """It restarts with other weights."""
    node.facts["fingerprint"] = fingerprint
    node.epoch += 1


async def poll(router: Router) -> None:
    services = router.services
    await HealthPoller(services.config, services.table, services.upstream).poll_all()


async def ask(router: Router, route: str = "p-first") -> tuple[int, str]:
    async with router.session.post(router.url + "/v1/completions", json=BODY, headers={"x-pd-route": route}) as answer:
        await answer.read()
        return answer.status, answer.headers["x-pd-route"]


@pytest.mark.anyio
async def test_health_tells_the_version() -> None:
    told: tuple[dict[str, Any], ...] = (
        {"fingerprint": "f", "kv_protocol": 9}, {"fingerprint": "f"}, {"fingerprint": None}, {"fingerprint": 5}, {},
    )  # fmt: skip
    nodes = [FakeNode("decode", fakes.decode) for _ in told]
    for node, facts in zip(nodes, told, strict=True):
        node.facts = facts
    async with running(*nodes), serving(decode=nodes) as router:
        found = [node.kv_version for node in router.services.table.nodes]
        assert found == ["f/9", "f/2", "", "", ""], "a node that tells no protocol is older than version 3"


@pytest.mark.anyio
@pytest.mark.parametrize("route", ["p-first", "d-first"])
async def test_a_ticket_and_an_offer_never_reach_another_version(route: str) -> None:
    ps = [a_node("prefill", fakes.prefill, version) for version in "AB"]
    ds = [a_node("decode", fakes.decode, version) for version in "AB"]
    async with running(*ps, *ds), serving(ps, ds) as router:
        assert [await ask(router, route) for _ in range(8)] == [(200, f"{route}; reason=header")] * 8
        for d, own, other in zip(ds, ps, reversed(ps), strict=True):
            for seen in d.seen:
                params = seen.body["kv_transfer_params"]
                assert params.get("remote_engine_id", f"engine-{own.node_id}") == f"engine-{own.node_id}"
                if offer := params.get("offer"):
                    assert other.url not in verify(KEY, offer, Offer, time.time()).prefill_urls


@pytest.mark.anyio
@pytest.mark.parametrize("route", ["p-first", "d-first"])
@pytest.mark.parametrize("fails", [fakes.hang_up, fakes.refuse(503)])
async def test_when_the_last_decode_node_of_a_version_fails_another_one_reads_the_prompt(
    route: str, fails: fakes.Script
) -> None:
    p, d_a = a_node("prefill", fakes.prefill, "A"), a_node("decode", fails, "A")
    d_b = a_node("decode", fakes.decode, "B")
    async with running(p, d_a, d_b), serving([p], [d_a, d_b]) as router:
        assert await ask(router, route) == (200, "direct; reason=no-pair")
        assert "kv_transfer_params" not in d_b.seen[0].body
        if route == "p-first":
            await p.wait_released(1)
        await router.idle()


@pytest.mark.anyio
async def test_where_local_prefill_is_forbidden_a_foreign_version_does_not_take_over() -> None:
    p, d_a = a_node("prefill", fakes.prefill, "A"), a_node("decode", fakes.refuse(503), "A")
    d_b = a_node("decode", fakes.decode, "B")
    async with running(p, d_a, d_b), serving([p], [d_a, d_b], on_prefill_failure="fail") as router:
        assert (await ask(router))[0] == 503
        assert d_b.seen == []


@pytest.mark.anyio
async def test_a_rolled_node_is_paired_anew_once_its_health_tells() -> None:
    p, d = a_node("prefill", fakes.prefill, "A"), a_node("decode", fakes.decode, "A")
    async with running(p, d), serving([p], [d]) as router:
        assert (await ask(router))[1] == "p-first; reason=header"
        roll(p, "B")
        await poll(router)
        assert (await ask(router))[1] == "direct; reason=no-pair"
        roll(d, "B")
        await poll(router)
        assert (await ask(router))[1] == "p-first; reason=header"
        assert {node.role for node in router.services.table.nodes} == {Role.PREFILL, Role.DECODE}
