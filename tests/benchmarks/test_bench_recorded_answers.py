"""`python -m benchmarks recorded_answers`: its texts, and that an engine of random weights writes them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from benchmarks import recorded_answers
from benchmarks.__main__ import main
from benchmarks.offline import OfflineEngine
from benchmarks.recorded_answers import MIXED, RecordedCase, RecordedResult, RecordedRound
from benchmarks.recorded_sampler import RecordedTokens
from benchmarks.recorded_texts import NUM_TEXTS, TASKS, UNMATCHED, AnswerMaker, encoder, make_texts
from pd_cluster.worker.pending_step import PendingStep
from tests.drafters import TokenDrafter, at_fixed_prices, lookup_drafter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.scheduling.batch import StepResult
    from pd_cluster.scheduling.drafts import Drafter

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


def draft_by(monkeypatch: pytest.MonkeyPatch, drafter: Drafter) -> None:
    """In the benchmark, at an H200's prices: by those of this machine no draft may be worth it."""

    class PricedEngine(OfflineEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            drafting = self.core._scheduler._drafting
            assert drafting is not None
            drafting._drafter = drafter
            at_fixed_prices(self.core)

    monkeypatch.setattr(recorded_answers, "OfflineEngine", PricedEngine)


class SameToken(TokenDrafter):
    """Proposes one token again and again."""

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        return (7,) * most


def command(path: Path, output_len: int, task: str, *more: str) -> list[str]:
    few = f"--device cpu --shapes tiny --contexts 128 --batches 2 --output-len {output_len} --max-num-seqs 16"
    return ["recorded_answers", *few.split(), "--repeats=1", f"--json={path}", f"--tasks={task}", *more]


def recorded(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["results"][0] for line in path.read_text().splitlines()]


def test_random_weights_write_recorded_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file after a change, in a context that has most of it."""
    draft_by(monkeypatch, lookup_drafter())
    path = tmp_path / "new" / "records.jsonl"
    assert main(command(path, 40, "rewrite", "--repeats=2", "--contexts=1024")) == 0
    [found] = recorded(path)
    assert (found["name"], found["is_right"]) == ("rewrite", True)
    assert found["spread"][0] <= found["spread"][1]
    for none, lookup in zip(found["rounds"]["none"], found["rounds"]["lookup"], strict=True):
        assert none["counts"]["drafts"] == 0, "drafts are off"
        assert none["run"] == 1.0
        assert 80 < lookup["counts"]["accepted"] <= lookup["counts"]["drafts"], "of three answers of 40 tokens"
        assert lookup["run"] > 2
        # Two answers at a time: the first step of the first two does not count
        assert none["num_tokens"] == 2 * 39 + 40
    assert str(tmp_path) not in path.read_text()


def test_a_wrong_draft_that_is_accepted_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told in place of what was drawn."""
    result = PendingStep.result

    def bent(self: PendingStep) -> StepResult:
        found = result(self)
        for part in self.parts:
            for seq_id, drafts in zip(part.samples.seq_ids, part.samples.drafts, strict=False):
                if drafts:
                    first, *rest = found.samples[seq_id]
                    found.samples[seq_id] = msgspec.structs.replace(first, token_id=drafts[0]), *rest
        return found

    draft_by(monkeypatch, SameToken())
    monkeypatch.setattr(PendingStep, "result", bent)
    path = tmp_path / "records.jsonl"
    assert main(command(path, 12, UNMATCHED)) == 1
    [found] = recorded(path)
    [none], [lookup] = found["rounds"]["none"], found["rounds"]["lookup"]
    assert none["num_right"] == none["num_streams"]
    assert lookup["num_right"] < lookup["num_streams"]


def rounds_of(*rates: float) -> list[RecordedRound]:
    """At each rate a round of two streams, which take a second and two a token at the rate 1."""
    tpots = [(1e3 / rate, 2e3 / rate) for rate in rates]
    return [
        RecordedRound(rate, 1.0, 1, {"drafts": 4, "accepted": 3, "steps": 9}, 2, 2, {"rewrite": tpot}, 1.0)
        for rate, tpot in zip(rates, tpots, strict=True)
    ]


def test_rounds_are_pooled() -> None:
    result = RecordedResult(RecordedCase("8b", 1024, 2, "rewrite"), rounds_of(1, 2, 4), rounds_of(2, 6, 4))
    assert (result.rates, result.ratio, result.spread) == ((2, 4), 2, (1, 3))
    record = result.record()
    assert (record["ratio"], record["spread"]) == (2, (1, 3))
    assert record["tpot_ms"]["none"] == (1000, 2000), "of 250, 500, 500, 1000, 1000, 2000"


def test_another_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine never learns the texts."""
    monkeypatch.setattr(RecordedTokens, "set", lambda *_: None)
    assert main(command(tmp_path / "records.jsonl", 4, UNMATCHED)) == 1


@pytest.mark.parametrize("wrong", ["--tasks=verse", "--batches=0", "--output-len=0"])
def test_wrong_flags_of_recorded_answers(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recorded_answers", wrong]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err
