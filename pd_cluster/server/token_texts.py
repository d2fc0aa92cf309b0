"""What each token id stands for in a text, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_SENTENCEPIECE_SPACE = "▁"
_NORMAL_FORMS = ("NFC", "NFD", "NFKD")  # NFKC is not bounded so tightly
_NORMAL_FORM_FACTOR = 3
_LOSSY_FACTOR = 16


def token_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes by token id: a character may be split over tokens, and detokenizing is one lookup for each token."""
    pieces: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    decoder = _decoder_name(tokenizer)
    table = []
    for token_id, piece in enumerate(pieces):
        if piece is None:
            table.append(b"")
        elif token_id in added:
            table.append(added[token_id].encode())
        elif decoder == "byte_level":
            table.append(_byte_level(piece))
        elif decoder == "sentencepiece":
            table.append(_sentencepiece(piece))
        else:
            table.append(_by_difference(tokenizer, token_id))
    return table


def max_bytes_per_token(tokenizer: Any, texts: Sequence[bytes]) -> int:
    """An upper bound of the bytes of text that one token stands for.

    It is the length of the longest token where encoding loses nothing (byte-level vocabularies). Unicode normal forms
    can turn three bytes into one. Tokenizers that drop or merge more (blanks, unknown words) get a generous factor.
    """
    longest = max(map(len, texts), default=1)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    blanks_go = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if _decoder_name(tokenizer) != "byte_level" or blanks_go:
        return longest * _LOSSY_FACTOR
    if normalizer is None:
        return longest
    return longest * (_NORMAL_FORM_FACTOR if type(normalizer).__name__ in _NORMAL_FORMS else _LOSSY_FACTOR)


def _decoder_name(tokenizer: Any) -> str:
    """The decoder: "byte_level" (as GPT-2), "sentencepiece" (Llama 2, Mistral, Gemma), or "" for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(backend.decoder) if backend is not None else ""
    if "ByteLevel" in decoder:
        return "byte_level"
    return "sentencepiece" if _SENTENCEPIECE_SPACE in decoder else ""


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_PRINTABLE_BYTES = _printable_bytes()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_PRINTABLE_BYTES[char] for char in piece)
    except KeyError:  # not of that alphabet: an added word that is not marked as added
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _by_difference(tokenizer: Any, token_id: int) -> bytes:
    """For unknown decoders: the text that the token adds after another token. Split characters stay U+FFFD."""
    anchor: str = tokenizer.decode([token_id])
    both: str = tokenizer.decode([token_id, token_id])
    return both[len(anchor) :].encode()
