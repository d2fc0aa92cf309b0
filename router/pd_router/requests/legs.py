"""The two legs of a request: P's leg yields a ticket and is then read to its end, D's leg yields the answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
from multidict import CIMultiDict

from pd_http.dialect import OPENAI
from pd_http.dialects import dialect_of
from pd_http.errors import ENGINE_DIED
from pd_http.frames import FRAMES_HEADER, FRAMES_TYPE, FRAMES_VERSION, StreamEnd, StreamFailed
from pd_http.names import MAX_NAME_CHARS
from pd_http.node_answers import FailureKind, PrefillEvents, code_of, object_in
from pd_http.node_report import REPORT_HEADER, NodeReport, decode_report
from pd_http.reply import PIECE_BYTES
from pd_http.sse import EVENT_STREAM
from pd_router.calls.body import RawObject
from pd_router.calls.headers import PREFILL_BY
from pd_router.nodes.upstream import LEG_ERRORS, Answer, LegFailed, Refused, Upstream, leg_failure
from pd_router.requests.framed_answer import FramedAnswer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from pd_http.sse import Event
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_connection import AnswerHead, NodeExchange, Sink
    from pd_router.policy.charge import Charge
    from pd_router.requests.stream_record import StreamRecord

log = logging.getLogger("pd_router")


class _Prefilled(msgspec.Struct):
    """What P tells in its ticket or in its whole answer."""

    kv_transfer_params: RawObject | None = None


_PREFILLED = msgspec.json.Decoder(_Prefilled)
_TICKET = msgspec.json.Decoder(str | None)


@dataclass(frozen=True, slots=True)
class Handoff:
    """P's kv_transfer_params. `params` goes to D unchanged; `ticket` is None for engines without tickets."""

    node: Node
    params: dict[str, Any]
    ticket: str | None


class PrefillLeg:
    """P's leg. Call `open`, then `drain`; `close` ends it at any time.

    Closing it early makes P abort the request. The charge on P is released when the leg ends.
    """

    def __init__(self, upstream: Upstream, node: Node, charge: Charge) -> None:
        self.node = node
        self._upstream = upstream
        self._charge = charge
        self._events = PrefillEvents()
        self._is_stream = False
        self._is_closed = False
        self._exchange: NodeExchange | None = None

    async def open(self, path: str, headers: Mapping[str, str], body: bytes, ticket_timeout_s: float) -> Handoff:
        """Send the request and wait for the ticket. Raises LegFailed or Refused, with the leg closed."""
        try:
            self._exchange = await self._upstream.post(self.node, path, headers, body, ticket_timeout_s)
            self._exchange.limit(ticket_timeout_s)
            try:
                return await self._handoff(self._exchange)
            except LEG_ERRORS as error:
                raise leg_failure(self.node, error, "ticket", f"no ticket within {ticket_timeout_s:g} s") from error
            except (ValueError, msgspec.MsgspecError, RecursionError) as error:
                raise LegFailed(self.node, FailureKind.BAD_ANSWER, f"no ticket: {error}") from error
        except BaseException:
            self.close()
            raise

    async def _handoff(self, exchange: NodeExchange) -> Handoff:
        self._is_stream = _head_of(exchange).content_type == EVENT_STREAM
        if not self._is_stream:
            return self._read_params(await exchange.whole())  # an engine without tickets: it has prefilled already
        event = await self._events.ticket(exchange.read)
        if event is None:
            raise LegFailed(self.node, FailureKind.BROKEN, "the answer ended without a ticket")
        if event.name == "error":
            raise _refusal_in(event) or _failure_in(self.node, event)
        return self._read_params(event.data)

    def _read_params(self, data: bytes) -> Handoff:
        params = _PREFILLED.decode(data).kv_transfer_params
        if params is None:
            raise LegFailed(self.node, FailureKind.BAD_ANSWER, "the answer has no kv_transfer_params")
        if len(ids := params.get("prompt_token_ids", b"")) > len(b"[]"):
            self._charge.count_prompt(bytes(ids).count(b",") + 1)
        ticket = _TICKET.decode(params["ticket"]) if "ticket" in params else None
        return Handoff(self.node, dict(params), ticket)

    def drain(self, timeout_s: float, on_failed: Callable[[LegFailed], None]) -> asyncio.Future[None]:
        """Read to the end, so that the connection can be reused, and close. `on_failed` is called if P did not finish.

        A leg that is closed meanwhile has not failed. The future is done when the leg is closed, whatever the reason.
        """
        assert self._exchange is not None
        self._exchange.limit(timeout_s)
        self._events.take(b"")  # of what came with the ticket
        done = self._exchange.splice(self._events.take)
        done.add_done_callback(lambda done: self._drained(done, timeout_s, on_failed))
        return done

    def _drained(self, done: asyncio.Future[None], timeout_s: float, on_failed: Callable[[LegFailed], None]) -> None:
        if self._is_closed or done.cancelled():
            self.close()
            return
        failure = self._failure_of(done.exception(), f"prefill not done within {timeout_s:g} s")
        if failure is None:
            self._charge.prefill_done()
        self.close()
        if failure is not None:
            on_failed(failure)

    def _failure_of(self, error: BaseException | None, timeout: str) -> LegFailed | None:
        reported = self._events.told
        if isinstance(error, Exception):
            return leg_failure(self.node, error, "prefill", timeout)
        if self._is_stream and reported is None:
            return LegFailed(self.node, FailureKind.BROKEN, "the answer ended before the prefill did")
        return _failure_in(self.node, reported) if reported is not None and reported.name == "error" else None

    def close(self) -> None:
        """Idempotent. After the end of the answer the connection is in the pool already."""
        self._is_closed = True
        if self._exchange is not None:
            self._exchange.close()
        self._charge.release()


def _failure_in(node: Node, event: Event) -> LegFailed:
    text = event.data[:500].decode("utf-8", "replace")
    kind = FailureKind.DIED if code_of(event.data) == ENGINE_DIED else FailureKind.REFUSED
    return LegFailed(node, kind, f"error event {text}")


def _refusal_in(event: Event) -> Refused | None:
    """A 4xx that came as an event, because the node had begun its answer before it knew."""
    body = object_in(event.data)
    status = body.pop("status", None)  # between nodes only
    if not isinstance(status, int) or not 400 <= status < 500 or status == 429:
        return None
    return Refused(Answer(status, (), msgspec.json.encode(body)))


class DecodeLeg:
    """D's leg. After `open` the answer is `whole` (not streamed), or what `splice` gives: a stream, or `is_long`.

    `record`: of the client's stream. A node that can write frames is asked for them; `given_up` is how such an answer
    failed by the node's own words.
    """

    def __init__(self, upstream: Upstream, node: Node, charge: Charge, record: StreamRecord | None = None) -> None:
        self.node = node
        self.given_up: StreamFailed | None = None
        self._record = record if node.stream_version else None
        self._dialect = OPENAI
        self._framed: FramedAnswer | None = None
        self.whole: Answer | None = None
        self.is_long = False  # an answer that is not streamed, but too long to be read whole
        self._first_bytes = b""  # of frames or a long answer, for the client
        self._upstream = upstream
        self._charge = charge
        self._exchange: NodeExchange | None = None

    async def open(
        self, path: str, headers: Mapping[str, str], body: bytes, first_byte_s: float, body_timeout_s: float
    ) -> None:
        """Send the request; wait for the first bytes of a stream, or for PIECE_BYTES or all of any other answer.

        The client gets no byte before this returns, so another node may still take over. Raises LegFailed or Refused,
        with the leg closed.
        """
        self._dialect = dialect_of(path)
        headers = CIMultiDict(headers)  # a client may repeat a header
        if self._record is not None:
            headers[FRAMES_HEADER] = FRAMES_VERSION
        elif self.node.stream_version:
            headers[REPORT_HEADER] = "1"
        try:
            exchange = self._exchange = await self._upstream.post(self.node, path, headers, body, first_byte_s)
            kind = _head_of(exchange).content_type
            if self._record is not None and kind == FRAMES_TYPE:
                self._framed = FramedAnswer(self._record)
            is_stream = self._framed is not None or kind == EVENT_STREAM
            exchange.limit(first_byte_s if is_stream else body_timeout_s)
            try:
                if self._framed is not None:
                    await self._read_head(self._framed, exchange)
                elif not is_stream:
                    await self._read_whole(exchange)
                elif not await exchange.has_more():
                    raise LegFailed(self.node, FailureKind.BROKEN, "the stream ended before its first byte")
            except LEG_ERRORS as error:
                raise leg_failure(self.node, error, "body", "the answer began and then stopped") from error
        except BaseException:
            self.close()
            raise
        if is_stream:
            self._charge.prefill_done()
        else:
            self._charge.prefill_over()  # long before the end of the answer

    async def _read_whole(self, exchange: NodeExchange) -> None:
        answer, body = _head_of(exchange), await exchange.read_most(PIECE_BYTES)
        if len(body) <= PIECE_BYTES:
            self.whole = Answer(answer.status, answer.headers, body)
        else:
            self.is_long, self._first_bytes = True, body

    @property
    def head(self) -> AnswerHead:
        return _head_of(self._exchange)

    @property
    def prefilled_by(self) -> str:
        """The node that prefilled the prompt, by the answer's headers; "" if they do not name it."""
        return self.head.header(PREFILL_BY.encode())[:MAX_NAME_CHARS]

    @property
    def report(self) -> NodeReport | None:
        """What the node reported at the end of its answer. None: another engine, or the answer was cut."""
        if self._framed is not None:
            return self._framed.last.report if isinstance(self._framed.last, StreamEnd) else None
        if self.whole is None and not self.is_long:
            return None
        return decode_report(self.head.header(REPORT_HEADER.encode()).encode("latin-1"))

    @property
    def is_complete(self) -> bool:
        """Whether frames have come to their end, so that what becomes of the connection does not matter."""
        return self._framed is not None and isinstance(self._framed.last, StreamEnd)

    def check_end(self, tail: bytes) -> None:
        """`tail`: the last bytes. Raises LegFailed unless the stream ends as a whole one, or with the node's error."""
        if self.is_long:
            is_whole = True  # by its length or its last chunk
        elif self._framed is None:
            is_whole = self._dialect.is_whole(tail)
        else:
            is_whole = self.is_complete
        if not is_whole:
            raise LegFailed(self.node, FailureKind.BROKEN, "the stream ended without its last event")

    def splice(self, sink: Sink) -> asyncio.Future[None]:
        """Give every byte of the stream to `sink`, as `NodeExchange.splice` does; what LEG_ERRORS names ends it.

        Of frames: the client's bytes in each piece that comes, maybe none. Raises LegFailed if they are over.
        """
        assert self._exchange is not None
        self._exchange.limit(inf)
        first, self._first_bytes = self._first_bytes, b""
        if first or self._framed is not None:
            sink(first)
        if self._framed is None:
            return self._exchange.splice(sink)
        self._check_frames(self._framed)
        return self._exchange.splice(partial(self._take, self._framed, sink))

    def _take(self, framed: FramedAnswer, sink: Sink, chunk: bytes) -> None:
        sink(framed.feed(chunk))
        self._check_frames(framed)

    def pause(self) -> None:
        """Take nothing from the node until `resume`."""
        assert self._exchange is not None
        self._exchange.pause()

    def resume(self) -> None:
        assert self._exchange is not None
        self._exchange.resume()

    async def _read_head(self, framed: FramedAnswer, exchange: NodeExchange) -> None:
        while not framed.has_begun:
            chunk = await exchange.read()
            if not chunk:
                raise LegFailed(self.node, FailureKind.BROKEN, "the stream ended before its head")
            self._first_bytes = framed.feed(chunk)
            if not framed.has_begun:
                self._check_begun(framed)

    def _check_begun(self, framed: FramedAnswer) -> None:
        """Raises, without a head, what the same status as an answer would raise: the client can still get it."""
        reported = framed.last
        if isinstance(reported, StreamFailed):
            answer = Answer(reported.status, (), reported.data.partition(b"data: ")[2].partition(b"\n")[0])
            if 400 <= reported.status < 500 and reported.status != 429:
                raise Refused(answer)
            kind = FailureKind.DIED if reported.code == ENGINE_DIED else FailureKind.REFUSED
            raise LegFailed(self.node, kind, f"it gave up: {reported.status} {reported.code}", answer)
        self._check_frames(framed)

    def _check_frames(self, framed: FramedAnswer) -> None:
        """Raises LegFailed if no more frames can come, and the stream is not complete."""
        if framed.error is not None:
            raise LegFailed(self.node, FailureKind.BAD_ANSWER, str(framed.error))
        if isinstance(framed.last, StreamFailed):
            self.given_up = framed.last
            kind = FailureKind.DIED if framed.last.code == ENGINE_DIED else FailureKind.REFUSED
            raise LegFailed(self.node, kind, f"it gave up: {framed.last.status} {framed.last.code}")

    def close(self) -> None:
        """Idempotent. Closing it before the end of the answer makes D abort the request."""
        if self._exchange is not None:
            self._exchange.close()
        self._charge.release()


def _head_of(exchange: NodeExchange | None) -> AnswerHead:
    assert exchange is not None, "the leg is not open"
    assert exchange.answer is not None
    return exchange.answer
