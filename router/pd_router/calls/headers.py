"""The headers that pass through the router, and those that it reads. Names are lower case, as in ASGI."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from pd_http.errors import InvalidRequest
from pd_http.node_report import REPORT_HEADER
from pd_router.calls.trace_context import TRACEPARENT
from pd_router.config import HandoffOrder

Headers = CIMultiDict[str]
RawHeaders = Iterable[tuple[bytes, bytes]]

REQUEST_ID = "x-request-id"
ROUTE = "x-pd-route"
PREDICTED = "x-pd-predicted-ttft"
TICKET = "x-pd-ticket"
PREFILL_BY = "x-pd-prefill"
DECODE_BY = "x-pd-decode"

# RFC 9110, 7.6.1; the headers that `Connection` names are dropped too
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
# The router frames each leg itself, reads P's leg (so no compression), and answers `Expect` itself. It also decides
# which origins may call: with `origin` a node would answer with its own consent.
_NOT_FORWARDED = _HOP_BY_HOP | {
    b"host", b"content-length", b"accept-encoding", b"expect", b"origin", REQUEST_ID.encode()
}  # fmt: skip
_NOT_ANSWERED = _HOP_BY_HOP | {
    b"content-length", b"date", b"server", REQUEST_ID.encode(), ROUTE.encode(), PREDICTED.encode(),
    REPORT_HEADER.encode(),
}  # fmt: skip
_OWN = frozenset({REQUEST_ID.encode(), ROUTE.encode(), TRACEPARENT.encode()})  # those that the router reads
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def forwarded(headers: RawHeaders, request_id: str) -> Headers:
    """The client's end-to-end headers for a leg. A client's `x-pd-*` headers never reach a node."""
    kept: Headers = CIMultiDict()
    named: set[bytes] = set()
    for name, value in headers:
        if name not in _NOT_FORWARDED and not name.startswith(b"x-pd-"):
            kept.add(name.decode("latin-1"), value.decode("latin-1"))
        elif name == b"connection":
            named |= _tokens(value)
    for name in named:
        kept.popall(name.decode("latin-1"), None)
    kept[REQUEST_ID] = request_id
    return kept


def answered(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """A node's end-to-end headers, for the client."""
    kept = []
    named: set[bytes] = set()
    for raw_name, value in headers:
        name = raw_name.lower()
        if name not in _NOT_ANSWERED:
            kept.append((name, value))
        elif name == b"connection":
            named |= _tokens(value)
    return [pair for pair in kept if pair[0] not in named] if named else kept


def _tokens(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")}


def first_values(headers: RawHeaders) -> dict[str, str]:
    """Name -> first value, of the headers that the router reads."""
    values: dict[str, str] = {}
    for name, value in headers:
        if name in _OWN:
            values.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return values


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id if it is safe in logs and headers, else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def asked_order(headers: Mapping[str, str]) -> HandoffOrder | None:
    """The order that the request asks for, if any. Raises InvalidRequest unless it is p-first or d-first."""
    asked = headers.get(ROUTE)
    if asked is None:
        return None
    if asked not in (HandoffOrder.P_FIRST, HandoffOrder.D_FIRST):
        raise InvalidRequest(f"header x-pd-route must be p-first or d-first, not {asked!r}", param=ROUTE)
    return HandoffOrder(asked)
