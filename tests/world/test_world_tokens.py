"""Each token of published tokenizers as `tokenizers` decodes it, and texts streamed token by token."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pd_cluster.server.text.detokenizer import Detokenizer
from pd_cluster.server.text.tokenizer import Tokenizer
from tests.world.published_models import PUBLISHED, PublishedModel
from tests.world.world_texts import world_texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_TEXTS = 10_000
BATCH = 4096
UNKNOWN = "\ufffd"


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda model: model.name)
def published(request: pytest.FixtureRequest) -> PublishedModel:
    model: PublishedModel = request.param
    assert model.tokenizer_folder.is_dir()  # or the test is skipped
    return model


@pytest.fixture(scope="module")
def ours(published: PublishedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """As a node loads it."""
    tokenizer = Tokenizer.load(published.write(tmp_path_factory.mktemp("model")))
    yield tokenizer
    tokenizer.close()


class Judge:
    """`tokenizers`' own decoder. A token stands after another one, since a decoder may strip the first blank."""

    def __init__(self, published: PublishedModel) -> None:
        self._raw = published.raw_tokenizer
        found = (self._raw.token_to_id(word) for word in ("a", "▁a"))
        self._anchor = next(number for number in found if number is not None)
        self._anchor_text = self._raw.decode([self._anchor], skip_special_tokens=False)

    @property
    def num_tokens(self) -> int:
        """The tokenizer's size: one more than its greatest id."""
        return max(self._raw.get_vocab().values()) + 1

    def has(self, token_id: int) -> bool:
        return self._raw.id_to_token(token_id) is not None

    def texts(self, sequences: Sequence[Sequence[int]]) -> Iterator[str]:
        for start in range(0, len(sequences), BATCH):
            batch = [[self._anchor, *ids] for ids in sequences[start : start + BATCH]]
            for text in self._raw.decode_batch(batch, skip_special_tokens=False):
                assert text.startswith(self._anchor_text)
                yield text[len(self._anchor_text) :]

    def encode(self, text: str) -> list[int]:
        return list(self._raw.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def judge(published: PublishedModel) -> Judge:
    return Judge(published)


def test_every_row_is_what_tokenizers_says(published: PublishedModel, ours: Tokenizer, judge: Judge) -> None:
    """Each row of the embedding, also those without a token, and each id of the tokenizer after them."""
    ids = range(max(published.rows, judge.num_tokens))
    wrong = {}
    for number, text in zip(ids, judge.texts([[number] if judge.has(number) else [] for number in ids]), strict=True):
        found = ours.token_bytes(number).decode(errors="replace")
        if found != text:
            wrong[number] = (found, text)
    assert wrong == {}


def test_streamed_texts_are_the_whole_ones(ours: Tokenizer, judge: Judge) -> None:
    encoded = [judge.encode(text) for text in world_texts(NUM_TEXTS)]
    wrong = []
    for ids, expected in zip(encoded, judge.texts(encoded), strict=True):
        whole, streamed = ours.text_of(ids), stream(ours, ids)
        if not whole == streamed == expected:
            wrong.append((ids, expected, whole, streamed))
    assert wrong == []


def test_any_tokens_stream_as_the_whole_text(published: PublishedModel, ours: Tokenizer) -> None:
    """Parts of characters in any order, special tokens and rows without a token among them."""
    rng = random.Random(published.name)
    for _ in range(2000):
        ids = rng.choices(range(published.rows), k=rng.randint(1, 30))
        assert stream(ours, ids) == ours.text_of(ids)


def test_a_text_comes_back(published: PublishedModel, ours: Tokenizer, judge: Judge) -> None:
    """What is encoded is decoded to the same text, but for normal forms, and blanks that look like sentencepiece's."""
    normalizer = published.raw_tokenizer.normalizer
    added = [token.content for token in published.raw_tokenizer.get_added_tokens_decoder().values()]
    is_byte_level = "ByteLevel" in repr(published.raw_tokenizer.decoder)
    for text in world_texts(NUM_TEXTS // 5, seed=34):
        found = ours.text_of(judge.encode(text))
        if not is_byte_level:
            if any(token in text for token in added):
                continue  # the text after an added token gets a blank, as a text's beginning does
            assert found.lstrip(" ") == text.replace("▁", " ").lstrip(" ")
        else:
            assert found == (text if normalizer is None else normalizer.normalize_str(text))


def stream(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    return "".join([*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()])
