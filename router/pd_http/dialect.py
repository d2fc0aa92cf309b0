"""The API in which a client speaks: how its bodies become chat requests, and how errors and streams end in it.

A *dialect* is pure. Nodes serve `/v1/messages` and `/v1/responses` as the chat request that `to_chat` makes; the router
only names prompts by it. This file has the dialect of chat and completions, which is OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from pd_http.errors import InvalidRequest
from pd_http.left_out import EMPTY, known, members_of
from pd_http.member_bounds import BAD_JSON, CHAT_BOUNDS
from pd_http.sse import SSE_DONE, event_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_http.errors import PdError
    from pd_http.left_out import Kind, LeftOut

RawFields = Mapping[str, msgspec.Raw]
Struct = TypeVar("Struct")
MANY_TOOLS = 4096  # of an API without a limit: agents send about 130
_WHOLE = re.compile(rb"[ \t\n\r]*(-?[0-9]+)\.0+[ \t\n\r]*")


class ToolLimits(NamedTuple):
    """Of the tools of one request."""

    tools: int
    name_chars: int


class CallForm(NamedTuple):
    """How the answer writes a call of a function that the client has under another name, or as another kind of tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False  # a tool that takes text


class ChatRequest(NamedTuple):
    """The fields of a chat body, and what of the client's body is not in it. `calls`: by the name of the function."""

    fields: RawFields
    left_out: Mapping[str, Kind] = EMPTY
    calls: Mapping[str, CallForm] = EMPTY


class Dialect:
    """OpenAI's chat and completions."""

    token_limit = "max_tokens"  # the field that bounds an answer
    requires_limit = False
    tool_limits = ToolLimits(128, 64)
    params: Mapping[str, str] = {}  # the client's names of chat fields, for errors
    bounds = CHAT_BOUNDS

    def to_chat(self, fields: RawFields) -> ChatRequest:
        """The chat request that the body with these fields asks for. Raises InvalidRequest."""
        return ChatRequest(fields)

    def status(self, error: PdError) -> int:
        return error.status

    def error_body(self, error: PdError) -> dict[str, Any]:
        """In the client's names of fields. One that is also a word is renamed where the message begins with it."""
        body, name = error.to_body(), error.param or ""
        if name in self.params:
            body["error"]["param"] = given = self.params[name]
            begins = "" if "_" in name else "^"
            body["error"]["message"] = re.sub(rf"{begins}\b{name}\b", given, str(error))
        return body

    def error_event(self, error: PdError) -> bytes:
        """The last bytes of a stream that fails."""
        return event_bytes(self.error_body(error)) + SSE_DONE

    def is_whole(self, tail: bytes) -> bool:
        """Whether a stream with these last bytes ended as one should: with its last event, or with an error."""
        return tail.rstrip().endswith(b"[DONE]") or b'data: {"error"' in tail


OPENAI = Dialect()


def read(
    fields: RawFields, kind: type[Struct], left_out: LeftOut, rewrite: Callable[[dict[str, Any]], None] | None = None
) -> Struct:
    """The fields of the struct `kind`. Raises InvalidRequest that names the wrong place.

    A body that has more than the struct is decoded twice: `rewrite` replaces what this server does not know, and what
    is ignored is named in `left_out`.
    """
    names = kind.__struct_fields__  # type: ignore[attr-defined]
    given = {name: whole_number(fields[name]) for name in names if name in fields}
    try:
        try:
            return msgspec.json.decode(msgspec.json.encode(given), type=kind)
        except msgspec.ValidationError:
            values = {name: msgspec.json.decode(raw) for name, raw in given.items()}
        if rewrite is not None:
            rewrite(values)
        shapes = members_of(kind)  # type: ignore[arg-type]
        pruned = {name: known(value, shapes[name], name, left_out) for name, value in values.items()}
        return msgspec.convert(pruned, kind)
    except BAD_JSON as error:
        raise refusal(str(error)) from error


def whole_number(raw: msgspec.Raw) -> msgspec.Raw:
    """4.0 as 4: some languages write integers so, and msgspec refuses it. All else as it is."""
    match = _WHOLE.fullmatch(raw)
    return raw if match is None else msgspec.Raw(match[1])


def refusal(message: str, prefix: str = "") -> InvalidRequest:
    """msgspec's "Invalid value 'image' - at `$.messages[0].content[1].type`" as an error. `prefix`: of the place."""
    reason, _, path = message.partition(" - at ")
    place = prefix + path.strip("`").removeprefix("$").lstrip("." if not prefix else "")
    param = re.split(r"[.\[]", place)[0]
    if not place and (missing := re.search("required field `(\\w+)`", reason)):
        return InvalidRequest(f"{missing[1]} is required", missing[1], "missing_required_parameter")
    if place.endswith(".type"):
        reason += " is not supported: this server takes text, and functions as tools"
        return InvalidRequest(f"{place}: {reason}", param, "unsupported_value")
    return InvalidRequest(f"{place or 'body'}: {reason.replace(' | null', '')}", param or None, "invalid_type")


def raw_fields(chat: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
    """These values as JSON. None: the chat request does not have the field."""
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in chat.items() if value is not None}
