"""`python -m benchmarks engine`: its rounds on contestants that answer at once, and our engine on the smallest task."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.contestants import Contestant, Task
from benchmarks.engine import Result, measure

if TYPE_CHECKING:
    from pathlib import Path

TASK = Task(num_requests=3, input_len=5, output_len=4, threads=1)


class FakeContestant:
    """Repeats each prompt's first token; `wrong` of every output's tokens are others."""

    def __init__(self, name: str, wrong: int = 0, length: int = TASK.output_len) -> None:
        self.name = name
        self.seen: list[list[list[int]]] = []
        self._wrong = wrong
        self._length = length

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        self.seen.append(prompts)
        return [[-1] * self._wrong + [prompt[0]] * (self._length - self._wrong) for prompt in prompts]

    def close(self) -> None:
        """Nothing is held."""


def test_all_contestants_get_the_same_prompts_and_a_round_to_warm_up() -> None:
    ours, peer = FakeContestant("ours"), FakeContestant("peer", wrong=1)
    contestants: list[Contestant] = [ours, peer]
    results = measure(contestants, TASK, repeats=2, seed=7)
    assert ours.seen == peer.seen
    assert len(ours.seen) == 3
    assert ours.seen[0] != ours.seen[1], "equal prompts would be found in a prefix cache"
    assert [len(result.seconds) for result in results] == [2, 2]
    assert [result.agreement for result in results] == [1.0, 0.75]
    assert results[0].tokens_per_round == 12


def test_the_rate_is_the_median_round() -> None:
    assert Result("x", (1.0, 4.0, 2.0), 100, 1.0).rate == 50.0


def test_short_outputs_are_not_measured() -> None:
    with pytest.raises(RuntimeError, match="peer did not generate 4 tokens for every prompt"):
        measure([FakeContestant("ours"), FakeContestant("peer", length=3)], TASK, repeats=1, seed=0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "engine.jsonl"
    arguments = f"engine --num-requests 2 --input-len 20 --output-len 3 --repeats 1 --no-peers --json {path}"
    for _ in range(2):
        assert main(arguments.split()) == 0
    assert "pd-cluster engine" in capsys.readouterr().out
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["engine_cpu", "engine_cpu"]
    assert records[0]["results"][0]["tokens_per_round"] == 6
    assert main(["engine", "--repeats=0"]) == 2
