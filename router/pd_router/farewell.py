"""The last answers of a router that hands over to its successor ask clients to close their connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSE = (b"connection", b"close")


class Farewell:
    """An ASGI app around another one. Once `begun`, answers carry `connection: close`.

    The client then opens its next connection in good order, to the successor. If the server just closed the connection,
    a request that is on its way would fail.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            await send(message)

        await self._app(scope, receive, close if self.begun and scope["type"] == "http" else send)
