"""The API process's connection to its engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq
import zmq.asyncio

from pd_cluster.engine.liveness import RANKED_STALL_S, STALL_S, EngineLiveness, EngineState
from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.engine.step_timing import FROZEN_S
from pd_cluster.errors import EngineFrozen, EngineLost, EngineUnavailable, PdError
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineDied,
    EngineNews,
    EngineReady,
    EngineStats,
    FromEngine,
    NeedsPrefill,
    PromptLogprobs,
    PromptRead,
    RequestFailed,
    SignOfLife,
    SilenceAllowed,
    StartupProgress,
    TicketOpened,
    ToEngine,
    TokensOut,
    Work,
)
from pd_cluster.protocol.orders import AdapterLoaded
from pd_connectors.protocol.clock import PatientClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pd_http.held_bytes import Share

logger = logging.getLogger("pd_cluster.engine")

LISTEN_S = 0.25  # between two looks at a silent engine

RequestMessage = TicketOpened | TokensOut | PromptLogprobs | PromptRead | NeedsPrefill | RequestFailed


def is_terminal(message: RequestMessage) -> bool:
    """Whether it is the last message of its request."""
    return isinstance(message, RequestFailed | PromptRead) or (isinstance(message, TokensOut) and message.finished)


class EngineClient(Protocol):
    """The interface of an engine for the HTTP side. `ZmqEngineClient` implements it.

    `on_freeze`: called when `frozen` has changed, but for its death. `on_adapter`: called with each answer to
    LoadAdapter.
    """

    on_freeze: Callable[[], None]
    on_adapter: Callable[[AdapterLoaded], None]

    @property
    def ready(self) -> EngineReady | None: ...

    @property
    def stats(self) -> EngineStats | None:
        """The newest statistics; None before the first."""

    @property
    def news(self) -> NewsMirror: ...

    @property
    def alive(self) -> bool:
        """The engine is ready and has not died."""

    @property
    def frozen(self) -> str:
        """Why the engine counts as frozen; "" while it makes progress."""

    @property
    def num_freezes(self) -> int:
        """How often the engine was judged frozen."""

    def open(self, request: AddRequest) -> RequestStream:
        """Admit a request. Raises EngineUnavailable when the engine can take none now; EngineFrozen is one."""

    def send(self, message: ToEngine) -> None:
        """Send any message but AddRequest. Never blocks. Ignored when the engine is gone: its requests have failed."""


class RequestStream:
    """One request's messages up to its terminal one. Leaving the `async with` block aborts a live request."""

    def __init__(
        self,
        request_id: str,
        send: Callable[[ToEngine], None],
        forget: Callable[[str], None],
        *,
        awaits_ticket: bool = False,
    ) -> None:
        self.request_id = request_id
        self.awaits_ticket = awaits_ticket  # without a ticket another engine can still do the work
        self.unread: Share | None = None  # counts the steps that wait here, until the client reads
        self.step_bytes = 0
        self._messages: asyncio.Queue[RequestMessage] = asyncio.Queue()
        self._send = send
        self._forget = forget
        self._ended = False

    def push(self, message: RequestMessage) -> None:
        self.awaits_ticket = self.awaits_ticket and not isinstance(message, TicketOpened)
        if self.unread is not None and isinstance(message, TokensOut):
            try:
                self.unread.grow(self.step_bytes)
            except PdError as error:
                self._forget(self.request_id)
                self._send(Abort(self.request_id))
                message = RequestFailed(self.request_id, type(error).__name__, str(error), None, error.code)
        self._messages.put_nowait(message)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._forget(self.request_id)
        if self.unread is not None:
            self.unread.close()
        if not self._ended:
            self._ended = True
            self._send(Abort(self.request_id))

    def __aiter__(self) -> AsyncIterator[RequestMessage]:
        return self

    async def __anext__(self) -> RequestMessage:
        if self._ended:
            raise StopAsyncIteration
        message = await self._messages.get()
        self._ended = is_terminal(message)
        return message

    def drain_ready(self) -> list[RequestMessage]:
        """Returns the messages that have arrived, without waiting, so that a backlog becomes one chunk."""
        ready: list[RequestMessage] = []
        while not self._ended and not self._messages.empty():
            message = self._messages.get_nowait()
            self._ended = is_terminal(message)
            ready.append(message)
        if self.unread is not None:
            self.unread.close()
        return ready


class ZmqEngineClient:
    """Talks to one engine process over a pair of ipc sockets that the API process binds.

    `watch` must run as a task for the client's whole life; when it returns or fails, every open request fails.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        on_progress: Callable[[str], None],
        *,
        frozen_s: float = FROZEN_S,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._to_engine = context.socket(zmq.PUSH)
        self._to_engine.set_hwm(0)  # bounded by max_waiting, not by the socket
        self._to_engine.setsockopt(zmq.LINGER, 0)
        self._to_engine.bind(f"{address}.in")
        self._from_engine = context.socket(zmq.PULL)
        self._from_engine.set_hwm(0)
        self._from_engine.bind(f"{address}.out")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[FromEngine]] = msgspec.msgpack.Decoder(list[FromEngine])
        self._streams: dict[str, RequestStream] = {}
        self._on_progress = on_progress
        self._frozen_s = frozen_s
        self._stall_s = stall_s
        self._clock = PatientClock(clock, patience_s=LISTEN_S)
        self._liveness: EngineLiveness | None = None  # None until the ready message
        self._frozen = ""
        self.on_freeze: Callable[[], None] = lambda: None
        self.on_adapter: Callable[[AdapterLoaded], None] = lambda message: None
        self.num_freezes = 0
        self._is_ready = asyncio.Event()
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.news = NewsMirror()
        self.is_stalled = False  # it died by its silence: its process may live, and will not end by itself
        self.death = ""  # why the engine is gone; "" while it lives

    @property
    def alive(self) -> bool:
        return self.ready is not None and not self.death

    @property
    def frozen(self) -> str:
        return "" if self.death else self._frozen

    def open(self, request: AddRequest) -> RequestStream:
        if not self.alive:
            raise EngineUnavailable(self.death or "the engine is still starting")
        if self._frozen:
            raise EngineFrozen(self._frozen)
        if request.request_id in self._streams:
            raise AssertionError(f"request id {request.request_id} is in use")
        awaits_ticket = request.work is Work.PREFILL
        stream = RequestStream(request.request_id, self.send, self._forget, awaits_ticket=awaits_ticket)
        self.send(request)  # first, so that a message that cannot be encoded leaves no stream
        self._streams[request.request_id] = stream
        self.news.note_sent(request)
        return stream

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def send(self, message: ToEngine) -> None:
        if self.death:
            return
        # Cannot block without a high-water mark; fails if no engine is connected
        sent = asyncio.ensure_future(self._to_engine.send(self._encoder.encode(message), zmq.NOBLOCK))
        sent.add_done_callback(_note_loss)

    async def wait_ready(self, deadline_s: float) -> EngineReady:
        """Raises EngineUnavailable when the engine dies first, TimeoutError after `deadline_s`."""
        async with asyncio.timeout(deadline_s):
            await self._is_ready.wait()
        if self.ready is None or self.death:
            raise EngineUnavailable(self.death)
        return self.ready

    async def watch(self) -> None:
        """Deliver messages until the engine reports its death or is declared dead; judge it when nothing has arrived.

        Time in which this process did not run does not count (`PatientClock`), so after a stop of both processes, or of
        the machine, the engine can report before it is judged.
        """
        while not self.death:
            self._clock.sleep(LISTEN_S)
            has_mail = await self._from_engine.poll(int(LISTEN_S * 1000))
            self._clock.resume()
            if not has_mail:
                self._judge()
                continue
            messages = self._decoder.decode(await self._from_engine.recv())
            for message in messages:
                self._deliver(message)
            if not all(isinstance(message, SignOfLife) for message in messages):
                if self._liveness is not None:
                    self._liveness.received(self._clock())
                    self._thaw()
            elif not await self._from_engine.poll(0):
                self._judge()

    def _judge(self) -> None:
        """Judge an engine that has sent nothing for `LISTEN_S`: it may be frozen or dead."""
        if self._liveness is None:
            return
        now = self._clock()
        state = self._liveness.state(now)
        if state is EngineState.DEAD:
            self.is_stalled = True
            self.declare_dead(self._liveness.reason(now))
        elif state is EngineState.FROZEN and not self._frozen:
            self._freeze(self._liveness.reason(now))

    def _freeze(self, why: str) -> None:
        """Fail the requests that still wait for their ticket: another node can do all of their work."""
        logger.warning("the engine is frozen: %s", why)
        self._frozen = why
        self.num_freezes += 1
        for stream in list(self._streams.values()):
            if stream.awaits_ticket:
                self.send(Abort(stream.request_id))
                stream.push(RequestFailed(stream.request_id, EngineFrozen.__name__, why))
        self.on_freeze()

    def _thaw(self) -> None:
        if self._frozen and not self.death:
            logger.warning("the engine makes progress again")
            self._frozen = ""
            self.on_freeze()

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case EngineStats():
                self.stats = message
            case EngineNews():
                self.news.take(message)
            case SignOfLife():
                if self._liveness is not None:
                    self._liveness.runs(self._clock())
            case SilenceAllowed(seconds):
                if self._liveness is not None:
                    self._liveness.allow(seconds)
            case EngineReady():
                self.ready = message
                mute_s = inf if message.num_ranks == 1 else RANKED_STALL_S
                self._liveness = EngineLiveness(
                    self._clock(), frozen_s=self._frozen_s, stall_s=self._stall_s, mute_s=mute_s
                )
                self._is_ready.set()
            case StartupProgress():
                self._on_progress(message.text)
            case AdapterLoaded():
                self.on_adapter(message)
            case EngineDied():
                self.declare_dead(message.message)
            case _:
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    stream.push(message)

    def declare_dead(self, why: str, error: type[EngineUnavailable] = EngineLost) -> None:
        """Fail every open request with `error`. Also called by the task that watches the process. Idempotent."""
        if self.death:
            return
        self.death = why
        self._is_ready.set()
        for stream in list(self._streams.values()):
            stream.push(RequestFailed(stream.request_id, error.__name__, why))

    def close(self) -> None:
        """Idempotent."""
        self.declare_dead("the node is shutting down", EngineUnavailable)
        for socket in (self._to_engine, self._from_engine):
            with contextlib.suppress(zmq.ZMQError):
                socket.close(linger=0)


def _note_loss(sent: asyncio.Future[zmq.MessageTracker | None]) -> None:
    """Log that a message was lost: the engine process is gone, and its requests fail when that is noticed."""
    if not sent.cancelled() and (error := sent.exception()) is not None:
        logger.warning("the engine did not get a message: %s", error)
