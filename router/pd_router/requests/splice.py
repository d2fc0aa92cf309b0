"""Passes a decode node's answer on to the client, byte for byte."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pd_http.body import ClientGone
from pd_http.errors import PdError
from pd_http.frames import FRAMES_TYPE
from pd_http.node_answers import FailureKind
from pd_http.reply import PIECE_BYTES
from pd_http.sse import EVENT_STREAM, SSE_DONE
from pd_router.calls.headers import RawHeaders, answered
from pd_router.nodes.upstream import LEG_ERRORS, LegFailed, leg_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_http.dialect import Dialect
    from pd_http.reply import HeaderList
    from pd_router.calls.reply import CallReply
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_connection import Sink
    from pd_router.requests.legs import DecodeLeg
    from pd_router.requests.liveness_guard import LivenessGuard

_SHORT_BYTES = 64  # a piece of the end of a stream, which a node may write byte by byte
_LENGTH = b"content-length"
_FRAMES = FRAMES_TYPE.encode()
_EVENTS = (b"content-type", EVENT_STREAM.encode() + b"; charset=utf-8")


class FollowingLegs(Protocol):
    """The legs that go on with a stream after its leg failed."""

    def guard(self, node: Node) -> LivenessGuard:
        """While entered, LegFailed is raised if `node` is judged down and another one can go on."""

    async def go_on(self, leg: DecodeLeg, failure: LegFailed) -> DecodeLeg | None:
        """A leg that has begun after the last byte that the client has. None: there is none."""


async def send_answer(
    leg: DecodeLeg,
    reply: CallReply,
    nodes: Mapping[str, Node],
    idle_timeout_s: float,
    stream: FollowingLegs,
    on_piece: Callable[[bytes], None] | None = None,
) -> DecodeLeg:
    """Send all of `leg`'s answer, and close it. -> the leg that ended the answer.

    `nodes`: those that did the work, by header that names them, unless the answer does. `stream` finds the leg that
    goes on if one fails. `on_piece`: gets each piece of a stream when it leaves.

    Raises ClientGone, or LegFailed if a stream breaks off. The client then has an error event without an end of the
    stream: the server closes the connection of an incomplete answer. Nothing is written after a long answer that
    breaks off, so it has no end either.
    """
    if leg.whole is not None:
        headers = _with_nodes(leg.whole.headers, nodes)
        await reply.whole(leg.whole.status, headers, leg.whole.body)
        return leg
    headers, on_error, is_long = _with_nodes(leg.head.headers, nodes), partial(_cut_off, reply.dialect), leg.is_long
    if is_long:
        reply.hold(PIECE_BYTES)
        if length := leg.head.header(_LENGTH):
            headers.append((_LENGTH, length.encode()))
    await reply.start(leg.head.status, headers, None if is_long else on_error)
    splice = StreamSplice(reply, idle_timeout_s, on_piece=None if is_long else on_piece)
    while True:
        try:
            await _pass_on(leg, splice, stream)
            await reply.end()
            return leg
        except LegFailed as failure:
            following = await stream.go_on(leg, failure)
            if following is None and is_long:
                raise
            if following is None and leg.given_up is not None:
                await reply.end(leg.given_up.data)
                raise
            if following is None:
                await reply.write(_last_words(splice.tail, failure, reply.dialect))
                raise
        finally:
            leg.close()
        leg = following


async def _pass_on(leg: DecodeLeg, splice: StreamSplice, stream: FollowingLegs) -> None:
    """Raises LegFailed unless the client gets the stream to its end; also if its node is judged down meanwhile."""
    try:
        with stream.guard(leg.node):
            await splice.run(leg)
    except LegFailed:
        if not leg.is_complete:
            raise
    leg.check_end(splice.tail)


class StreamSplice:
    """Passes the bytes of a leg to the client as they arrive, without a task for each.

    `idle_timeout_s` bounds the silence of the node, and apart from it the time in which the client takes nothing: while
    the client does not read, nothing is read from the node either, so its silence then says nothing.
    """

    __slots__ = ("_done", "_idle_timeout_s", "_is_paused", "_last", "_leg", "_loop", "_moved_s", "_on_piece", "_reply",
                 "_sink", "_timer")  # fmt: skip

    def __init__(
        self,
        reply: CallReply,
        idle_timeout_s: float,
        sink: Sink | None = None,
        on_piece: Callable[[bytes], None] | None = None,
    ) -> None:
        """`sink`: takes the bytes of the leg instead of the client; it calls `pass_on` itself. `on_piece`: gets each
        piece when it leaves."""
        self._reply = reply
        self._idle_timeout_s = idle_timeout_s
        self._sink = sink
        self._on_piece = on_piece
        self._last = (b"", b"")
        self._done: asyncio.Future[None] | None = None  # while a leg is copied
        self._timer: asyncio.TimerHandle | None = None  # set when the client has the first bytes

    @property
    def tail(self) -> bytes:
        """The last two pieces that the client got; short ones count as one."""
        return b"".join(self._last)

    async def run(self, leg: DecodeLeg) -> None:
        """Copy to the end. Raises LegFailed, ClientGone if the client takes nothing, and what the sink raises."""
        self._leg = leg
        self._loop = asyncio.get_running_loop()
        self._is_paused = False
        self._moved_s = self._loop.time()
        self._reply.watch_flow(self._flow_changed)
        try:
            self._done = leg.splice(self._take)
            self._timer = self._loop.call_later(self._idle_timeout_s, self._look)
            await self._done
        except LEG_ERRORS as error:
            raise leg_failure(leg.node, error, "", "") from error
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._reply.watch_flow(None)
            self._done = None  # its failure's traceback refers here: a cycle

    def pass_on(self, data: bytes) -> None:
        """Give `data` to the client."""
        before, last = self._last
        self._last = (last, data) if len(last) >= _SHORT_BYTES else (before, last + data)
        self._reply.write_now(data)
        if data and self._on_piece is not None:
            self._on_piece(data)

    def _take(self, data: bytes) -> None:
        self._moved_s = self._loop.time()
        if self._sink is None:
            self.pass_on(data)
        else:
            self._sink(data)

    def _flow_changed(self, is_paused: bool) -> None:
        self._moved_s = self._loop.time()
        self._is_paused = is_paused
        if is_paused:
            self._leg.pause()
        else:
            self._leg.resume()

    def _look(self) -> None:
        """Give the stream up if nothing has moved for too long. One timer, set again: not one for each piece."""
        left_s = self._moved_s + self._idle_timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif self._done is not None and not self._done.done():
            detail = f"the stream made no progress for {self._idle_timeout_s:g} s"
            stalled = LegFailed(self._leg.node, FailureKind.TIMEOUT, detail, wait="stream")
            self._done.set_exception(ClientGone() if self._is_paused else stalled)


def _last_words(tail: bytes, failure: LegFailed, dialect: Dialect) -> bytes:
    """An error event; a blank line before it ends an incomplete event."""
    error = PdError(f"the answer broke off: {failure}", code="stream_interrupted")
    event = dialect.error_event(error).removesuffix(SSE_DONE)
    return event if tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n" + event


def _cut_off(dialect: Dialect, error: PdError) -> bytes:
    """The last events of a stream that the router ends. The blank line ends an event that the node may have begun."""
    return b"\n\n" + dialect.error_event(error)


def _with_nodes(headers: RawHeaders, nodes: Mapping[str, Node]) -> HeaderList:
    kept = answered(headers)
    names = {name for name, _ in kept}
    for name, node in nodes.items():
        if name.encode() not in names:
            kept.append((name.encode(), node.node_id.encode()))
    return [_EVENTS if value == _FRAMES else (name, value) for name, value in kept]
