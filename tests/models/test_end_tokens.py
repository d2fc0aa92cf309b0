"""EOS ids: the union of config, generation config and tokenizer, and what is left out of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pd_cluster
from pd_cluster.errors import StartupError
from pd_cluster.models.end_tokens import read_end_tokens

DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"
CHATML = [(0, "<|endoftext|>"), (1, "<|im_start|>"), (2, "<|im_end|>")]
ADDED = [{"id": token_id, "content": text, "special": True} for token_id, text in CHATML]
BPE = {"added_tokens": ADDED, "model": {"type": "BPE", "vocab": {"a": 3, "b": 4, "</s>": 5}, "merges": []}}
UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["<s>", 0.0], ["</s>", -1.5]]}}
OBJECT = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "normalized": False}
DECODER = {str(token_id): {"content": text, "special": True} for token_id, text in CHATML}


def write(directory: Path, files: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("config", "files", "ids"),
    [
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": "<|im_end|>"}}, {0, 2}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": OBJECT}}, {0, 2}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "special_tokens_map.json": {"eos_token": "<|im_end|>"}}, {0, 2}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "special_tokens_map.json": {"eos_token": OBJECT}}, {0, 2}),
        (
            {"eos_token_id": 0},
            {"tokenizer_config.json": {"eos_token": OBJECT, "added_tokens_decoder": DECODER}},
            {0, 2},
        ),
        (
            {"eos_token_id": 0},
            {"tokenizer_config.json": {"eos_token": "<|im_end|>"}, "added_tokens.json": {"<|im_end|>": 6}},
            {0, 6},
        ),
        ({}, {"tokenizer_config.json": {"eos_token": "</s>"}, "vocab.json": {"a": 0, "</s>": 7}}, {7}),
        ({}, {"tokenizer_config.json": {"eos_token": "[SEP]"}, "vocab.txt": "[PAD]\n\u2028\n[SEP]\n"}, {2}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": "</s>"}}, {0, 5}),
        ({"eos_token_id": None}, {"tokenizer.json": UNIGRAM, "tokenizer_config.json": {"eos_token": "</s>"}}, {2}),
        (
            {"eos_token_id": 0},
            {
                "tokenizer.json": BPE,
                "generation_config.json": {"eos_token_id": [2, 3]},
                "tokenizer_config.json": {"eos_token": "</s>"},
            },
            {0, 2, 3, 5},
        ),
        ({"eos_token_id": [0, 1], "text_config": {"eos_token_id": 4}}, {"tokenizer.json": BPE}, {0, 1, 4}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": None}}, {0}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE, "tokenizer_config.json": {}}, {0}),
        ({"eos_token_id": 0}, {"tokenizer.json": BPE}, {0}),
        ({"eos_token_id": [3]}, {}, {3}),
        ({}, {}, set()),
    ],
)
def test_ids_of_all_files(tmp_path: Path, config: dict[str, Any], files: dict[str, Any], ids: set[int]) -> None:
    ends = read_end_tokens(write(tmp_path, files), config)
    assert ends.ids == ids
    assert not ends.left_out
    assert read_end_tokens(tmp_path, config).ids == ids


@pytest.mark.parametrize(
    ("config", "files", "left_out"),
    [
        ({"eos_token_id": [2, 99]}, {"tokenizer.json": BPE}, "config.json: eos_token_id = 99, which the vocabulary"),
        ({"eos_token_id": [2, -1]}, {}, "config.json: eos_token_id = -1, which the vocabulary lacks"),
        ({"eos_token_id": [2, 8], "vocab_size": 8}, {}, "config.json: eos_token_id = 8, which the vocabulary lacks"),
        (
            {"eos_token_id": 2, "vocab_size": 99},
            {"tokenizer.json": BPE, "generation_config.json": {"eos_token_id": 98}},
            "generation_config.json: eos_token_id = 98, which the vocabulary lacks",
        ),
        (
            {"eos_token_id": 2},
            {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": "<|eot|>"}},
            "eos_token '<|eot|>' of tokenizer_config.json, which the vocabulary lacks",
        ),
        (
            {"eos_token_id": 2, "vocab_size": 5},
            {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": "</s>"}},
            "eos_token '</s>' of tokenizer_config.json, which the vocabulary lacks",
        ),
    ],
)
def test_what_the_vocabulary_lacks_is_left_out_and_said(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], left_out: str
) -> None:
    ends = read_end_tokens(write(tmp_path, files), config)
    assert ends.ids == {2}
    assert left_out in ends.left_out[0]
    assert left_out in ends.line
    assert "\n" not in ends.line


WRONG = ("2", 2.0, True, [[2]], [2, None], {"id": 2})


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_what_is_no_id_is_refused_with_file_and_field(tmp_path: Path, place: str, value: Any) -> None:
    files = {"generation_config.json": {"eos_token_id": value}} if place == "generation_config.json" else {}
    config = {} if files else {"eos_token_id": value}
    with pytest.raises(StartupError, match=f"{place}: eos_token_id must be a token id or a list of them, not"):
        read_end_tokens(write(tmp_path, files), config)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer_config.json": {"eos_token": 2}}, r"tokenizer_config\.json: eos_token must be a token's text, not"),
        ({"special_tokens_map.json": {"eos_token": {"content": []}}}, r"special_tokens_map\.json: eos_token must be"),
        ({"tokenizer_config.json": "{"}, "cannot read .*tokenizer_config.json"),
        ({"tokenizer.json": "{"}, "cannot read .*tokenizer.json"),
        ({"tokenizer.json": []}, "cannot read .*tokenizer.json: Expected"),
        ({"tokenizer.json": {"added_tokens": [{"id": 1}]}}, "cannot read .*tokenizer.json: Object missing"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"x": {"content": "a"}}}},
            "added_tokens_decoder cannot be",
        ),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        read_end_tokens(write(tmp_path, files), {"eos_token_id": 0})


def test_the_line_of_the_start() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    assert read_end_tokens(DEMO_MODEL, config).line == "answers end at the tokens 2 '<|im_end|>'"
    assert read_end_tokens(DEMO_MODEL / "none", {}).line == "no token ends an answer: the model's files name none"
    assert read_end_tokens(DEMO_MODEL / "none", {"eos_token_id": [7, 5]}).line == "answers end at the tokens 5, 7"
