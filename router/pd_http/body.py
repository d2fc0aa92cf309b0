"""Reads a request's body within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import BodyTooLarge, UnreadCoding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Receive, Scope

BODY_BYTES_PER_TOKEN = 64  # a token is 4 bytes of text on average; escaped and in JSON it can be tens
# A bias for each of 131,072 tokens has 2 MB. A list of 256 prompts, each 4,096 token ids long, has 7.
BODY_BYTES_BESIDE = 8 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # before a JSON text; a parser may ignore it (RFC 8259, 8.1)


class ClientGone(Exception):
    """The client's connection is closed, by the client or by this server."""


def longest_body(max_model_len: int) -> int:
    """Bytes of the longest useful body: any prompt that fits the model, in any encoding, plus lists of tokens or of
    prompts."""
    return max_model_len * BODY_BYTES_PER_TOKEN + BODY_BYTES_BESIDE


def check_declared(headers: Iterable[tuple[bytes, bytes]], max_bytes: int) -> None:
    """Raise what the headers say of a body that cannot be read: BodyTooLarge or UnreadCoding."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise BodyTooLarge(f"the request body is longer than {max_bytes} bytes")
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            coding = value.decode("ascii", "replace")
            raise UnreadCoding(f"Content-Encoding: {coding} is not supported: send the body as it is, not compressed")


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body, without a byte order mark.

    Raises ClientGone, and BodyTooLarge or UnreadCoding before reading if the headers declare it.
    """
    check_declared(scope["headers"], max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(f"the request body is longer than {max_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return (parts[0] if len(parts) == 1 else b"".join(parts)).removeprefix(BYTE_ORDER_MARK)
