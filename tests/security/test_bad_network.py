"""2P + 2D behind a bad network: late and lost bytes, and nodes that are parted from the router while others answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.deadlines import until
from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import Member, make_prompt, start, wait_clean
from tests.security.relay import Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1800)]
ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
LENGTHS = (40, 130, 300)
NUM_TOKENS = 200
NUM_CLIENTS = 4
ANSWER_S = 300.0  # of NUM_TOKENS: five processes compute, and where they had 8% of a core each some took over 60 s


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


async def served(
    url: str, expected: dict[int, Outcome], number: int, stop: asyncio.Event, outcomes: list[Outcome]
) -> None:
    """One client: a request after the other. Asserts that each answer is right."""
    for turn in itertools.count():
        length, stream = LENGTHS[turn % len(LENGTHS)], (turn + number) % 3 > 0
        route = ("p-first", "d-first")[number % 2]
        outcome = await Call(url, body(length, f"{number} {turn}", stream=stream), route, deadline_s=ANSWER_S).outcome()
        outcome.check(expected[length])
        outcomes.append(outcome)
        if stop.is_set():
            return


async def wait_answers(clients: list[asyncio.Task[None]], answers: list[list[Outcome]], count: int) -> None:
    """Until each client has had so many more. The first of them may have been under way."""
    wanted = [len(one) + count for one in answers]

    def are_served() -> bool:
        for client in clients:
            if client.done():
                client.result()
        return all(len(one) >= least for one, least in zip(answers, wanted, strict=True))

    await until(are_served, lambda: f"{list(map(len, answers))} of {wanted} answers", deadline_s=count * ANSWER_S)


@pytest.mark.parametrize(
    ("cut", "delay_s", "lost"),
    [((), 0.02, 0.05), (("p0",), 0.0, 0.0), (("p0", "p1"), 0.0, 0.0), (("d0",), 0.0, 0.0)],
    ids=["late and lost", "a prefill node", "all prefill nodes", "a decode node"],
)
async def test_every_answer_is_right(
    nodes: dict[str, Member], cut: tuple[str, ...], delay_s: float, lost: float
) -> None:
    """While they are parted all that was under way is answered, and what comes then: nothing waits for their return."""
    asked = {length: body(length, "a", stream=False) for length in LENGTHS}
    calls = {length: Call(nodes["d0"].url, one, deadline_s=ANSWER_S) for length, one in asked.items()}
    expected = {length: await call.outcome() for length, call in calls.items()}
    stop = asyncio.Event()
    answers: list[list[Outcome]] = [[] for _ in range(NUM_CLIENTS)]
    async with relayed(nodes, delay_s, lost) as (url, relays):
        clients = [
            asyncio.create_task(served(url, expected, number, stop, outcomes))
            for number, outcomes in enumerate(answers)
        ]
        try:
            await wait_answers(clients, answers, 1)
            async with contextlib.AsyncExitStack() as stack:
                for name in cut:
                    await stack.enter_async_context(relays[name].parted())
                await wait_answers(clients, answers, 2)
            await wait_answers(clients, answers, 1)
        finally:
            stop.set()
            ends = await asyncio.gather(*clients, return_exceptions=True)
        assert ends == [None] * NUM_CLIENTS
    for node in nodes.values():
        await wait_clean(node)
