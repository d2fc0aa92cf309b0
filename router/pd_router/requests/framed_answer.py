"""The frames of one node's answer, and the client's bytes in them. Pure: no IO, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.stream_codec import StreamParser
from pd_http.frames import AnyFrame, Frame, StreamEnd, StreamFailed, StreamHead

if TYPE_CHECKING:
    from pd_router.requests.stream_record import StreamRecord


class FramedAnswer:
    """Takes the bytes of one answer, returns those of the client, and keeps `record` up to date with them."""

    __slots__ = ("_parser", "_record", "error", "has_begun", "last")

    def __init__(self, record: StreamRecord) -> None:
        self._record = record
        self._parser: StreamParser[AnyFrame] = StreamParser(AnyFrame)
        self.has_begun = False  # the head has come; before it another node may begin the answer
        self.last: StreamEnd | StreamFailed | None = None  # how the answer ended; None: it goes on
        self.error: ValueError | None = None  # the node sent what is no frame of this stream; nothing more is taken

    def feed(self, chunk: bytes) -> bytes:
        """The client's bytes in the frames that `chunk` completes: exactly those that the record then includes.

        The bytes of an incomplete frame and what follows a failure or an error are dropped.
        """
        parts: list[bytes] = []
        if self.error is None:
            try:
                for message in self._parser.feed(chunk):
                    self._take(message, parts)
            except (ValueError, msgspec.MsgspecError) as error:
                self.error = ValueError(f"its frames are wrong: {error}")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, message: AnyFrame, parts: list[bytes]) -> None:
        if self.last is not None:
            raise ValueError("a message came after the end of the stream")
        if not self.has_begun and not isinstance(message, (StreamHead, StreamFailed)):
            raise ValueError("the answer has no head")  # `record` may have one: of the node before
        if isinstance(message, Frame):
            if not self.has_begun:  # the record may have the head of the node before
                raise ValueError("a frame came before the head of the answer")
            self._record.take(message)
            parts.append(message.data)
        elif isinstance(message, StreamHead):
            if self.has_begun:
                raise ValueError("the answer has two heads")
            self._record.begin(message)
            self.has_begun = True
        else:
            self.last = message
            if isinstance(message, StreamEnd):
                parts.append(message.data)
