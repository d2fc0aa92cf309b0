"""llguidance sees the texts that answers have, and a row without a token is never drawn under a grammar."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import normalizers

from pd_cluster.errors import InvalidRequest
from pd_cluster.models.token_texts import token_bytes
from pd_cluster.worker.grammar_vocabulary import GrammarTokens
from pd_cluster.worker.grammars import Grammars, GrammarState
from tests.models.small_tokenizers import TOKENIZERS, byte_level, words

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

pytest.importorskip("llguidance")
WITH_BYTES = [  # kinds that can spell any text
    "gemma", "llama2", "nested", "gaps", "metaspace bytes", "byte level", "byte level in a sequence", "byte level gaps",
]  # fmt: skip
# Blanks, a text that spells a special token or a marker, decomposed characters, characters of several tokens
CHOICES = [
    "a,  b,    c",
    "he <|end|> x",
    "he<think></s>",
    "e\u0301\u212b",
    "日本🙂",
    "two words é",
    "\n\n   xy",
    "<mark>x</mark>",
    "👩\u200d👧 7",
]


def saved(tokenizer: Tokenizer, directory: Path) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def id_of(tokenizer: Tokenizer, token: str) -> int:
    vocab: dict[str, int] = tokenizer.get_vocab()
    return vocab[token]


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()  # type: ignore[no-any-return]


def drawn(grammars: Grammars, grammar: str, seed: int) -> list[int]:
    """The tokens of a random answer, without its end."""
    generator, output = random.Random(seed), list[int]()
    state = grammars.state(grammars.prepare(grammar))
    while not state.is_over:
        mask = filled(grammars, state)
        token_id = generator.choice(allowed(mask))
        if state.is_accepting:
            return output
        output.append(token_id)
        state.advance([token_id])
        assert not state.error, (state.error, output)
    return output


def filled(grammars: Grammars, state: GrammarState) -> Any:
    masks = np.zeros((1, -(-grammars._vocab_size // 32)), np.int32)
    grammars.fill({0: state}, masks)
    return masks[0]


@pytest.mark.parametrize("kind", ["word pieces", "word pieces as they are", "no decoder"])
def test_words_that_blanks_join_meet_no_grammar(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS.get(kind) or words(None)
    with pytest.raises(ValueError, match="words that blanks join"):
        GrammarTokens.read(saved(tokenizer, tmp_path), 99)


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZERS if "word pieces" not in kind])
def test_llguidance_has_the_texts_of_the_answers(kind: str, tmp_path: Path) -> None:
    table = token_bytes(TOKENIZERS[kind])
    tokens = GrammarTokens.read(saved(TOKENIZERS[kind], tmp_path), len(table) + 70)
    seen = tokens.vocabulary([tokens.stand_in_eos]).tokenizer
    assert seen.vocab_size == len(table) + 70
    for token_id, raw in enumerate([*table, *[b""] * 70]):
        if token_id in tokens.marks:
            assert seen.is_special_token(token_id)
        elif raw != b"\xff":  # llguidance's own sign for special tokens; no text has this byte
            assert seen.decode_bytes([token_id]) == (raw or b"<[%d]>" % token_id), token_id


MORE = {
    "normal form": byte_level(normalizer=normalizers.NFC()),  # Qwen's
    "words only": byte_level(pattern=r" ?\p{L}+|\s+"),  # no joiners of emoji, as DeepSeek's pattern
}


@pytest.mark.parametrize("kind", [*WITH_BYTES, *MORE])
def test_a_choice_comes_back_as_it_was_given(kind: str, tmp_path: Path) -> None:
    """Whichever of the allowed tokens are drawn, from a model with more rows than the tokenizer has tokens."""
    tokenizer = MORE.get(kind) or TOKENIZERS[kind]
    table = token_bytes(tokenizer)
    saved(tokenizer, tmp_path)
    eos = id_of(tokenizer, "</s>" if "<unk>" in tokenizer.get_vocab() else "<|end|>")
    grammars = Grammars(tmp_path, len(table) + 70, frozenset({eos}))
    grammar = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in CHOICES)
    try:
        answers = {b"".join(table[one] for one in drawn(grammars, grammar, seed)).decode() for seed in range(60)}
    finally:
        grammars.close()
    assert answers == set(CHOICES)


@pytest.mark.parametrize("kind", ["gaps", "byte level", "byte level gaps"])
def test_rows_without_a_token_are_never_allowed(kind: str, tmp_path: Path) -> None:
    """Not by a wildcard over tokens, and not by their ids."""
    tokenizer = TOKENIZERS[kind]
    table = token_bytes(tokenizer)
    saved(tokenizer, tmp_path)
    vocab_size, eos = len(table) + 70, max(tokenizer.get_added_tokens_decoder())
    grammars = Grammars(tmp_path, vocab_size, frozenset({eos}))
    try:
        for grammar in ("start: <[*]>", "start: <[^0-5]>", f"start: <[{vocab_size - 9}]> | <[{eos}]>"):
            mask = filled(grammars, grammars.state(grammars.prepare(grammar)))
            ids = allowed(mask)
            assert ids
            assert all(table[token_id] for token_id in ids)
    finally:
        grammars.close()


def test_the_end_is_an_id_that_is_a_token(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["gaps"]
    size, eos = len(token_bytes(tokenizer)), id_of(tokenizer, "</s>")
    path = saved(tokenizer, tmp_path)
    tokens = GrammarTokens.read(path, size + 9)
    assert tokens.vocabulary([0, eos, size + 3, size + 99]).tokenizer.eos_tokens == [eos]
    with pytest.raises(ValueError, match="none of the EOS ids"):
        tokens.vocabulary([0, size + 3])
    grammars = Grammars(tmp_path, size + 9, frozenset({0, size + 3}))
    compiled = grammars.prepare('start: "x"')
    compiled.exception()
    with pytest.raises(InvalidRequest, match="none of the EOS ids"):
        grammars.state(compiled)
    grammars.close()


def test_tokens_after_the_model_s_rows_are_left_out(tmp_path: Path) -> None:
    """Gemma 3 1B has one token more than its embedding has rows."""
    for number, kind in enumerate(("gemma", "byte level")):
        table = token_bytes(TOKENIZERS[kind])
        (directory := tmp_path / str(number)).mkdir()
        tokens = GrammarTokens.read(saved(TOKENIZERS[kind], directory), len(table) - 2)
        assert tokens.vocabulary([tokens.stand_in_eos]).tokenizer.vocab_size == len(table) - 2
        assert max(tokens.added.values()) < len(table) - 2


def test_forced_text_is_encoded_as_the_tokenizer_does(tmp_path: Path) -> None:
    """The longest tokens, and not the letters that a random model may prefer."""
    tokenizer = TOKENIZERS["byte level"]
    saved(tokenizer, tmp_path)
    grammars = Grammars(tmp_path, len(token_bytes(tokenizer)), frozenset({id_of(tokenizer, "<|end|>")}))
    output = drawn(grammars, 'start: "hel hexy."', 0)
    grammars.close()
    assert output[:-1] == tokenizer.encode("hel hexy.").ids[:-1]
