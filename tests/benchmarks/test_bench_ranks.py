"""Frames to ranks are measured with real processes of ranks that compute nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.ranks import CONTEXT, PROMPT, decodes, prompt

if TYPE_CHECKING:
    from pathlib import Path


def test_every_sequence_gets_its_blocks_in_turn() -> None:
    chunks = [chunk for step in range(64) for chunk in decodes(step, 3).chunks if chunk.new_blocks]
    assert [chunk.seq_id for chunk in chunks] == [0, 2, 1]
    assert [chunk.start for chunk in chunks] == [CONTEXT, CONTEXT + 64, CONTEXT + 64]
    [start] = prompt(0, PROMPT).starts
    assert (len(start.token_ids), len(start.tables[0].block_ids)) == (PROMPT, PROMPT // 64)


@pytest.mark.integration
def test_a_record_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    flags = ["--ranks", "2", "--steps", "25", "--step-ms", "0.1", "--idle-s", "0.05", "--json", str(out)]
    assert main(["ranks", *flags]) == 0
    record = json.loads(out.read_text())
    assert list(record["results"]) == ["1 decodes", "32 decodes", "256 decodes", "a prompt of 8,192"]
    for found in record["results"].values():
        assert all(found[name][0] > 0 for name in ("sent", "frame", "acknowledged"))
        assert all(found[name] > 0 for name in ("together_ms", "cpu_rank_0", "cpu_rank"))
    assert record["results"]["a prompt of 8,192"]["frame_bytes"] > 3 * PROMPT
    assert "2 ranks, p50 / p99 in us" in capsys.readouterr().out


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--steps", "20"]) == 2
    assert "--steps more than 20" in capsys.readouterr().err
