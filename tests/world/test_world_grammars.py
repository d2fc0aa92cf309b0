"""Grammars over published vocabularies with the rows of the models: masks allow what the grammar accepts."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from pd_cluster.server.grammar.grammar_process import write
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_cluster.worker.grammars import Grammars
from tests.world.published_models import PUBLISHED, PublishedModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("llguidance")

WALKS = 60
MAX_TOKENS = 400
CHOICES = [
    *("a,  b,    c", "if x:\n    y\n\tz", "你好，世界", "👩‍👩‍👧‍👦 🦜", "naïve é ẹ̀", "▁"),
    *(" leading", "x", "<b>&amp;</b>\r\n", "Ġ", "<think>", "</s> <|im_end|>"),
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "word": {"enum": ["x  y", "日本", "🦜", 'say "hi"']},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3},
        "at": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "word", "tags", "at"],
    "additionalProperties": False,
}
REGEXES = {
    "indented": r"(?:if [a-z]:\n(?: {4}){1,3}[a-z] = [0-9]{1,4}\n){1,3}",
    "scripts": r"[\u4e00-\u4eff]{1,5}(?: {2,6}[\U0001F300-\U0001F5FF]){1,3}",
    "words": r"[A-Z][a-zé]{1,12}(?:[ \u00a0][a-z]{1,8}){0,4}[.!?]",
}


class Vocabulary:
    """One model's tokens, as its node has them in grammars and in texts."""

    def __init__(self, published: PublishedModel, directory: Path) -> None:
        self.published = published
        self.tokenizer = Tokenizer.load(directory)
        self.eos = published.eos_token_ids
        self.grammars = Grammars(directory, published.rows, frozenset(self.eos))
        raw = published.raw_tokenizer
        self.without_token = np.array([raw.id_to_token(number) is None for number in range(published.rows)])

    def close(self) -> None:
        self.grammars.close()
        self.tokenizer.close()

    def walk(self, grammar: str, seed: int) -> str:
        """The text of a random walk under the masks, to its end. Each mask allows rows with a token alone."""
        rng = random.Random(seed)
        state = self.grammars.state(self.grammars.prepare(grammar))
        masks = np.zeros((1, -(-self.published.rows // 32)), np.int32)
        taken: list[int] = []
        while not state.is_over and len(taken) < MAX_TOKENS:
            self.grammars.fill({0: state}, masks)
            allowed = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
            assert not allowed[: self.published.rows][self.without_token].any(), "a row without a token is allowed"
            assert not allowed[self.published.rows :].any(), "a row that the model lacks is allowed"
            ids = [number for number in np.flatnonzero(allowed).tolist() if number not in self.eos]
            may_end = bool(allowed[self.eos].any())
            assert may_end == state.is_accepting
            assert ids or may_end, "nothing is allowed"
            if may_end and (not ids or rng.random() < 0.3):
                break
            taken.append(rng.choice(ids))
            self.grammars.advance([(state, taken[-1:])])
        assert not state.error, state.error
        assert state.is_accepting or state.is_over
        return self.tokenizer.text_of(taken)


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda model: model.name)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    model: PublishedModel = request.param
    vocabulary = Vocabulary(model, model.write(tmp_path_factory.mktemp("model")))
    yield vocabulary
    vocabulary.close()


@cache
def _written(kind: str, value: str, choices: tuple[str, ...] = ()) -> str:
    return write(kind, value, list(choices), coerces_one_of=False)


def test_a_choice_is_one_of_them(vocabulary: Vocabulary) -> None:
    grammar = _written("choice", "", tuple(CHOICES))
    found = {vocabulary.walk(grammar, seed) for seed in range(WALKS)}
    assert found <= set(CHOICES)
    assert len(found) > len(CHOICES) // 2


def test_json_is_of_the_schema(vocabulary: Vocabulary) -> None:
    grammar = _written("json", json.dumps(SCHEMA))
    for seed in range(WALKS):
        text = vocabulary.walk(grammar, seed)
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("name", REGEXES)
def test_a_regex_matches(name: str, vocabulary: Vocabulary) -> None:
    grammar = _written("regex", REGEXES[name])
    for seed in range(WALKS):
        text = vocabulary.walk(grammar, seed)
        assert re.fullmatch(REGEXES[name], text), text


def test_free_text_allows_no_row_without_a_token(vocabulary: Vocabulary) -> None:
    """The mask of all tokens, where a padded row would be drawn most often."""
    grammar = _written("regex", "(?s:.*)")
    for seed in range(20):
        assert isinstance(vocabulary.walk(grammar, seed), str)
