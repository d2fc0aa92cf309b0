"""How many members a JSON body may have, found before anything is made of them.

A server's work rises with the members of a body, and its bytes say little of them: 8 MB are one prompt, or 2.7 million
empty objects, which would stop an event loop for seconds. Marks outside of strings are counted by C code:

    `value`   a member of an object or of a list, at any level
    `entry`   an object or a list in a list: a message, part, call, tool, item, block, alternative of a schema

Text has the same marks, so a first count, of all of them, is an upper bound. A body that exceeds it is counted exactly.
"""

from __future__ import annotations

import re
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from pd_http.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

# What msgspec raises: not JSON or of another type, not UTF-8, nested too deeply
BAD_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MAX_FIELDS = 256  # of a body, read or not
MAX_NODE_FIELDS = MAX_FIELDS + 32  # a router and the translation to chat add some
FREE_BYTES = 24 << 10  # of a body that is not counted: `{},` is the smallest entry


class Members(NamedTuple):
    """How many members a value has, or may have."""

    entries: int
    values: int
    strings: int  # names of members, too


class BodyBounds(NamedTuple):
    """Of the bodies of one API."""

    tokens: Mapping[str, Members]  # by field: lists of tokens
    others: Members  # of all other fields together, read or not


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
# An entry of chat takes up to 4 us in a node, a value 0.7 us, and a field 0.5 us where a top level becomes a dict
_VALUES = 1 << 16
CHAT_BOUNDS: Final = BodyBounds(TOKEN_FIELDS, Members(1 << 14, _VALUES, 2 * _VALUES))
# Where bodies become chat requests: 12 us an entry
TRANSLATED_BOUNDS: Final = BodyBounds(
    {name: most for name, most in TOKEN_FIELDS.items() if name != "input"}, Members(1 << 13, _VALUES, 2 * _VALUES)
)


# Fields with members in numbers. A decoder passes over others at 1 ns a byte
_LISTED = (
    "messages", "system", "tools", "tool_choice", "documents", "response_format", "chat_template_kwargs", "prediction",
)  # fmt: skip
# Half of a UTF-16 pair: JavaScript cuts texts so. msgspec refuses it also in fields that it passes over, and tells the
# byte after it or after the escape that follows it. With less than six bytes after a first half it tells a cut body
_SURROGATE_ERROR = re.compile(r"(utf-16 surrogate pair|end of hex escape) \(byte (\d+)\)$")
_CUT_ERROR = "Input data was truncated"
_FIRST_HALF = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_SECOND_HALF = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"%b|%b" % (_FIRST_HALF, _SECOND_HALF.pattern))
_HALF_AT_END = re.compile(rb'(?<!\\)(?:\\\\)*(%b)(?=[^"]*").{1,5}\Z' % _FIRST_HALF, re.DOTALL)  # of a string that ends
_END_BYTES = 256  # in which it is searched, with the backslashes before it
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_SOME_FIELDS = msgspec.json.Decoder(
    msgspec.defstruct("_SomeFields", [(name, Raw | UnsetType, UNSET) for name in (*_LISTED, *TOKEN_FIELDS)])
)


def check_members(raw: bytes, bounds: BodyBounds, free_bytes: int = FREE_BYTES) -> None:
    """Raises InvalidRequest if the body has too many members, or is not a JSON object.

    `free_bytes`: bodies of so many are not looked at.
    """
    if len(raw) <= free_bytes:
        return
    body = CountedJson(raw)
    if body.num_marks <= bounds.others.entries or not _first(body.most, bounds.others):
        return
    given = msgspec.structs.asdict(_decoded(raw, _SOME_FIELDS))
    listed = {name: CountedJson(bytes(one)) for name, one in given.items() if one is not UNSET}
    tokens = {name: one for name, one in listed.items() if name in bounds.tokens}
    for name, one in tokens.items():
        if excess := _excess(one, (), bounds.tokens[name]):
            raise too_many(name, *excess, name)
    if excess := _excess(body, tokens.values(), bounds.others):
        rest = body.num_marks - sum(one.num_marks for one in listed.values())
        sizes = {name: one.num_marks for name, one in listed.items() if name not in tokens}
        largest = max((name for name in sizes if sizes[name] > rest), key=sizes.__getitem__, default=None)
        raise too_many("the body", *excess, largest, f", most of them in {largest}" if largest else "")


def top_level(raw: bytes | Raw, place: str = "", most: int = MAX_FIELDS) -> dict[str, Raw]:
    """The fields of a JSON object; `place`: "" for a body. Raises InvalidRequest, also for too many fields."""
    fields: dict[str, Raw] = _decoded(raw, _FIELDS)
    if len(fields) > most:
        raise too_many(place or "the body", len(fields), "fields", most, place or None)
    return fields


def too_many(place: str, number: int | str, what: str, most: int, param: str | None, at: str = "") -> InvalidRequest:
    """The error for `number` members of `place`, of which `most` are allowed."""
    return InvalidRequest(f"{place} has {number} {what}{at}; {most} are allowed", param)


def check_texts(texts: Sequence[str], place: str, param: str) -> None:
    """Raises InvalidRequest if JSON in these texts of a body has more values than a body: its own count has none."""
    if sum(map(len, texts)) <= _VALUES:
        return
    counted = [CountedJson(text.encode(errors="surrogatepass")) for text in texts]
    if sum(one.num_marks for one in counted) <= _VALUES:
        return
    if (number := sum(one.exact.values for one in counted)) > _VALUES:
        raise too_many(place, number, "values", _VALUES, param, " in texts of JSON")


class CountedJson:
    """The members of a JSON value, as far as they were counted."""

    def __init__(self, json: bytes) -> None:
        self._json = json

    @cached_property
    def num_marks(self) -> int:
        return len(self._json) - len(self._json.translate(None, b"[{,"))

    @cached_property
    def most(self) -> Members:
        """At least as many members as the value has."""
        num_brackets = len(self._json) - len(self._json.translate(None, b"[{"))
        return Members(num_brackets, self.num_marks, 2 * self.num_marks)

    @cached_property
    def strings(self) -> int:
        return self._unescaped.count(b'"') // 2

    @cached_property
    def commas(self) -> int:
        return self._outside.count(b",")

    @cached_property
    def exact(self) -> Members:
        outside = self._outside
        opened = outside.count(b"{") + outside.count(b"[")
        # Each is the value itself, or stands in an object after a colon, or in a list
        num_entries = opened - outside.startswith((b"{", b"[")) - outside.count(b":{") - outside.count(b":[")
        num_empty = outside.count(b"{}") + outside.count(b"[]")
        return Members(num_entries, self.commas + opened - num_empty, self.strings)

    @cached_property
    def _unescaped(self) -> bytes:
        """Without backslashes and quotes of texts."""
        return self._json.replace(b"\\\\", b"").replace(b'\\"', b"")

    @cached_property
    def _outside(self) -> bytes:
        """What is outside of strings, each of which is a 0. It takes 50 ns a string."""
        return b"0".join(self._unescaped.split(b'"')[::2]).translate(None, b" \t\n\r")


def _excess(body: CountedJson, others: Collection[CountedJson], most: Members) -> tuple[int | str, str, int] | None:
    """What `body` without the `others`, which are parts of it, has more than `most`: number, word, most.

    The others are within their own bounds, so what is counted takes time for `body` alone. What is far above a bound
    is not counted to its end: 8 MB of commas take 0.05 s less.
    """
    upper = _less(body.most, (one.most for one in others))
    if not _first(upper, most):
        return None
    if (num_strings := body.strings - sum(one.strings for one in others)) > most.strings:
        return num_strings, "strings", most.strings
    if not _first(upper._replace(strings=0), most):
        return None
    if body.commas - sum(one.commas for one in others) > most.values:
        return f"more than {most.values}", "values", most.values
    return _first(_less(body.exact, (one.exact for one in others)), most)


def _first(found: Members, most: Members) -> tuple[int, str, int] | None:
    words = zip(found, Members._fields, most, strict=True)
    return next(((number, word, limit) for number, word, limit in words if number > limit), None)


def _less(all_of_it: Members, parts: Iterable[Members]) -> Members:
    return Members(*map(sub, all_of_it, map(sum, zip((0, 0, 0), *parts, strict=True))))


def _decoded(raw: bytes | Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object", code="invalid_json") from error
    except BAD_JSON as error:
        raise InvalidRequest(_why(raw, str(error)), code="invalid_json") from error


def _why(raw: bytes | Raw, told: str) -> str:
    """`told`: by msgspec. It looks at a few bytes of the body, where msgspec stopped."""
    body = memoryview(raw)
    lone = None
    if found := _SURROGATE_ERROR.search(told):
        end = int(found[2])
        is_last = found[1] == "end of hex escape" or _SECOND_HALF.match(body, end - 6)
        lone = _HALF.match(body, end - (6 if is_last else 12))
    elif told == _CUT_ERROR and (at_end := _HALF_AT_END.search(body, max(0, len(body) - _END_BYTES))):
        lone = _HALF.match(body, at_end.start(1))
    if lone is None:
        return f"the body is not valid JSON: {told}"
    return f"the body has a lone surrogate, half of a character: {lone[0].decode()} at byte {lone.start()}"
