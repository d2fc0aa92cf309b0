"""`python -m benchmarks drafts`: its tasks and figures, and the command on the demo model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from benchmarks import drafts
from benchmarks.__main__ import main
from benchmarks.draft_tasks import PIECE, PIECES, make_tasks
from benchmarks.drafts import Case, DraftBench, DraftPrompt, MeasuredTask, Sample

if TYPE_CHECKING:
    from pathlib import Path


def sample(tokens: list[list[int]], seconds: float, accepted_at: tuple[int, ...] = (0, 0), drafts: int = 0) -> Sample:
    counts = {"steps": 4, "runs": 2, "drafts": drafts, "accepted": sum(accepted_at)}
    return Sample(seconds, tokens, [1 / seconds] * 2, counts, [*accepted_at])


def test_figures_of_a_case() -> None:
    rounds = [
        {"none": sample([[1, 2], [3, 4]], 2.0), "lookup": sample([[1, 2], [3, 4]], 1.0, (2, 1), 4)},
        {"none": sample([[1, 2], [3, 4]], 2.0), "lookup": sample([[1, 2], [3, 5]], 4.0, (1, 0), 4)},
        {"none": sample([[1, 2], [3, 4]], 3.0), "lookup": sample([[1, 2], [3, 4]], 2.0)},
    ]
    measured = MeasuredTask(Case("edit", 2, 0.0), rounds)
    assert (measured.num_answers, measured.num_equal) == (6, 5)
    assert measured.ratio == 1.5, "the median of 2, 0.5 and 1.5"
    assert (measured.rate("none"), measured.rate("lookup")) == (2.0, 2.0)
    assert measured.stream_ratio == 1.5
    assert measured.acceptance == 0.5
    assert measured.accepted_at == [3, 1]
    record = json.loads(json.dumps(measured.record()))
    assert record["steps"] == {"none": 12, "lookup": 12}
    assert [one["tokens"] for one in record["samples"]["lookup"]] == [4, 4, 4]
    assert MeasuredTask(Case("edit", 2, 0.0), rounds[2:]).acceptance is None


def test_files_are_edited_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "text.md"
    path.write_text("".join(f"line {number}\n" for number in range(2000)))
    tasks = make_tasks([path])
    assert [*tasks] == ["edit", "predicted", "json", "prose", "edit of text.md"]
    texts = [question.text for question in tasks["edit of text.md"]]
    assert len(texts) == PIECES
    assert all(len(text) < PIECE + 200 for text in texts)
    assert "line 0\n" in texts[0]
    assert "line 0\n" not in texts[1]
    assert not any(question.prediction for name, task in tasks.items() if name != "predicted" for question in task)
    assert all(question.prediction in question.text for question in tasks["predicted"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "drafts.jsonl"
    text = tmp_path / "text.md"
    text.write_text("one line\n")
    few = "--num-prompts 1 --output-len 8 --repeats 1 --batches 1 --temperatures 0.7 --tasks predicted json"
    assert main([*f"drafts {few} --json {path} --files".split(), str(text)]) == 0
    assert "predicted" in capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert {record["kind"] for record in records} == {"drafts"}
    results = [one for record in records for one in record["results"]]
    assert [one["task"] for one in results] == ["predicted", "json", "edit of text.md"]
    for one in results:
        assert one["answers"] == one["equal"] == 1
        assert 0 < one["tokens"] <= 8
        assert one["accepted"] <= one["drafts"]
    assert str(tmp_path) not in path.read_text()


def test_a_run_that_is_ended_keeps_its_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in the second of two cases. No engine is made."""

    def measured(bench: DraftBench, case: Case, prompts: list[DraftPrompt], repeats: int) -> MeasuredTask:
        if case.task == "json":
            raise KeyboardInterrupt
        return MeasuredTask(case, [{name: sample([[1, 2]], 1.0) for name in drafts.SETTINGS}])

    monkeypatch.setattr(drafts, "make_engine", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(DraftBench, "measure", measured)
    path = tmp_path / "drafts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        main(f"drafts --num-prompts 1 --batches 1 --temperatures 0 --tasks predicted json --json {path}".split())
    [record] = map(json.loads, path.read_text().splitlines())
    assert [one["task"] for one in record["results"]] == ["predicted"]


@pytest.mark.parametrize(
    "wrong", ["--repeats=0", "--batches=0", "--tasks=verse", "--files=nothing.md", "--files=/dev/null"]
)
def test_wrong_flags(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts", wrong]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


def test_a_model_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drafts", "--model", str(tmp_path)]) == 2
    assert "the tokenizer" in capsys.readouterr().err
