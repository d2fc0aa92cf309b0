"""Vocabularies that are published in other forms than `tokenizer.json`, in that form: tekken, tiktoken, sentencepiece.

The results are those of the `tokenizer.json` files that the models' authors publish beside them: byte-level BPE, or BPE
with `▁` for blanks, bytes as a last resort, and the decoder that goes with it.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

Piece = TypeVar("Piece", str, bytes)

_BLANK = "▁"
# The first ids of a tekken that names none of its special tokens; further ones have numbers
_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def tekken(path: Path) -> Tokenizer:
    """The special tokens come first, then the bytes of each further token. What exceeds the given size is cut off."""
    told = json.loads(path.read_text())
    config = told["config"]
    num_special, num_all = config["default_num_special_tokens"], config["default_vocab_size"]
    names = [*_TEKKEN_SPECIAL, *(f"<SPECIAL_{number}>" for number in range(len(_TEKKEN_SPECIAL), num_special))]
    pieces = [base64.b64decode(entry["token_bytes"]) for entry in told["vocab"][: num_all - num_special]]
    ids = {piece: number for number, piece in enumerate(pieces, num_special)}
    return byte_level(ids, config["pattern"], {name: number for number, name in enumerate(names)}, not_special=())


def tiktoken(path: Path, pattern: str, added: Mapping[str, int], not_special: Iterable[str]) -> Tokenizer:
    """Lines with a token in base64 and its id."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return byte_level({base64.b64decode(token): int(rank) for token, rank in lines}, pattern, added, not_special)


def byte_level(
    ids: Mapping[bytes, int], pattern: str, added: Mapping[str, int], not_special: Iterable[str]
) -> Tokenizer:
    """BPE over bytes. Two tokens merge to a third where one is there, the lower id first."""
    shown = {token: _as_text(token) for token in ids}
    vocabulary = {shown[token]: number for token, number in ids.items()} | dict(added)
    merges = [(shown[left], shown[right]) for left, right in _merges(ids)]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, {name: name not in set(not_special) for name in added})
    return tokenizer


def sentencepiece(path: Path) -> Tokenizer:
    """BPE of sentencepiece with a byte as the last resort; its control tokens are special."""
    from sentencepiece import SentencePieceProcessor

    model: Any = SentencePieceProcessor(model_file=str(path))
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merged = {piece: number for piece, number in ids.items() if not (model.is_byte(number) or model.is_control(number))}
    tokenizer = Tokenizer(
        models.BPE(ids, list(_merges(merged)), unk_token=pieces[model.unk_id()], fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = [piece for piece, number in ids.items() if model.is_control(number) or model.is_unknown(number)]
    _add(tokenizer, dict.fromkeys(control, True))
    return tokenizer


def _add(tokenizer: Tokenizer, are_special: Mapping[str, bool]) -> None:
    for name, is_special in are_special.items():
        token = AddedToken(name, special=is_special, normalized=False)
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)([token])


def _merges(ids: Mapping[Piece, int]) -> Iterable[tuple[Piece, Piece]]:
    for piece in sorted(ids, key=lambda one: ids[one]):
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _byte_names() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it is printable."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(0x100)]


_NAMES = _byte_names()


def _as_text(token: bytes) -> str:
    return "".join(_NAMES[byte] for byte in token)
