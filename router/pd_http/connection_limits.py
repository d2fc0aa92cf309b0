"""The bounds of one HTTP connection. Fed bytes and time; no sockets, no clock."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from pd_http.framing import RequestFraming
from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from pd_http.limits import HttpLimits

# Bytes that must arrive within body_timeout_s (30 s). So 2 KiB a second is always enough, and one byte every 10 s ends
# after 30 s. A body of less than 64 KiB, which nearly every prompt is, must arrive within 30 s in all.
BODY_PROGRESS_BYTES = 64 * 1024


class ConnectionLimits:
    """Decides whether a connection must end, and why.

    Call `take` until all received bytes are taken, `head_ended` at the end of each head, `answered` at the end of each
    answer, `write_paused` and `write_resumed` as the transport's buffer fills and empties, and `due` periodically
    (no earlier than `deadline_s`). A returned Refusal ends the connection.

    Read deadlines run only while the client has to send: not during an answer, and not while `hold` stops reading.
    """

    __slots__ = (
        "_framing", "_is_held", "_keepalive_s", "_limits", "_read_by_s", "_unanswered", "_window_bytes", "_write_by_s",
        "deadline_s"
    )  # fmt: skip

    def __init__(self, limits: HttpLimits, now_s: float) -> None:
        self._limits = limits
        self._keepalive_s = limits.client_keepalive_s
        self._framing = RequestFraming()
        self._unanswered = 0  # requests with a whole head and without a complete answer
        self._window_bytes = 0  # body_bytes at the start of the current window of body_timeout_s
        self._is_held = False
        self._write_by_s = inf
        self._set_read_deadline(now_s)

    @property
    def is_waiting(self) -> bool:
        """Whether the client has to send: no complete request is being answered."""
        return not self._unanswered or (self._framing.in_body and self._unanswered == 1)

    @property
    def in_body(self) -> bool:
        """Whether a body is arriving."""
        return self._framing.in_body

    @property
    def unfinished_bytes(self) -> int:
        """Bytes received of a request that is not complete."""
        return self._framing.head_bytes + self._framing.body_bytes

    @property
    def discards(self) -> bool:
        """Whether the rest of a body is awaited although its answer is complete."""
        return self._framing.in_body and not self._unanswered

    def take(self, data: bytes, start: int, now_s: float) -> tuple[int, bool] | Refusal:
        """(end of the piece of `data` from `start` for the parser, whether a head ends there), or why to end."""
        framing = self._framing
        was_begun = framing.head_bytes > 0
        end, part_ends = framing.take(data, start)
        if framing.head_bytes > self._limits.max_head_bytes or framing.head_lines > self._limits.max_headers:
            return Refusal.LARGE_HEAD
        if not framing.in_body:
            if not was_begun and not part_ends:
                self._set_read_deadline(now_s)
            return end, part_ends
        if framing.has_long_chunk_line:
            return Refusal.BAD_REQUEST
        if part_ends:
            framing.begin()
            self._set_read_deadline(now_s)
        elif framing.body_bytes - self._window_bytes >= BODY_PROGRESS_BYTES and not self.discards:
            self._set_read_deadline(now_s)
        return end, False

    def head_ended(self, body_bytes: int | None, now_s: float) -> None:
        """Note that a request's head was read. `body_bytes`: length of the body; None: it comes in chunks."""
        self._unanswered += 1
        if body_bytes == 0:
            self._framing.begin()
        else:
            self._framing.body_follows(body_bytes)
        self._set_read_deadline(now_s)

    def answered(self, now_s: float) -> None:
        """Note that the answer to the oldest request is complete."""
        self._unanswered -= 1
        self._set_read_deadline(now_s)

    def leave(self, linger_s: float, now_s: float) -> None:
        """Note that the server leaves: a connection that is idle, from now on or later, ends after `linger_s`."""
        self._keepalive_s = linger_s
        if not self._unanswered and not self.unfinished_bytes:
            self._set_read_deadline(now_s)

    def hold(self) -> None:
        """Note that the server stops reading, to save memory."""
        self._is_held = True
        self._read_by_s = inf
        self.deadline_s = self._write_by_s

    def go_on(self, now_s: float) -> None:
        """Note that reading resumes after `hold`."""
        self._is_held = False
        self._set_read_deadline(now_s)

    def write_paused(self, now_s: float) -> None:
        """Note that the transport's buffer is full."""
        self._write_by_s = now_s + self._limits.write_timeout_s
        self.deadline_s = min(self._read_by_s, self._write_by_s)

    def write_resumed(self) -> None:
        self._write_by_s = inf
        self.deadline_s = self._read_by_s

    def due(self, now_s: float) -> Refusal | None:
        """The deadline that has passed, if any."""
        if now_s >= self._write_by_s:
            return Refusal.READS_NOTHING
        if now_s < self._read_by_s:
            return None
        if self._framing.in_body:
            return Refusal.SLOW_BODY
        return Refusal.SLOW_HEAD if self._framing.head_bytes else Refusal.IDLE

    def _set_read_deadline(self, now_s: float) -> None:
        self._read_by_s = inf if self._is_held else now_s + self._patience_s()
        self._window_bytes = self._framing.body_bytes
        self.deadline_s = min(self._read_by_s, self._write_by_s)

    def _patience_s(self) -> float:
        framing, limits = self._framing, self._limits
        if framing.in_body:
            return limits.body_timeout_s if self._unanswered <= 1 else inf  # else it waits for the answer before
        if self._unanswered:
            return inf
        return limits.head_timeout_s if framing.head_bytes else self._keepalive_s
