"""What clients send, whole and cut into pieces, and what the limits say to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from pd_http.connection_limits import ConnectionLimits
from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_http.limits import HttpLimits

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")
_HEADER = st.binary(min_size=1, max_size=30).map(lambda raw: b"x: " + raw.replace(b"\r", b"r").replace(b"\n", b"n"))


@dataclass
class Outcome:
    """How a connection went: the requests that came whole, as (bytes of the head, bytes of the body)."""

    requests: list[tuple[int, int]] = field(default_factory=list)
    refusal: Refusal | None = None


def feed(limits: HttpLimits, pieces: Iterable[bytes]) -> Outcome:
    """What comes of `pieces` at the time 0. Every whole request is answered at once."""
    watched, outcome = ConnectionLimits(limits, 0.0), Outcome()
    head, num_head, num_body, in_body = b"", 0, 0, False
    for piece in pieces:
        at = 0
        while at < len(piece):
            taken = watched.take(piece, at, 0.0)
            if isinstance(taken, Refusal):
                outcome.refusal = taken
                return outcome
            end, head_ends = taken
            assert end > at or head_ends
            if in_body:
                num_body += end - at
            else:
                head += piece[at:end]
            at = end
            if head_ends:
                length = _LENGTH.search(head)
                chunked = b"\r\ntransfer-encoding: chunked\r\n" in head  # a header's value may hold the name
                num_head, head, num_body = len(head), b"", 0
                watched.head_ended(None if chunked else int(length[1]) if length else 0, 0.0)
                in_body = True
            if in_body and not watched.in_body:
                outcome.requests.append((num_head, num_body))
                watched.answered(0.0)
                in_body = False
    return outcome


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, tuple[int, int]]:
    """A request, and the sizes of its head and body as sent."""
    blank = draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
    lines = [b"POST / HTTP/1.1", *draw(st.lists(_HEADER, max_size=4))]
    kind = draw(st.sampled_from(["none", "length", "chunks"]))
    body = b""
    if kind == "length":
        body = draw(st.binary(max_size=40))
        lines.append(b"content-length: %d" % len(body))
    elif kind == "chunks":
        lines.append(b"transfer-encoding: chunked")
        extension = draw(st.sampled_from([b"", b";x=1"]))
        chunks = draw(st.lists(st.binary(min_size=1, max_size=20), max_size=4))
        trailers = draw(st.lists(_HEADER, max_size=2))
        body = b"".join(b"%X%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks)
        body += b"0\r\n" + b"".join(line + b"\r\n" for line in trailers) + b"\r\n"
    head = blank + b"\r\n".join([*lines, b"", b""])
    return head + body, (len(head), len(body))


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """`data` in pieces, cut at these places (modulo its length)."""
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


cuts = st.lists(st.integers(min_value=0, max_value=1 << 16), max_size=12)
