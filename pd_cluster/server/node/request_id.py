"""Ids of requests, as clients send them and answers carry them."""

from __future__ import annotations

MAX_REQUEST_ID_CHARS = 128


def is_request_id(text: str) -> bool:
    """Whether a client's id is safe in headers and logs."""
    return 0 < len(text) <= MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()
