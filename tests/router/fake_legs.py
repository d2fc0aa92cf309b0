"""One leg's node without a socket: an answer with chunks that come when the test says, in time that the test moves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, cast

from pd_router.config import RouterConfig
from pd_router.nodes.node import Node, NodeSpec, Role
from pd_router.nodes.node_connection import AnswerHead
from pd_router.nodes.node_table import FLAGS, NodeTable
from pd_router.policy.charge import Charge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

EVENTS = "text/event-stream"
STUCK = 1e9  # seconds: longer than every limit


def node(node_id: str = "node-1", role: Role = Role.DECODE) -> Node:
    """One of a table of its own."""
    table = NodeTable(RouterConfig(start_empty=True), lambda: 0.0)
    table.apply(FLAGS, (NodeSpec(f"http://{node_id}:1", role),))
    made = table.nodes[0]
    made.node_id = node_id
    return made


def charge(on: Node, *, prefill_bytes: int = 0, sequences: int = 0) -> Charge:
    """On a clock that goes on by a second with each look."""
    seconds = count()
    return Charge(on, lambda: float(next(seconds)), prefill_bytes=prefill_bytes, sequences=sequences)


class VirtualTime:
    """The running loop's clock: it stands still but for `advance`. Use it on asyncio's own loop."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        asyncio.get_running_loop().time = lambda: self.now_s  # type: ignore[method-assign]

    async def advance(self, seconds: float) -> None:
        """In small steps, so that each timer fires at its own time."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + max(0.125, seconds / 1000))
            await asyncio.sleep(0)
            await asyncio.sleep(0)


@dataclass
class FakeExchange:
    """A NodeExchange. `parts`: bytes, seconds to wait, or what to raise."""

    parts: list[bytes | float | Exception]
    answer: AnswerHead
    time: VirtualTime | None = None
    closed: int = 0
    pauses: list[str] = field(default_factory=list)
    _splicing: asyncio.Task[None] | None = None
    _expires_s: float = inf

    def limit(self, seconds: float) -> None:
        self._expires_s = asyncio.get_running_loop().time() + seconds

    async def read(self) -> bytes:
        while self.parts:
            part = self.parts.pop(0)
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                return part
            assert self.time is not None
            await self.time.advance(min(part, self._expires_s - self.time.now_s))
            if self.time.now_s >= self._expires_s:
                raise TimeoutError
        return b""

    async def has_more(self) -> bool:
        part = await self.read()
        if part:
            self.parts.insert(0, part)
        return bool(part)

    async def whole(self) -> bytes:
        return await self.read_most(STUCK)

    async def read_most(self, max_bytes: float) -> bytes:
        data = b""
        while len(data) <= max_bytes and (part := await self.read()):
            data += part
        return data

    def splice(self, sink: Callable[[bytes], None]) -> asyncio.Future[None]:
        done = self._done = asyncio.get_running_loop().create_future()
        self._splicing = asyncio.create_task(self._splice(sink, done))
        return done

    async def _splice(self, sink: Callable[[bytes], None], done: asyncio.Future[None]) -> None:
        try:
            while part := await self.read():
                sink(part)
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    def pause(self) -> None:
        self.pauses.append("pause")

    def resume(self) -> None:
        self.pauses.append("resume")

    def close(self) -> None:
        self.closed += 1
        if self._splicing is not None:
            self._splicing.cancel()


@dataclass
class FakeUpstream:
    """Answers each `post` with the same response, or raises."""

    response: FakeExchange | Exception
    posted: list[tuple[str, str, bytes, float]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def post(self, on: Node, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float) -> Any:
        self.posted.append((on.node_id, path, body, first_byte_s))
        self.headers.append(headers)
        if isinstance(self.response, Exception):
            raise self.response
        return self.response


def answer(
    *parts: bytes | float | Exception,
    content_type: str = EVENTS,
    headers: Iterable[tuple[bytes, bytes]] = (),
    time: VirtualTime | None = None,
    status: int = 200,
) -> FakeExchange:
    named = ((b"content-type", f"{content_type}; charset=utf-8".encode()), *headers)
    return FakeExchange(list(parts), AnswerHead(status, named), time)


def as_any(fake: object) -> Any:
    """Where a real one is asked for."""
    return cast("Any", fake)
