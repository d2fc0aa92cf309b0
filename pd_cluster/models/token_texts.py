"""What each token id stands for in a text, as bytes. API, logprobs, stop strings and grammars all read this table.

The tokenizer's own decoder says it, for special and added tokens too. It is asked for each token in the middle of a
text: decoders drop a blank at the beginning of a whole text (Llama 2's Strip, Metaspace, WordPiece), and an answer goes
on after a prompt. So the texts of the tokens joined are what `tokenizers` decodes, but for such a blank of the first
token, which `whole_bytes` leaves out. Tokens that are parts of a character have its exact bytes.

Three numbers, which differ in most published models: the rows of the model's embedding (`vocab_size` of its config, of
the logits and of masks), the tokens (the greatest id and one, `len` of this table), and how many of the ids have a
token: rows after the tokens and gaps between the ids have the text "".
"""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_NORMAL_FORMS = ("NFC", "NFD", "NFKD")  # NFKC is not bounded so tightly
_NORMAL_FORM_FACTOR = 3
_LOSSY_FACTOR = 16
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode keeps them out of texts


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes by token id: a character may be split over tokens, and detokenizing is one lookup for each token.

    `tokenizer`: transformers' or `tokenizers`'. An id without a token has b"".
    """
    backend = _backend(tokenizer)
    if backend is None:
        return _slow_bytes(tokenizer)
    pieces = _pieces(backend)
    known = [piece or "" for piece in pieces]
    if backend.decoder is None:  # tokens are then words, which blanks join
        table = [f" {piece}".encode() for piece in known]
    else:
        table = _decoded(backend.decoder, known)
    return [b"" if piece is None else raw for piece, raw in zip(pieces, table, strict=True)]


def whole_bytes(tokenizer: Any, token_ids: Sequence[int], texts: list[bytes]) -> bytes:
    """The whole text of these tokens. `texts`: those that they have in the middle of one."""
    backend = _backend(tokenizer)
    begin = 0
    while backend is not None and begin < len(token_ids):
        piece = backend.id_to_token(token_ids[begin])
        if piece is not None:
            return b"".join([_first_bytes(backend.decoder, piece, texts[begin]), *texts[begin + 1 :]])
        begin += 1
    return b"".join(texts)


def _first_bytes(decoder: Any, piece: str, inside: bytes) -> bytes:
    if decoder is None:
        return piece.encode()
    text = _Separated(decoder, _mark_for(piece)).first(piece)
    return inside if "\ufffd" in text else text.encode()


def max_bytes_per_token(tokenizer: Any, texts: Sequence[bytes]) -> int:
    """An upper bound of the bytes of text that one token stands for.

    It is the length of the longest token where encoding loses nothing (byte-level vocabularies). Unicode normal forms
    can turn three bytes into one. Tokenizers that drop or merge more (blanks, unknown words) get a generous factor.
    """
    longest = max(map(len, texts), default=1)
    backend = _backend(tokenizer)
    normalizer = getattr(backend, "normalizer", None)
    blanks_go = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if backend is None or "ByteLevel" not in decoder_steps(backend.decoder) or blanks_go:
        return longest * _LOSSY_FACTOR
    if normalizer is None:
        return longest
    return longest * (_NORMAL_FORM_FACTOR if type(normalizer).__name__ in _NORMAL_FORMS else _LOSSY_FACTOR)


def _backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer`; None: a tokenizer in Python."""
    return tokenizer if hasattr(tokenizer, "id_to_token") else getattr(tokenizer, "backend_tokenizer", None)


def _pieces(backend: Any) -> list[str | None]:
    """The vocabulary's pieces by id. The library counts the tokens, so gaps between ids hide as many at the end."""
    size = backend.get_vocab_size(with_added_tokens=True)
    pieces = list(map(backend.id_to_token, range(size)))
    if None in pieces:
        size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        pieces = list(map(backend.id_to_token, range(size)))
    return pieces


def _decoded(decoder: Any, pieces: list[str]) -> list[bytes]:
    """Byte-level tokens are read by their table, others are decoded in one call: 0.4 s of CPU for 260,000."""
    steps = list(decoder_steps(decoder))
    if set(steps) <= {"ByteLevel", "Fuse"}:
        return _byte_level(pieces)
    mark = _mark_for("".join(pieces))
    separated = _Separated(decoder, mark)
    table = [text.encode() for text in separated.texts(pieces)]
    if separated.texts(["<0x41>"]) == ["A"]:
        for token_id, piece in enumerate(pieces):
            if piece.startswith("<0x") and (byte := _BYTE_PIECE.fullmatch(piece)):
                table[token_id] = bytes.fromhex(byte[1])
    if "ByteLevel" in steps:  # with others: parts of characters are the only bytes that these leave alone
        exact = _byte_level(pieces)
        table = [exact[at] if b"\xef\xbf\xbd" in raw else raw for at, raw in enumerate(table)]
    return table


class _Separated:
    """Tokens between marks, which decoders leave alone: all stand in the middle of a text, and one call is enough."""

    def __init__(self, decoder: Any, mark: str) -> None:
        self._decode, self._mark = decoder.decode, mark
        # what the decoder writes before each word, a blank or nothing, belongs to the mark after a token
        self._between = decoder.decode([mark] * 3).split(mark)[1]

    def texts(self, pieces: Sequence[str]) -> list[str]:
        mark = self._mark
        tokens = [mark] * (2 * len(pieces) + 1)
        tokens[1::2] = pieces
        texts = str(self._decode(tokens)).split(mark)[1:-1]
        return [text.removesuffix(self._between) for text in texts]

    def first(self, piece: str) -> str:
        return str(self._decode([piece, self._mark])).split(self._mark)[0].removesuffix(self._between)


def _mark_for(text: str) -> str:
    return next(mark for mark in _NONCHARACTERS if mark not in text)


def decoder_steps(decoder: Any) -> list[str]:
    """The names of a decoder's steps, one for a decoder that is not a sequence."""

    def names(state: dict[str, Any]) -> list[str]:
        inner = state.get("decoders")
        return [state.get("type", "")] if inner is None else [name for one in inner for name in names(one)]

    return names(json.loads(decoder.__getstate__()) if decoder is not None else {})


def _printable_bytes() -> dict[int, str]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for characters from 256 on.

    -> code of a character: the Latin-1 character of its byte. Other Latin-1 characters become one that is none.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    outside = dict.fromkeys(moved, _NONCHARACTERS[0])
    return outside | {256 + at: chr(byte) for at, byte in enumerate(moved)}


_PRINTABLE_BYTES = _printable_bytes()


def _byte_level(pieces: list[str]) -> list[bytes]:
    """A piece that is not of the alphabet, an added token with a blank, stands for itself."""
    mark = _mark_for("".join(pieces) + _NONCHARACTERS[0])
    table = []
    for piece, text in zip(pieces, mark.join(pieces).translate(_PRINTABLE_BYTES).split(mark), strict=True):
        try:
            table.append(text.encode("latin-1"))
        except UnicodeEncodeError:
            table.append(piece.encode())
    return table


def _slow_bytes(tokenizer: Any) -> list[bytes]:
    """Of a tokenizer in Python: its own bytes (mistral-common's), or the text that a token adds after itself.

    A part of a character then stays U+FFFD.
    """
    inner: Any = getattr(getattr(getattr(tokenizer, "tokenizer", None), "instruct_tokenizer", None), "tokenizer", None)
    if hasattr(inner, "id_to_byte_piece"):
        policy = import_module("mistral_common.tokens.tokenizers.base").SpecialTokenPolicy.KEEP
        return [inner.id_to_byte_piece(token_id, policy) for token_id in range(inner.n_words)]
    ids = set(tokenizer.get_vocab().values())
    return [_by_difference(tokenizer, one) if one in ids else b"" for one in range(max(ids, default=-1) + 1)]


def _by_difference(tokenizer: Any, token_id: int) -> bytes:
    once, twice = tokenizer.decode([token_id]), tokenizer.decode([token_id, token_id])
    return str(twice[len(once) :]).encode()
