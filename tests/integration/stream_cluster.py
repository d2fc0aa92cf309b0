"""A cluster behind one or more routers, long streams through it, and what can happen to its nodes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from typing import TYPE_CHECKING, Any

from tests.deadlines import HANG_S
from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import (
    DECODE_FLAGS,
    Member,
    Part,
    RouterMember,
    fetch,
    make_prompt,
    parse_metrics,
    start,
)
from tests.integration.gate import Gate
from tests.patient_node import IMPATIENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.cluster import Launcher

PROMPTS = (40, 150, 300)  # tokens
SPOKEN = 8
SAMPLINGS: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
NODE_FLAGS = ("--drain-s=0.3",)  # shorter than any stream, so that a drain cuts


class StreamCluster:
    """Nodes, their routers, and the answers that a node gives alone."""

    def __init__(
        self,
        launcher: Launcher,
        prefills: int,
        decodes: int,
        num_tokens: Sequence[int],
        *,
        num_routers: int = 1,
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = DECODE_FLAGS,
        router_flags: Sequence[str] = (),
        deadline_s: float = HANG_S,
        directory: Path | None = None,
        patient: bool = False,
    ) -> None:
        """`num_tokens`: of the answers to each prompt of PROMPTS. `deadline_s`: of each request.

        `directory`: an empty one, for gates of the decode nodes; else they have none. `patient`: they are, see `Gate`.
        """
        self._launcher = launcher
        self.prefills = [Member(launcher, f"p{i}", "prefill", *NODE_FLAGS, *prefill_flags) for i in range(prefills)]
        names = [f"d{i}" for i in range(decodes)]
        self._gates = {} if directory is None else {name: Gate(directory, name, patient=patient) for name in names}
        self.decodes = [self._decode(name, *decode_flags) for name in names]
        self._router_flags = router_flags
        self._deadline_s = deadline_s
        start([*self.prefills, *self.decodes])
        self.routers = [self.new_router() for _ in range(num_routers)]
        self._bodies = [
            {"prompt": make_prompt(length), "max_tokens": num, "ignore_eos": True, "stream": True} | sampling
            for (length, num), sampling in itertools.product(zip(PROMPTS, num_tokens, strict=True), SAMPLINGS)
        ]
        self._expected: list[Outcome] = []

    def _decode(self, name: str, *flags: str) -> Member:
        gate = self._gates.get(name)
        more, environment = (gate.flags, gate.environment) if gate else ((), IMPATIENT)
        return Member(self._launcher, name, "decode", *NODE_FLAGS, *flags, *more, environment=environment)

    @contextlib.contextmanager
    def spoken(self, *nodes: Member) -> Iterator[None]:
        """These decode nodes go on with no answer that has SPOKEN tokens, until the end."""
        with contextlib.ExitStack() as gates:
            for node in nodes:
                gates.enter_context(self._gates[node.name].held(answer=SPOKEN))
            yield

    def new_router(self, *flags: str, prefills: Sequence[Member] = ()) -> RouterMember:
        """One more router before all decode nodes and these prefill nodes; before all if none is named."""
        return RouterMember(self._launcher, prefills or self.prefills, self.decodes, *self._router_flags, *flags)

    async def learn(self) -> None:
        """Ask one node alone, before anything fails."""
        calls = [Call(self.decodes[0].url, body, deadline_s=self._deadline_s) for body in self._bodies]
        self._expected = [await call.outcome() for call in calls]
        assert all(outcome.error is None for outcome in self._expected)

    def call(self, number: int, server: RouterMember | Member | None = None) -> Call:
        """The stream of this number, at its turn's router, else at `server`.

        No two share a prefix: each prompt is computed anew.
        """
        body = self._bodies[number % len(self._bodies)] | {"cache_salt": f"stream {number}"}
        url = (server or self.routers[number % len(self.routers)]).url
        return Call(url, body, deadline_s=self._deadline_s)

    async def check(self, number: int, call: Call) -> Outcome:
        """Its end. Asserts that the answer is the expected one."""
        outcome = await call.outcome()
        outcome.check(self._expected[number % len(self._expected)])
        return outcome

    async def continued(self) -> int:
        """Streams that went on at another node. Asserts that no stream did not."""
        return sum([await self._continued(router) for router in self.routers])

    async def _continued(self, router: RouterMember) -> int:
        told = parse_metrics((await fetch(f"{router.url}/metrics")).text)
        found = {name: value for name, value in told.items() if name.startswith("pd_router_continuations_total")}
        log = "\n".join(line for line in router.process.lines if "leg failed" in line or "goes on" in line)
        assert set(found) <= {'pd_router_continuations_total{outcome="continued"}'}, f"{found}\n{log}"
        return int(sum(found.values()))

    async def deaths(self) -> int:
        """Streams that routers moved because they took their node for dead."""
        told = [parse_metrics((await fetch(f"{router.url}/metrics")).text) for router in self.routers]
        moved = [(name, one[name]) for one in told for name in one if name.startswith("pd_router_legs_moved_total")]
        return int(sum(value for name, value in moved if 'leg="stream"' in name and 'kind="died"' in name))

    async def replace(self, node: Member) -> None:
        """Start a node that has ended, or let one go on that stands still, until every router sends it requests."""
        if node.is_running:
            node.go_on()
        else:
            node.begin()
            await asyncio.to_thread(node.wait_ready)
        await self.agree(node)

    async def agree(self, node: Member, healthy: bool = True) -> None:
        """Until every router thinks so of `node`."""
        await asyncio.gather(*(router.wait_healthy(node, healthy) for router in self.routers))


async def drain(node: Member) -> None:
    node.process.send(signal.SIGTERM)
    assert await asyncio.to_thread(node.process.wait, HANG_S) == 0, node.process.output


async def stop(node: Member) -> None:
    node.stop()


async def stop_engine(node: Member) -> None:
    node.stop(Part.ENGINE)


async def kill(node: Member) -> None:
    await node.kill(Part.API)


async def kill_engine(node: Member) -> None:
    await node.kill(Part.ENGINE)
