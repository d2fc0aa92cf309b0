"""The bounds of an HTTP server. The flags of router and nodes are made from these fields."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pd_http.errors import StartupError
from pd_http.settings import check_numbers, setting
from pd_http.tls import TlsFiles

KIB = 1024
# As browsers write them: other spellings would never match. `null` is the origin of sandboxed pages of all sites
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits(TlsFiles):
    """Bounds on what HTTP clients may send and hold, and TLS. Raises StartupError if one is out of range."""

    client_keepalive_s: float = setting(
        75.0, "Seconds that a connection may stay open without a request.", positive=True
    )
    head_timeout_s: float = setting(
        10.0, "Seconds from the first byte of a request to the end of its headers, and for a TLS handshake."
    )
    body_timeout_s: float = setting(
        30.0, "Seconds within which 64 KiB more of a request's body, or the rest of it, must arrive."
    )
    write_timeout_s: float = setting(
        60.0, "Seconds that a full send buffer (64 KiB) may wait for the client to read 48 KiB of it."
    )
    max_head_kb: int = setting(64, "Largest request line and headers in KiB, trailers included.", least=1)
    max_headers: int = setting(256, "Most header lines of a request.", least=1)
    max_unfinished_mb: float = setting(
        48.0, "Memory in MB of requests that have not arrived whole, over all connections.", positive=True
    )
    max_held_mb: float = setting(
        192.0, "Memory in MB of whole bodies and of answers above 64 KiB, over all requests. One may have half of it.",
        positive=True,
    )  # fmt: skip
    max_connections: int = setting(
        16384, "Most open connections; fewer where the process may not open that many files.", least=1
    )
    max_connections_per_address: int = setting(
        0, "Most open connections of one client address (IPv6: of one /64). 0: three quarters of all."
    )

    allowed_origins: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may call this server from a browser (CORS), or *. Default: none.",
        metavar="ORIGIN",
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise StartupError(f"--allowed-origins {origin}: write SCHEME://HOST[:PORT] in lower case, or *")

    @property
    def max_head_bytes(self) -> int:
        return self.max_head_kb * KIB

    @property
    def max_unfinished_bytes(self) -> int:
        return int(self.max_unfinished_mb * 1e6)

    @property
    def max_held_bytes(self) -> int:
        return int(self.max_held_mb * 1e6)

    @property
    def tick_s(self) -> float:
        """Seconds between two checks of the deadlines: a quarter of the shortest deadline, at most 1 s."""
        shortest = min(self.client_keepalive_s, self.head_timeout_s, self.body_timeout_s, self.write_timeout_s)
        return min(1.0, shortest / 4)
