"""2P + 2D behind a bad network: late and lost bytes, and nodes that are parted from the router for ten seconds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import Member, make_prompt, start, wait_clean
from tests.security.relay import Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(600)]
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
LENGTHS = (40, 130, 300)
NUM_TOKENS = 200
NUM_CLIENTS = 4
BEFORE_S, PARTED_S, AFTER_S = 4.0, 10.0, 4.0
GAP_S = 6.0  # a frozen node is judged within 3 s; a busy machine may take as long again


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, Member]]:
    with Launcher() as launcher:
        members = {name: Member(launcher, name, role, "--min-remote-tokens=1") for name, role in ROLES.items()}
        start(list(members.values()))
        yield members
        for member in members.values():
            member.process.stop()


def body(length: int, salt: str, *, stream: bool) -> dict[str, Any]:
    return {"prompt": make_prompt(length), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
            "stream": stream, "cache_salt": salt}  # fmt: skip


@contextlib.asynccontextmanager
async def relayed(nodes: dict[str, Member], delay_s: float, lost: float) -> AsyncIterator[tuple[str, dict[str, Relay]]]:
    """A router that reaches the nodes through relays, and the relays by name. D reaches P's HTTP port so too."""
    async with contextlib.AsyncExitStack() as stack:
        relays = {}
        for name, node in nodes.items():
            relays[name] = await stack.enter_async_context(Relay(node.url, delay_s=delay_s, lost=lost).running())
        launcher = stack.enter_context(Launcher())
        urls: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for name, relay in relays.items():
            urls[ROLES[name]].append(SimpleNamespace(url=relay.url))
        router = await asyncio.to_thread(launcher.router, prefill=urls["prefill"], decode=urls["decode"])
        yield router.url, relays
        await asyncio.to_thread(launcher.close)


async def served(url: str, ends_s: float, expected: dict[int, Outcome], number: int) -> list[Outcome]:
    """One client: a request after the other. Asserts that each answer is right."""
    outcomes: list[Outcome] = []
    while time.monotonic() < ends_s:
        length, stream = LENGTHS[len(outcomes) % len(LENGTHS)], (len(outcomes) + number) % 3 > 0
        route = ("p-first", "d-first")[number % 2]
        asked = body(length, f"{number} {time.monotonic_ns()}", stream=stream)
        outcome = await Call(url, asked, route).outcome()
        outcome.check(expected[length])
        outcomes.append(outcome)
    return outcomes


@pytest.mark.parametrize(
    ("cut", "delay_s", "lost"),
    [((), 0.02, 0.05), (("p0",), 0.0, 0.0), (("p0", "p1"), 0.0, 0.0), (("d0",), 0.0, 0.0)],
    ids=["late and lost", "a prefill node", "all prefill nodes", "a decode node"],
)
async def test_every_answer_is_right(
    nodes: dict[str, Member], cut: tuple[str, ...], delay_s: float, lost: float
) -> None:
    expected = {length: await Call(nodes["d0"].url, body(length, "a", stream=False)).outcome() for length in LENGTHS}
    async with relayed(nodes, delay_s, lost) as (url, relays):
        ends_s = time.monotonic() + BEFORE_S + PARTED_S + AFTER_S
        clients = [asyncio.create_task(served(url, ends_s, expected, number)) for number in range(NUM_CLIENTS)]
        await asyncio.sleep(BEFORE_S)
        async with contextlib.AsyncExitStack() as stack:
            for name in cut:
                await stack.enter_async_context(relays[name].parted())
            await asyncio.sleep(PARTED_S)
        outcomes = [outcome for client in await asyncio.gather(*clients) for outcome in client]
        assert len(outcomes) >= NUM_CLIENTS
        assert max(outcome.longest_gap_s for outcome in outcomes) <= GAP_S
    for node in nodes.values():
        await wait_clean(node)
