"""Reads the text of a tool call as it comes, and says which pieces of name and arguments are certain.

Pieces of arguments are JSON text, and join to what an answer that is not streamed has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import orjson
import regex

from pd_cluster.server.text.detokenizer import MARK
from pd_http.member_bounds import BAD_JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_OUTSIDE = regex.compile(r'[^"{}\[\]]*')
_INSIDE = regex.compile(r'[^"\\]*(?:\\.[^"\\]*)*', regex.DOTALL)
# The usual order of members, which can be streamed. The bounds keep the text that is matched again short.
_HEAD = regex.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\<\[\udc80]{1,256})"\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_FIRST_KEY = regex.compile(r'\{\s{0,64}"(?:name|arguments|parameters|type|id)"\s{0,64}:')
MAX_TAG_CHARS = 1024  # that are held back: patterns of other templates may have no bound
_NULLS = ("null", "None")


class CallPiece(NamedTuple):
    """The first piece of a call has its name."""

    name: str
    arguments: str


class CallReader:
    """Reads one region of a response template: one call, or for JSON several.

    `live`: give each piece at once. Else the pieces of a call are given when it has ended.
    """

    def __init__(self, *, live: bool) -> None:
        self.broken = False  # the text is no call
        self.ended = False  # the text so far is whole calls
        self.in_string = False  # a closing marker that is not a token is text
        self._live = live
        self._raw: list[str] = []
        self._held: list[CallPiece] = []
        self._ready: list[CallPiece] = []

    @property
    def raw(self) -> str:
        """The text that has been read and is in no piece."""
        return "".join(self._raw)

    @property
    def is_partial(self) -> bool:
        """Whether pieces of a call have been given that has not ended."""
        return self._live and not self.ended

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        """Read up to the end of a call, or to where the text stops to be of one. Returns the number of characters."""
        raise NotImplementedError

    def is_text(self, marker: str) -> bool:
        """Whether what looks like the closing marker, and is no token, belongs to a string."""
        return self.in_string

    def close(self) -> list[CallPiece]:
        """The closing marker has come. Sets `broken` when it comes too early."""
        self.broken = not self.ended
        return []

    def _say(self, arguments: str, name: str = "") -> None:
        """Add a piece. If it is given at once, all that has been read is in pieces."""
        self._held.append(CallPiece(name.replace(MARK, ""), arguments.replace(MARK, "")))
        if self._live:
            self._commit()

    def _commit(self) -> None:
        self._ready += self._held
        self._held, self._raw = [], []

    def _take(self) -> list[CallPiece]:
        ready, self._ready = self._ready, []
        return ready


class JsonReader(CallReader):
    """Objects with name and arguments, alone or in a list; or, where `name` is known, the arguments alone."""

    def __init__(self, name: str = "", *, live: bool) -> None:
        super().__init__(live=live)
        self._name = name
        self._object: list[str] = []  # the text of the present object
        self._depth = 0
        self._escaped = False  # the text so far ends with a backslash in a string
        self._in_list = False
        self._in_head = False
        self._is_said = False  # the arguments of the present object are in pieces
        self._arguments_depth = -1  # the depth around the arguments; -1: not in arguments

    @property
    def is_partial(self) -> bool:
        return self._live and self._is_said and bool(self._object)

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        position = 0
        while position < len(text) and not self.broken:
            had_ended = self.ended
            if self._in_head:
                position = self._read_head(text, position)
            elif self._object:
                position = self._read_object(text, position)
            else:
                position = self._read_between(text, position)
            if self.ended and not had_ended:
                break
        return position, self._take()

    def _read_between(self, text: str, position: int) -> int:
        char = text[position]
        if char == "{" and not (self.ended and (self._name or self._in_list)):
            self.ended, self._is_said = False, bool(self._name)
            if not self._name:
                self._in_head = True
                return position
            self._arguments_depth = 0
            self._say("", self._name)
            return self._read_object(text, position)
        if char == "[" and not (self._name or self._in_list or self.ended):
            self._in_list = True
        elif char == "]" and self._in_list and not self.ended:
            self.ended = True
            self._commit()
        elif not (char.isspace() or (char == "," and self._in_list and not self.ended)):
            self.broken = True
            return position
        self._raw.append(char)
        return position + 1

    def _read_head(self, text: str, position: int) -> int:
        """Read the object until it is known whether its members have the usual order."""
        known = "".join(self._object)
        head = known + text[position:]
        match = _HEAD.match(head, partial=True) or _FIRST_KEY.match(head, partial=True)
        if match is None:
            self.broken = True
            return position
        end = len(text) if match.partial else position + match.end() - len(known)
        self._object.append(text[position:end])
        self._raw.append(text[position:end])
        if not match.partial:
            self._in_head, self._depth = False, 1
            if match.re is _HEAD:
                self._is_said, self._arguments_depth = True, 1
                self._say("", match["name"])
        return end

    def _read_object(self, text: str, start: int) -> int:
        end = self._scan(text, start, max(self._arguments_depth, 0))
        piece = text[start:end]
        self._object.append(piece)
        self._raw.append(piece)
        if self._arguments_depth >= 0:
            self._say(piece)
            if self._depth == self._arguments_depth:
                self._arguments_depth = -1
        if self._depth == 0:
            self._end_object()
        return end

    def _scan(self, text: str, position: int, floor: int) -> int:
        """Follow strings and brackets until the depth falls to `floor`."""
        if self._escaped:
            position, self._escaped = position + 1, False
        while position < len(text):
            position = (_INSIDE if self.in_string else _OUTSIDE).match(text, position).end()
            if position == len(text):
                break
            char = text[position]
            position += 1
            if char == "\\":  # the last character of the text
                self._escaped = True
            elif char == '"':
                self.in_string = not self.in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth == floor:
                    break
        return position

    def _end_object(self) -> None:
        """Raises nothing: text that is no JSON, or no call, breaks the call."""
        written = "".join(self._object).replace(MARK, "")
        try:
            msgspec.json.decode(written)
            if not self._is_said:
                self._say_members(written)
        except BAD_JSON:
            self.broken = True
            return
        self._object = []
        self.ended = not self._in_list
        self._commit()

    def _say_members(self, written: str) -> None:
        """The call of an object with its members in another order. Raises msgspec.DecodeError."""
        members = msgspec.json.decode(written, type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(members.get("name", b"null"), type=Annotated[str, msgspec.Meta(min_length=1)])
        arguments = bytes(members.get("arguments") or members.get("parameters") or b"{}").strip()
        if arguments.startswith(b'"'):  # JSON text as a string
            arguments = msgspec.json.decode(arguments, type=str).strip().encode()
        if arguments == b"null":
            arguments = b"{}"
        msgspec.json.decode(arguments, type=dict[str, Any])
        self._say("", name)
        self._say(arguments.decode())


class ArgumentTags(NamedTuple):
    """The patterns of what stands before and after the value of an argument. `head` has a group `key`."""

    head: Any
    end: Any


def argument_tags(tag_pattern: str, closing: str) -> ArgumentTags | None:
    """The tags of a response template's pattern; None for a pattern that is not of two parts around a value.

    The end of a value that is no token is one if another argument or `closing`, the pattern of the call's end, follows.
    """
    head, value, end = tag_pattern.partition("(?P<value>.*?)")
    if not (value and end and "(?P<key>" in head) or "(?P<" in end:
        return None
    head = rf"\s{{0,64}}(?:{head})"
    if MARK not in end:
        following = head.replace("(?P<key>", "(?:")
        end = rf"(?:{end})(?={following}|\s{{0,64}}(?:{closing}))"
    try:
        return ArgumentTags(regex.compile(head, regex.DOTALL), regex.compile(end, regex.DOTALL))
    except regex.error:  # groups that reach over the value
        return None


class XmlReader(CallReader):
    """A value between tags for each argument. Values become JSON as the tool's schema says.

    Text that is a string by the schema is given as it comes, a value of another type when it has ended.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], tags: ArgumentTags, *, live: bool) -> None:
        super().__init__(live=live)
        self._schema = schema  # by key
        self._tags = tags
        self._rest = ""  # read, and not decided yet
        self._types, self._value = set[str](), ""  # of the present argument: what is in no piece
        self._num_keys = 0
        self._say("", name)

    @property
    def raw(self) -> str:
        return super().raw + self._rest

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        self._rest += text
        while self._rest and (self._read_value() if self.in_string else self._read_tag()):
            pass
        if not self.broken:
            return len(text), self._take()
        cut = max(0, len(self._rest) - len(text))  # before it: from earlier pieces
        num_left, self._rest = len(self._rest) - cut, self._rest[:cut]
        return len(text) - num_left, self._take()

    def is_text(self, marker: str) -> bool:
        if self.in_string:
            self._read_value(marker)
        return self.in_string

    def close(self) -> list[CallPiece]:
        self.broken = bool(self.in_string or self._rest.strip())
        if not self.broken:
            self.ended, self._rest = True, ""
            self._say("}" if self._num_keys else "{}")
            self._commit()
        return self._take()

    def _read_tag(self) -> bool:
        match = self._tags.head.match(self._rest, partial=True)
        is_open = match is not None and (match.partial or match.end() == len(self._rest))  # more may belong to it
        self.broken = match is None or (is_open and len(self._rest) > MAX_TAG_CHARS)
        if self.broken or is_open:
            return False
        self._move(match.end())
        key = match["key"].replace(MARK, "")
        self._value, self.in_string = "", True
        self._types = json_types(self._schema.get(key)) or {"string"}
        quote = '"' if self._types == {"string"} else ""
        self._say(f"{', ' if self._num_keys else '{'}{_dumps(key)}: {quote}")
        self._num_keys += 1
        return True

    def _read_value(self, following: str = "") -> bool:
        """Read up to the value's end, which `following` text may decide. Returns whether it was found."""
        match = self._tags.end.search(self._rest + following, partial=not following)
        is_whole = match is not None and not match.partial
        if following and not (is_whole and match.end() <= len(self._rest)):
            return False
        if match is not None and not is_whole and len(self._rest) - match.start() > MAX_TAG_CHARS:
            self.broken = True
            return False
        self._value += self._move(match.start() if match is not None else len(self._rest)).replace(MARK, "")
        if is_whole:
            self._move(len(match[0]))
            self.in_string = False
        if self._types == {"string", "null"} and not _may_be_null(self._value):
            self._types = {"string"}
            self._say('"')
        if self._types == {"string"}:
            self._say(_dumps(self._value)[1:-1] + ('"' if is_whole else ""))
            self._value = ""
        elif is_whole:
            self._say(typed_json(self._value, self._types))
        return is_whole

    def _move(self, length: int) -> str:
        """Take text that is decided from `_rest`."""
        moved, self._rest = self._rest[:length], self._rest[length:]
        self._raw.append(moved)
        return moved


class WholeReader(CallReader):
    """A region of a form that is not known here: its text is parsed when it has ended.

    `parse` returns calls as a response template describes them (`{"function": {"name", "arguments"}}`).
    """

    def __init__(self, parse: Callable[[str], Any]) -> None:
        super().__init__(live=False)
        self._parse = parse

    def read(self, text: str) -> tuple[int, list[CallPiece]]:
        self._raw.append(text)
        return len(text), []

    def close(self) -> list[CallPiece]:
        try:
            parsed = self._parse(self.raw.replace(MARK, ""))
            for call in parsed if isinstance(parsed, list) else [parsed]:
                function = call["function"]
                arguments = function.get("arguments") or {}
                self._say(arguments if isinstance(arguments, str) else _dumps(arguments), str(function["name"]))
        except Exception:  # patterns and parsers of a template that is not ours
            self.broken = True
            return []
        self.ended = True
        self._commit()
        return self._take()


def json_types(schema: Any) -> set[str]:
    """The types that a property's schema allows; empty when it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {one for one in _list(declared) if isinstance(one, str)} | (
        {declared} if isinstance(declared, str) else set()
    )
    if not types:
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        types = {_NAMES.get(type(value), "string") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        for choice in _list(schema.get(name)):
            types |= json_types(choice)
    return types


def _may_be_null(text: str) -> bool:
    text = text.strip()
    return any(null.startswith(text) for null in _NULLS)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def typed_json(text: str, types: set[str]) -> str:
    """The value as JSON text: of one of these types if it is one, else a string."""
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    forms = [plain]
    if plain[:1] in ("[", "{") and "string" not in types:  # models may write it as the inside of a JSON string
        forms.append(f'"{plain}"')
    for form in forms:
        try:
            value = msgspec.json.decode(form)
            if isinstance(value, str) and form is not plain:
                form, value = value, msgspec.json.decode(value)
        except BAD_JSON:
            continue
        name = _NAMES.get(type(value), "")
        if name in types or (name == "integer" and "number" in types):
            return form
    return _dumps(text)


_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
