"""Clients of a key before the router's admission, in virtual time: how much of the key's limit they use.

The nodes have room for all, so a limit is all that refuses.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from pd_router.admission.api_keys import ApiKey, KeyRing
from pd_router.admission.key_admission import AdmittedRequest, KeyAdmission
from pd_router.calls.body import RequestBody
from pd_router.config import RouterConfig
from pd_router.errors import RateLimited
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.prompt_facts import PromptFacts
from pd_router.records.metrics import RouterMetrics
from tests.router.admission_world import VirtualLoop
from tests.router.choosing import choose

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 100  # of a request, of its prompt and answer together
ANSWERS: dict[str, Callable[[Random], float]] = {
    "fixed": lambda random: 1.0,
    "exponential": lambda random: random.expovariate(1.0),
    "heavy tail": lambda random: random.lognormvariate(-0.72, 1.2),  # a mean of 1, a standard deviation of 1.8
}


@dataclass(frozen=True)
class Clients:
    """`per_s` requests a second: at random or evenly. `come_back`: of the refused ones, at most `times`."""

    per_s: float
    come_back: float = 0.0
    early: bool = False  # at half of Retry-After
    evenly: bool = False
    times: int = 2  # as OpenAI's SDK
    burst: int = 0  # at the begin
    answer: str = "fixed"


class LimitWorld:
    """One key. `refused_idle`: requests that were refused while nothing of the key ran."""

    def __init__(self, clients: Clients, seed: int = 0, **limits: Any) -> None:
        self.served = self.refused_idle = 0
        self.served_s = 0.0  # the sum of the times of the answers
        self.most_inside = 0
        self._clients = clients
        self._random = Random(seed)
        self._loop = VirtualLoop()
        config = RouterConfig(mixed=("http://n:1",))
        self._table = NodeTable(config, self._loop.time)
        self._table.nodes[0].reachable = True
        key = ApiKey(name="k", sha256="0" * 64, **limits)
        self.admission = KeyAdmission(config, self._table, RouterMetrics(self._table), KeyRing((key,)))
        self.limits = self.admission.limits_of(key)
        self._plan = choose(self._table, None, PromptFacts(0), config, None, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun_s = 0.0

    def run(self, seconds: float, begin_s: float = 0.0) -> LimitWorld:
        """What is served counts from `begin_s` on."""
        self._begun_s = begin_s
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run(seconds))
        return self

    async def _run(self, seconds: float) -> None:
        for _ in range(self._clients.burst):
            self._spawn()
        while self._loop.time() < seconds:
            per_s = self._clients.per_s
            await asyncio.sleep(1 / per_s if self._clients.evenly else self._random.expovariate(per_s))
            self._spawn()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self) -> None:
        task = asyncio.ensure_future(self._ask())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self) -> None:
        for _ in range(1 + self._clients.times):
            try:
                admitted = await self._enter()
            except RateLimited as refusal:
                self.refused_idle += self.limits.running == 0
                if self._random.random() >= self._clients.come_back:
                    return
                await asyncio.sleep(refusal.retry_after_s * (0.5 if self._clients.early else 1.0))
            else:
                return await self._answer(admitted)

    async def _enter(self) -> AdmittedRequest:
        """The router keeps nothing of a refused body, so one that comes back is a new one to it."""
        body = RequestBody(b'{"max_tokens": %d}' % TOKENS)
        return await self.admission.enter(self.limits, body, self._plan)

    async def _answer(self, admitted: AdmittedRequest) -> None:
        self.most_inside = max(self.most_inside, self.limits.inside)
        took_s = ANSWERS[self._clients.answer](self._random)
        try:
            await asyncio.sleep(took_s)
            if self._loop.time() >= self._begun_s:
                self.served += 1
                self.served_s += took_s
        finally:
            admitted.end((0, TOKENS), "ok")
