"""Reading a request's body within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

BODY_BYTES_PER_TOKEN = 64  # a token is 4 bytes of text on average; escaped and in JSON it can be tens
# A bias for each of 131,072 tokens has 2 MB. A list of 256 prompts, each 4,096 token ids long, has 7.
BODY_BYTES_BESIDE = 8 << 20


class ClientGone(Exception):
    """The client has closed its connection, or was made to."""


class BodyTooLong(Exception):
    """The message names the bound."""


def longest_body(max_model_len: int) -> int:
    """Bytes of the longest useful body: any prompt that fits the model, however it is written, and lists of tokens or
    of prompts beside it."""
    return max_model_len * BODY_BYTES_PER_TOKEN + BODY_BYTES_BESIDE


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """The whole request body. Raises BodyTooLong, at once when the headers tell the length, and ClientGone."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise BodyTooLong(f"the request body is longer than {max_bytes} bytes")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise BodyTooLong(f"the request body is longer than {max_bytes} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
