"""Models with sliding windows in five layers of six, or in all: transformers' tokens on every path, cold and warm.

One of them is quantized.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.integration.system import Path, System, running_system
from tests.worker.conftest import VOCAB_SIZE, ModelStore, SavedModel
from tests.worker.driver import random_prompts
from tests.worker.quantized_models import CASES, save_quantized

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LENGTHS = (5, 24, 25, 70, 200)  # around the window of 24 tokens, and over it by several blocks
NUM_TOKENS = 40  # over the window, whatever the prompt


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "mixtral-channels")]


@pytest.fixture(scope="module", params=["gemma3", *SLOW])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """A checkpoint in the hub's format with a tokenizer in which each id is a number."""
    directory, name = tmp_path_factory.mktemp("models"), request.param
    saved = save_quantized(CASES[name], directory) if name in CASES else ModelStore(directory).get(name)
    tokenizer = Tokenizer(models.WordLevel({str(index): index for index in range(VOCAB_SIZE)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (saved.directory / "tokenizer.json").write_text(tokenizer.to_str())
    about = {"backend": "tokenizers", "tokenizer_class": "PreTrainedTokenizerFast"}
    (saved.directory / "tokenizer_config.json").write_text(json.dumps(about))
    return saved


@pytest.fixture(scope="module")
def system(saved: SavedModel) -> Iterator[System]:
    """Prompts are computed in chunks."""
    with running_system(f"--model={saved.directory}", "--max-num-batched-tokens=64") as system:
        yield system


@pytest.mark.parametrize("path", Path)
def test_tokens_equal_transformers(path: Path, saved: SavedModel, system: System) -> None:
    prompts = random_prompts(LENGTHS, VOCAB_SIZE, seed=3)
    bodies = [
        {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "cache_salt": path.value}
        for prompt in prompts
    ]
    for cached in (False, True):
        answers = system.ask_all(path, [("/v1/completions", body) for body in bodies])
        found = [[int(word) for word in answer.choices[0]["text"].split()] for answer in answers]
        assert found == [saved.generate(prompt, NUM_TOKENS) for prompt in prompts]
        assert {answer.headers["x-pd-decode"] for answer in answers} == {"decode"}
        assert (answers[-1].num_cached_tokens > 0) == cached
