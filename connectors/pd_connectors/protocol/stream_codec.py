"""Messages in a stream of bytes: msgpack, with a length of 4 bytes (big-endian) before each."""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 64 << 20
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: msgspec.Struct) -> bytes:
    """The message with its length before it."""
    data = _encoder.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


@functools.cache
def _decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Making one takes 6 us, and each stream of a router has a parser."""
    return msgspec.msgpack.Decoder(kind)


class StreamParser(Generic[T]):
    """Takes bytes, returns whole messages of the type that it was made for."""

    __slots__ = ("_buffer", "_decoder")

    def __init__(self, kind: Any) -> None:
        """`kind`: a tagged union of structs."""
        self._buffer = bytearray()
        self._decoder: msgspec.msgpack.Decoder[T] = _decoder_of(kind)

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes. Raises ValueError for anything else than messages of this type."""
        self._buffer += data
        messages: list[T] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            length = int.from_bytes(self._buffer[at:start], "big")
            if length > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message has {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
            if len(self._buffer) < start + length:
                break
            messages.append(self._decoder.decode(self._buffer[start : start + length]))
            at = start + length
        del self._buffer[:at]
        return messages

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a message that has not come whole."""
        return len(self._buffer)
