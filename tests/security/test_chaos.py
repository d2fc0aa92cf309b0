"""Every process of 2P + 2D + 2 routers is killed, stopped and restarted under load: no answer is altered, lost or hung.

PD_CHAOS_S=300 (how long), PD_CHAOS_CLIENTS=32, PD_CHAOS_SEED=1, PD_CHAOS_STREAMS=100 (the fewest streams that must have
been under way on what was hit), PD_CHAOS_DEADLINE_S=60 (of each request, retries included). It writes one line of JSON.
A rehearsal on a small machine:

    PD_CHAOS_S=40 PD_CHAOS_CLIENTS=6 PD_CHAOS_STREAMS=5 pytest tests/security/test_chaos.py -m slow -s
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import RouterMember, start, until
from tests.security.chaos_load import Case, Load, Request, judge, make_cases
from tests.security.chaos_storm import DRAIN_S, Event, Fault, Storm, StormNode, charges

if TYPE_CHECKING:
    from collections.abc import Sequence

SECONDS = float(os.environ.get("PD_CHAOS_S", "300"))
CLIENTS = int(os.environ.get("PD_CHAOS_CLIENTS", "32"))
SEED = int(os.environ.get("PD_CHAOS_SEED", "1"))
MIN_STREAMS = int(os.environ.get("PD_CHAOS_STREAMS", "100"))
REQUEST_DEADLINE_S = float(os.environ.get("PD_CHAOS_DEADLINE_S", "60"))
CLEAN_DEADLINE_S = HANG_S  # until nothing of any request is left on any node or router
FULL_S = 200.0  # every member must be hit in a run of this length
CASES_PER_KIND = 12
COMMON = (
    "--kv-cache-gb=0.3", "--lease-ttl-s=2", "--load-deadline-s=8", "--min-remote-tokens=1", f"--drain-s={DRAIN_S:g}",
    "--max-num-batched-tokens=256",
)  # fmt: skip
ROUTER_FLAGS = ("--health-interval-s=1", "--health-timeout-s=3", f"--drain-s={DRAIN_S:g}")
# As between machines: over shared memory a reader needs no help of the other process, so nothing could be late.
NETWORK = {"UCX_TLS": "tcp"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.anyio
@pytest.mark.timeout(SECONDS + 600)
async def test_chaos(capsys: pytest.CaptureFixture[str]) -> None:
    with Launcher() as launcher:
        roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        nodes = [StormNode(launcher, name, role, *COMMON, environment=NETWORK) for name, role in roles.items()]
        reference = StormNode(launcher, "reference", "mixed", *COMMON)
        await asyncio.to_thread(start, [reference])
        cases = await make_cases(reference.url, CASES_PER_KIND)
        await asyncio.to_thread(reference.end)
        await asyncio.to_thread(start, nodes)
        routers = {
            name: await asyncio.to_thread(RouterMember, launcher, nodes[:2], nodes[2:], *ROUTER_FLAGS)
            for name in ("r0", "r1")
        }
        urls = {name: router.url for name, router in routers.items()}
        load = Load(urls, cases, CLIENTS, REQUEST_DEADLINE_S, SEED)
        storm = Storm(nodes, routers, load, SEED)
        clients = asyncio.create_task(load.run())
        try:
            await storm.rage(SECONDS)
        finally:
            load.stop()
            await clients
        leaked = await wait_clean(nodes, routers)
        with capsys.disabled():
            sys.stdout.write(f"\n{json.dumps(report(load, leaked))}\n")
        await asyncio.gather(*(asyncio.to_thread(node.end) for node in nodes))
    assert load.tally.wrong == []
    assert storm.ended == []
    assert leaked == {}
    assert sum(event.streams for event in load.events) >= MIN_STREAMS, "too few streams were under way on what was hit"
    if SECONDS >= FULL_S:
        assert {event.member for event in load.events} == {*roles, *routers}, "a member was never hit"


async def wait_clean(nodes: Sequence[StormNode], routers: dict[str, RouterMember]) -> dict[str, dict[str, float]]:
    """What is left of requests CLEAN_DEADLINE_S after the last one, by member."""
    left: dict[str, dict[str, float]] = {}

    async def is_clean() -> bool:
        left.clear()
        left.update({node.name: held for node in nodes if (held := await node.held())})
        left.update({name: owed for name, router in routers.items() if (owed := await charges(router))})
        return not left

    try:
        await until(is_clean, "nothing is left", CLEAN_DEADLINE_S)
    except AssertionError:
        assert left
    return left


def report(load: Load, leaked: dict[str, dict[str, float]]) -> dict[str, object]:
    """One line of JSON for the log."""
    faults = Counter(f"{event.member} {event.fault}" for event in load.events)
    return {
        "seconds": SECONDS, "clients": CLIENTS, "seed": SEED, **dict(sorted(load.tally.counts.items())),
        "slowest_s": round(load.tally.slowest_s, 1), "events": len(load.events),
        "streams_on_what_was_hit": sum(event.streams for event in load.events),
        "broken_by": dict(load.tally.broken_by), "faults": dict(sorted(faults.items())), "leaked": leaked,
        "wrong": load.tally.wrong[:20],
    }  # fmt: skip


# the judge


CASE = Case((5, 6), 4, "one two three four")


def ended(
    text: str, error: str = "", *, streamed: bool = True, finish_reason: str | None = None, lost: bool = False
) -> Request:
    """A request from 10 to 20 s, of r0 and d0."""
    return Request(CASE, streamed, 10.0, 20.0, "r0", "d0", text, finish_reason, error, lost, 1)


def event(member: str, fault: Fault, at_s: float = 15.0, over_s: float = math.inf) -> Event:
    return Event(member, fault, at_s, 1, over_s, member.startswith("r"))


@pytest.mark.parametrize(("request_", "events", "verdict"), [
    (ended(CASE.text, finish_reason="length"), [], "ok"),
    (ended(CASE.text), [], "altered"),
    (ended("one two", finish_reason="length"), [], "altered"),
    (ended("one too", "broken"), [event("d0", Fault.KILL_API)], "altered"),
    (ended("one two", "broken"), [event("d0", Fault.KILL_ENGINE)], "broken"),
    (ended("one two", "broken"), [event("r0", Fault.KILL_API)], "broken_without_cause"),
    (ended("one two", "broken", lost=True), [event("r0", Fault.KILL_API)], "broken"),
    (ended("one two", "broken", lost=True), [event("d0", Fault.KILL_API)], "broken"),
    (ended("one two", "broken", lost=True), [event("d1", Fault.KILL_API)], "broken_without_cause"),
    (ended("one two", "broken"), [event("d0", Fault.STOP_BOTH, 5.0, 11.0)], "broken"),
    (ended("one two", "broken"), [event("d0", Fault.STOP_BOTH, 5.0, 9.0)], "broken_without_cause"),
    (ended("one two", "broken"), [event("d0", Fault.RESTART)], "broken_without_cause"),
    (ended("one two", "broken"), [event("d1", Fault.KILL_API), event("p0", Fault.KILL_API)], "broken_without_cause"),
    (ended("", "500"), [event("d0", Fault.KILL_API)], "failed"),
    (ended("", "500"), [event("d0", Fault.KILL_API), event("p1", Fault.KILL_ENGINE)], "two_deaths"),
    (ended("", "500"), [event("d0", Fault.KILL_API), event("r0", Fault.KILL_API)], "failed"),
    (ended("", "500", streamed=False), [event("d0", Fault.STOP_API), event("p1", Fault.KILL_API)], "failed"),
])  # fmt: skip
def test_what_the_judge_allows(request_: Request, events: list[Event], verdict: str) -> None:
    assert judge(request_, events)[0] == verdict
