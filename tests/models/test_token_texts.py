"""What a token is as text and bytes agrees with the tokenizer's own decoder, for every id and every kind of decoder."""

from __future__ import annotations

import random

import pytest

from pd_cluster.models.token_texts import token_bytes, whole_bytes
from tests.models.small_tokenizers import BYTES, TOKENIZERS, byte_level

# The text after a whole text's last token is not known to a stream: these drop what stands there
LAST_TOKEN_DIFFERS = {"word ends"}


@pytest.mark.long_cases
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_texts_are_those_of_the_decoder(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    table = token_bytes(tokenizer)
    generator, trailing = random.Random(0), " " if kind in LAST_TOKEN_DIFFERS else ""
    assert len(table) == max(tokenizer.get_vocab().values()) + 1
    sequences = [[token_id] for token_id in range(len(table))]
    sequences += [generator.choices(range(len(table)), k=generator.randint(2, 12)) for _ in range(2000)]
    compared = 0
    for ids in sequences:
        expected = tokenizer.decode(ids, skip_special_tokens=False)
        text = whole_bytes(tokenizer, ids, [table[token_id] for token_id in ids]).decode(errors="replace")
        if "\ufffd" not in expected:
            assert text.removesuffix(trailing) == expected.removesuffix(trailing), ids
            compared += 1
    assert compared > 200


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_token_has_its_text_in_the_middle_of_a_text(kind: str) -> None:
    """An answer goes on after a prompt: a blank that only the beginning of a whole text loses is there."""
    tokenizer = TOKENIZERS[kind]
    table, around = token_bytes(tokenizer), tokenizer.get_vocab()
    anchor = next(around[piece] for piece in ("x", "un") if piece in around)
    alone = tokenizer.decode([anchor, anchor], skip_special_tokens=False)
    first = tokenizer.decode([anchor], skip_special_tokens=False)
    for token_id in range(len(table)):
        text = tokenizer.decode([anchor, token_id, anchor], skip_special_tokens=False)
        if "\ufffd" not in text:
            assert first + table[token_id].decode() + alone.removeprefix(first) == text, token_id


def test_an_id_without_a_token_has_no_text() -> None:
    tokenizer = TOKENIZERS["gaps"]
    table = token_bytes(tokenizer)
    used = set(tokenizer.get_vocab().values())
    assert len(used) < len(table)
    assert {token_id for token_id, raw in enumerate(table) if not raw} == set(range(len(table))) - used


def test_parts_of_a_character_have_its_bytes() -> None:
    for kind in ("gemma", "llama2", "metaspace bytes"):
        vocab, table = TOKENIZERS[kind].get_vocab(), token_bytes(TOKENIZERS[kind])
        assert [table[vocab[piece]] for piece in BYTES] == [bytes([byte]) for byte in range(256)]
    table = token_bytes(byte_level())
    assert {bytes([byte]) for byte in range(256)} <= set(table)


def test_a_decoder_without_byte_fallback_shows_a_byte_s_name() -> None:
    vocab, table = TOKENIZERS["metaspace always"].get_vocab(), token_bytes(TOKENIZERS["metaspace always"])
    assert table[vocab["<0x41>"]] == b"<0x41>"
