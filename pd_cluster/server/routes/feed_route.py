"""GET /pd/feed: one answer without an end for each router. The order of a router is its authority."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from pd_cluster.errors import InvalidRequest, PdError
from pd_cluster.server.node.feed_hub import MAX_NAME_CHARS, FeedReader
from pd_cluster.server.routes.order_routes import check_order
from pd_connectors.protocol.feed import CHARGE_HEADER, FEED_TYPE, MAX_WAIT_MS, WAIT_HEADER
from pd_connectors.protocol.ticket import FEED_ACTION, ORDER_HEADER
from pd_http.body import ClientGone
from pd_http.reply import DisconnectWatch, Reply

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from pd_cluster.server.node.feed_hub import FeedHub
    from pd_cluster.server.state import NodeState

_HEADERS = [(b"content-type", FEED_TYPE.encode()), (b"cache-control", b"no-store")]


async def feed(state: NodeState, request: Request) -> Response:
    """Serve `GET /pd/feed`. It counts as no request: a node with readers is idle."""
    order = check_order(state, request.headers.get(ORDER_HEADER, ""), FEED_ACTION)
    _ = state.ready
    wait_s = _wait_s(request.headers.get(WAIT_HEADER, "0"))
    name = (order.reader.partition(".")[0] or request.headers.get(CHARGE_HEADER, ""))[:MAX_NAME_CHARS]
    return _FeedAnswer(state.feed, FeedReader(name, wait_s, order.reader or str(order.expires_at_s), order.serial))


def _wait_s(text: str) -> float:
    """Raises InvalidRequest."""
    if not (text.isascii() and text.isdecimal() and len(text) < 5):
        raise InvalidRequest(f"{WAIT_HEADER}: a whole number of milliseconds is needed", WAIT_HEADER)
    return min(int(text), MAX_WAIT_MS) / 1e3


class _FeedAnswer(Response):
    def __init__(self, hub: FeedHub, reader: FeedReader) -> None:
        self._hub = hub
        self._reader = reader
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            with DisconnectWatch(receive, reply):
                await self._serve(reply)
        except ClientGone:
            pass  # the router reads a snapshot when it connects again
        except PdError as error:
            await reply.fail(error)

    async def _serve(self, reply: Reply) -> None:
        reader = self._reader
        await self._hub.open(reader)
        try:
            await reply.start(200, _HEADERS)
            while data := await reader.next():
                await reply.write(data)
            await reply.end()
        finally:
            self._hub.leave(reader)
