"""Small tokenizers, one for each kind of decoder that published models have."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
BLANK = "▁"
PIECES = [BLANK, f"{BLANK}{BLANK}", f"{BLANK}he", "llo", "he", f"a{BLANK}b", "é", "日本", "🙂", "x", "##ing", "un", "_"]


def byte_fallback(decoder: Any) -> Tokenizer:
    """The pieces of a SentencePiece vocabulary, with added tokens: special, not special, of blanks alone."""
    pieces = ["<unk>", *BYTES, *PIECES]
    model = models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", BLANK)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>", f"<{BLANK}>"])
    tokenizer.add_tokens([BLANK * 3, "\n\n", "<mark>", "é", AddedToken("[X]", lstrip=True, rstrip=True)])
    return tokenizer


def byte_level(decoder: Any = None, normalizer: Any = None, pattern: str = "") -> Tokenizer:
    """As GPT-2: bytes and a few merges. Added tokens of blanks and accents, which are not of its alphabet.

    `pattern`: splits words in place of GPT-2's.
    """
    vocab = {piece: at for at, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("he", "l"), ("Ġ", "he"), ("i", "m"), ("Ã", "©"), ("x", "y")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoder or decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens(["<|end|>", "<｜fin▁｜>"])
    tokenizer.add_tokens(["<think>", "two words", "é", "日本"])
    return tokenizer


def words(decoder: Any) -> Tokenizer:
    """Whole words and their parts, as BERT's and the first GPT's."""
    pieces = ["[UNK]", "play", "##ing", "un", "do</w>", "able</w>", ".", "n't", "##", "日本"]
    tokenizer = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


def with_gaps(tokenizer: Tokenizer) -> Tokenizer:
    """The same, but the ids of the vocabulary have gaps, and begin after one."""
    told = json.loads(tokenizer.to_str())
    added = {token["content"] for token in told["added_tokens"]}
    vocab = told["model"]["vocab"]
    told["model"]["vocab"] = {piece: 3 * at + 2 for piece, at in vocab.items() if piece not in added}
    last = max(told["model"]["vocab"].values())
    for number, token in enumerate(told["added_tokens"]):
        token["id"] = told["model"]["vocab"][token["content"]] = last + 2 + 2 * number
    return Tokenizer.from_str(json.dumps(told))


def _sentencepiece(*more: Any) -> Any:
    return decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *more])


TOKENIZERS = {
    "gemma": byte_fallback(_sentencepiece()),
    "llama2": byte_fallback(_sentencepiece(decoders.Strip(" ", 1, 0))),
    "strip each": byte_fallback(decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Strip(" ", 1, 0)])),
    "metaspace always": byte_fallback(decoders.Metaspace(BLANK, "always")),
    "metaspace first": byte_fallback(decoders.Metaspace(BLANK, "first")),
    "metaspace never": byte_fallback(decoders.Metaspace(BLANK, "never")),
    "metaspace bytes": byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(BLANK, "always")])),
    "nested": byte_fallback(decoders.Sequence([_sentencepiece(), decoders.Fuse()])),
    "two replaces": byte_fallback(decoders.Sequence([decoders.Replace(BLANK, " "), decoders.Replace("x", "yz")])),
    "byte level": byte_level(),
    "byte level in a sequence": byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "byte level and more": byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("x", "[x]")])),
    "word pieces": words(decoders.WordPiece()),
    "word pieces as they are": words(decoders.WordPiece(cleanup=False)),
    "word ends": words(decoders.BPEDecoder("</w>")),
    "gaps": with_gaps(byte_fallback(_sentencepiece())),
    "byte level gaps": with_gaps(byte_level()),
}
