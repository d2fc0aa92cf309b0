"""Where the requests on one connection begin and end, found by counting bytes only.

The HTTP parser decides what the bytes mean. The framing counts the bytes of each part, so that bounds also hold for
bytes that the parser buffers: a header line or a chunk size that never ends.
"""

from __future__ import annotations

import re

_END_OF_HEAD = b"\r\n\r\n"
_HEX = re.compile(rb"[0-9A-Fa-f]+")
_MAX_CHUNK_LINE = 1024  # a chunk's size and its extensions, which are ignored


class RequestFraming:
    """Takes all bytes of a connection, in pieces of any size.

    Invariant: the parts that it finds do not depend on how the bytes were cut.
    """

    __slots__ = (
        "_chunked", "_in_trailer", "_left", "_line", "_tail", "body_bytes", "has_long_chunk_line", "head_bytes",
        "head_lines", "in_body",
    )  # fmt: skip

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a request: the next byte is its first."""
        self.in_body = False
        self._chunked = False
        self.head_bytes = 0  # with trailers
        self.head_lines = 0
        self.body_bytes = 0  # with the framing of chunks
        self.has_long_chunk_line = False  # longer than any useful one
        self._tail = b""  # last bytes of the head that may be part of _END_OF_HEAD
        self._left = 0  # bytes left of a body, or of a chunk and its CR LF
        self._line = b""  # unfinished size line or trailer line of a chunked body
        self._in_trailer = False

    def take(self, data: bytes, start: int) -> tuple[int, bool]:
        """(end of the piece of `data` from `start` that belongs to the current part, whether the part ends there).

        Call `body_follows` or `begin` after the end of a head, and `begin` after the end of a body.
        """
        if not self.in_body:
            return self._take_head(data, start)
        if self._chunked:
            return self._take_chunks(data, start)
        end = min(len(data), start + self._left)
        self._left -= end - start
        self.body_bytes += end - start
        return end, not self._left

    def body_follows(self, num_bytes: int | None) -> None:
        """Call it after a head. `num_bytes` None: the body comes in chunks."""
        self.in_body = True
        self._chunked = num_bytes is None
        self._left = num_bytes or 0

    def _take_head(self, data: bytes, start: int) -> tuple[int, bool]:
        blank = start
        if not self._tail:
            while blank < len(data) and data[blank] in b"\r\n":  # skip empty lines before a request
                blank += 1
            self.head_bytes += blank - start
            if blank == len(data):
                return blank, False
        kept = len(self._tail)
        found = (self._tail + data[blank : blank + 3]).find(_END_OF_HEAD) if kept else -1
        if found >= 0:
            end = blank + found + len(_END_OF_HEAD) - kept
        else:
            found = data.find(_END_OF_HEAD, blank)
            end = found + len(_END_OF_HEAD) if found >= 0 else len(data)
        self._tail = (self._tail + data[max(blank, end - 3) : end])[-3:]
        self.head_bytes += end - blank
        self.head_lines += data.count(b"\n", blank, end)
        return end, found >= 0

    def _take_chunks(self, data: bytes, start: int) -> tuple[int, bool]:
        at = start
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            newline = data.find(b"\n", at)
            end = newline + 1 if newline >= 0 else len(data)
            self._line += data[at:end]
            if self._in_trailer:
                self._line = self._line.strip()[:1]  # only whether it is blank matters
                self.head_bytes += end - at
                self.head_lines += newline >= 0
            elif len(self._line) > _MAX_CHUNK_LINE:
                self.has_long_chunk_line = True
            at = end
            if newline >= 0 and self._line_ends():
                self.body_bytes += at - start
                return at, True
        self.body_bytes += at - start
        return at, False

    def _line_ends(self) -> bool:
        """Whether the body ends with this line."""
        line, self._line = self._line.strip(), b""
        if self._in_trailer:
            return not line
        size = _HEX.match(line)
        number = int(size[0], 16) if size and len(size[0]) <= 16 else 0  # the parser refuses any other size
        self._left = number + 2 if number else 0
        self._in_trailer = not number
        return False
