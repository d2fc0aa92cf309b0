"""Where tokens begin in a text, by character: `text[offset:]` begins with the token's text."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.server.text.detokenizer import Vocabulary

_SEARCHED = 8  # characters of a prompt that the tokenizer may have changed before a token


class TextOffsets:
    """The offsets of an answer's tokens, in the order in which `Detokenizer` shows them.

    The parts of one character share its offset. A token that is not shown has that of the text after it.
    """

    def __init__(self, vocabulary: Vocabulary, start: int = 0, *, skip_special: bool = True) -> None:
        """`start`: characters before the first token."""
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        return list(map(self._next, token_ids))

    def _next(self, token_id: int) -> int:
        if self._skip_special and self._vocabulary.is_special(token_id):
            return self._at
        raw = self._vocabulary.token_bytes(token_id)
        begun = self._decoder.getstate()[0]
        is_cut = begun and raw and raw[0] & 0xC0 != 0x80  # what was begun becomes U+FFFD, before this token
        offset = self._at + (len(begun.decode(errors="replace")) if is_cut else 0)
        self._at += len(self._decoder.decode(raw))
        return offset


def echo_offsets(vocabulary: Vocabulary, token_ids: Sequence[int], text: str) -> list[int]:
    """The offsets of a prompt's tokens in its text, as the client wrote it or as the tokens spell it.

    A client's text lacks what the tokenizer adds (special tokens, a blank at the beginning), and may have what it
    changes (normal forms). After that a token has the offset of its own text where this follows soon.
    """
    shown = [one for one in token_ids if not vocabulary.is_special(one)]
    if b"".join(map(vocabulary.token_bytes, shown)).decode(errors="replace") == text:
        return TextOffsets(vocabulary).of(token_ids)
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    at, offsets = 0, []
    for token_id in token_ids:
        piece = decode(vocabulary.token_bytes(token_id))
        if not text.startswith(piece, at):
            bare = piece.lstrip()
            if text.startswith(bare, at):
                piece = bare
            else:
                found = text.find(piece, at, at + len(piece) + _SEARCHED)
                lacks = found < 0 or vocabulary.is_special(token_id)
                at, piece = (at, "") if lacks else (found, piece)
        offsets.append(at)
        at += len(piece)
    return offsets
