"""How many members a JSON body may have, found before anything is made of them.

A server's work rises with the members of a body, and its bytes say little of them: 8 MB are one prompt, or 2.7 million
empty objects, which would stop an event loop for seconds. Marks outside of strings are counted by C code:

    `value`   a member of an object or of a list, at any level
    `entry`   an object or a list in a list: a message, part, call, tool, item, block, alternative of a schema

Text has the same marks, so a first count, of all of them, is an upper bound. A body that exceeds it is counted exactly.
"""

from __future__ import annotations

from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pd_http.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# What msgspec raises: not JSON or of another type, not UTF-8, nested too deeply
BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_FIELDS = 256  # of a body, read or not
FREE_BYTES = 24 << 10  # of a body that is not counted: `{},` is the smallest entry


class Members(NamedTuple):
    """How many members a value has, or may have."""

    entries: int
    values: int
    strings: int  # names of members, too


class BodyBounds(NamedTuple):
    """Of the bodies of one API."""

    tokens: Mapping[str, Members]  # by field: lists of tokens
    others: Members  # of all other fields together
    unlisted: Members  # of those of them that BodyFields lacks


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
# An entry of chat takes up to 4 us in a node, a value 0.7 us. A field takes 0.5 us where a top level becomes a dict
_VALUES, _UNLISTED = 1 << 16, 1 << 15
CHAT_BOUNDS: Final = BodyBounds(
    TOKEN_FIELDS, Members(1 << 14, _VALUES, 2 * _VALUES), Members(1 << 14, _UNLISTED, 2 * _UNLISTED)
)
# Of an API whose bodies become chat requests: 12 us an entry
TRANSLATED_BOUNDS: Final = CHAT_BOUNDS._replace(
    tokens={name: most for name, most in TOKEN_FIELDS.items() if name != "input"},
    others=Members(1 << 13, _VALUES, 2 * _VALUES),
)


class BodyFields(msgspec.Struct):
    """Fields with members in numbers. All others together have a bound of their own.

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


def check_members(raw: bytes, bounds: BodyBounds, free_bytes: int = FREE_BYTES) -> None:
    """Raises InvalidRequest if the body has too many members, or is not a JSON object.

    `free_bytes`: bodies of so many are not looked at.
    """
    if len(raw) <= free_bytes or (body := _Counted(raw)).marks.values <= bounds.others.entries:
        return
    given = msgspec.structs.asdict(_decoded(raw, BodyFields))
    listed = {name: _Counted(bytes(one)) for name, one in given.items() if one is not UNSET}
    tokens = {name: one for name, one in listed.items() if name in bounds.tokens}
    for name, one in tokens.items():
        if excess := _excess(one, (), bounds.tokens[name]):
            raise too_many(name, *excess, name)
    if excess := _excess(body, tokens.values(), bounds.others):
        rest = _less(body.marks, (one.marks for one in listed.values())).values
        sizes = {name: one.marks.values for name, one in listed.items() if name not in tokens}
        largest = max((name for name in sizes if sizes[name] > rest), key=sizes.__getitem__, default=None)
        raise too_many("the body", *excess, largest, f", most of them in {largest}" if largest else "")
    if excess := _excess(body, listed.values(), bounds.unlisted):
        raise too_many("the body", *excess, None, " in fields that have none elsewhere")


def top_level(raw: bytes | Raw) -> dict[str, Raw]:
    """The fields of a JSON object. Raises InvalidRequest for anything else, and for too many fields."""
    fields: dict[str, Raw] = _decoded(raw, dict[str, Raw])
    if len(fields) > MAX_FIELDS:
        raise too_many("the body", len(fields), "fields", MAX_FIELDS, None)
    return fields


def too_many(place: str, number: int | str, what: str, most: int, param: str | None, where: str = "") -> InvalidRequest:
    """The error for `number` members of `place`, of which `most` are allowed."""
    return InvalidRequest(f"{place} has {number} {what}{where}; {most} are allowed", param)


class _Counted:
    """The members of a JSON value, as far as they were counted."""

    def __init__(self, json: bytes) -> None:
        self._json = json

    @cached_property
    def marks(self) -> Members:
        """At least as many members as the value has."""
        entries, values = (len(self._json) - len(self._json.translate(None, marks)) for marks in (b"[{", b"[{,"))
        return Members(entries, values, 2 * values + 1)

    @cached_property
    def strings(self) -> int:
        return self._unescaped.count(b'"') // 2

    @cached_property
    def exact(self) -> Members:
        outside = self._outside
        opened = outside.count(b"{") + outside.count(b"[")
        # Each is the value itself, or stands in an object behind a colon, or in a list
        num_entries = opened - outside.startswith((b"{", b"[")) - outside.count(b":{") - outside.count(b":[")
        num_empty = outside.count(b"{}") + outside.count(b"[]")
        return Members(num_entries, self.commas + opened - num_empty, self.strings)

    @cached_property
    def commas(self) -> int:
        return self._outside.count(b",")

    @cached_property
    def _unescaped(self) -> bytes:
        """Without backslashes and quotes of texts."""
        return self._json.replace(b"\\\\", b"").replace(b'\\"', b"")

    @cached_property
    def _outside(self) -> bytes:
        """What is outside of strings, each of which is a 0. It takes 50 ns a string."""
        return b"0".join(self._unescaped.split(b'"')[::2]).translate(None, b" \t\n\r")


def count_members(json: bytes) -> Members:
    """The members of a JSON value, exactly."""
    return _Counted(json).exact


def _excess(body: _Counted, others: Collection[_Counted], most: Members) -> tuple[int | str, str, int] | None:
    """What `body` without the `others`, which are parts of it, has more than `most`: number, word, most.

    The others are within their own bounds, so what is counted takes time for `body` alone. What is far above a bound
    is not counted to its end: 8 MB of commas take 0.05 s less.
    """
    marks = _less(body.marks, (one.marks for one in others))
    if not _first(marks, most):
        return None
    if (num_strings := body.strings - sum(one.strings for one in others)) > most.strings:
        return num_strings, "strings", most.strings
    if not _first(marks._replace(strings=0), most):
        return None
    if body.commas - sum(one.commas for one in others) > most.values:
        return f"more than {most.values}", "values", most.values
    return _first(_less(body.exact, (one.exact for one in others)), most)


def _first(found: Members, most: Members) -> tuple[int, str, int] | None:
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
