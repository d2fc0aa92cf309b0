"""Nodes that are killed, stopped and started again while a request's KV is on its way between them.

Every request ends: right, token for token, or with an error that says why, long before the deadline of its load. No
living node keeps a block. Later requests are served. Times are logged: `pytest -o log_cli=true --log-cli-level=INFO`.

Each fault comes while a gate holds the request where the test wants it. What must be noticed soon is noticed at all:
every deadline that could end the wait instead is LONG_S.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.calls import COMPLETIONS, Call, Outcome
from tests.integration.fault_cluster import LEASE_TTL_S, Member, Part, fetch, until
from tests.integration.gated_cluster import BLOCK_SIZE, D0_BLOCKS, LONG, LONG_S, SHORT, SPOKEN, GatedCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]
logger = logging.getLogger(__name__)

BRIEF = 100  # tokens of a prompt that fits p0's memory beside the long one
FILLING = D0_BLOCKS * BLOCK_SIZE - LONG  # tokens of a prompt that leaves d0 no room for the long one
P_FIRST, D_FIRST = "p-first", "d-first"


@pytest.fixture
async def cluster(nodes: GatedCluster) -> AsyncIterator[GatedCluster]:
    """The whole cluster, whatever the test before has left of it. What the test leaves running becomes clean again."""
    await nodes.restore()
    yield nodes
    nodes.go_on()
    await nodes.check_clean(*nodes.running)
    await asyncio.to_thread(nodes.stop_new_routers)


async def parted(one: Member, other: Member, probe: Callable[[Member], Awaitable[bool]]) -> tuple[Member, Member]:
    """The node of the two that the router has chosen, as `probe` shows it, and the other one."""
    found: list[Member] = []

    async def is_chosen() -> bool:
        found[:] = [node for node in (one, other) if await probe(node)]
        return bool(found)

    await until(is_chosen, f"the request is at {one.name} or {other.name}")
    return (one, other) if found[0] is one else (other, one)


async def wait_fallback(node: Member, before: dict[str, float]) -> None:
    """Until `node` has counted another failed load. Asserts that it did not wait for the load's deadline."""

    async def has_failed() -> bool:
        return await failed_loads(node) != before

    await until(has_failed, f"{node.name} gives a load up")
    assert not (await failed_loads(node)).get('pd_loads_failed_total{reason="deadline"}')


async def failed_loads(node: Member) -> dict[str, float]:
    told = await node.metrics()
    return {name: value for name, value in told.items() if name.startswith("pd_loads_failed_total")}


@pytest.mark.parametrize(
    ("part", "route", "stream"),
    [(Part.ENGINE, P_FIRST, True), pytest.param(Part.API, D_FIRST, False, marks=pytest.mark.slow)],
    ids=["engine", "api"],
)
async def test_p_killed_while_d_reads(part: Part, route: str, stream: bool, cluster: GatedCluster) -> None:
    """D computes the prompt by itself. P comes back under its old address and is read again, but for an old ticket."""
    long, short = await cluster.expected(LONG), await cluster.expected(SHORT)
    outlived = await with_ticket(cluster, BRIEF)
    failed = await failed_loads(cluster.d0)
    with cluster.held():
        call = await cluster.reading("d0", route, stream=stream)
        await asyncio.gather(cluster.p0.kill(part), wait_fallback(cluster.d0, failed))
        outcome = await call.outcome()
    outcome.check(long)
    assert outcome.headers["x-pd-prefill"] == "d0"
    logger.info("answered after %.2f s, d0 clean after %.2f s", outcome.seconds, await cluster.check_clean(cluster.d0))

    await cluster.router.wait_healthy(cluster.p0, False)
    alone = await cluster.call(SHORT, route).outcome()
    alone.check(short)
    assert alone.headers["x-pd-route"] == "direct; reason=no-prefill-node"

    await cluster.restore()
    await check_refused(cluster, outlived, BRIEF, "peer_restarted")
    await cluster.check_transfer(SHORT, route)
    await cluster.check_clean()


async def with_ticket(cluster: GatedCluster, length: int) -> dict[str, Any]:
    """A request that has p0's ticket for its prompt, as D gets it from a router that is not ours."""
    body = cluster.body(length)
    prefill = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = await fetch(cluster.p0.url + COMPLETIONS, prefill)
    return body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}


async def check_refused(cluster: GatedCluster, body: dict[str, Any], length: int, reason: str) -> None:
    """D cannot use the ticket of `body` any more, counts why, and answers by itself."""
    name = f'pd_handoff_fallbacks_total{{reason="{reason}"}}'
    before = await cluster.d0.metric(name)
    (await Call(cluster.d0.url, body).outcome()).check(await cluster.expected(length))
    await cluster.d0.wait_more(name, before)


@pytest.mark.parametrize(
    ("part", "route"), [pytest.param(Part.API, P_FIRST, marks=pytest.mark.slow), (Part.ENGINE, D_FIRST)]
)
async def test_p_killed_another_p_lives(part: Part, route: str, cluster: GatedCluster) -> None:
    """D asks the next prefill node that it was offered."""
    long = await cluster.expected(LONG)
    router = cluster.new_router(["p0", "p1"], ["d0"])
    moved = await cluster.d0.metric("pd_kv_transfer_bytes_total")
    with cluster.held(), cluster.held("p1"):
        call = await cluster.reading("d0", route, url=router.url)
        asked, other = await parted(cluster.p0, cluster.nodes["p1"], Member.is_busy)
        await asked.kill(part)
        await until(other.is_busy, f"{other.name} is asked")
    outcome = await call.outcome()
    outcome.check(long)
    assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == (other.name, "d0")
    await cluster.d0.wait_more("pd_kv_transfer_bytes_total", moved)
    logger.info("answered after %.2f s by %s and d0", outcome.seconds, other.name)
    await cluster.check_clean(cluster.d0, other)


@asynccontextmanager
async def told_but_not_loading(cluster: GatedCluster) -> AsyncIterator[tuple[Call, Call]]:
    """A call that has shown p1's first token while d0 has no room for its KV, and the call that takes the room."""
    with cluster.spoken():
        fills = cluster.call(FILLING, "", stream=True, num_tokens=2 * SPOKEN, url=cluster.d0.url)
        await fills.begun()
        call = cluster.call(LONG, P_FIRST, stream=True, url=cluster.new_router(["p1"], ["d0"]).url)
        await call.begun()

        async def waits() -> bool:
            return await cluster.d0.metric("pd_num_waiting_for_remote_kv") == 1

        await until(waits, "d0 waits for room")
        yield call, fills


async def test_p_killed_after_its_first_token(cluster: GatedCluster) -> None:
    """D goes on after that token, by itself."""
    long = await cluster.expected(LONG)
    async with told_but_not_loading(cluster) as (call, fills):
        failed = await failed_loads(cluster.d0)
        await cluster.nodes["p1"].kill(Part.ENGINE)
        await wait_fallback(cluster.d0, failed)
        await fills.leave()
        outcome = await call.outcome()
    outcome.check(long)
    assert outcome.headers["x-pd-prefill"] == "p1", "as it was when the stream began"
    logger.info("answered after %.2f s", outcome.seconds)
    await cluster.check_clean(cluster.d0, cluster.p0)


@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["goes on", "dies"])
async def test_bytes_that_come_late(goes_on: bool, cluster: GatedCluster) -> None:
    """D reads from a stopped P. Blocks that such a read may still write are not reused until it cannot any more."""
    long, d0, p1 = await cluster.expected(LONG), cluster.d0, cluster.nodes["p1"]
    with cluster.impatient("d0"):
        async with told_but_not_loading(cluster) as (call, fills):
            failed = await failed_loads(d0)
            p1.stop()
            await fills.leave()
            await until(d0.has_reserved, "d0 has room")
            await wait_fallback(d0, failed)
            (await call.outcome()).check(long)
    num_blocks = -(-LONG // BLOCK_SIZE)
    left = {"orphaned_loads": 1, "loads_open": 1, "in_use": num_blocks, "quarantined": num_blocks}

    async def has_left() -> bool:
        return await d0.held() == left

    await until(has_left, f"d0 holds {left}")
    (await cluster.call(SHORT, "", url=d0.url).outcome()).check(await cluster.expected(SHORT))
    await until(has_left, f"d0 still holds {left}")
    if goes_on:
        p1.go_on()
        logger.info("all clean %.2f s after p1 went on", await cluster.check_clean())
    else:
        await p1.kill(Part.API)
        logger.info("d0 clean %.2f s after p1 died", await cluster.check_clean(d0))


async def test_a_ticket_that_no_node_took_in_time(cluster: GatedCluster) -> None:
    """P's blocks are free after the ttl, and the old ticket leads nowhere wrong."""
    expired = await with_ticket(cluster, SHORT)
    logger.info("p0 clean %.2f s after no reader came, ttl %.1f s", await cluster.check_clean(cluster.p0), LEASE_TTL_S)
    await check_refused(cluster, expired, SHORT, "lease_ended")
    await cluster.check_transfer(SHORT)


async def test_p_stopped_before_it_is_asked(cluster: GatedCluster) -> None:
    """No health check has failed yet. The router and D each end their wait for a ticket by themselves."""
    short = await cluster.expected(SHORT)
    interval = f"--health-interval-s={LONG_S:g}"
    router = cluster.new_router(["p0"], ["d0"], interval, f"--ticket-timeout-s={LONG_S:g}")
    impatient = cluster.new_router(["p0"], ["d0"], interval, "--ticket-timeout-s=0.5")
    with cluster.impatient("d0"):
        cluster.p0.stop()
        second, leaves = (cluster.call(SHORT, D_FIRST, url=router.url) for _ in range(2))

        async def both_ask() -> bool:
            return await cluster.d0.metric("pd_num_waiting_for_remote_kv") == 2

        await until(both_ask, "d0 asks p0 for two tickets")
        await leaves.leave()
        first = cluster.call(SHORT, P_FIRST, url=impatient.url)
        for call, route in ((second, "d-first; reason=header"), (first, "direct; reason=prefill-failed")):
            outcome = await call.outcome()
            outcome.check(short)
            logger.info("%s: answered after %.2f s", route, outcome.seconds)
            assert outcome.headers["x-pd-route"] == route
    await cluster.check_clean(cluster.d0)
    cluster.p0.go_on()
    logger.info("all clean %.2f s after p0 went on", await cluster.check_clean())


async def test_p_killed_and_d_may_not_prefill(cluster: GatedCluster) -> None:
    """The client hears why, with a status: nothing was streamed yet."""
    strict = cluster.nodes["strict"]
    router = cluster.new_router(["p0"], ["strict"])
    with cluster.held():
        call = await cluster.reading("strict", url=router.url, stream=True)
        await cluster.p0.kill(Part.ENGINE)
        outcome = await call.outcome()
    check_error(outcome, 502, "prefill_unavailable")
    await cluster.check_clean(strict)
    alone = await cluster.call(SHORT, P_FIRST, url=strict.url).outcome()
    alone.check(await cluster.expected(SHORT))


@pytest.mark.parametrize(("route", "parts"), [(P_FIRST, (Part.ENGINE,)), (D_FIRST, tuple(Part))])
async def test_p_stopped_while_d_reads(route: str, parts: tuple[Part, ...], cluster: GatedCluster) -> None:
    """D leaves a P that is silent, long before its deadline. What P does later does no harm."""
    long, short = await cluster.expected(LONG), await cluster.expected(SHORT)
    router = cluster.new_router(["p0"], ["d0"], "--health-timeout-s=1")
    with cluster.held(), cluster.impatient("p0", "d0"):
        call = await cluster.reading("d0", route, url=router.url)
        failed = await failed_loads(cluster.d0)
        cluster.p0.stop(*parts)
        await wait_fallback(cluster.d0, failed)
        outcome = await call.outcome()
    outcome.check(long)
    assert outcome.headers["x-pd-prefill"] == "d0"
    # A read that was under way when p0 stopped ends when p0 goes on: over TCP it needs p0's progress
    await wait_clean_but_for_reads(cluster.d0)
    await router.wait_healthy(cluster.p0, False)
    alone = await cluster.call(SHORT, route, url=router.url).outcome()
    alone.check(short)

    cluster.p0.go_on()
    await router.wait_healthy(cluster.p0)
    await cluster.router.wait_healthy(cluster.p0)
    logger.info(
        "answered after %.2f s; all clean %.2f s after p0 went on", outcome.seconds, await cluster.check_clean()
    )
    await cluster.check_transfer(SHORT, route)


async def wait_clean_but_for_reads(member: Member) -> None:
    """Until `member` holds at most the blocks of one long prompt, which a read from a stopped peer may still write."""
    found: dict[str, float] = {}

    async def is_clean() -> bool:
        found.clear()
        found.update(await member.held())
        others = found.keys() - {"orphaned_loads", "loads_open", "in_use", "quarantined"}
        num_loads = max(found.get("orphaned_loads", 0), found.get("loads_open", 0))
        in_use, quarantined = found.get("in_use", 0), found.get("quarantined", 0)
        return not others and num_loads <= 1 and in_use == quarantined <= num_loads * -(-LONG // BLOCK_SIZE)

    await until(is_clean, f"{member.name} holds only what is read", explain=lambda: str(found))


@pytest.mark.parametrize("route", [P_FIRST, pytest.param(D_FIRST, marks=pytest.mark.slow)])
async def test_d_stopped_while_it_reads(route: str, cluster: GatedCluster) -> None:
    """P's lease runs out, and its blocks go to others; D, going on, believes nothing that it has read."""
    long = await cluster.expected(LONG)
    with cluster.held():
        call = await cluster.reading("d0", route)
        cluster.d0.stop()
    clean_s = await cluster.check_clean(cluster.p0)
    logger.info("p0 clean %.2f s after its reader was stopped, with a ttl of %.1f s", clean_s, LEASE_TTL_S)
    other = await cluster.call(LONG + 1, "", num_tokens=1, url=cluster.p0.url).outcome()
    assert other.error is None, "it overwrites what p0 has freed"
    cluster.d0.go_on()
    outcome = await call.outcome()
    outcome.check(long)
    assert outcome.headers["x-pd-prefill"] == "d0"
    await cluster.check_clean()
    await cluster.check_transfer(SHORT, route)


@pytest.mark.parametrize("part", Part)
async def test_d_killed_while_it_reads(part: Part, cluster: GatedCluster) -> None:
    """No other node may answer: clients hear that at once, and P lets go. A stream that has begun breaks off."""
    route = P_FIRST if part is Part.ENGINE else D_FIRST
    router = cluster.new_router(["p0"], ["d0"], "--continue-wait-s=0.1", "--decode-on-prefill=never")
    with cluster.held(), cluster.spoken():
        begun = cluster.call(SHORT, P_FIRST, stream=True, num_tokens=2 * SPOKEN, url=router.url)
        await generates(cluster, begun)
        call = await cluster.reading("d0", route, url=router.url, stream=part is Part.API)
        await cluster.d0.kill(part)
        outcome = await call.outcome()
        check_error(outcome, *((503, "engine_died") if part is Part.ENGINE else (502, "node_failed")))
        check_broken_off(await begun.outcome(), "engine_died" if part is Part.ENGINE else "stream_interrupted")
        logger.info("%s; p0 clean after %.2f s", outcome.error, await cluster.check_clean(cluster.p0))

    await router.wait_healthy(cluster.d0, False)
    check_error(await cluster.call(SHORT, route, url=router.url).outcome(), 503, "no_healthy_node")
    await cluster.restore()
    await cluster.check_transfer(SHORT, route)
    await cluster.check_clean()


@pytest.mark.parametrize(
    ("part", "route"), [(Part.API, P_FIRST), pytest.param(Part.ENGINE, D_FIRST, marks=pytest.mark.slow)]
)
async def test_d_killed_another_d_lives(part: Part, route: str, cluster: GatedCluster) -> None:
    """It takes the request over: P-first with the same ticket, while P goes on computing."""
    long = await cluster.expected(LONG)
    router = cluster.new_router(["p0"], ["d0", "strict"])
    with cluster.held():
        call = await cluster.reading(("d0", "strict"), route, url=router.url)
        reader, other = await parted(cluster.d0, cluster.nodes["strict"], Member.is_reading)
        await reader.kill(part)
        if route == P_FIRST:  # else P has the first blocks cached, and computes the rest in one step
            await until(other.is_reading, f"{other.name} reads")
            assert not call.done
    outcome = await call.outcome()
    outcome.check(long)
    assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == ("p0", other.name)
    logger.info("answered after %.2f s by p0 and %s", outcome.seconds, other.name)
    await cluster.check_clean(cluster.p0, other)


async def test_d_killed_in_the_middle_of_a_stream(cluster: GatedCluster) -> None:
    """Another one goes on after what the client has."""
    strict = cluster.nodes["strict"]
    bodies = [cluster.body(SHORT, num_tokens=3 * SPOKEN, stream=True) for _ in range(2)]
    expected = await Call(strict.url, bodies[0]).outcome()
    with cluster.spoken(), cluster.spoken("strict"):
        call = Call(cluster.new_router(["p0"], ["d0", "strict"]).url, bodies[1])
        await call.begun()
        speaker, other = await parted(cluster.d0, strict, Member.is_busy)
        await speaker.kill(Part.API)
    outcome = await call.outcome()
    outcome.check(expected)
    assert outcome.headers["x-pd-decode"] == speaker.name
    logger.info("the longest gap was %.2f s", outcome.longest_gap_s)
    await cluster.check_clean(cluster.p0, other)


async def generates(cluster: GatedCluster, stream: Call) -> None:
    """Until d0 generates; `stream` must be the only request. P's first token may be told while d0 still reads."""
    await stream.begun()
    await until(cluster.d0.is_busy, "d0 generates")


def check_broken_off(outcome: Outcome, code: str) -> None:
    """Asserts that the client has a part of an answer, and is told that more will not come."""
    assert (outcome.status, outcome.finish_reason) == (200, None)
    assert outcome.text
    assert outcome.error is not None
    assert outcome.error["code"] == code


def check_error(outcome: Outcome, status: int, code: str) -> None:
    """Asserts that it is an error of OpenAI's shape that says something, and no answer."""
    assert outcome.error is not None
    assert (outcome.status, outcome.error["code"], outcome.text) == (status, code, "")
    assert outcome.error["message"]
