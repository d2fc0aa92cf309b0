"""How a connection goes on after a head that offered another protocol: in HTTP/1.1 (RFC 9110, 7.8).

The parser takes all bytes after such a head for the other protocol. So a new parser goes on, from a head that says
the same about the body and offers nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class _Callbacks:
    """The parser's callbacks of a connection. Those of a head do nothing while `is_repeated`."""

    __slots__ = ("_connection", "is_repeated", "on_body", "on_message_complete")

    def __init__(self, connection: HttpToolsProtocol) -> None:
        self._connection = connection
        self.is_repeated = True
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if not self.is_repeated:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.is_repeated:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_repeated:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.is_repeated:
            self._connection.on_headers_complete()


def parser_after(num_body: int | None, connection: HttpToolsProtocol) -> httptools.HttpRequestParser:
    """A parser for the bytes after a head with a body of `num_body` bytes; None: in chunks.

    `connection.parser` must still be the parser before: a request without a body ends here, in `on_message_complete`.
    """
    callbacks = _Callbacks(connection)
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    body = b"transfer-encoding: chunked" if num_body is None else b"content-length: %d" % num_body
    connection.parser = parser
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % body)
    callbacks.is_repeated = False
    return parser
