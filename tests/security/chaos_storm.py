"""Breaks the processes of a cluster, one of each pair at a time, in an order that a seed decides, and mends them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

import httpx
import psutil

from tests.cluster import LaunchFailed
from tests.integration.fault_cluster import Member, Part, RouterMember, fetch, parse_metrics, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tests.security.adapter_load import AdapterLoad
    from tests.security.chaos_load import Load

logger = logging.getLogger(__name__)
T = TypeVar("T")

MEND_DEADLINE_S = 120.0  # from a fault until both routers use the member again
DRAIN_S = 60.0  # longer than any stream of the load
END_DEADLINE_S = DRAIN_S + 60.0  # of a process that drains and has nothing to do
STOPPED_S = (0.5, 8.0)  # how long a process stands still
PAUSE_S = (0.2, 1.0)  # between two faults of a pair
BUSY_DEADLINE_S = 5.0  # how long a fault waits for streams on what it will hit
START_TRIES = 3
POLL_S = 0.05


class Fault(StrEnum):
    """What is done to a node or a router."""

    KILL_API = "kill api"  # a router has no other process
    KILL_ENGINE = "kill engine"
    STOP_API = "stop api"
    STOP_ENGINE = "stop engine"
    STOP_BOTH = "stop both"
    RESTART = "restart"  # SIGTERM, drained, started again: nothing may break


NODE_FAULTS = tuple(Fault)
ROUTER_FAULTS = (Fault.KILL_API, Fault.STOP_API, Fault.RESTART)


@dataclass
class Event:
    """One fault, and how many streams were under way on what it hit. Times are `time.monotonic`."""

    member: str
    fault: Fault
    at_s: float
    streams: int
    over_s: float = math.inf  # when the member served again
    is_router: bool = False

    @property
    def is_kill(self) -> bool:
        return self.fault in (Fault.KILL_API, Fault.KILL_ENGINE)

    @property
    def is_death(self) -> bool:
        """A node died of it."""
        return self.is_kill and not self.is_router

    @property
    def breaks_streams(self) -> bool:
        """A stream of the member may break."""
        return self.fault is not Fault.RESTART


class StormNode(Member):
    """A node with processes that can be stopped one by one."""

    def suspend(self, fault: Fault) -> None:
        """SIGSTOP to the processes that the fault names."""
        parts = {Fault.STOP_API: (Part.API,), Fault.STOP_ENGINE: (Part.ENGINE,)}.get(fault, (Part.ENGINE, Part.API))
        for part in parts:
            psutil.Process(self._pid(part)).suspend()

    def end(self) -> None:
        """SIGTERM. Asserts that it ends well."""
        assert self.process.stop(signal.SIGTERM, END_DEADLINE_S) == 0, self.process.output

    def start_again(self) -> None:
        """Under its old address."""

        def start() -> None:
            self.begin()
            self.wait_ready()

        _try_to_start(start, lambda: self.is_running)


def _try_to_start(start: Callable[[], None], is_running: Callable[[], bool]) -> None:
    """Several times: a connection may have taken the port while nothing listened on it."""
    for tries_left in reversed(range(START_TRIES)):
        try:
            start()
            return
        except LaunchFailed:
            if not tries_left or is_running():
                raise


class Storm:
    """Faults on pairs of nodes and a pair of routers, each pair on its own: at most one of a pair is disturbed."""

    def __init__(
        self, nodes: Sequence[StormNode], routers: dict[str, RouterMember], load: Load | AdapterLoad, seed: int
    ) -> None:
        self._nodes = nodes
        self._routers = routers
        self._load = load
        self._seed = seed
        self._end_s = 0.0
        self.ended: list[str] = []  # nodes that no fault has ended; they are started again

    async def rage(self, seconds: float) -> None:
        """Until the time is over and all that was hit serves again."""
        self._end_s = time.monotonic() + seconds
        pairs = [[node for node in self._nodes if node.name.startswith(letter)] for letter in "pd"]
        async with asyncio.TaskGroup() as group:
            for number, pair in enumerate(pairs):
                group.create_task(self._disturb_nodes(pair, random.Random(self._seed * 10 + number)))
            group.create_task(self._disturb_routers(random.Random(self._seed * 10 + 9)))
        for node in self._nodes:
            await self._start_if_ended(node)

    def end(self) -> None:
        """No further fault; `rage` mends what was hit."""
        self._end_s = 0.0

    async def _disturb_nodes(self, pair: Sequence[StormNode], rng: random.Random) -> None:
        for node, fault in self._order(list(itertools.product(pair, NODE_FAULTS)), rng):
            await self._wait_busy(node.name, rng)
            async with asyncio.timeout(MEND_DEADLINE_S + DRAIN_S):
                for one in pair:
                    await self._start_if_ended(one)
                event = self._begin(node.name, fault)
                try:
                    await _break_node(node, fault, rng)
                except psutil.NoSuchProcess:  # its engine has died, and the node is about to end
                    await asyncio.to_thread(node.process.wait, END_DEADLINE_S)
                await self._wait_used(node)
            event.over_s = time.monotonic()

    async def _disturb_routers(self, rng: random.Random) -> None:
        for name, fault in self._order(list(itertools.product(self._routers, ROUTER_FAULTS)), rng):
            await self._wait_busy(name, rng)
            router = self._routers[name]
            async with asyncio.timeout(MEND_DEADLINE_S + DRAIN_S):
                event = self._begin(name, fault)
                event.is_router = True
                await _break_router(router, fault, rng)
                await until(router_answers(router), f"{name} answers", MEND_DEADLINE_S)
            event.over_s = time.monotonic()

    def _order(self, choices: list[T], rng: random.Random) -> Iterator[T]:
        """Every choice once before any comes again, until the time is over."""
        while True:
            for choice in rng.sample(choices, len(choices)):
                if time.monotonic() >= self._end_s:
                    return
                yield choice

    def _begin(self, member: str, fault: Fault) -> Event:
        event = Event(member, fault, time.monotonic(), self._load.streams_on(member))
        self._load.events.append(event)
        logger.info("%s: %s, %d streams", member, fault, event.streams)
        return event

    async def _wait_busy(self, member: str, rng: random.Random) -> None:
        """A moment, then until the member has its share of streams; but no longer than BUSY_DEADLINE_S."""
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUSY_DEADLINE_S):
                while not self._load.streams_on(member) and not member.startswith("p"):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)

    async def _wait_used(self, node: StormNode) -> None:
        """Until every router that runs sends requests there."""
        for router in self._routers.values():

            async def used(router: RouterMember = router) -> bool:
                await self._start_if_ended(node)
                return await _uses(router, node)

            await until(used, f"{node.name} is used again", MEND_DEADLINE_S)

    async def _start_if_ended(self, node: StormNode) -> None:
        """A node that no fault has ended. The end of the storm tells it."""
        if not node.is_running:
            self.ended.append(f"{node.name} has ended by itself with {node.process.returncode}")
            logger.error("%s:\n%s", self.ended[-1], node.process.output)
            await asyncio.to_thread(node.start_again)


def router_answers(router: RouterMember) -> Callable[[], Awaitable[bool]]:
    """A probe: whether it tells its nodes."""

    async def answers() -> bool:
        try:
            await fetch(f"{router.url}/nodes")
        except httpx.TransportError:
            return False
        return True

    return answers


async def _uses(router: RouterMember, node: Member) -> bool:
    """A router that is gone or stopped uses nothing yet."""
    try:
        nodes = (await fetch(f"{router.url}/nodes")).json()["nodes"]
    except httpx.TransportError:
        return False
    return any(one["url"] == node.url and one["healthy"] for one in nodes)


async def _break_node(node: StormNode, fault: Fault, rng: random.Random) -> None:
    """Do it and mend it; the node serves when this returns, though routers may not know yet."""
    if fault in (Fault.KILL_API, Fault.KILL_ENGINE):
        await node.kill(Part.API if fault is Fault.KILL_API else Part.ENGINE)
        await asyncio.to_thread(node.start_again)
    elif fault is Fault.RESTART:
        await asyncio.to_thread(node.end)
        await asyncio.to_thread(node.start_again)
    else:
        node.suspend(fault)
        try:
            await asyncio.sleep(rng.uniform(*STOPPED_S))
        finally:
            node.go_on()


async def _break_router(router: RouterMember, fault: Fault, rng: random.Random) -> None:
    process = psutil.Process(router.process.pid)
    if fault is Fault.STOP_API:
        process.suspend()
        try:
            await asyncio.sleep(rng.uniform(*STOPPED_S))
        finally:
            process.resume()
    else:
        if fault is Fault.KILL_API:
            process.kill()
            await asyncio.to_thread(router.process.wait)
        else:
            await asyncio.to_thread(router.process.stop, signal.SIGTERM, END_DEADLINE_S)
        await asyncio.to_thread(_try_to_start, router.start_again, lambda: router.process.returncode is None)


async def charges(router: RouterMember) -> dict[str, float]:
    """All that a router still counts as under way. Empty when it is idle."""
    told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
    names = ("pd_router_requests_in_flight", "pd_router_node_outstanding")
    return {name: value for name, value in told.items() if name.startswith(names) and value}
