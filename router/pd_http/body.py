"""Reads a request's body within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import BodyTooLarge

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

BODY_BYTES_PER_TOKEN = 64  # a token is 4 bytes of text on average; escaped and in JSON it can be tens
# A bias for each of 131,072 tokens has 2 MB. A list of 256 prompts, each 4,096 token ids long, has 7.
BODY_BYTES_BESIDE = 8 << 20


class ClientGone(Exception):
    """The client's connection is closed, by the client or by this server."""


def longest_body(max_model_len: int) -> int:
    """Bytes of the longest useful body: any prompt that fits the model, in any encoding, plus lists of tokens or of
    prompts."""
    return max_model_len * BODY_BYTES_PER_TOKEN + BODY_BYTES_BESIDE


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises ClientGone, and BodyTooLarge, before reading if the headers declare the length."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the request body is longer than {max_bytes} bytes")
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
            return parts[0] if len(parts) == 1 else b"".join(parts)
