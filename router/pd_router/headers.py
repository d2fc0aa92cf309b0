"""The headers that pass through the router, and those that it reads. Names are lower case, as in ASGI."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from multidict import CIMultiDict

from pd_http.errors import InvalidRequest
from pd_router.config import HandoffOrder

Headers = CIMultiDict[str]
RawHeaders = Iterable[tuple[bytes, bytes]]

REQUEST_ID = "x-request-id"
ROUTE = "x-pd-route"
TICKET = "x-pd-ticket"
PREFILL_BY = "x-pd-prefill"
DECODE_BY = "x-pd-decode"

# RFC 9110, 7.6.1; the headers that `Connection` names are dropped too
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
     "transfer-encoding", "upgrade"}
)  # fmt: skip
# The router frames each leg itself, reads P's leg (so no compression), and answers `Expect` itself.
_REQUEST_ONLY = frozenset({"host", "content-length", "accept-encoding", "expect", REQUEST_ID})
_ANSWER_ONLY = frozenset({"content-length", "date", "server", REQUEST_ID, ROUTE})
_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def forwarded(headers: RawHeaders, request_id: str) -> Headers:
    """The client's end-to-end headers for a leg. A client's `x-pd-*` headers never reach a node."""
    kept: Headers = CIMultiDict()
    named: set[str] = set()
    for raw_name, raw_value in headers:
        name = raw_name.decode("latin-1")
        if name == "connection":
            named.update(token.strip().lower() for token in raw_value.decode("latin-1").split(","))
        if name in _HOP_BY_HOP or name in _REQUEST_ONLY or name.startswith("x-pd-"):
            continue
        kept.add(name, raw_value.decode("latin-1"))
    for name in named:
        kept.popall(name, None)
    kept[REQUEST_ID] = request_id
    return kept


def answered(headers: RawHeaders) -> list[tuple[bytes, bytes]]:
    """A node's end-to-end headers, for the client."""
    kept = []
    named: set[str] = set()
    for raw_name, value in headers:
        name = raw_name.decode("latin-1").lower()
        if name == "connection":
            named.update(token.strip().lower() for token in value.decode("latin-1").split(","))
        if name not in _HOP_BY_HOP and name not in _ANSWER_ONLY:
            kept.append((name.encode("latin-1"), value))
    return [pair for pair in kept if pair[0].decode("latin-1") not in named] if named else kept


def first_values(headers: RawHeaders) -> dict[str, str]:
    """Name -> first value."""
    values: dict[str, str] = {}
    for name, value in headers:
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
