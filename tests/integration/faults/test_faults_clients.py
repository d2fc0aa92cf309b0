"""Clients that leave in every phase of a request, and routers that end under load: no node works for them on."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import ExitStack
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING

import pytest

from tests.deadlines import HANG_S, until_equal
from tests.integration.calls import BROKEN, Call
from tests.integration.fault_cluster import RouterMember, fetch, parse_metrics, until
from tests.integration.gated_cluster import LONG, SHORT, SPOKEN, GatedCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]
logger = logging.getLogger(__name__)

P_FIRST, D_FIRST = "p-first", "d-first"
ROUTES = (P_FIRST, D_FIRST)
NUM_STREAMS = 6
ADMITTED = 'pd_prompt_tokens_total{work="prefill"}'


class Phase(StrEnum):
    """Where a request is when its client leaves."""

    QUEUE = "queue"  # P computes another one first
    PREFILL = "prefill"  # P computes
    LOAD = "load"  # D reads, while P computes on
    DECODE = "decode"  # D generates


@pytest.fixture
async def cluster(nodes: GatedCluster) -> AsyncIterator[GatedCluster]:
    """The cluster, its router running. All of it is clean when the test is over."""
    await nodes.restore()
    yield nodes
    if nodes.router.process.returncode is not None:
        nodes.router.start_again()
    await nodes.check_clean()
    await asyncio.to_thread(nodes.stop_new_routers)


async def in_phase(cluster: GatedCluster, phase: Phase, call: Call) -> None:
    """Wait until `call`, the only request but for one that it may queue behind, is there, where the gates hold it."""
    p0, d0 = cluster.p0, cluster.d0

    async def queues() -> bool:
        return await p0.metric("pd_num_waiting") > 0

    if phase is Phase.DECODE:
        await until(d0.is_busy, "d0 generates")
    else:
        probe = {Phase.QUEUE: queues, Phase.PREFILL: p0.is_busy, Phase.LOAD: d0.is_reading}[phase]
        await until(probe, f"the request is in {phase}")
    assert not call.done


def leaving() -> Iterator[object]:
    """Each phase in both orders, streamed in one of them; what is streamed in the other one is slow."""
    for (index, phase), (by_d, route), stream in product(enumerate(Phase), enumerate(ROUTES), (False, True)):
        marks = [pytest.mark.slow] if (index + by_d + stream) % 2 else []
        yield pytest.param(phase, route, stream, id=f"{phase}-{route}-{'stream' if stream else 'whole'}", marks=marks)


@pytest.mark.parametrize(("phase", "route", "stream"), list(leaving()))
async def test_client_leaves(phase: Phase, route: str, stream: bool, cluster: GatedCluster) -> None:
    left = 'pd_requests_total{endpoint="completions",outcome="disconnected"}'
    before = await cluster.d0.metric(left)
    with cluster.held(), cluster.spoken():
        calls = []
        if phase is Phase.QUEUE:
            calls.append(cluster.call(LONG, route))
            await until(cluster.p0.is_busy, "p0 computes the first one")
        if phase is Phase.DECODE:
            calls.append(cluster.call(SHORT, route, stream=stream, num_tokens=2 * SPOKEN))
        elif phase is Phase.LOAD:
            calls.append(await cluster.reading("d0", route, stream=stream))
        else:
            calls.append(cluster.call(LONG, route, stream=stream))
        await in_phase(cluster, phase, calls[-1])
        if phase is Phase.DECODE and stream:
            await calls[-1].begun()
        for call in reversed(calls):
            await call.leave()
        clean_s = await cluster.check_clean()  # though none of it could come to its end
    logger.info("%s, %s: clean %.2f s after the client left", phase, route, clean_s)
    await cluster.d0.wait_more(left, before)


@pytest.mark.parametrize("route", ROUTES)
async def test_after_all_that_left(route: str, cluster: GatedCluster) -> None:
    await cluster.check_transfer(SHORT, route)


async def under_load(cluster: GatedCluster, gates: ExitStack) -> list[Call]:
    """Streams that have begun, by both orders, and a long prompt under way. The gates hold them all there."""
    gates.enter_context(cluster.held())
    gates.enter_context(cluster.spoken())
    calls = [cluster.call(SHORT, ROUTES[i % 2], stream=True, num_tokens=2 * SPOKEN) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(call.begun() for call in calls))
    calls.append(await cluster.reading())
    assert not any(call.done for call in calls)
    return calls


async def test_router_killed_under_load(cluster: GatedCluster) -> None:
    """Its requests are gone, and no node works for them; its successor needs nothing that it knew."""
    with ExitStack() as gates:
        calls = await under_load(cluster, gates)
        await asyncio.to_thread(cluster.router.process.stop, signal.SIGKILL)
        for outcome in await asyncio.gather(*(call.outcome() for call in calls)):
            assert outcome.error is not None
            assert outcome.error["code"] == BROKEN
        logger.info("clean %.2f s after the router was killed", await cluster.check_clean())
    await asyncio.to_thread(cluster.router.start_again)
    for route in ROUTES:
        await cluster.check_transfer(SHORT, route)


async def test_router_restarted_under_load(cluster: GatedCluster) -> None:
    """Told to stop, it sees through what it has."""
    expected = await cluster.expected(LONG)
    with ExitStack() as gates:
        calls = await under_load(cluster, gates)
        cluster.router.process.send(signal.SIGTERM)
        await until(cluster.router.is_draining, "the router takes no more")
        assert not any(call.done for call in calls)
    *streams, long = await asyncio.gather(*(call.outcome() for call in calls))
    long.check(expected)
    for one in streams:
        assert (one.status, one.error, one.finish_reason) == (200, None, "length")
    assert len({one.text for one in streams}) == 1
    assert await asyncio.to_thread(cluster.router.process.wait, HANG_S) == 0
    await asyncio.to_thread(cluster.router.start_again)
    await cluster.check_transfer(SHORT, P_FIRST)


async def test_router_without_prefill_nodes(cluster: GatedCluster) -> None:
    router = cluster.new_router([], ["d0"])
    admitted = await cluster.p0.metric(ADMITTED)
    for route in ("", *ROUTES):
        outcome = await cluster.call(SHORT, route, url=router.url).outcome()
        outcome.check(await cluster.expected(SHORT))
        assert outcome.headers["x-pd-route"] == "direct; reason=no-prefill-node"
        assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == ("d0", "d0")
    await check_only_admitted(cluster, admitted)


async def test_router_without_decode_nodes(cluster: GatedCluster) -> None:
    """Prefill nodes answer, unless they must not: then P is not even asked."""
    short = await cluster.expected(SHORT)
    kept = RouterMember(cluster.launcher, [cluster.p0], [], "--decode=http://127.0.0.1:1")
    for route in ROUTES:
        outcome = await cluster.call(SHORT, route, url=kept.url).outcome()
        outcome.check(short)
        assert outcome.headers["x-pd-route"] == "direct; reason=no-decode-node"
    admitted = await cluster.p0.metric(ADMITTED)
    flags = ("--decode=http://127.0.0.1:1", "--decode-on-prefill=never")
    router = RouterMember(cluster.launcher, [cluster.p0], [], *flags)
    for route, stream in product(ROUTES, (False, True)):
        outcome = await cluster.call(SHORT, route, stream=stream, url=router.url).outcome()
        assert outcome.error is not None
        assert (outcome.status, outcome.error["code"], outcome.text) == (503, "no_healthy_node", "")
    await check_only_admitted(cluster, admitted)


async def check_only_admitted(cluster: GatedCluster, before: float) -> None:
    """p0 had no prompt since it had counted `before`: one more is all that it counts."""
    asked = await cluster.check_transfer(SHORT)
    await until_equal(lambda: cluster.p0.metric(ADMITTED), before + asked * SHORT)


async def test_the_router_counts_clients_that_left(cluster: GatedCluster) -> None:
    name = 'pd_router_client_disconnects_total{phase="decode"}'

    async def count() -> float:
        return parse_metrics((await fetch(f"{cluster.router.url}/metrics")).text).get(name, 0.0)

    with cluster.held():
        call = await cluster.reading()
        before = await count()
        await call.leave()

        async def is_counted() -> bool:
            return await count() > before

        await until(is_counted, "the router counts it")
        await cluster.check_clean()
    assert await count() == before + 1
