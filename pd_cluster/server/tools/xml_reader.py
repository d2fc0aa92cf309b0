"""Reads the arguments of a call that stand between tags. Values become JSON as the tool's schema says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import regex

from pd_cluster.server.text.detokenizer import MARK
from pd_cluster.server.tools.call_reader import CallReader, json_text
from pd_cluster.server.tools.json_strings import JsonStrings
from pd_http.member_bounds import BAD_JSON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.server.tools.call_reader import CallPiece

MAX_TAG_CHARS = 1024  # that are held back: patterns of other templates may have no bound
_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_STARTS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}  # else a number


class ArgumentTags(NamedTuple):
    """The patterns of what stands before and after the value of an argument.

    `head` has a group `key`. `end` may have a group `other`: a marker that no value has.
    """

    head: Any
    end: Any
    ends_in_token: bool


def argument_tags(tag_pattern: str, closing: str, markers: Sequence[str]) -> ArgumentTags | None:
    """The tags of a response template's pattern; None for a pattern that is not of two parts around a value.

    The end of a value that is no token is one if another argument or `closing`, the pattern of the call's end, follows.
    One that is a token is the only one of `markers`, the call's tokens, that a value may meet.
    """
    head, value, end = tag_pattern.partition("(?P<value>.*?)")
    if not (value and end and "(?P<key>" in head) or "(?P<" in end:
        return None
    is_token = MARK in end
    if not is_token:
        following = head.replace("(?P<key>", "(?:")
        end = rf"(?:{end})(?=\s*+(?:{following}|{closing}))"
    elif markers:
        end = rf"{end}|(?P<other>{MARK}(?:{'|'.join(map(regex.escape, markers))}))"
    try:
        return ArgumentTags(regex.compile(head, regex.DOTALL), regex.compile(end, regex.DOTALL), is_token)
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
        self._strings, self._num_followed = JsonStrings(), 0  # of the value, and of the characters of `_rest`
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
        if self.in_string or self._read_tag(marker):
            self._read_value(marker)
        return self.in_string

    def close(self) -> list[CallPiece]:
        self.broken = bool(self.in_string or self._rest.strip())
        if not self.broken:
            self.ended, self._rest = True, ""
            self._say("}" if self._num_keys else "{}")
            self._commit()
        return self._take()

    def _read_tag(self, following: str = "") -> bool:
        """Read what stands before a value, which `following` text may end. Returns whether it was found."""
        self._move(len(self._rest) - len(self._rest.lstrip()))
        match = self._tags.head.match(self._rest + following, partial=not following)
        if following and (match is None or match.end() > len(self._rest)):
            return False
        # more may belong to it
        is_open = match is not None and (match.partial or (match.end() == len(self._rest) and not following))
        self.broken = match is None or (is_open and len(self._rest) > MAX_TAG_CHARS)
        if self.broken or is_open:
            return False
        self._move(match.end())
        key = match["key"].replace(MARK, "")
        self._value, self.in_string, self._strings = "", True, JsonStrings()
        self._types = json_types(self._schema.get(key)) or {"string"}
        quote = '"' if self._types == {"string"} else ""
        self._say(f"{', ' if self._num_keys else '{'}{json_text(key)}: {quote}")
        self._num_keys += 1
        return True

    def _read_value(self, following: str = "") -> bool:
        """Read up to the value's end, which `following` text may decide. Returns whether it was found."""
        match = self._find_end(self._rest + following, partial=not following)
        is_whole = match is not None and not match.partial
        if following and not (is_whole and match.end() <= len(self._rest)):
            return False
        is_other = match is not None and is_whole and match.lastgroup == "other"
        start = len(self._rest) if match is None else match.start()
        if is_other or (not is_whole and len(self._rest) - start > MAX_TAG_CHARS):
            self.broken = True
            return False
        self._follow(start)
        self._num_followed = 0
        self._value += self._move(start).replace(MARK, "")
        if is_whole:
            self._move(len(match[0]))
            self.in_string = False
        if self._types == {"string", "null"} and not "null".startswith(self._value):
            self._types = {"string"}
            self._say('"')
        if self._types == {"string"}:
            self._say(json_text(self._value)[1:-1] + ('"' if is_whole else ""))
            self._value = ""
        elif is_whole:
            self._say(typed_json(self._value, self._types))
        return is_whole

    def _find_end(self, text: str, *, partial: bool) -> Any:
        """The first end of the value that is not inside of a string of its JSON."""
        match = self._tags.end.search(text, partial=partial)
        while match is not None and not match.partial and match.end() <= len(self._rest):
            self._follow(match.start())
            if not self._strings.inside:
                break
            match = self._tags.end.search(text, match.start() + 1, partial=partial)
        return match

    def _follow(self, end: int) -> None:
        """Know whether the value stops inside of a string before this character of `_rest`."""
        if "string" not in self._types and not self._tags.ends_in_token:
            self._strings.read(self._rest[self._num_followed : end])
            self._num_followed = end

    def _move(self, length: int) -> str:
        """Take text that is decided from `_rest`."""
        moved, self._rest = self._rest[:length], self._rest[length:]
        self._raw.append(moved)
        return moved


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


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def typed_json(text: str, types: set[str]) -> str:
    """The value as JSON text: of one of these types if it is one, else a string."""
    if "string" in types and text != "null":  # a word is a text, unless it is exactly null
        types = types - {"null"}
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    forms = [plain]
    if plain[:1] in ("[", "{") and "string" not in types:  # models may write it as the inside of a JSON string
        forms.append(f'"{plain}"')
    for form in forms:
        try:
            if form is not plain:
                form = msgspec.json.decode(form, type=str)
            msgspec.json.decode(form, type=msgspec.Raw)  # a number may be larger than a float
        except BAD_JSON:
            continue
        form = form.strip()
        name = _STARTS.get(form[0]) or ("integer" if form.lstrip("-").isdigit() else "number")
        if name in types or (name == "integer" and "number" in types):
            return form
    return json_text(text)
