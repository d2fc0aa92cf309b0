"""Turns token ids into the text that may be shown: whole characters, without a tail that may begin a stop string."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Precedes the text of a marker, so that a parser can tell the token from the same characters. Decoded text never has
# it: a lone surrogate is not UTF-8.
MARK = "\udc80"


class Vocabulary(Protocol):
    """The bytes of each token id."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class StopMatcher:
    """Finds the first stop string that is completed in a text that comes in pieces.

    Knuth, Morris, Pratt (1977), one automaton per string: amortised one step per character and string. A state is the
    number of last characters that may become that stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple((stop, _borders(stop)) for stop in stops)
        self._states = [0] * len(stops)

    @property
    def num_pending(self) -> int:
        """The number of last characters that are the beginning of a stop string."""
        return max(self._states, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """(index in `text` after the last character of the match, the stop string); of several, the longest string."""
        for position, char in enumerate(text):
            matched = ""
            for i, (stop, borders) in enumerate(self._stops):
                state = self._states[i]
                while state and stop[state] != char:
                    state = borders[state]
                state += stop[state] == char
                if state == len(stop):
                    matched = max(matched, stop, key=len)
                    state = borders[state]
                self._states[i] = state
            if matched:
                return position + 1, matched
        return None


def _borders(text: str) -> list[int]:
    """borders[k]: length of the longest proper prefix of text[:k] that is also its suffix."""
    borders, border = [0, 0], 0
    for char in text[1:]:
        while border and text[border] != char:
            border = borders[border]
        border += text[border] == char
        borders.append(border)
    return borders


class Detokenizer:
    """The text of one sequence. `push` each token once, `flush` at the end.

    `stop` is the stop string that ended it. The first `min_tokens` tokens are not searched for stop strings. The text
    of `markers` (token ids) is shown, special or not, and follows `MARK`.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
        markers: Collection[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._skip_special = skip_special
        self._min_tokens = min_tokens
        self._markers = markers
        self._held = ""
        self.num_tokens = 0
        self.stop: str | None = None

    def push(self, token_id: int, *, hidden: bool = False) -> str:
        """The text that became certain. `hidden`: the token is counted and shows no text (a stop token)."""
        self.num_tokens += 1
        if hidden:
            return ""
        if token_id in self._markers:
            marker = self._vocabulary.token_bytes(token_id)
            return self._release(f"{self._decode(marker)[: -len(marker.decode())]}{MARK}{marker.decode()}")
        if self._skip_special and self._vocabulary.is_special(token_id):
            return ""
        return self._release(self._decode(self._vocabulary.token_bytes(token_id)))

    def flush(self) -> str:
        """The text that was held back, when no more tokens come. An unfinished character becomes U+FFFD."""
        if self.stop is not None:
            return ""
        text = self._release(self._decode(b"", True))
        held, self._held = self._held, ""
        return text if self.stop is not None else text + held

    def _release(self, text: str) -> str:
        if not text or self._matcher is None or self.num_tokens <= self._min_tokens:
            return text
        match = self._matcher.feed(text)
        if match is None:
            text = self._held + text
            cut = len(text) - self._matcher.num_pending
            self._held = text[cut:]
            return text[:cut]
        end, self.stop = match
        text = self._held + text[:end]
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(self.stop)]
