"""A client's connection to the router: the calls that compute leave uvicorn when their head is complete."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, ClassVar

import httptools

from pd_http.cross_origin import consent
from pd_http.endpoints import Kind, paths_of
from pd_http.protocol import BoundedProtocol
from pd_router.calls.client_call import ClientCall

if TYPE_CHECKING:
    from pd_http.reply import HeaderList
    from pd_router.edge.proxy import Proxy

PROXY_PATHS = paths_of(Kind.GENERATE, Kind.READ)
_PATHS = {path.encode(): path for path in PROXY_PATHS}


class ClientConnection(BoundedProtocol):
    """Serves `POST` to PROXY_PATHS by `proxy`; every other request by uvicorn and the app.

    The bounds of the connection, pipelining, keep-alive and the graceful end are those of the base classes for both.
    """

    proxy: ClassVar[Proxy]  # set by the subclass that `token_path` makes

    def begin_cycle(self) -> None:
        path = self._proxy_path() if self.parser.get_method() == b"POST" else None
        if path is None:
            super().begin_cycle()
            return
        is_old = self.parser.get_http_version() == "1.0"
        before = self.cycle
        self.cycle = call = ClientCall(  # type: ignore[assignment]
            path, self.headers, self.proxy.serve, self.transport, self.flow,
            keep_alive=not is_old and self.parser.should_keep_alive(), may_chunk=not is_old,
            expects_continue=self.expect_100_continue, answer_headers=self._answer_headers,
            on_complete=self.on_response_complete,
        )  # fmt: skip
        call.host = self.client[0] if self.client else ""
        if before is None or before.response_complete:
            self._start_asgi_task(call, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _proxy_path(self) -> str | None:
        """The path if it is one of PROXY_PATHS, read as uvicorn does: without a query, unquoted."""
        path = _PATHS.get(self.url)
        if path is None:
            path = urllib.parse.unquote(httptools.parse_url(self.url).path.decode("ascii"))
        return path if path in PROXY_PATHS else None

    def _answer_headers(self) -> HeaderList:
        """Of the call under way."""
        headers = [*self.server_state.default_headers]
        if self.gate.limits.allowed_origins and self.serving is not None:  # else the client is gone
            origin = next((value for name, value in self.serving.headers if name == b"origin"), None)
            headers += consent(self.gate.limits, None if origin is None else origin.decode("latin-1"))
        return headers

    def pause_writing(self) -> None:
        super().pause_writing()
        self._tell_flow()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._tell_flow()

    def _tell_flow(self) -> None:
        if isinstance(self.serving, ClientCall):
            self.serving.flow_changed()


def token_path(proxy: Proxy) -> type[ClientConnection]:
    """The class of the connections of one router."""
    return type("TokenPath", (ClientConnection,), {"proxy": proxy})
