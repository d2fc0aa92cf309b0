"""Grammars over published vocabularies with the rows of the models: what the masks allow is what the grammar accepts."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from pd_cluster.server.grammar_process import write
from pd_cluster.server.tokenizer import Tokenizer
from pd_cluster.worker.grammars import GrammarState, compile_grammar, load_vocabulary
from tests.world.published_models import PUBLISHED, PublishedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
llguidance = pytest.importorskip("llguidance")

WALKS = 60
MAX_TOKENS = 400
CHOICES = ["a,  b,    c", "if x:\n    y\n\tz", "你好，世界", "👩‍👩‍👧‍👦 🦜", "naïve é ẹ̀", "▁", " leading", "x", "<b>&amp;</b>\r\n", "Ġ"]
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
    "indented": r"(?:if [a-z]:\n(?: {4}){1,3}[a-z] = [0-9]+\n){1,3}",
    "scripts": r"[\u4e00-\u4eff]{1,5}(?: {2,6}[\U0001F300-\U0001F5FF]){1,3}",
    "words": r"[A-Z][a-zé]{1,12}(?:[ \u00a0][a-z]{1,8}){0,4}[.!?]",
}


class Vocabulary:
    """One model's tokens as the engine's grammars and as the API process see them."""

    def __init__(self, published: PublishedModel, tokenizer: Tokenizer) -> None:
        self.published, self.tokenizer = published, tokenizer
        path = published.tokenizer_folder / "tokenizer.json"
        self.eos = published.eos_token_ids
        self.tokens = load_vocabulary(path, published.rows, self.eos)
        self.executor = llguidance.LLExecutor(1)
        raw = published.raw_tokenizer
        self.without_token = np.array([raw.id_to_token(number) is None for number in range(published.rows)])

    def walk(self, grammar: str, seed: int) -> str:
        """The text of a random walk under the masks, to its end. Each mask allows rows with a token alone."""
        rng = random.Random(seed)
        state = GrammarState(compile_grammar(self.tokens, self.executor, grammar))
        mask = np.zeros(-(-self.published.rows // 32), np.int32)
        taken: list[int] = []
        while not state.is_over and len(taken) < MAX_TOKENS:
            state.fill(mask)
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert not allowed[: self.published.rows][self.without_token].any(), "a row without a token is allowed"
            assert not allowed[self.published.rows :].any()
            ids = np.flatnonzero(allowed)
            assert len(ids), "nothing is allowed"
            if state.is_accepting and rng.random() < 0.3 and set(self.eos) & set(ids.tolist()):
                break
            ends = state.is_accepting and set(ids.tolist()) <= set(self.eos)
            if ends:
                break
            shown = [number for number in ids.tolist() if number not in self.eos]
            taken.append(rng.choice(shown))
            state.advance(taken[-1:])
        assert not state.error, state.error
        assert state.is_accepting or state.is_over
        return self.tokenizer.text_of(taken)


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda model: model.name)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    model: PublishedModel = request.param
    tokenizer = Tokenizer.load(model.write(tmp_path_factory.mktemp("model")))
    yield Vocabulary(model, tokenizer)
    tokenizer.close()


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
    """The mask of all tokens, where a padded row would be drawn most often; special tokens are none of the text."""
    grammar = _written("regex", "(?s:.*)")
    assert isinstance(vocabulary.walk(grammar, 0), str)


@pytest.mark.parametrize("kind", ["added", "longest"])
def test_what_llguidance_reads_of_a_token_is_its_text(kind: str, vocabulary: Vocabulary) -> None:
    """Added tokens that are not special, and the longest ones: a grammar follows the bytes that a client is shown."""
    raw = vocabulary.published.raw_tokenizer
    added = raw.get_added_tokens_decoder()
    if kind == "added":
        ids = [number for number, token in added.items() if not token.special and number < vocabulary.published.rows]
    else:
        plain = (number for number in range(vocabulary.published.rows) if number not in added)
        ids = sorted(plain, key=lambda number: len(vocabulary.tokenizer.token_bytes(number)))[-500:]
    wrong = {
        number: (theirs, ours)
        for number in ids
        if (theirs := vocabulary.tokens.decode_bytes([number])) != (ours := vocabulary.tokenizer.token_bytes(number))
    }
    assert wrong == {}
