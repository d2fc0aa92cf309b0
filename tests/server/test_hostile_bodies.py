"""A client cannot make a node answer 500, delay other requests, or read more bytes than a request needs."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.schema import MAX_PROMPTS
from pd_cluster.server.text.tokenizer import Tokenizer
from tests.bad_bodies import BAD_BODIES, OVERSIZED, check_error
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import demo_tokenizer, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


@pytest.mark.long
async def test_every_bad_body_is_a_400_however_often_it_comes() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for name, (path, body) in list(BAD_BODIES.items()) * 10:
            async with node.session.post(node.url + path, data=body) as response:
                assert response.status == 400, name
                check_error(await response.json())
        async with node.session.get(f"{node.url}/health") as response:
            assert (response.status, (await response.json())["num_in_flight"]) == (200, 0)
        assert node.engine.requests == []


async def test_an_error_repeats_little_of_what_was_sent() -> None:
    body = json.dumps({"prompt": "x", "model": "m" * 1_000_000}).encode()
    async with (
        running(FakeEngine(says([5]))) as node,
        node.session.post(f"{node.url}/v1/completions", data=body) as response,
    ):
        assert response.status == 404
        assert len(await response.read()) < 5000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/pd/release"])
async def test_the_longest_body_follows_from_the_context_length(path: str) -> None:
    async with (
        running(FakeEngine(says([5]))) as node,
        node.session.post(node.url + path, data=io.BytesIO(OVERSIZED)) as response,
    ):
        answer = await response.json()
        assert response.status == 413
        check_error(answer)
        assert answer["error"]["code"] == "body_too_large"
    async with running(FakeEngine(says([5]), max_model_len=1 << 20)) as node:
        assert node.state.max_body_bytes > len(OVERSIZED)


@pytest.mark.long
async def test_a_small_model_takes_as_many_prompts_as_a_request_may_have() -> None:
    """The length of such a body does not follow from the length of one prompt."""
    body = json.dumps({"prompt": [[1000] * 2000] * MAX_PROMPTS, "max_tokens": 1}).encode()
    async with (
        running(FakeEngine(says([5]))) as node,
        node.session.post(f"{node.url}/v1/completions", data=io.BytesIO(body)) as response,
    ):
        assert response.status == 200
        assert len((await response.json())["choices"]) == MAX_PROMPTS


class Untouched:
    """A tokenizer that fails when it encodes a text."""

    is_fast = False  # a fast one encodes an empty text at its start

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("the text was encoded")


@pytest.fixture
def untouched() -> Iterator[Tokenizer]:
    plain = demo_tokenizer()
    tokenizer = Tokenizer(Untouched(plain._tokenizer))
    yield tokenizer
    plain.close()
    tokenizer.close()


async def test_what_must_be_too_long_is_not_encoded(untouched: Tokenizer) -> None:
    longest = max(len(untouched.token_bytes(i)) for i in range(untouched.vocab_size))
    for text in ("x" * (10 * longest + 1), "é" * (5 * longest + 1)):
        with pytest.raises(InvalidRequest, match="more than 10 tokens") as plain:
            await untouched.encode(text, max_tokens=10)
        assert plain.value.code == "context_length_exceeded"
        with pytest.raises(InvalidRequest, match="more than 10 tokens"):
            await untouched.encode_chat([{"role": "user", "content": text}], None, {}, max_tokens=10)
    with pytest.raises(AssertionError, match="was encoded"):
        await untouched.encode("x" * (10 * longest), max_tokens=10)


async def test_the_longest_texts_that_fit_are_encoded() -> None:
    tokenizer = demo_tokenizer()
    try:
        by_length = sorted(range(tokenizer.vocab_size), key=lambda i: -len(tokenizer.token_bytes(i)))
        for token_id in by_length[:3]:
            text = tokenizer.token_bytes(token_id).decode() * 10
            assert len(await tokenizer.encode(text, max_tokens=10)) >= 10
    finally:
        tokenizer.close()


async def test_a_normal_form_that_shrinks_texts_is_allowed_for() -> None:
    """Three Hangul letters of three bytes each become one syllable of three bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    try:
        assert len(await tokenizer.encode("\u1112\u1161\u11ab" * 4, max_tokens=12)) == 12
        with pytest.raises(InvalidRequest):
            await tokenizer.encode("x" * 37, max_tokens=12)
    finally:
        tokenizer.close()
