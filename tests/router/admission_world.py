"""The router's admission before simulated nodes, in virtual time: the loop's clock jumps to the next event."""

from __future__ import annotations

import asyncio
import selectors
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.feed import NodeLoad
from pd_router.admission.api_keys import ApiKey, KeyRing
from pd_router.admission.key_admission import AdmittedRequest, KeyAdmission
from pd_router.calls.body import RequestBody
from pd_router.config import RouterConfig
from pd_router.errors import RateLimited
from pd_router.nodes.node import Role
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.charge import Charge
from pd_router.policy.prompt_facts import PromptFacts
from pd_router.records.metrics import RouterMetrics
from tests.router.choosing import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

FEED_S = 0.1
CHUNK_TOKENS = 512  # of a step of a prefill node


class _Jump(selectors.SelectSelector):
    """Waits for nothing: time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the simulation stands still"
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def hold_up(self, seconds: float) -> None:
        """This process does not run for so long."""
        self._jump.now_s += seconds


async def later(seconds: float) -> None:
    """So much later, in virtual time."""
    await asyncio.sleep(seconds)


@dataclass(frozen=True)
class SimKey:
    """Requests of one key: Poisson arrivals, or `clients` of which each sends the next one after its answer."""

    key: ApiKey
    per_s: float = 0.0
    clients: int = 0
    tokens: int = 2000
    output: int = 100


@dataclass
class Outcome:
    """Of one key."""

    ttft_s: list[float] = field(default_factory=list)
    refused: int = 0
    retries: int = 0
    retries_refused: int = 0
    served: int = 0

    @property
    def p99_s(self) -> float:
        return sorted(self.ttft_s)[int(0.99 * len(self.ttft_s))]


class AdmissionWorld:
    """One prefill node, which computes chunks of the best prompt, and one decode node with slots."""

    def __init__(
        self,
        *keys: SimKey,
        num_slots: int = 16,
        token_s: float = 50e-6,
        step_s: float = 0.02,
        seed: int = 0,
        has_admission: bool = True,
        **settings: Any,
    ) -> None:
        self.outcomes = {one.key.name: Outcome() for one in keys}
        self._keys = keys
        self._token_s, self._step_s, self._num_slots = token_s, step_s, num_slots
        self._random = Random(seed)
        self._loop = VirtualLoop()
        self._config = RouterConfig(prefill=("http://p:1",), decode=("http://d:1",), **settings)
        self.table = NodeTable(self._config, self._loop.time)
        for node in self.table.nodes:
            node.reachable = True
        self._p, self._d = self.table.nodes
        assert self._d.role is Role.DECODE
        ring = KeyRing(tuple(one.key for one in keys))
        self.admission = KeyAdmission(self._config, self.table, RouterMetrics(self.table), ring)
        self._has_admission = has_admission
        self._slots = asyncio.Semaphore(num_slots)
        self._running = 0
        self._prompts: list[tuple[int, int, int, asyncio.Event]] = []  # priority, turn, tokens left, done
        self.most_prompts = 0  # at the prefill node at once
        self._arrived = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = iter(range(1 << 40))

    def run(self, seconds: float) -> dict[str, Outcome]:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run(seconds))
        return self.outcomes

    async def _run(self, seconds: float) -> None:
        self._tell()
        self._spawn(self._forever(self._tell, FEED_S))
        self._spawn(self._compute())
        for one in self._keys:
            if one.per_s:
                self._spawn(self._arrive(one))
            for _ in range(one.clients):
                self._spawn(self._client(one))
        await asyncio.sleep(seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forever(self, act: Callable[[], None], every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            act()

    def _tell(self) -> None:
        """The nodes' feeds, without their own queues: this router's charges say the same."""
        common = {"free_blocks": 10**6, "num_blocks": 10**6, "block_size": 64, "token_s": self._token_s}
        for node in self.table.nodes:
            node.view.receive(NodeLoad(num_slots=self._num_slots, **common), ())  # type: ignore[arg-type]

    async def _arrive(self, one: SimKey) -> None:
        while True:
            await asyncio.sleep(self._random.expovariate(one.per_s))
            self._spawn(self._ask(one))

    async def _client(self, one: SimKey) -> None:
        while True:
            await self._ask(one)

    async def _ask(self, one: SimKey) -> None:
        """One request, again and again as it is told, until it has its answer."""
        outcome, is_retry = self.outcomes[one.key.name], False
        while True:
            try:
                await self._request(one)
                outcome.retries += is_retry
                return
            except RateLimited as refusal:
                outcome.refused += 1
                outcome.retries += is_retry
                outcome.retries_refused += is_retry
                await asyncio.sleep(refusal.retry_after_s + self._random.uniform(0, 0.2))
                is_retry = True

    async def _request(self, one: SimKey) -> None:
        begun_s = self._loop.time()
        body = RequestBody(b'{"stream": true, "prompt": "%s"}' % (b"x" * (4 * one.tokens)))
        limits = self.admission.limits_of(one.key)
        admitted: AdmittedRequest | None = None
        if self._has_admission:
            self.admission.shape(limits, body)
            plan = choose(self.table, None, PromptFacts(body.num_bytes), self._config, None, 0)
            admitted = await self.admission.enter(limits, body, plan)
        used = None
        try:
            with Charge(self._p, self._loop.time, prefill_bytes=body.num_bytes, prompt_tokens=one.tokens):
                await self._prefill(one.tokens, one.key.priority if self._has_admission else 0)
            with Charge(self._d, self._loop.time, sequences=1):
                async with self._slots:
                    self.outcomes[one.key.name].ttft_s.append(self._loop.time() - begun_s)
                    output = self._random.randint(1, 2 * one.output)
                    await asyncio.sleep(output * self._step_s)
            used = (one.tokens, output)
            self.outcomes[one.key.name].served += sum(used)
        finally:
            if admitted is not None:
                admitted.end(used, "ok")

    async def _prefill(self, tokens: int, priority: int) -> None:
        done = asyncio.Event()
        self._prompts.append((priority, next(self._numbers), tokens, done))
        self.most_prompts = max(self.most_prompts, len(self._prompts))
        self._arrived.set()
        await done.wait()

    async def _compute(self) -> None:
        while True:
            while not self._prompts:
                self._arrived.clear()
                await self._arrived.wait()
            prompt = min(self._prompts)
            priority, turn, tokens, done = prompt
            step = min(tokens, CHUNK_TOKENS)
            await asyncio.sleep(step * self._token_s)
            self._prompts.remove(prompt)
            if tokens > step:
                self._prompts.append((priority, turn, tokens - step, done))
            else:
                done.set()
