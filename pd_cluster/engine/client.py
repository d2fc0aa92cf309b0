"""The API process's end of the line to its engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq
import zmq.asyncio

from pd_cluster.engine.messages import (
    HEARTBEAT_S,
    Abort,
    AddRequest,
    EngineDied,
    EngineReady,
    EngineStats,
    FromEngine,
    NeedsPrefill,
    RequestFailed,
    StartupProgress,
    TicketOpened,
    ToEngine,
    TokensOut,
)
from pd_cluster.errors import EngineUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

logger = logging.getLogger("pd_cluster.engine")

STALL_S = 60.0  # silence after which an engine counts as hung; the longest step, with compilations, is shorter

RequestMessage = TicketOpened | TokensOut | NeedsPrefill | RequestFailed


class EngineClient(Protocol):
    """What the HTTP side needs of an engine. `ZmqEngineClient` is the real one."""

    @property
    def ready(self) -> EngineReady | None: ...

    @property
    def stats(self) -> EngineStats | None:
        """The latest; None before the first."""

    @property
    def alive(self) -> bool:
        """The engine is ready and has not died."""

    def open(self, request: AddRequest) -> RequestStream:
        """Admit a request. Raises EngineUnavailable."""

    def send(self, message: ToEngine) -> None:
        """Anything but AddRequest. Never blocks; silently void when the engine is gone (its requests have failed)."""


class RequestStream:
    """One request's messages, ending with its terminal one. Leaving the `async with` block aborts what still runs."""

    def __init__(self, request_id: str, send: Callable[[ToEngine], None], forget: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._messages: asyncio.Queue[RequestMessage] = asyncio.Queue()
        self._send = send
        self._forget = forget
        self._ended = False

    def push(self, message: RequestMessage) -> None:
        self._messages.put_nowait(message)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._forget(self.request_id)
        if not self._ended:
            self._ended = True
            self._send(Abort(self.request_id))

    def __aiter__(self) -> AsyncIterator[RequestMessage]:
        return self

    async def __anext__(self) -> RequestMessage:
        if self._ended:
            raise StopAsyncIteration
        message = await self._messages.get()
        self._ended = isinstance(message, RequestFailed) or (isinstance(message, TokensOut) and message.finished)
        return message

    def drain_ready(self) -> list[RequestMessage]:
        """What has arrived already, without waiting (chunks are coalesced under backlog). Does not end the stream."""
        ready: list[RequestMessage] = []
        while not self._ended and not self._messages.empty():
            message = self._messages.get_nowait()
            self._ended = isinstance(message, RequestFailed) or (isinstance(message, TokensOut) and message.finished)
            ready.append(message)
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
        stall_s: float = STALL_S,
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
        self._stall_s = stall_s
        self._is_ready = asyncio.Event()
        self._ready: EngineReady | None = None
        self._stats: EngineStats | None = None
        self._death = ""

    @property
    def ready(self) -> EngineReady | None:
        return self._ready

    @property
    def stats(self) -> EngineStats | None:
        return self._stats

    @property
    def alive(self) -> bool:
        return self._ready is not None and not self._death

    @property
    def death(self) -> str:
        """Why the engine is gone; "" while it lives."""
        return self._death

    def open(self, request: AddRequest) -> RequestStream:
        if not self.alive:
            raise EngineUnavailable(self._death or "the engine is still starting")
        if request.request_id in self._streams:
            raise AssertionError(f"request id {request.request_id} is in use")
        stream = RequestStream(request.request_id, self.send, self._forget)
        self._streams[request.request_id] = stream
        self.send(request)
        return stream

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def send(self, message: ToEngine) -> None:
        if self._death:
            return
        # Never held up, for the high-water mark is off; it fails where no engine is connected
        sent = asyncio.ensure_future(self._to_engine.send(self._encoder.encode(message), zmq.NOBLOCK))
        sent.add_done_callback(_note_loss)

    async def wait_ready(self, deadline_s: float) -> EngineReady:
        """Raises EngineUnavailable when the engine dies first, TimeoutError after `deadline_s`."""
        async with asyncio.timeout(deadline_s):
            await self._is_ready.wait()
        if self._ready is None or self._death:
            raise EngineUnavailable(self._death)
        return self._ready

    async def watch(self) -> None:
        """Deliver messages until the engine says that it died, or says nothing for too long although it is ready.

        Silence is counted in polls that this process made, so that a machine that slept, or a stopped process, is not
        taken for a silent engine.
        """
        num_silent = 0
        while not self._death:
            if not await self._from_engine.poll(int(HEARTBEAT_S * 1000)):
                num_silent += self._ready is not None
                if num_silent * HEARTBEAT_S >= self._stall_s:
                    self.declare_dead(f"the engine has said nothing for {self._stall_s:g} s")
                continue
            num_silent = 0
            for message in self._decoder.decode(await self._from_engine.recv()):
                self._deliver(message)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case EngineStats():
                self._stats = message
            case EngineReady():
                self._ready = message
                self._is_ready.set()
            case StartupProgress():
                self._on_progress(message.text)
            case EngineDied():
                self.declare_dead(message.message)
            case _:
                stream = self._streams.get(message.request_id)
                if stream is not None:
                    stream.push(message)

    def declare_dead(self, why: str) -> None:
        """Fail every open request. Also called by whoever watches the process. Idempotent."""
        if self._death:
            return
        self._death = why
        self._is_ready.set()
        for stream in list(self._streams.values()):
            stream.push(RequestFailed(stream.request_id, EngineUnavailable.__name__, why))

    def close(self) -> None:
        """Idempotent."""
        self.declare_dead("the node is shutting down")
        for socket in (self._to_engine, self._from_engine):
            with contextlib.suppress(zmq.ZMQError):
                socket.close(linger=0)


def _note_loss(sent: asyncio.Future[zmq.MessageTracker | None]) -> None:
    """An engine process that is gone hears nothing; its requests fail as soon as that is noticed."""
    if not sent.cancelled() and (error := sent.exception()) is not None:
        logger.warning("the engine did not get a message: %s", error)
