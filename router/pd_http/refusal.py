"""Why an HTTP server ends a connection by itself, and its answer."""

from __future__ import annotations

from enum import Enum

import orjson

from pd_http.errors import error_body


class Refusal(Enum):
    """Value: (word for the metric, HTTP status or 0 for no answer, message)."""

    BAD_REQUEST = ("bad_request", 400, "this is not HTTP/1.1")
    HOST = ("host", 400, "a request in HTTP/1.1 has one Host header")
    EXPECTATION = ("expectation", 417, "Expect: of expectations only 100-continue can be met")
    TRANSFER_CODING = ("transfer_coding", 501, "Transfer-Encoding: of codings only chunked is read")
    SLOW_HEAD = ("slow_head", 408, "the request's headers did not arrive in time")
    SLOW_BODY = ("slow_body", 408, "the request's body did not arrive in time")
    LARGE_HEAD = ("large_head", 431, "the request's headers are too large")
    NO_MEMORY = ("unfinished_memory", 503, "too many requests are arriving at once; try again")
    CONNECTIONS = ("connections", 503, "too many connections are open; try again")
    CONNECTIONS_OF_ADDRESS = ("connections_of_address", 503, "too many connections are open from your address")
    FILES = ("files", 503, "this process has no file descriptors left; try again")
    IDLE = ("idle", 0, "no request came")
    PLACE_NEEDED = ("place_needed", 0, "no request was under way, and a new connection needed the place")
    SLOW_HANDSHAKE = ("slow_handshake", 0, "the TLS handshake did not end in time")
    TLS = ("tls", 0, "the TLS handshake failed")
    READS_NOTHING = ("reads_nothing", 0, "the client did not read its answer")

    def __init__(self, word: str, status: int, message: str) -> None:
        self.word = word
        self.status = status
        self.message = message

    @property
    def is_logged(self) -> bool:
        """Whether the refusal is logged. The end of an idle connection is not."""
        return self is not Refusal.IDLE

    @property
    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return orjson.dumps(error_body(self.message, kind, self.word))
