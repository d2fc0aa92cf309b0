"""A client's body of another API, as the chat body that is served in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.fields import ELSEWHERE, refuse
from pd_http.dialects import MESSAGES, dialect_of
from pd_http.member_bounds import MAX_NODE_FIELDS, top_level

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_http.dialect import CallForm, RawFields
    from pd_http.left_out import Kind


class TranslatedBody(NamedTuple):
    """`given`: the client's fields. `chat`: a chat body. `left_out`, `calls`: see `ChatRequest`."""

    given: RawFields
    chat: bytes
    left_out: Mapping[str, Kind]
    calls: Mapping[str, CallForm]


def translated(path: str, raw: bytes) -> TranslatedBody:
    """The body `raw` of `path`. Raises InvalidRequest, also for fields of chat that have no place in that API."""
    given = top_level(raw, most=MAX_NODE_FIELDS)
    refuse(given, ELSEWHERE[path])
    if path == MESSAGES and bytes(given.get("max_tokens", b"null")).strip() == b"null":
        raise InvalidRequest("max_tokens is required", "max_tokens", "missing_required_parameter")
    asked = dialect_of(path).to_chat(given)
    return TranslatedBody(given, msgspec.json.encode(asked.fields), asked.left_out, asked.calls)
