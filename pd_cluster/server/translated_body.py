"""A client's body of another API, as the chat body that is served in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pd_cluster.server.fields import ELSEWHERE, refuse
from pd_cluster.server.schema import object_fields
from pd_http.dialects import dialect_of

if TYPE_CHECKING:
    from pd_http.dialect import RawFields


class TranslatedBody(NamedTuple):
    """`given`: the client's fields. `chat`: a chat body. `ignored`: members of the client's that nothing reads."""

    given: RawFields
    chat: bytes
    ignored: frozenset[str]


def translated(path: str, raw: bytes) -> TranslatedBody:
    """The body `raw` of `path`. Raises InvalidRequest, also for fields of chat that have no place in that API."""
    given = object_fields(raw)
    refuse(given, ELSEWHERE[path])
    chat, ignored = dialect_of(path).to_chat(given)
    return TranslatedBody(given, msgspec.json.encode(chat), ignored)
