"""Answers of another form than the app's: without a body to HEAD, without chunks to HTTP/1.0, and to `OPTIONS *`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def app_for(cycle: RequestResponseCycle, app: Any) -> Any:
    """`app`, or what stands between it and a request that wants another form of answer."""
    scope: Any = cycle.scope
    if scope["method"] == "OPTIONS" and scope["path"] == "*":
        app = _answer_asterisk
    elif scope["method"] == "HEAD":
        app = _Bodiless(app)
    return _Unchunked(app, cycle) if scope["http_version"] == "1.0" else app


async def _answer_asterisk(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [(b"allow", b"GET, HEAD, POST, OPTIONS"), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


class _Bodiless:
    """Answers HEAD as GET, and ends with the head: a GET that streams would never end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_ended = False

        async def send_head(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not has_ended:
                has_ended = True
                await send({"type": "http.response.body", "body": b""})

        await self._app({**scope, "method": "GET"}, receive, send_head)


class _Unchunked:
    """Ends an answer of unknown length by closing the connection: HTTP/1.0 knows no chunks (RFC 9112, 6.1)."""

    def __init__(self, app: Any, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle: Any = self._cycle
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not has_length:  # uvicorn then writes no `transfer-encoding`, and takes any length
                    cycle.chunked_encoding, cycle.expected_content_length = False, inf
            elif not has_length and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)
