"""The parts of the tier's benchmark that need no GPU, on a tiny model."""

from __future__ import annotations

import json
from math import inf
from typing import TYPE_CHECKING, Any

import benchmarks.tier
from benchmarks.__main__ import main
from benchmarks.tier import TierBench

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

FLAGS = (
    "tier --parts hits --device cpu --shape tiny --num-blocks 400 --host-gb 0.02 "
    "--prompt 256 --context 16 --most-tokens 330 --repeats 1"
)
# Of five prompts of 256 tokens, 7 more each: all but the last token, in blocks of 16
NUM_WHOLE = 240 + 256 + 256 + 272 + 272


def measured(path: Path) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """-> the status, the record, its rows by name."""
    status = main([*FLAGS.split(), "--json", str(path)])
    record = json.loads(path.read_text())
    return status, record, {row["name"]: row for row in record["results"]}


def test_hits_and_gaps_are_recorded(tmp_path: Path) -> None:
    status, record, rows = measured(tmp_path / "record")
    assert (status, record["faults"]) == (0, [])
    assert len(rows["TTFT of 256, hit in the host"]["ms"]) == 5
    assert rows["TTFT of 256, computed"]["counters"]["prefix_cache_hit_tokens_total"] == 0
    on_device = rows["TTFT of 256, hit on the device"]["counters"]
    assert on_device["prefix_cache_hit_tokens_total"] == NUM_WHOLE
    assert on_device["host_cache_hit_tokens_total"] == 0
    assert rows["TTFT of 256, hit in the host"]["counters"]["host_cache_hit_tokens_total"] == NUM_WHOLE
    assert rows["16 streams, prompts of 256 load"]["gap_max_ms"] > 0
    assert rows["answers of hits in the host"]["equal"]["hit on the device"], "with NaN in blocks not written"


def test_a_miss_in_the_host_and_another_answer_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as if the host's blocks had other content."""
    answers, rounds = TierBench._answers, list[int]()

    def bent(self: TierBench, *arguments: Any) -> tuple[list[float], list[list[int]]]:
        rounds.append(len(rounds))
        times, found = answers(self, *arguments)
        return times, [tokens[:-1] for tokens in found] if len(rounds) == 3 else found

    monkeypatch.setattr(TierBench, "_answers", bent)
    monkeypatch.setattr(benchmarks.tier, "no_wait", lambda *_, **__: inf)
    status, record, _ = measured(tmp_path / "record")
    assert status == 1
    assert record["faults"] == [
        f"hit in the host: 0 of {NUM_WHOLE} tokens in whole blocks",
        "answers after hits on the device and in the host differ",
    ]
