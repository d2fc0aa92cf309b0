"""Calls of web pages from other origins (CORS): browsers make them only with the server's consent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

if TYPE_CHECKING:
    from pd_http.limits import HttpLimits

SHOWN_HEADERS = (
    "x-request-id", "x-pd-route", "x-pd-predicted-ttft", "x-pd-prefill", "x-pd-decode", "x-pd-ignored", "retry-after",
)  # fmt: skip


def cross_origin(limits: HttpLimits) -> list[Middleware]:
    """The middleware that gives consent to `allowed_origins`; [] when there are none.

    Pages may send any header, `authorization` among them, but no cookies. Requests without `Origin` pass unchanged.
    """
    if not limits.allowed_origins:
        return []
    rules = Middleware(
        CORSMiddleware,
        allow_origins=list(limits.allowed_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=list(SHOWN_HEADERS),
    )
    return [rules]


def consent(limits: HttpLimits, origin: str | None) -> list[tuple[bytes, bytes]]:
    """The headers that this middleware adds to an answer, for answers that pass around it. `origin`: of the request."""
    if not limits.allowed_origins:
        return []
    shown = (b"access-control-expose-headers", ", ".join(SHOWN_HEADERS).encode())
    vary = (b"vary", b"Origin")
    if origin is None:
        return [vary]
    if "*" in limits.allowed_origins:
        return [(b"access-control-allow-origin", b"*"), shown, vary]
    if origin in limits.allowed_origins:
        return [(b"access-control-allow-origin", origin.encode("latin-1")), shown, vary]
    return [shown, vary]
