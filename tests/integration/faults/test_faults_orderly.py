"""Nodes that are told to stop, or drained by order, while a request's KV is on its way between them.

Nothing is lost: what runs is finished by the nodes that began it, leases end, and the process leaves in good order
within its grace. What comes meanwhile is served by others.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from pd_cluster.launch.cli import main
from tests.cluster import TEST_KEY
from tests.integration.calls import COMPLETIONS
from tests.integration.fault_cluster import (
    LEASE_TTL_S,
    LOAD_DEADLINE_S,
    LONG,
    SHORT,
    SLACK_S,
    FaultCluster,
    Member,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]

DRAIN_S = 30.0  # the nodes' own default, as their grace before they are cut short
STOP_S = 6.0  # what a node needs to stop its engine once it is drained


@pytest.fixture(scope="module")
def patient_nodes(nodes: FaultCluster) -> Iterator[FaultCluster]:
    """No load is to fail here: on two cores with other work the long prompt takes more than LOAD_DEADLINE_S."""
    d0 = nodes.d0
    if d0.is_running:
        assert d0.process.stop() == 0
    d0.begin(f"--load-deadline-s={DRAIN_S:g}")
    d0.wait_ready()
    yield nodes
    if d0.is_running:
        assert d0.process.stop() == 0
    d0.add_flags(f"--load-deadline-s={LOAD_DEADLINE_S:g}")  # `restore` starts it for the tests of another module


@pytest.fixture
async def cluster(patient_nodes: FaultCluster) -> AsyncIterator[FaultCluster]:
    nodes = patient_nodes
    await nodes.restore()
    await nodes.expected(LONG)
    await nodes.expected(SHORT)
    yield nodes
    await nodes.restore()
    await nodes.check_clean()


async def gone(node: Member, told_at: float) -> float:
    """Its exit, in good order. Returns the seconds since it was told."""
    assert await asyncio.to_thread(node.process.wait, DRAIN_S + STOP_S) == 0, node.process.output
    return time.monotonic() - told_at


async def test_p_told_to_stop_sees_its_handoff_through(cluster: FaultCluster) -> None:
    call = cluster.call(LONG, "p-first", stream=True)
    await until(cluster.d0.is_reading, "d0 reads")
    assert await cluster.p0.metric("pd_leases_open") == 1
    assert not call.done
    cluster.p0.process.send(signal.SIGTERM)
    told_at = time.monotonic()
    await cluster.router.wait_healthy(cluster.p0, False)
    other = await cluster.call(SHORT, "p-first").outcome()
    other.check(await cluster.expected(SHORT))
    assert other.headers["x-pd-route"] == "direct; reason=no-prefill-node"
    outcome = await call.outcome()
    outcome.check(await cluster.expected(LONG))
    assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == ("p0", "d0")
    assert await gone(cluster.p0, told_at) < DRAIN_S + STOP_S
    await cluster.check_clean(cluster.d0)


async def test_d_told_to_stop_finishes_what_it_reads(cluster: FaultCluster) -> None:
    call = cluster.call(LONG, "d-first", stream=True)
    await until(cluster.d0.is_reading, "d0 reads")
    assert not call.done
    cluster.d0.process.send(signal.SIGTERM)
    told_at = time.monotonic()
    outcome = await call.outcome()
    outcome.check(await cluster.expected(LONG))
    assert outcome.headers["x-pd-prefill"] == "p0"
    assert await gone(cluster.d0, told_at) < DRAIN_S + STOP_S
    assert await cluster.check_clean(cluster.p0) < LEASE_TTL_S + SLACK_S  # it gave its lease back


async def test_a_lease_without_a_reader_is_kept_for_its_ttl_and_no_longer(cluster: FaultCluster) -> None:
    """Its prompt is still being computed when the node is told to stop: the lease outlives the answer."""
    body = cluster.body(LONG) | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    async with httpx.AsyncClient(timeout=DRAIN_S, trust_env=False) as client:
        asked = asyncio.create_task(client.post(cluster.p0.url + COMPLETIONS, json=body))
        await until(cluster.p0.is_busy, "p0 computes")
        assert not asked.done()
        cluster.p0.process.send(signal.SIGTERM)
        assert (await asked).status_code == 200
    after_s = await gone(cluster.p0, time.monotonic())
    assert 0.9 * LEASE_TTL_S < after_s < LEASE_TTL_S + STOP_S + SLACK_S


async def test_p_drained_by_order_finishes_and_comes_back(
    cluster: FaultCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pd-cluster nodes drain --wait-s` returns when the router has nothing there any more."""
    monkeypatch.setenv("PD_CLUSTER_KEY", TEST_KEY)

    async def order(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["nodes", *arguments, "--router", cluster.router.url]) == 0
        return capsys.readouterr().out

    call = cluster.call(LONG, "p-first", stream=True)
    await until(cluster.d0.is_reading, "d0 reads")
    draining = asyncio.create_task(order("drain", "p0", f"--wait-s={DRAIN_S:g}"))
    await cluster.router.wait_healthy(cluster.p0, False)
    assert not call.done
    assert not draining.done()
    other = await cluster.call(SHORT, "p-first").outcome()
    assert other.headers["x-pd-route"] == "direct; reason=no-prefill-node"
    assert "draining" in await draining
    (await call.outcome()).check(await cluster.expected(LONG))
    await cluster.check_clean()
    assert "draining" not in await order("undrain", "p0")
    await cluster.router.wait_healthy(cluster.p0)
    await cluster.check_transfer(SHORT)
