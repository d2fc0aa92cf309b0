"""Bytes sent to an HTTP port as they are, and the answers that came back, taken apart."""

from __future__ import annotations

import io
import socket
import time
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httptools

from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_S = 2.0  # a complete request has its first byte of an answer before this, usually
INCOMPLETE_S = 0.01  # what is incomplete waits for more: a moment for a refusal, then the end
RECEIVED = 65536


@dataclass(frozen=True)
class Reply:
    """One answer. `is_whole`: its body ended as its head said it would."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool


def exchange(url: str, raw: bytes, answer_s: float = ANSWER_S) -> tuple[list[Reply], bool]:
    """Send `raw`, then read until the server closes; (answers, whether this side closed first, after a silence).

    `answer_s`: the silence after which a complete request is given up.
    AssertionError when the server does neither answer nor close within HANG_S.
    """
    parts = urlsplit(url)
    assert parts.hostname
    assert parts.port
    received = bytearray()
    gave_up = False
    silence_s = answer_s if is_complete(raw) else INCOMPLETE_S
    with socket.create_connection((parts.hostname, parts.port), HANG_S) as connection:
        end_s = time.monotonic() + HANG_S
        try:
            connection.sendall(raw)
            connection.settimeout(silence_s)
            while True:
                try:
                    piece = connection.recv(RECEIVED)
                except TimeoutError:
                    assert time.monotonic() < end_s, f"neither an answer nor an end: {bytes(received)!r}"
                    if not gave_up:
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(ANSWER_S)
                        gave_up = True
                    continue
                if not piece:
                    break
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            pass  # it closed with bytes of ours unread
    return list(replies(bytes(received))), gave_up


def is_complete(raw: bytes) -> bool:
    """Whether a parser finds the end of a request in `raw`, or an error: only then an answer is to be waited for."""
    seen = _Seen()
    parser = httptools.HttpRequestParser(seen)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return True
    return seen.complete


class _Seen:
    complete = False

    def on_message_complete(self) -> None:
        self.complete = True


def replies(raw: bytes) -> Iterator[Reply]:
    """The answers in what a server sent. AssertionError for bytes that are none."""
    stream = io.BytesIO(raw)
    while stream.tell() < len(raw):
        begins = raw[stream.tell() : stream.tell() + 200]
        response = HTTPResponse(_Readable(stream))  # type: ignore[arg-type]
        try:
            response.begin()
        except (HTTPException, ValueError) as error:
            raise AssertionError(f"no answer of HTTP: {begins!r}") from error
        try:
            body, is_whole = response.read(), True
        except HTTPException:
            body, is_whole = b"", False
            stream.seek(0, io.SEEK_END)
        yield Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, body, is_whole)


class _Readable:
    """As much of a socket as HTTPResponse wants: it reads from one stream, which stays open."""

    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def makefile(self, _: str) -> io.BufferedReader:
        return _Unclosed(self._stream)  # type: ignore[return-value]


class _Unclosed:
    def __init__(self, stream: io.BytesIO) -> None:
        self.read, self.readline, self.readinto = stream.read, stream.readline, stream.readinto

    def close(self) -> None:
        """The next answer follows in the same stream."""

    def flush(self) -> None:
        """Nothing is written."""
