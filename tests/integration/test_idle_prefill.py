"""Real processes are killed and started again in every order, with requests meanwhile: an idle prefill node is in use
again within 100 requests."""

from __future__ import annotations

import asyncio
import logging
import random
from itertools import count
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import VOCABULARY, Member, Part, RouterMember, fetch, start, until
from tests.patient_node import IMPATIENT

if TYPE_CHECKING:
    from tests.cluster import Launcher

pytestmark = pytest.mark.integration
logger = logging.getLogger(__name__)

LENGTH, NUM_OUTPUT = 300, 8
AWAY = 6  # requests between two events: so many answers have more decodes than a model of steps is fitted to
WITHIN = 100
IN_USE = 10  # of them at least go P-first
LEARNT = 40  # prompts after which each node tells its pace
TOKEN_S = (
    1.6e-3  # by which a token of a prompt takes a slowed node longer; it takes others 0.25 ms, on a busy machine 0.7
)
# -P: all prefill nodes are killed, +P: they are back; R: the router is killed and started again
ORDERS = (
    "-P +P", "-D +D", "R", "-P +P -D +D", "-D +D -P +P", "-P -D +P +D", "-P -D +D +P", "-P R +P", "-D R +D",
    "R -P +P -D +D", "-P -D R +D +P", "-P +P R -D +D", "-D -P +P +D R",
)  # fmt: skip


class Cluster:
    """Nodes and a router that are killed and started again under their old addresses."""

    def __init__(self, launcher: Launcher, num_prefill: int, num_decode: int, *flags: str, slow: str = "") -> None:
        """`slow`: P or D, the nodes that take longer."""
        flags = ("--max-model-len=512", "--logits-stage=tests.pause_step:SlowPrompts", *flags)
        self.sides: dict[str, list[Member]] = {}
        for name, role, how_many in (("P", "prefill", num_prefill), ("D", "decode", num_decode)):
            environment = {"PD_TEST_TOKEN_S": str(TOKEN_S)} if name == slow else IMPATIENT
            self.sides[name] = [
                Member(launcher, f"{name}{number}", role, *flags, environment=environment) for number in range(how_many)
            ]
        start([*self.sides["P"], *self.sides["D"]])
        self.router = RouterMember(launcher, self.sides["P"], self.sides["D"])
        self._numbers = count()

    async def seen(self) -> None:
        """Until the router uses the nodes that run, each by its feed, and no other."""
        running = {node.url for side in self.sides.values() for node in side if node.is_running}

        async def agrees() -> bool:
            nodes = (await fetch(f"{self.router.url}/nodes")).json()["nodes"]
            found = {node["url"] for node in nodes if node["healthy"] and node["load"]["feed"] == "live"}
            return found == running and all(node["healthy"] == (node["url"] in running) for node in nodes)

        await until(agrees, f"the router uses {running}")

    async def ask(self) -> str:
        """A prompt that is new to all, and its route. "": nothing decodes, and the client was told so."""
        rng = random.Random(next(self._numbers))
        body = {
            "prompt": [rng.choice(VOCABULARY) for _ in range(LENGTH)], "max_tokens": NUM_OUTPUT, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        outcome: Outcome = await Call(self.router.url, body).outcome()
        if not any(node.is_running for node in self.sides["D"]):
            assert outcome.status == 503, outcome
            return ""
        assert (outcome.status, outcome.error) == (200, None), outcome
        return outcome.headers["x-pd-route"]

    async def ask_more(self, how_many: int) -> list[str]:
        return [await self.ask() for _ in range(how_many)]

    async def play(self, order: str) -> None:
        for event in order.split():
            if event == "R":
                psutil.Process(self.router.process.pid).kill()
                await asyncio.to_thread(self.router.process.wait)
                await asyncio.to_thread(self.router.start_again)
            elif event[0] == "-":
                for node in self.sides[event[1]]:
                    await node.kill(Part.API)
            else:
                for node in self.sides[event[1]]:
                    node.begin()
                for node in self.sides[event[1]]:
                    await asyncio.to_thread(node.wait_ready)
            await self.seen()
            await self.ask_more(AWAY)

    async def until_in_use(self, how_many: int = IN_USE) -> list[str]:
        """The routes until so many prompts went P-first by the router's own choice."""
        routes: list[str] = []
        while sum(route.startswith("p-first") for route in routes) < how_many:
            assert len(routes) < WITHIN, f"{routes[-how_many:]} of {WITHIN}"
            routes.append(await self.ask())
        return routes


@pytest.mark.timeout(300)
def test_a_prefill_node_that_was_killed_is_in_use_again(launcher: Launcher) -> None:
    """D read the prompts meanwhile, and has told a pace since. Before, 150 of 150 went direct for good."""
    cluster = Cluster(launcher, 1, 1)

    async def run() -> None:
        await cluster.seen()
        await cluster.ask_more(AWAY)
        await cluster.play("-P +P")
        await cluster.until_in_use(3)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "flags"), [(1, 1, ()), (2, 2, ()), (1, 1, ("--tp=2",))], ids=["1P1D", "2P2D", "tp2"]
)
def test_whatever_is_killed_in_whatever_order(
    launcher: Launcher, num_prefill: int, num_decode: int, flags: tuple[str, ...]
) -> None:
    cluster = Cluster(launcher, num_prefill, num_decode, *flags)

    async def run() -> None:
        await cluster.seen()
        await cluster.ask_more(AWAY)
        for order in ORDERS:
            await cluster.play(order)
            routes = await cluster.until_in_use()
            logger.info("%s: %d of %d P-first", order, IN_USE, len(routes))

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow", ["P", "D"])
def test_nodes_of_unequal_speed(launcher: Launcher, slow: str) -> None:
    """A P that takes several times as long gets a trial now and then; one that is faster than D gets all.

    D reads prompts beside no P after its own start in these orders. Until then it tells no pace, and all go P-first.
    """
    cluster = Cluster(launcher, 1, 1, slow=slow)

    async def run() -> None:
        await cluster.seen()
        for order in ("-P +P", "-D +D -P +P", "-P -D +D +P", "-P R +P"):
            await cluster.play(order)
            await cluster.ask_more(LEARNT)
            routes = await cluster.ask_more(WITHIN)
            num_first = sum(route.startswith("p-first") for route in routes)
            logger.info("%s: %d of %d P-first", order, num_first, WITHIN)
            assert 1 <= num_first < WITHIN / 2 if slow == "P" else num_first == WITHIN, (order, routes)

    asyncio.run(run())
