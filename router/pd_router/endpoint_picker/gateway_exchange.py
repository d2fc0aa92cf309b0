"""One HTTP request of a gateway, as the messages of `envoy.service.ext_proc.v3`. No sockets.

The gateway sends the request's headers, its body in parts, and later the same of the answer. Bodies are full duplex:
each part must be sent back, the request's only after the answer to its headers, which names the destination.
Protocol: gateway-api-inference-extension, proposal 004.
"""

from __future__ import annotations

import logging
import urllib.parse
from typing import TYPE_CHECKING, Any

import orjson
from google.protobuf.json_format import MessageToDict

from pd_http.connection_limits import BODY_PROGRESS_BYTES
from pd_http.dialects import COUNT_TOKENS, dialect_of
from pd_http.errors import BodyTooLarge, InvalidRequest, PdError
from pd_http.names import MAX_NAME_CHARS
from pd_http.refusal import Refusal
from pd_router.calls.body import RequestBody
from pd_router.calls.headers import DECODE_BY, PREFILL_BY, REQUEST_ID, ROUTE, request_id
from pd_router.edge.client_connection import PROXY_PATHS
from pd_router.endpoint_picker.messages import (
    FULL_DUPLEX_STREAMED,
    OVERWRITE_IF_EXISTS_OR_ADD,
    ProcessingResponse,
)
from pd_router.endpoint_picker.picks import Pick, subset_of
from pd_router.errors import NotRouted, TooManyUnfinished
from pd_router.records.call_record import CallRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pd_router.endpoint_picker.picks import EndpointPicker
    from pd_router.requests.services import Services

log = logging.getLogger("pd_router")
DESTINATION = "x-gateway-destination-endpoint"  # header, and key of the dynamic metadata `envoy.lb`
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
PART_BYTES = 62_000  # of a body that is replaced: gateways take parts of at most 64 KiB
_OF_A_REQUEST = frozenset({"request_headers", "request_body", "request_trailers"})
# Beside the generating calls; the rest of a node is for routers and other nodes
SMALL_CALLS = frozenset({"/v1/models", COUNT_TOKENS, "/tokenize", "/detokenize", "/health", "/ping", "/version"})


class UnfinishedBodies:
    """Bytes of the bodies that have not arrived whole, over all exchanges, and their bound."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0


class GatewayExchange:
    """Answers the gateway's messages about one request. `close` it when the gateway's stream ends, however it ends."""

    def __init__(self, services: Services, picker: EndpointPicker, unfinished: UnfinishedBodies) -> None:
        self.is_refused = False  # the client gets an error; nothing more comes
        self._s = services
        self._picker = picker
        self._unfinished = unfinished
        self._record = CallRecord("", "", services.table.clock(), services.wall_clock())
        self._has_begun = False  # the request's headers have come
        self._headers: dict[str, str] = {}  # first values
        self._path = ""
        self._subset: frozenset[str] | None = None  # of addresses to choose among
        self._window_bytes, self._begun_s = 0, services.table.clock()  # as HTTP bounds bodies (`connection_limits`)
        self._parts: list[bytes] = []  # of the body, until a node is picked
        self._num_bytes = 0
        self._pick: Pick | None = None
        self._sees_end = False  # the gateway sends the answer's body
        self._outcome = "cut"  # neither the answer nor an error has come to its end
        self._answer_outcome = "cut"  # by the answer's status
        services.metrics.num_in_flight += 1

    @property
    def left_s(self) -> float | None:
        """Seconds until more of the request must have come. None: it needs nothing more."""
        if self._pick is not None or self._record.status:
            return None
        return max(0.0, self._begun_s + self._s.config.body_timeout_s - self._s.table.clock())

    def take(self, message: Any) -> Iterator[Any]:
        """The answers to one message; None: none has come in `left_s`. An error becomes the client's answer."""
        try:
            yield from self._take(message)
        except PdError as error:
            yield self.refused(error)
        except Exception as error:
            self._outcome = "crashed"
            log.error("request %s: a bug", self._headers.get(REQUEST_ID), exc_info=error)
            yield self._refusal(PdError("internal error"))

    def num_to_read(self, message: Any) -> int:
        """The size of the body that ends with the message; 0: none does."""
        part = message.request_body
        is_last = part.end_of_stream or message.HasField("request_trailers")
        return self._num_bytes + len(part.body) if is_last and self._pick is None else 0

    def refused(self, error: PdError) -> Any:
        """The answer to a message that is not taken: the client gets the error."""
        self._outcome = "refused" if error.status < 500 else "failed"
        return self._refusal(error)

    def _take(self, message: Any) -> Iterator[Any]:
        if message is None:
            late = Refusal.SLOW_BODY
            raise InvalidRequest(late.message, code=late.word, status=late.status)
        kind = message.WhichOneof("request")
        if kind in _OF_A_REQUEST and (kind == "request_headers") == self._has_begun:
            found = "a second request_headers" if self._has_begun else f"{kind} before request_headers"
            raise PdError(f"the gateway sent {found}: an ext_proc stream is for one request", code="ext_proc_order")
        if kind == "request_headers":
            yield from self._begin(message)
        elif kind == "request_body":
            yield from self._more(message.request_body.body, is_last=message.request_body.end_of_stream)
        elif kind == "request_trailers":
            if self._pick is None:
                yield from self._picked(is_last=False)
            yield ProcessingResponse(request_trailers={})
        elif kind == "response_headers":
            yield self._answered(message)
        elif kind == "response_body":
            part = message.response_body
            if part.end_of_stream:  # noted first: the gateway may end its stream as soon as it has the echo
                self._ended()
            yield _echo("response_body", part.body, is_last=part.end_of_stream)
        elif kind == "response_trailers":
            self._ended()
            yield ProcessingResponse(response_trailers={})

    def close(self) -> None:
        """Record the request, and release what it occupies."""
        s, pick, record = self._s, self._pick, self._record
        self._drop_parts()
        s.metrics.num_in_flight -= 1
        if pick is not None:
            pick.close()
            record.order, record.reason = pick.route.order.value, pick.route.reason
        record.end(s.table.clock(), self._outcome, record.status)
        s.sinks.take(record)
        s.recent.add(record)

    # --- the request

    def _begin(self, message: Any) -> Iterator[Any]:
        head = message.request_headers
        self._has_begun = True
        for one in head.headers.headers:
            self._headers.setdefault(one.key.lower(), _value(one))
        self._headers[REQUEST_ID] = request_id(self._headers)
        self._path = urllib.parse.unquote(self._headers.get(":path", "").partition("?")[0])
        self._record.request_id = self._headers[REQUEST_ID]
        self._subset = _subset(message)
        is_generating = self._path in PROXY_PATHS and self._headers.get(":method") == "POST"
        if is_generating or self._path in SMALL_CALLS:  # a record has no text of the client
            self._record.path = self._path
        elif not self._path.startswith("/v1/models/"):
            raise NotRouted(f"{self._path} is not served here")
        if not is_generating:
            self._pick = self._picker.any_node(self._subset)
            yield self._destination(self._pick)
            return
        if message.HasField("protocol_config"):
            modes = message.protocol_config
            self._sees_end = modes.response_body_mode == FULL_DUPLEX_STREAMED
            if modes.request_body_mode != FULL_DUPLEX_STREAMED:
                raise PdError("the gateway's ext_proc filter must set request_body_mode: FULL_DUPLEX_STREAMED")
        if head.end_of_stream:
            yield from self._picked(is_last=True)

    def _more(self, part: bytes, *, is_last: bool) -> Iterator[Any]:
        if self._pick is not None:
            yield _echo("request_body", part, is_last=is_last)
            return
        self._parts.append(part)
        self._num_bytes += len(part)
        self._unfinished.num_bytes += len(part)
        if self._num_bytes > self._s.longest_body:
            raise BodyTooLarge(f"the request body is longer than {self._s.longest_body} bytes")
        if self._unfinished.num_bytes > self._unfinished.most and not is_last:
            raise TooManyUnfinished("too many requests have not arrived whole; try again")
        if is_last:
            yield from self._picked(is_last=True)
        elif self._num_bytes - self._window_bytes >= BODY_PROGRESS_BYTES:
            self._window_bytes, self._begun_s = self._num_bytes, self._s.table.clock()

    def _picked(self, *, is_last: bool) -> Iterator[Any]:
        """The answers to the headers and to the whole body. Its parts pass on as they came."""
        data = b"".join(self._parts)
        body = RequestBody(data, dialect_of(self._path))
        record, s = self._record, self._s
        if not body.has_chain:
            s.metrics.unchained.inc()
        record.model, record.stream = s.table.known_name(body.model), body.wants_stream
        self._pick = self._picker.pick(self._path, body, self._headers, self._subset)
        record.predict(now_s := s.table.clock(), self._pick.predicted_s)
        record.until(now_s, "plan")
        parts = self._parts
        self._drop_parts()
        if body.had_transfer:
            data = body.plain()
            parts = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
        yield self._destination(self._pick, len(data))
        for number, part in enumerate(parts, 1):
            yield _echo("request_body", part, is_last=is_last and number == len(parts))

    def _drop_parts(self) -> None:
        self._unfinished.num_bytes -= self._num_bytes
        self._parts, self._num_bytes = [], 0

    def _destination(self, pick: Pick, num_bytes: int | None = None) -> Any:
        """The answer to the request's headers. A client's `x-pd-*` headers never reach a node."""
        reported = {DESTINATION: pick.destination, REQUEST_ID: self._headers[REQUEST_ID], **pick.headers}
        if num_bytes is not None:
            reported["content-length"] = str(num_bytes)
        answer = ProcessingResponse()
        mutation = answer.request_headers.response.header_mutation
        _set(mutation.set_headers, reported)
        mutation.remove_headers.extend(
            name for name in self._headers if name.startswith("x-pd-") and name not in pick.headers
        )
        lb = answer.dynamic_metadata.fields["envoy.lb"].struct_value
        lb.fields[DESTINATION].string_value = pick.destination
        return answer

    # --- the answer

    def _answered(self, message: Any) -> Any:
        answer = ProcessingResponse(response_headers={})
        reported = {one.key.lower(): _value(one) for one in message.response_headers.headers.headers}
        status, record = reported.get(":status", ""), self._record
        record.status = int(status) if status.isdigit() else 0
        if (pick := self._pick) is None:  # the gateway's own answer
            return answer
        self._answer_outcome = "ok" if status < "400" else "refused" if status < "500" else "failed"
        served = _metadata(message, "envoy.lb").get(SERVED, "")
        pick.answered(reported.get(PREFILL_BY, ""), served or reported.get(DECODE_BY, ""))
        record.prefill_by = reported.get(PREFILL_BY, "")[:MAX_NAME_CHARS]
        served_by = reported.get(DECODE_BY) or served or pick.nodes[0].node_id
        record.answered(self._s.table.clock(), served_by[:MAX_NAME_CHARS])
        if record.stream and self._answer_outcome == "ok":
            record.first_piece(record.until_s)
            self._s.metrics.first_token_took(record.model, pick.route.order.value, record.first_s - record.arrived_s)
        _set(answer.response_headers.response.header_mutation.set_headers, {ROUTE: pick.route.text})
        if message.response_headers.end_of_stream:
            self._ended()
        elif not self._sees_end:
            self._outcome = self._answer_outcome
        return answer

    def _ended(self) -> None:
        self._outcome = self._answer_outcome
        if self._pick is not None:
            self._pick.close()

    def _refusal(self, error: PdError) -> Any:
        self.is_refused = True
        dialect = dialect_of(self._path)
        reported = {"content-type": "application/json"}
        if REQUEST_ID in self._headers:
            reported[REQUEST_ID] = self._headers[REQUEST_ID]
        if error.status == 503:
            reported["retry-after"] = "1"
        answer = ProcessingResponse()
        answer.immediate_response.status.code = dialect.status(error)
        answer.immediate_response.body = orjson.dumps(dialect.error_body(error))
        answer.immediate_response.details = error.code
        _set(answer.immediate_response.headers.set_headers, reported)
        return answer


def _echo(kind: str, part: bytes, *, is_last: bool) -> Any:
    answer = ProcessingResponse()
    streamed = getattr(answer, kind).response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = part, is_last
    return answer


def _set(options: Any, reported: Mapping[str, str]) -> None:
    for name, value in reported.items():
        option = options.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name, value.encode("latin-1")


def _value(header: Any) -> str:
    return str(header.raw_value.decode("latin-1") or header.value)


def _metadata(message: Any, namespace: str) -> dict[str, Any]:
    """The gateway's metadata in a namespace, as JSON has it."""
    found: dict[str, Any] = {}
    for entry in message.metadata_context.filter_metadata:
        if entry.key == namespace:
            found |= MessageToDict(entry.value)
    return found


def _subset(message: Any) -> frozenset[str] | None:
    """The addresses among which the gateway lets choose; None: all."""
    namespace, key = SUBSET
    value = _metadata(message, namespace).get(key)
    return None if value is None else subset_of(value if isinstance(value, list) else [value])
