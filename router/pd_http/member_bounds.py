"""How many members a JSON body may have, found before anything is made of them.

A server's work rises with the members of a body, and its bytes say little of them: 8 MB are one prompt, or 2.7 million
empty objects, which would stop an event loop for seconds. Marks outside of strings are counted by C code:

    `value`   a member of an object or of a list, at any level
    `entry`   an object or a list in a list: a message, part, call, tool, item, block, alternative of a schema

Text has the same marks, so a first count, of all of them, is an upper bound. A body that exceeds it is counted exactly.
"""

from __future__ import annotations

from operator import sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pd_http.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# What msgspec raises: not JSON or of another type, not UTF-8, nested too deeply
BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_FIELDS = 256  # of a body, read or not
MAX_ENTRIES = 1 << 14
MAX_VALUES = 1 << 17
MAX_UNLISTED_VALUES = 1 << 15  # a field takes 0.5 us where a body's top level becomes a dict
FREE_BYTES = 3 * MAX_ENTRIES  # of a body that is not counted: `{},` is the smallest entry


class Members(NamedTuple):
    """How many members a value has, or may have."""

    entries: int
    values: int
    strings: int  # names of members, too


ALL_FIELDS: Final = Members(MAX_ENTRIES, MAX_VALUES, 2 * MAX_VALUES)  # together, but those of tokens
UNLISTED: Final = Members(MAX_ENTRIES, MAX_UNLISTED_VALUES, 2 * MAX_UNLISTED_VALUES)  # those that BodyFields lacks
# Lists of tokens, which C code decodes by type: 20 ns a value. A vocabulary has up to 262,144 tokens
_VOCABULARY = Members(0, 1 << 18, 1 << 18)
TOKEN_FIELDS: Final[dict[str, Members]] = {
    "prompt": Members(256, 1 << 21, 256),
    "input": Members(2048, 1 << 21, 2048),  # of embeddings
    "tokens": Members(0, 1 << 21, 0),
    "logit_bias": _VOCABULARY,
    "stop_token_ids": _VOCABULARY,
    "allowed_token_ids": _VOCABULARY,
    # Of a router or a decode node: names of blocks, choices of a stream that goes on, the sampling
    "kv_transfer_params": Members(1 << 16, 1 << 21, (1 << 18) + 1024),
}


class BodyFields(msgspec.Struct):
    """Fields with members in numbers. All others together have the bound UNLISTED.

    A decoder passes over an unknown field in 1 ns a byte, and needs 1 ns more for each name here.
    """

    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    structured_outputs: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    tokens: Raw | UnsetType = UNSET
    logit_bias: Raw | UnsetType = UNSET
    stop_token_ids: Raw | UnsetType = UNSET
    allowed_token_ids: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET


def check_members(raw: bytes, token_fields: Collection[str] = TOKEN_FIELDS, free_bytes: int = FREE_BYTES) -> None:
    """Raises InvalidRequest if the body has too many members, or is not a JSON object.

    `token_fields`: those of TOKEN_FIELDS that are lists of tokens in the client's API. `free_bytes`: bodies of so many
    are not looked at.
    """
    if len(raw) <= free_bytes or _num_marks(raw).values <= MAX_ENTRIES:
        return
    given = {name: bytes(one) for name, one in msgspec.structs.asdict(_decoded(raw, BodyFields)).items() if one}
    listed = [*given.values()]
    tokens = {name: given.pop(name) for name in token_fields if name in given}
    for name, json in tokens.items():
        if excess := _excess(json, (), TOKEN_FIELDS[name]):
            raise too_many(name, *excess, name)
    if excess := _excess(raw, tokens.values(), ALL_FIELDS):
        largest = max(given, key=lambda name: _num_marks(given[name]).values, default=None)
        raise too_many("the body", *excess, largest, f", most of them in {largest}" if largest else "")
    if excess := _excess(raw, listed, UNLISTED):
        raise too_many("the body", *excess, None, " in fields that are ignored or small elsewhere")


def top_level(raw: bytes | Raw) -> dict[str, Raw]:
    """The fields of a JSON object. Raises InvalidRequest for anything else, and for too many fields."""
    fields: dict[str, Raw] = _decoded(raw, dict[str, Raw])
    if len(fields) > MAX_FIELDS:
        raise too_many("the body", len(fields), "fields", MAX_FIELDS, None)
    return fields


def too_many(place: str, number: int, what: str, most: int, param: str | None, where: str = "") -> InvalidRequest:
    """The error for `number` members of `place`, of which `most` are allowed."""
    return InvalidRequest(f"{place} has {number} {what}{where}; {most} are allowed", param)


def count_members(json: bytes) -> Members:
    """The members of a JSON value, exactly."""
    unescaped = _unescaped(json)
    outside = b"0".join(unescaped.split(b'"')[::2]).translate(None, b" \t\n\r")
    opened = outside.count(b"{") + outside.count(b"[")
    # Each is the value itself, or stands in an object behind a colon, or in a list
    num_entries = opened - outside.startswith((b"{", b"[")) - outside.count(b":{") - outside.count(b":[")
    num_empty = outside.count(b"{}") + outside.count(b"[]")
    return Members(num_entries, outside.count(b",") + opened - num_empty, unescaped.count(b'"') // 2)


def _num_strings(json: bytes) -> int:
    return _unescaped(json).count(b'"') // 2


def _unescaped(json: bytes) -> bytes:
    """Without backslashes and quotes of texts."""
    return json.replace(b"\\\\", b"").replace(b'\\"', b"")


def _num_marks(json: bytes) -> Members:
    """At least as many entries and values as the value has."""
    return Members(len(json) - len(json.translate(None, b"[{")), len(json) - len(json.translate(None, b"[{,")), 0)


def _excess(json: bytes, others: Collection[bytes], most: Members) -> tuple[int, str, int] | None:
    """What `json` without the `others`, which are parts of it, has more than `most`: number, word, most."""
    marks = _less(_num_marks(json), map(_num_marks, others))
    if marks.entries <= most.entries and marks.values <= most.values:
        return None
    # First: `count_members` takes 50 ns a string. The `others` are within their own bounds
    if (num_strings := _num_strings(json) - sum(map(_num_strings, others))) > most.strings:
        return num_strings, "strings", most.strings
    found = _less(count_members(json), map(count_members, others))
    words = zip(found, Members._fields, most, strict=True)
    return next(((number, word, limit) for number, word, limit in words if number > limit), None)


def _less(all_of_it: Members, parts: Iterable[Members]) -> Members:
    return Members(*map(sub, all_of_it, map(sum, zip((0, 0, 0), *parts, strict=True))))


def _decoded(raw: bytes | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object", code="invalid_json") from error
    except BAD_JSON as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
