"""Nodes change their roles under load, by orders to one of two routers: every answer is what a node alone says."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any, Self

import httpx
import pytest

from pd_cluster.launch.node_commands import OrderRefused, RouterOrders
from pd_connectors.protocol.keys import derive_key
from tests.cluster import TEST_KEY, Launcher
from tests.deadlines import HANG_S
from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import Member, fetch, make_prompt, start, until, wait_clean
from tests.patient_node import PATIENT
from tests.router.router_process import Router, serving
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

pytestmark = [pytest.mark.integration, pytest.mark.anyio, pytest.mark.timeout(300)]

KEY = derive_key(TEST_KEY)
FLAGS = ("--max-num-batched-tokens=64", "--max-num-seqs=16", "--min-remote-tokens=1", "--kv-cache-gb=0.05")
NUM_WORKERS = 4
ROUTES = ("p-first", "d-first", "")
BODIES: list[dict[str, Any]] = [
    {"prompt": make_prompt(length), "max_tokens": length // 8, "ignore_eos": True, "stream": length != 40} | sampling
    for length in (40, 150, 300)
    for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    with Launcher() as launcher:
        flags = (f"--model={shallow_model()}", *FLAGS)
        found = [Member(launcher, f"n{i}", "decode" if i else "prefill", *flags, environment=PATIENT) for i in range(3)]
        start(found)
        yield found


class Load:
    """Clients that ask without a pause, at both routers and by all routes. `with` it, they are stopped at the end."""

    def __init__(
        self, urls: list[str], expected: list[list[Outcome]], bodies: Sequence[dict[str, Any]] = BODIES
    ) -> None:
        """`expected`: of each of `bodies`, the answers that are right."""
        self.answered: list[tuple[str, str]] = []  # prefill and decode node of each answer
        self.reasons: list[str] = []
        self._urls = urls
        self._expected = expected
        self._bodies = bodies
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._work()) for _ in range(NUM_WORKERS)]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    async def _work(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            which = number % len(self._bodies)
            body = self._bodies[which] | {"cache_salt": self.salt(number)}
            call = Call(self._urls[number % len(self._urls)], body, ROUTES[number % len(ROUTES)])
            outcome = await call.outcome()
            assert (outcome.status, outcome.error) == (200, None), outcome
            answers = [(one.text, one.finish_reason) for one in self._expected[which]]
            assert (outcome.text, outcome.finish_reason) in answers, f"altered: {outcome}"
            self.answered.append((outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]))
            self.reasons.append(outcome.headers["x-pd-route"])

    def salt(self, number: int) -> str:
        """Of the request of this number. A salt of its own: each prompt is handed over."""
        return f"salt {number}"

    async def until_new(self, condition: Callable[[str, str], bool], what: str) -> None:
        """Until an answer from now on has such nodes. Fails as soon as an answer is wrong."""
        begun = len(self.answered)

        async def is_there() -> bool:
            for task in self._tasks:
                if task.done():
                    task.result()
            return any(condition(*nodes) for nodes in self.answered[begun:])

        await until(is_there, what)


async def learn(url: str, bodies: Sequence[dict[str, Any]] = BODIES) -> list[Outcome]:
    """What a node alone answers."""
    outcomes = [await Call(url, body).outcome() for body in bodies]
    for outcome in outcomes:
        outcome.check(outcome)
    return outcomes


def roles(router: Router) -> dict[str, str]:
    return {node.node_id: node.role.value for node in router.services.table.nodes}


async def crossed(member: Member) -> float:
    """Tickets of another version that this node was given, as it counts them."""
    told = await member.metrics()
    return sum(
        value for name, value in told.items() if name.startswith("pd_handoff_fallbacks_total") and "mismatch" in name
    )


async def test_roles_change_under_load(members: list[Member]) -> None:
    n0, n1, n2 = members
    expected = [[outcome] for outcome in await learn(n1.url)]
    epochs = [(await fetch(f"{one.url}/health")).json()["epoch"] for one in members]
    settings: dict[str, Any] = {"key": KEY, "health_interval_s": 0.2, "health_timeout_s": HANG_S}
    async with (
        serving([n0], [n1, n2], **settings) as one,
        serving([n0], [n1, n2], **settings) as other,
        Load([one.url, other.url], expected) as load,
    ):
        with httpx.Client(base_url=one.url, trust_env=False, timeout=HANG_S) as client:
            orders = RouterOrders(client, KEY)
            known = roles(one)

            async def change(name: str, role: str) -> None:
                row = await asyncio.to_thread(orders.give, "role", name, role)
                assert row["role"] == role
                known[name] = role

                async def agrees() -> bool:
                    return roles(one) == roles(other) == known

                await until(agrees, f"both routers know that {name} is {role}")

            await load.until_new(lambda p, d: (p, d) == ("n0", "n1"), "the first pair")
            await change("n1", "prefill")
            await load.until_new(lambda p, d: (p, d) == ("n1", "n2"), "n1 reads prompts")
            await change("n0", "decode")
            await load.until_new(lambda p, d: (p, d) == ("n1", "n0"), "n0 decodes")
            await change("n2", "prefill")
            await load.until_new(lambda p, d: (p, d) == ("n2", "n0"), "n2 reads prompts")
            with pytest.raises(OrderRefused, match="no other node that decodes"):
                await asyncio.to_thread(orders.give, "role", "n0", "prefill")
            await change("n2", "mixed")
            await load.until_new(lambda p, d: (p, d) == ("n1", "n2"), "n2 decodes")
            for name, role in (
                ("n0", "prefill"),
                ("n1", "decode"),
                ("n2", "decode"),
                ("n0", "mixed"),
                ("n0", "prefill"),
            ):
                await change(name, role)  # faster than requests end
            await load.until_new(lambda p, d: (p, d) == ("n0", "n1"), "the first pair again")
    assert [(await fetch(f"{one.url}/health")).json()["epoch"] for one in members] == epochs
    for member in members:
        await wait_clean(member)  # nothing is counted any more
        assert await crossed(member) == 0
