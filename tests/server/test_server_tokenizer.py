"""Token bytes agree with the tokenizer's own decoding, for the decoders that LLMs use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.server.tokenizer import Tokenizer
from tests.server.live_server import MODEL_DIR

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Llama 2's decoder over a handful of pieces."""
    pieces = ["<unk>", "▁he", "llo", "▁wor", "ld", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def wordpiece_like() -> PreTrainedTokenizerFast:
    """A decoder that is not known by name: bytes come by difference."""
    backend = Backend(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


def test_byte_level_bytes_are_the_tokenizers_own() -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    reference = AutoTokenizer.from_pretrained(str(MODEL_DIR))
    for token_id in range(len(reference)):
        assert tokenizer.token_bytes(token_id).decode(errors="replace") == reference.decode([token_id])
    text = 'Mira 4831. "Où est 🙂?"\n\tdéjà-vu <|im_end|>'
    ids = reference.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_sentencepiece_bytes_spell_spaces_and_byte_fallback() -> None:
    tokenizer = Tokenizer(sentencepiece_like())
    assert b"".join(map(tokenizer.token_bytes, [1, 2, 3, 4])) == b" hello world"
    assert b"".join(map(tokenizer.token_bytes, [5, 6, 7, 8])).decode() == "🙂"


def test_other_decoders_are_read_by_difference() -> None:
    tokenizer = Tokenizer(wordpiece_like())
    assert tokenizer.token_bytes(1) == b" play"
    assert tokenizer.token_bytes(2) == b"ing"


def test_rows_beyond_the_tokenizer_stand_for_nothing() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), vocab_size=64)
    assert tokenizer.vocab_size == 64
    assert tokenizer.token_bytes(63) == b""


async def test_a_row_without_a_token_has_no_text_anywhere() -> None:
    tokenizer = Tokenizer(sentencepiece_like(), vocab_size=64)
    try:
        assert (tokenizer.num_tokens, tokenizer.vocab_size) == (10, 64)
        assert await tokenizer.pieces([1, 63]) == ["▁he", ""]
        assert await tokenizer.decode([63, 1, 40, 2]) == " hello"
        assert tokenizer.text_of([1, 63, 2]) == " hello"
    finally:
        tokenizer.close()


async def test_a_whole_text_loses_the_blank_that_its_decoder_drops() -> None:
    """Where it stands alone: an answer goes on behind a prompt, and keeps it."""
    backend = sentencepiece_like()
    backend.backend_tokenizer.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    try:
        assert await tokenizer.decode([1, 2, 3, 4]) == backend.decode([1, 2, 3, 4]) == "hello world"
        assert tokenizer.text_of([1, 2, 3, 4]) == " hello world"
    finally:
        tokenizer.close()


async def test_a_token_that_the_embedding_lacks_is_the_clients() -> None:
    """Gemma 3 1B has a token more than its embedding has rows."""
    backend = sentencepiece_like()
    backend.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer = Tokenizer(backend, vocab_size=10)
    try:
        assert (tokenizer.num_tokens, tokenizer.vocab_size) == (11, 10)
        with pytest.raises(InvalidRequest, match="has the token '<image>'") as refused:
            await tokenizer.encode("<image>", max_tokens=64, param="input")
        assert refused.value.param == "input"
        assert await tokenizer.encode("▁he", max_tokens=64, add_special_tokens=False)
    finally:
        tokenizer.close()


async def test_chat_template_failures_are_the_clients() -> None:
    backend = sentencepiece_like()
    message = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match="no chat template"):
        await Tokenizer(backend).encode_chat(message, None, {}, max_tokens=64)
    backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await Tokenizer(backend).encode_chat(message, None, {}, max_tokens=64)


async def test_text_survives_the_round_trip() -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    try:
        ids = await tokenizer.encode("naïve 🙂 text", max_tokens=4096)
        assert await tokenizer.decode(ids) == "naïve 🙂 text"
    finally:
        tokenizer.close()


def test_missing_tokenizer_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(StartupError, match="tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("part", ["pre_tokenizer", "decoder", "normalizer", "model"])
def test_a_part_of_a_newer_format_is_a_startup_error(part: str, tmp_path: Path) -> None:
    """The library raises a plain Exception for it."""
    sentencepiece_like().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: {"type": "NotYetKnown"}}))
    with pytest.raises(StartupError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)


def test_the_vocabulary_of_a_wrapper_is_that_of_its_text_model(tmp_path: Path) -> None:
    sentencepiece_like().save_pretrained(tmp_path)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"vocab_size": 99}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.close()
    assert tokenizer.vocab_size == 99
