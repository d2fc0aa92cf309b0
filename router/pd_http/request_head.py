"""What the server itself must know of a request's head: where its body ends, and whether it asks for the impossible."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

_ORIGIN = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The head of one request. The parser has refused lengths that contradict each other."""

    num_body: int | None  # bytes of the body; None: it comes in chunks

    @classmethod
    def of(cls, version: str, headers: Iterable[tuple[bytes, bytes]]) -> RequestHead | Refusal:
        """The head with these headers, names in lower case, or why it is refused (RFC 9112, 3.2, 6.1, 6.3)."""
        if version not in ("1.0", "1.1"):  # a request line without a version is HTTP/0.9
            return Refusal.BAD_REQUEST
        num_body: int | None = 0
        num_hosts = 0
        for name, value in headers:
            if name == b"content-length":
                num_body = int(value)
            elif name == b"host":
                num_hosts += 1
            elif name == b"transfer-encoding":
                *others, last = value.lower().split(b",")
                if last.strip(b" \t") != b"chunked":  # the end of the body cannot be found
                    return Refusal.BAD_REQUEST
                if others:
                    return Refusal.TRANSFER_CODING
                num_body = None
            elif name == b"expect" and version == "1.1" and value.strip().lower() not in (b"", b"100-continue"):
                return Refusal.EXPECTATION
        if num_hosts > 1 or (version == "1.1" and not num_hosts):
            return Refusal.HOST
        return cls(num_body)


def origin_form(target: bytes) -> bytes:
    """The path and query of a target in absolute form, which every server must take (RFC 9112, 3.2.2)."""
    rest = _ORIGIN.sub(b"", target, count=1)
    return rest if rest.startswith((b"/", b"*")) or rest == target else b"/" + rest
