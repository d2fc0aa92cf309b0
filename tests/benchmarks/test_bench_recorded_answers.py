"""`python -m benchmarks recorded_answers`: its texts, and that an engine of random weights writes them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.recorded_answers import MIXED
from benchmarks.recorded_sampler import RecordedTokens
from benchmarks.recorded_texts import NUM_TEXTS, TASKS, UNMATCHED, AnswerMaker, encoder, make_texts

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 50_000


@pytest.fixture(scope="module")
def maker() -> AnswerMaker:
    return AnswerMaker(encoder(None, VOCABULARY), VOCABULARY)


def test_each_task_has_texts_and_patches_give_the_rewritten_files() -> None:
    texts = make_texts()
    assert set(texts) == set(TASKS)
    assert {len(found) for found in texts.values()} == {NUM_TEXTS}
    for asked, patch in zip(texts["rewrite"], texts["patch"], strict=True):
        assert asked.prompt == patch.prompt
        text = asked.prompt
        for hunk in patch.answer.split("<<<<<<< SEARCH\n")[1:]:
            old, new = hunk.removesuffix(">>>>>>> REPLACE\n").split("=======\n")
            assert old in text
            text = text.replace(old, new, 1)
        assert text.startswith(asked.answer)


def test_prompts_have_one_length_and_differ(maker: AnswerMaker) -> None:
    for task in (*TASKS, MIXED, UNMATCHED):
        answers = maker.answers(task, NUM_TEXTS + 5, 257, 20)
        assert {len(one.prompt) for one in answers} == {257}
        assert all(0 < len(one.answer) <= 20 for one in answers)
        assert len({one.prompt[:64] for one in answers}) == len(answers), "blocks of one are no other's"
        assert max(max(one.prompt + one.answer) for one in answers) < VOCABULARY
    assert [one.task for one in maker.answers(MIXED, 7, 257, 20)] == [*TASKS, TASKS[0]]


def test_what_matches_nothing_has_hardly_a_pair_twice(maker: AnswerMaker) -> None:
    for one in maker.answers(UNMATCHED, 8, 1025, 128):
        tokens = one.prompt + one.answer
        pairs = list(pairwise(tokens))
        assert len(pairs) - len(set(pairs)) <= 1


def command(path: Path, output_len: int, *tasks: str) -> list[str]:
    few = f"--device cpu --shapes tiny --contexts 128 --batches 2 --output-len {output_len} --max-num-seqs 16"
    return ["recorded_answers", *few.split(), "--json", str(path), "--tasks", *tasks]


def test_random_weights_write_recorded_answers(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    assert main(command(path, 40, "mixed", UNMATCHED)) == 0
    mixed, unmatched = (json.loads(line)["results"][0] for line in path.read_text().splitlines())
    assert (mixed["name"], unmatched["name"]) == ("mixed", UNMATCHED)
    for one in (mixed, unmatched):
        [none], [lookup] = one["rounds"]["none"], one["rounds"]["lookup"]
        assert one["is_right"]
        assert none["counts"]["drafts"] == 0, "drafts are off"
        assert none["run"] == 1.0
        assert lookup["counts"]["accepted"] <= lookup["counts"]["drafts"]
    none = unmatched["rounds"]["none"][0]
    # Two streams of 40 tokens at a time until three have ended: the first step of both does not count
    assert none["num_tokens"] == 2 * 79
    assert str(tmp_path) not in path.read_text()


def test_another_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a draft were accepted that is not the recorded token: here the engine never learns the texts."""
    monkeypatch.setattr(RecordedTokens, "set", lambda *_: None)
    assert main(command(tmp_path / "records.jsonl", 4, UNMATCHED)) == 1


@pytest.mark.parametrize("wrong", ["--tasks=verse", "--batches=0", "--output-len=0"])
def test_wrong_flags_of_recorded_answers(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recorded_answers", wrong]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err
