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
    from collections.abc import Callable

_OUTSIDE = regex.compile(r'[^"{}\[\]]*')
_INSIDE = regex.compile(r'[^"\\]*(?:\\.[^"\\]*)*', regex.DOTALL)
# The usual order of members, which can be streamed. The bounds keep the text that is matched again short.
_HEAD = regex.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"(?P<name>[^"\\<\[\udc80]{1,256})"\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_FIRST_KEY = regex.compile(r'\{\s{0,64}"(?:name|arguments|parameters|type|id)"\s{0,64}:')


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
            msgspec.json.decode(written, type=msgspec.Raw)  # a number may be larger than a float
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
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
        self._say("", name)
        self._say(arguments.decode())


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
                self._say(arguments if isinstance(arguments, str) else json_text(arguments), str(function["name"]))
        except Exception:  # patterns and parsers of a template that is not ours
            self.broken = True
            return []
        self.ended = True
        self._commit()
        return self._take()


def json_text(value: Any) -> str:
    return orjson.dumps(value).decode()
