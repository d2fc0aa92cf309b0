"""Nodes that are told to stop, or drained by order, while a request's KV is on its way between them.

Nothing is lost: what runs is finished by the nodes that began it, leases end, and the process leaves in good order
within its grace. What comes meanwhile is served by others.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.launch.cli import main
from tests.cluster import TEST_KEY
from tests.deadlines import HANG_S
from tests.integration.calls import COMPLETIONS, Call
from tests.integration.fault_cluster import Member, fetch, until
from tests.integration.gated_cluster import LONG, LONG_S, NUM_TOKENS, SHORT, GatedCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.integration.fault_cluster import RouterMember

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]


@pytest.fixture
async def cluster(nodes: GatedCluster) -> AsyncIterator[GatedCluster]:
    await nodes.restore()
    await nodes.expected(LONG)
    await nodes.expected(SHORT)
    yield nodes
    await nodes.restore()
    await nodes.check_clean()
    await asyncio.to_thread(nodes.stop_new_routers)


async def check_gone(node: Member) -> None:
    """Asserts that it ends in good order. It would wait LONG_S for what it could not see through."""
    assert await asyncio.to_thread(node.process.wait, HANG_S) == 0, node.process.output


async def test_p_told_to_stop_sees_its_handoff_through(cluster: GatedCluster) -> None:
    with cluster.held():
        call = await cluster.reading("d0", "p-first", stream=True)
        cluster.p0.process.send(signal.SIGTERM)
        await cluster.router.wait_healthy(cluster.p0, False)
        other = await cluster.call(SHORT, "p-first").outcome()
        other.check(await cluster.expected(SHORT))
        assert other.headers["x-pd-route"] == "direct; reason=no-prefill-node"
        assert not call.done
    outcome = await call.outcome()
    outcome.check(await cluster.expected(LONG))
    assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == ("p0", "d0")
    await check_gone(cluster.p0)
    await cluster.check_clean(cluster.d0)


async def test_d_told_to_stop_finishes_what_it_reads(cluster: GatedCluster) -> None:
    """And gives its lease back: p1's do not run out."""
    p1 = cluster.nodes["p1"]
    router = cluster.new_router(["p1"], ["d0"])
    with cluster.held("p1"):
        call = await cluster.reading("d0", "d-first", url=router.url, stream=True)
        cluster.d0.process.send(signal.SIGTERM)
        await router.wait_healthy(cluster.d0, False)
        assert not call.done
    outcome = await call.outcome()
    outcome.check(await cluster.expected(LONG))
    assert outcome.headers["x-pd-prefill"] == "p1"
    await check_gone(cluster.d0)
    await cluster.check_clean(p1)


async def lease_of_one_told_to_stop(cluster: GatedCluster, node: Member, router: RouterMember) -> dict[str, Any]:
    """What asks a decode node for the prompt that `node` computed and leased after it was told to stop."""
    body = cluster.body(LONG) | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    with cluster.held(node.name):
        asked = asyncio.create_task(fetch(node.url + COMPLETIONS, body))
        await until(node.is_busy, f"{node.name} computes")
        node.process.send(signal.SIGTERM)
        await router.wait_healthy(node, False)
        assert not asked.done()
    answer = await asked
    return {**body, "max_tokens": NUM_TOKENS, "kv_transfer_params": answer.json()["kv_transfer_params"]}


async def test_a_lease_outlives_the_answer_of_a_p_that_was_told_to_stop(cluster: GatedCluster) -> None:
    """p1, which keeps a lease for LONG_S, is there for the reader, and ends when the reader has given it back."""
    p1 = cluster.nodes["p1"]
    late = await lease_of_one_told_to_stop(cluster, p1, cluster.new_router(["p1"], ["d0"]))
    moved = await cluster.d0.metric("pd_kv_transfer_bytes_total")
    (await Call(cluster.d0.url, late).outcome()).check(await cluster.expected(LONG))
    await cluster.d0.wait_more("pd_kv_transfer_bytes_total", moved)
    await check_gone(p1)


async def test_a_lease_without_a_reader_holds_a_p_that_was_told_to_stop_for_its_ttl_only(cluster: GatedCluster) -> None:
    await lease_of_one_told_to_stop(cluster, cluster.p0, cluster.router)
    await check_gone(cluster.p0)


async def test_p_drained_by_order_finishes_and_comes_back(
    cluster: GatedCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pd-cluster nodes drain --wait-s` returns when the router has nothing there any more."""
    monkeypatch.setenv("PD_CLUSTER_KEY", TEST_KEY)

    async def order(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["nodes", *arguments, "--router", cluster.router.url]) == 0
        return capsys.readouterr().out

    with cluster.held():
        call = await cluster.reading("d0", "p-first", stream=True)
        draining = asyncio.create_task(order("drain", "p0", f"--wait-s={LONG_S:g}"))
        await cluster.router.wait_healthy(cluster.p0, False)
        other = await cluster.call(SHORT, "p-first").outcome()
        assert other.headers["x-pd-route"] == "direct; reason=no-prefill-node"
        assert not call.done
        assert not draining.done()
    assert "draining" in await draining
    (await call.outcome()).check(await cluster.expected(LONG))
    await cluster.check_clean()
    assert "draining" not in await order("undrain", "p0")
    await cluster.router.wait_healthy(cluster.p0)
    await cluster.check_transfer(SHORT)
