"""Token bytes agree with the tokenizer's own decoding, for the decoders that LLMs use."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.server.text.tokenizer import LONG_CHARS, Tokenizer
from tests.deadlines import HANG_S
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


@pytest.mark.long
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
    """Where it stands alone: an answer goes on after a prompt, and keeps it."""
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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["text", "chat"])
async def test_a_short_text_does_not_wait_for_a_long_one(kind: str) -> None:
    """8 MB take Qwen 3's tokenizer 7 to 15 s."""
    tokenizer, goes_on = Tokenizer.load(MODEL_DIR), threading.Event()

    def wait(*_: object) -> None:
        goes_on.wait(2 * HANG_S)

    long = "a long story " * (LONG_CHARS // 10)
    chat = [{"role": "user", "content": long}]
    try:
        if kind == "text":
            reading = tokenizer.encode(long, max_tokens=1 << 20, note=wait)
        else:
            reading = tokenizer.encode_chat(chat, None, {}, max_tokens=1 << 20, note=wait)
        under_way = asyncio.create_task(reading)
        await asyncio.sleep(0)  # it is in its thread's queue
        short = tokenizer.encode_chat([{"role": "user", "content": "hi"}], None, {}, max_tokens=64)
        assert await asyncio.wait_for(short, HANG_S)
        assert await asyncio.wait_for(tokenizer.encode("hi", max_tokens=64), HANG_S)
        assert not under_way.done()
        goes_on.set()
        assert len(await under_way) > LONG_CHARS // 10
    finally:
        goes_on.set()
        tokenizer.close()


@pytest.mark.long
async def test_two_threads_read_right() -> None:
    """Settings in a tokenizer's file would be changed by a call, which fails beside another one."""
    backend = PreTrainedTokenizerFast.from_pretrained(str(MODEL_DIR))
    backend.backend_tokenizer.enable_truncation(5)
    backend.backend_tokenizer.enable_padding()
    tokenizer = Tokenizer(backend)
    assert (backend.backend_tokenizer.truncation, backend.backend_tokenizer.padding) == (None, None)
    texts = ["Mira 4831. " * number for number in (1, 10, 9000, 3, 12000, 100) * 4]
    try:
        asked = [tokenizer.encode(text, max_tokens=1 << 20, note=lambda _: None) for text in texts]
        for text, ids in zip(texts, await asyncio.gather(*asked), strict=True):
            assert tokenizer.text_of(ids) == text
    finally:
        tokenizer.close()


@pytest.mark.long
async def test_of_a_text_with_too_many_tokens_a_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(MODEL_DIR)
    encode, read = tokenizer._encode, list[int]()

    def counted(text: str, *more: Any) -> list[int]:
        read.append(len(text))
        return encode(text, *more)

    monkeypatch.setattr(tokenizer, "_encode", counted)
    chat = [{"role": "user", "content": "☃" * 200_000}]
    try:
        with pytest.raises(InvalidRequest, match=r"prompt: the first 100000 of 200000 characters") as refused:
            await tokenizer.encode("☃" * 200_000, max_tokens=50_000, refuses=True)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequest, match="first 100000"):
            await tokenizer.encode_chat(chat, None, {}, max_tokens=50_000, refuses=True)
        assert read == [100_000, 100_000]
        assert len(await tokenizer.encode("☃" * 200_000, max_tokens=50_000)) > 200_000
        long = "the tree and the river " * 11_000
        ids = await tokenizer.encode(long, max_tokens=50_000, refuses=True)
        assert tokenizer.text_of(ids) == long
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
