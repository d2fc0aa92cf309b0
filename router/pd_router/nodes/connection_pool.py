"""Kept-alive connections to the nodes. The number of connections has no bound: the nodes admit requests."""

from __future__ import annotations

import asyncio
import errno
import ssl
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from pd_http.files import has_files
from pd_http.sockets import watch_path
from pd_router.nodes.node_connection import AnswerBroken, NodeConnection, Unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_router.nodes.node_connection import NodeExchange


# Descriptors, ports or memory of this process or machine have run out
_OWN = {errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}


class NoConnection(OSError):
    """No connection to the node within the deadline. `is_own`: the cause is this process, and not the node."""

    is_own = False  # the lookup of a name does not tell why it failed


class _Origin:
    """One address, and its idle connections, the longest idle first."""

    __slots__ = ("host", "host_line", "idle", "num_open", "port", "prefix", "tls", "uses")

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, "checked when the node was named"
        self.host = parts.hostname.encode("idna").decode()
        self.port = parts.port or (443 if tls else 80)
        self.tls = tls
        self.prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.host_line = f"host: {host}:{parts.port}\r\n" if parts.port else f"host: {host}\r\n"
        self.idle: list[tuple[float, NodeConnection]] = []  # (since when, connection)
        self.num_open = 0
        self.uses = 0  # that wait for a connection


class ConnectionPool:
    """Sends requests to base URLs. Use it in one event loop; `close` ends every connection.

    A connection that was idle for `keepalive_s` is closed. `connect_timeout_s`: for name lookup, TCP and TLS together.
    """

    def __init__(
        self,
        connect_timeout_s: float,
        keepalive_s: float,
        make_tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        """`make_tls`: called at the first https:// URL."""
        self._connect_timeout_s = connect_timeout_s
        self._keepalive_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._origins: dict[str, _Origin] = {}
        self._open: dict[NodeConnection, _Origin] = {}
        self._make_tls = make_tls
        self._tls: ssl.SSLContext | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Open connections."""
        return len(self._open)

    async def send(
        self,
        url: str,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        body: bytes = b"",
        *,
        is_fresh: bool = False,
    ) -> NodeExchange:
        """Send one request. `is_fresh`: on a new connection. Raises NoConnection, Unanswered."""
        origin = self._origins.get(url) or self._add(url)
        connection = None if is_fresh else self._take(origin)
        if connection is None:
            connection = await self._connect(origin)
        lines = [f"{method} {origin.prefix}{path} HTTP/1.1\r\n{origin.host_line}"]
        lines += [f"{name}: {value}\r\n" for name, value in headers]
        lines.append("\r\n" if method == "GET" else f"content-length: {len(body)}\r\n\r\n")
        return connection.send("".join(lines).encode("latin-1"), body)

    def close(self) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self._open):
            connection.fail(AnswerBroken("the router closed the connection"))

    def _add(self, url: str) -> _Origin:
        tls = None
        if url.startswith("https:"):
            tls = self._tls = self._tls or self._make_tls()
        origin = self._origins[url] = _Origin(url, tls)
        return origin

    def _take(self, origin: _Origin) -> NodeConnection | None:
        """The connection that was used last, if any is still good."""
        oldest_s = self._loop.time() - self._keepalive_s
        while origin.idle:
            since_s, connection = origin.idle.pop()
            if since_s > oldest_s and connection.is_open:
                return connection
            connection.abandon()
        return None

    async def _connect(self, origin: _Origin) -> NodeConnection:
        def made() -> NodeConnection:
            return NodeConnection(self._loop, lambda connection: self._free(origin, connection), self._lost)

        origin.uses += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                there, connection = await self._loop.create_connection(made, origin.host, origin.port, ssl=origin.tls)
        except OSError as error:
            limit = f"no answer within {self._connect_timeout_s:g} s" if isinstance(error, TimeoutError) else error
            failure = NoConnection(f"cannot connect to {origin.host}:{origin.port}: {limit}")
            failure.is_own = error.errno in _OWN or not has_files()
            raise failure from error
        finally:
            origin.uses -= 1
        if not connection.is_open:
            raise Unanswered("the connection was closed at once")
        watch_path(there.get_extra_info("socket"))
        self._open[connection] = origin
        origin.num_open += 1
        return connection

    def _free(self, origin: _Origin, connection: NodeConnection) -> None:
        origin.idle.append((self._loop.time(), connection))
        if self._sweep_timer is None:
            self._sweep_timer = self._loop.call_later(self._keepalive_s, self._sweep)

    def _lost(self, connection: NodeConnection) -> None:
        origin = self._open.pop(connection, None)
        if origin is not None:
            origin.num_open -= 1

    def _sweep(self) -> None:
        """Close what was idle for too long, and forget addresses without connections."""
        self._sweep_timer = None
        oldest_s = self._loop.time() - self._keepalive_s
        for url, origin in list(self._origins.items()):
            kept = []
            for since_s, connection in origin.idle:
                if since_s > oldest_s and connection.is_open:
                    kept.append((since_s, connection))
                else:
                    connection.abandon()
            origin.idle = kept
            if not origin.num_open and not origin.uses:
                del self._origins[url]
        if self._open:
            self._sweep_timer = self._loop.call_later(self._keepalive_s, self._sweep)
