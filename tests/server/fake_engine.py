"""A scripted engine behind the EngineClient interface: each request is answered by a script that the test gives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pd_cluster.engine.client import RequestMessage, RequestStream
from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.errors import EngineFrozen, EngineUnavailable
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineReady,
    EngineStats,
    FinishReason,
    KvGroupStats,
    KvStats,
    NeedsPrefill,
    PrefillLocally,
    SequenceTokens,
    TicketOpened,
    Timeline,
    ToEngine,
    TokensOut,
    UseTicket,
    Work,
)
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.messages import LeaseRef, SampledToken, TopLogprob
from pd_connectors.protocol.ticket import Ticket
from tests.connectors.layouts import full_layout
from tests.deadlines import HANG_S

WAIT_S = HANG_S
FAR = time.time() + 3600.0  # an expiry that no test reaches
LAYOUT = full_layout(block_size=16, num_kv_heads=2, num_layers=2, head_dim=8, dtype="float32")


class Line:
    """One request as its script sees it: send messages to the API process, read those of the API process."""

    def __init__(self, engine: FakeEngine, request: AddRequest, stream: RequestStream) -> None:
        self.engine = engine
        self.request = request
        self.from_api: asyncio.Queue[ToEngine] = asyncio.Queue()
        self._stream = stream

    def push(self, message: RequestMessage) -> None:
        self._stream.push(message)

    async def heard(self) -> ToEngine:
        """The next message of the API process about this request."""
        async with asyncio.timeout(WAIT_S):
            return await self.from_api.get()

    async def taken(self) -> None:
        """Wait until the API process has taken what was pushed."""
        while not self._stream._messages.empty():  # noqa: ASYNC110 (the queue belongs to the product)
            await asyncio.sleep(0)

    def tokens(
        self,
        ids: Sequence[int],
        *,
        index: int = 0,
        finish: FinishReason | None = None,
        stop_token_id: int | None = None,
        finished: bool | None = None,
        num_cached: int = 0,
        num_external: int = 0,
    ) -> None:
        """One step's tokens of one sequence; `finished` defaults to whether the sequence ends."""
        sampled = tuple(self.engine.sampled(token_id, self.request) for token_id in ids)
        done = finish is not None if finished is None else finished
        self.push(
            TokensOut(
                self.request.request_id,
                (SequenceTokens(index, sampled, finish, stop_token_id),),
                done,
                num_cached,
                num_external,
                Timeline(queue_s=0.001, prefill_s=0.002) if done else None,
            )
        )

    def ticket(self) -> Ticket:
        """The ticket that this engine, as P, would send for the request."""
        return self.engine.make_ticket(self.request.prompt_token_ids, self.request.salt, self.request.sampling.n)


Script = Callable[[Line], Awaitable[None]]


class FakeEngine:
    """Implements EngineClient. `script` runs as a task for each request."""

    def __init__(self, script: Script, *, engine_id: str = "fake-engine", max_model_len: int = 4096) -> None:
        self.script = script
        self.is_alive = True
        self.frozen = ""
        self.on_freeze: Callable[[], None] = lambda: None
        self.on_adapter: Callable[[Any], None] = lambda message: None
        self.adapter_error: str | None = ""  # of each load; None: the test answers
        self.num_freezes = 0
        self.ready: EngineReady | None = EngineReady(
            engine_id=engine_id,
            epoch=7,
            num_blocks=100,
            block_size=16,
            max_model_len=max_model_len,
            fingerprint="fingerprint",
            connector="fake",
            control_port=4242,
            max_num_seqs=48,
        )
        self.stats: EngineStats | None = EngineStats(
            kv=KvStats(
                num_blocks=100,
                free=80,
                cached=5,
                in_use=15,
                leased=3,
                quarantined=1,
                groups=(
                    KvGroupStats("full", num_blocks=40, free=25, cached=5, in_use=10, leased=3, quarantined=1),
                    KvGroupStats("window", num_blocks=1, free=0, cached=0, in_use=1, leased=0, quarantined=0),
                ),
            ),
            num_running=2,
            num_waiting=1,
            num_waiting_for_remote_kv=1,
            counters={"kv_transfer_bytes_total|direction=read": 1024.0, "preemptions_total": 3.0},
            gauges={"step_tokens": 17.0},
        )
        self.news = NewsMirror()
        self.requests: list[AddRequest] = []
        self.sent: list[ToEngine] = []
        self.released = asyncio.Event()  # for scripts that wait for their test
        self.aborts: asyncio.Queue[Abort] = asyncio.Queue()
        self._lines: dict[str, Line] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def alive(self) -> bool:
        return self.is_alive and self.ready is not None

    def open(self, request: AddRequest) -> RequestStream:
        if not self.alive:
            raise EngineUnavailable("the fake engine is gone")
        if self.frozen:
            raise EngineFrozen(self.frozen)
        stream = RequestStream(request.request_id, self.send, self._forget)
        self.requests.append(request)
        self.news.note_sent(request)
        self._lines[request.request_id] = line = Line(self, request, stream)
        self._tasks[request.request_id] = asyncio.create_task(self._run(line))
        return stream

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, Abort):
            self.aborts.put_nowait(message)
        if isinstance(message, LoadAdapter) and self.adapter_error is not None:
            answer = AdapterLoaded(message.digest, self.adapter_error, message.number)
            asyncio.get_running_loop().call_soon(lambda: self.on_adapter(answer))
        line = self._lines.get(getattr(message, "request_id", ""))
        if line is not None:
            line.from_api.put_nowait(message)

    def sampled(self, token_id: int, request: AddRequest) -> SampledToken:
        if request.sampling.logprobs is None:
            return SampledToken(token_id)
        top = tuple(TopLogprob(i, -1.0 - i) for i in range(request.sampling.logprobs))
        return SampledToken(token_id, -0.5, top)

    def make_ticket(
        self, prompt: Sequence[int], salt: str = "", num_samples: int = 1, expires_at_s: float = FAR
    ) -> Ticket:
        assert self.ready is not None
        return Ticket(
            request_id="on-p",
            lease=LeaseRef(self.ready.engine_id, self.ready.epoch, "lease-1"),
            generation=0,
            expires_at_s=expires_at_s,
            fingerprint=self.ready.fingerprint,
            layout=LAYOUT,
            prompt_digest=prompt_digest(prompt, salt),
            num_tokens=len(prompt),
            num_samples=num_samples,
            host="127.0.0.1",
            port=4242,
        )

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        results = await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _run(self, line: Line) -> None:
        await self.script(line)

    def _forget(self, request_id: str) -> None:
        self._lines.pop(request_id, None)


def says(ids: Sequence[int], finish: FinishReason = FinishReason.LENGTH) -> Script:
    """Each of the n sequences says `ids`, one token a message; every request is answered, whatever its work."""

    async def script(line: Line) -> None:
        n, last = line.request.sampling.n, len(ids) - 1
        if line.request.work is Work.PREFILL:
            line.push(TicketOpened(line.request.request_id, line.ticket()))
        for position, token_id in enumerate(ids):
            for index in range(n):
                ends = position == last
                line.tokens([token_id], index=index, finish=finish if ends else None, finished=ends and index == n - 1)

    return script


def decodes(ids: Sequence[int], *, failures: Sequence[str] = (), n: int = 1) -> Script:
    """D's engine: asks for a prefill (after each failure once more) when it takes over, then `ids` per sequence."""

    async def script(line: Line) -> None:
        request = line.request
        reasons = [*(() if request.ticket is not None else ("",)), *failures]
        external = len(request.prompt_token_ids) if request.work is Work.TAKE_OVER else 0
        for reason in reasons if request.work is Work.TAKE_OVER else ():
            line.push(NeedsPrefill(request.request_id, 0, reason))
            answer = await line.heard()
            assert isinstance(answer, UseTicket | PrefillLocally | Abort)
            if isinstance(answer, Abort):
                return
            if isinstance(answer, PrefillLocally):
                external = 0
                break
        for index in range(n):
            line.tokens(ids, index=index, finish=FinishReason.LENGTH, finished=index == n - 1, num_external=external)

    return script
