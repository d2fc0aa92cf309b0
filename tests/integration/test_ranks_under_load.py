"""A rank of a decode node and one of a prefill node are killed under load: 2P + 2D, each of two ranks.

Slow: nine engine processes. With PD_TEST_DEVICE=cuda on four GPUs, which a prefill and a decode node share in pairs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import (
    Member,
    RouterMember,
    fetch,
    make_prompt,
    parse_metrics,
    until,
    wait_clean,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]
logger = logging.getLogger(__name__)

NUM_STREAMS = 6  # at a time
LENGTHS = (40, 150, 300)
NUM_TOKENS, LONG_PROMPT = 96, 1200
START_DEADLINE_S, DEADLINE_S = 400.0, 240.0  # of all nodes; of a request or a phase, beside other work on two cores
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
# Long prompts take many steps; nodes that share GPUs have a fixed part of their memory
NODE_FLAGS = ("--tp=2", "--max-num-seqs=16", "--max-num-batched-tokens=32", "--num-blocks=400")
# Limits of health that nine processes on two cores keep
ROUTER_FLAGS = ("--prefill-on-decode=never", "--continue-wait-s=60", "--health-interval-s=0.5", "--health-timeout-s=5")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def make_members(launcher: Launcher, role: str) -> list[Member]:
    """Two nodes. On GPUs the first one's ranks take 0 and 1, the second one's 2 and 3."""
    return [
        Member(
            launcher, f"{role[0]}{i}", role, *NODE_FLAGS, environment={"CUDA_VISIBLE_DEVICES": f"{2 * i},{2 * i + 1}"}
        )
        for i in range(2)
    ]


def begin(members: list[Member]) -> None:
    """All at once: on two cores that took more than the three minutes of `fault_cluster.start`."""
    for member in members:
        member.begin()
    for member in members:
        member.process.wait_line("ready: ", START_DEADLINE_S)
        member.wait_ready()


class Load:
    """Streams through a router, NUM_STREAMS at a time until `end`. Each must give the answer of a node alone."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._numbers = count()
        self._expected: list[Outcome] = []
        self._bodies = [
            {"prompt": make_prompt(length), "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True} | sampling
            for length in LENGTHS
            for sampling in SAMPLINGS
        ]
        self._is_over = False
        self.under_way: set[Call] = set()
        self.num_done = 0
        self.longest_gap_s = 0.0

    async def learn(self, url: str) -> None:
        self._expected = [await Call(url, body, deadline_s=DEADLINE_S).outcome() for body in self._bodies]
        assert all(outcome.error is None for outcome in self._expected)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(self._repeat())
            yield
            self._is_over = True

    async def _repeat(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            body = self._bodies[number % len(self._bodies)] | {"cache_salt": f"stream {number}"}
            call = Call(self._url, body, deadline_s=DEADLINE_S)
            self.under_way.add(call)
            outcome = await call.outcome()
            self.under_way.remove(call)
            outcome.check(self._expected[number % len(self._bodies)])
            self.num_done += 1
            self.longest_gap_s = max(self.longest_gap_s, outcome.longest_gap_s)

    @property
    def num_silent(self) -> int:
        """Requests that have shown no byte."""
        return sum(not call.has_text for call in self.under_way)


async def continued(router: RouterMember) -> float:
    told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
    return told.get('pd_router_continuations_total{outcome="continued"}', 0.0)


async def test_no_request_fails_when_ranks_die() -> None:
    with Launcher() as launcher:
        prefills, decodes = make_members(launcher, "prefill"), make_members(launcher, "decode")
        begin([*prefills, *decodes])
        router = RouterMember(launcher, prefills, decodes, *ROUTER_FLAGS)
        load = Load(router.url)
        await load.learn(decodes[0].url)
        async with load.running():
            await kill_rank_of_decode(decodes[0], router, load)
            await kill_rank_of_prefill(prefills[0], router, load)
        logger.info("%d streams, longest gap %.2f s", load.num_done, load.longest_gap_s)
        await asyncio.gather(*(wait_clean(node) for node in (prefills[1], decodes[1])))


async def kill_rank_of_decode(node: Member, router: RouterMember, load: Load) -> None:
    """Its streams go on at the other decode node."""

    async def decodes_some() -> bool:
        return await node.metric("pd_num_running") >= NUM_STREAMS // 3

    await until(decodes_some, f"{node.name} decodes", DEADLINE_S)
    silent = load.num_silent
    await node.kill_rank()

    async def has_moved() -> bool:
        return await continued(router) > 0

    await until(has_moved, f"a stream of {node.name} goes on elsewhere", DEADLINE_S)
    logger.info("a rank of %s: %d requests had shown no byte", node.name, silent)
    await flows_again(load)


async def kill_rank_of_prefill(node: Member, router: RouterMember, load: Load) -> None:
    """The other prefill node, or the decode node, reads its prompts."""
    body = {"prompt": make_prompt(LONG_PROMPT), "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    long = [Call(router.url, body | {"cache_salt": f"long {index}"}, deadline_s=DEADLINE_S) for index in range(2)]

    async def reads_one() -> bool:
        return await node.is_busy() or all(call.has_text for call in long)

    await until(reads_one, f"{node.name} reads", DEADLINE_S)
    silent = load.num_silent + sum(not call.has_text for call in long)
    assert silent, "every request has shown a byte"
    await node.kill_rank()
    ends = [await call.outcome() for call in long]
    ends[0].check(ends[1])
    logger.info("a rank of %s: %d requests had shown no byte", node.name, silent)
    await flows_again(load)


async def flows_again(load: Load) -> None:
    """Until as many streams as run at a time have ended since."""
    goal = load.num_done + NUM_STREAMS

    async def has_ended() -> bool:
        return load.num_done >= goal

    await until(has_ended, "streams end", DEADLINE_S)
