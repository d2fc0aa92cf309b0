"""Follows the strings of JSON text that comes in pieces."""

from __future__ import annotations

import regex

_OUTSIDE = regex.compile(r"""[^"'\\]*+""")
_INSIDE = regex.compile(r'(?:[^"\\]|\\.)*+', regex.DOTALL)


class JsonStrings:
    """Each character is read once. Text that is no object or list, or that JSON has not, is inside of no string."""

    def __init__(self) -> None:
        self.inside = False
        self._is_json: bool | None = None  # None: blanks so far
        self._rest = ""  # a backslash

    def read(self, text: str) -> None:
        text, self._rest, position = self._rest + text, "", 0
        if self._is_json is None and text.strip():
            self._is_json = text.lstrip()[0] in "[{"
        while self._is_json and position < len(text):
            position = (_INSIDE if self.inside else _OUTSIDE).match(text, position).end()
            if position == len(text):
                break
            if text[position] == '"':
                self.inside = not self.inside
            elif self.inside:
                self._rest = "\\"
            else:  # as where the text is the inside of a JSON string
                self._is_json = False
            position += 1
