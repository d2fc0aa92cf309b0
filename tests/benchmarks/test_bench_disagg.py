"""The commands around a cluster that tells its timings, played by a fake; and the model that it would serve."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.disagg import HEADERS, aims, our_row, peer_row
from benchmarks.presets import PRESETS
from benchmarks.shapes import CONFIGS
from pd_cluster.bench.statistics import RequestRecord, summarize
from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import resolve_spec
from pd_cluster.server.text.tokenizer import Tokenizer
from tests.launch.test_bench_serve import serving

TIMINGS = {
    "queue": 9.0, "transfer": 4.0, "admit": 0.2, "first_decode": 6.0, "prefill_leg": 8.0, "announce": 0.2,
    "reserve": 0.0, "post": 0.1, "link": 0.5, "confirm": 0.2, "schedule": 0.3,
}  # fmt: skip


def test_workloads_are_recorded_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        server.timings = TIMINGS
        arguments = f"disagg --url {server.url} --workloads 1024x256 4096x128 --num-requests 3 --scale 0.02"
        assert main([*arguments.split(), f"--json={out}", "--vocab-size=100", "--note=flags"]) == 0
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert [record["workload"] for record in (first, second)] == ["1024x256", "4096x128"]
    assert (first["setting"], first["model"], first["note"], first["scale"]) == ("1P1D", "fake-model", "flags", 0.02)
    assert [row[1:3] for row in first["requests"]] == [[20, 5]] * 3
    assert dict(zip(first["columns"], first["requests"][0], strict=True))["leg_ms"] == 8.0
    assert first["summary"]["spreads"]["handover"]["p50_ms"] == pytest.approx(1.3)
    shown = capsys.readouterr().out
    assert "1024 in, 256 out, 20/s" in shown
    assert "73/133/237" in shown
    assert "TTFT beyond the prefill node's own, p50" in shown
    measured = [body for body in server.bodies if len(body["prompt"]) == 20]
    assert len(measured) == 2 * 3, "three to warm up"


def test_a_failed_workload_is_recorded_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        server.refuse_all, server.roles = True, ["mixed", "mixed"]
        arguments = f"disagg --url {server.url} --workloads 1024x256 --num-requests 2 --scale 0.02 --json {out}"
        assert main(arguments.split()) == 1
    assert "2 failed: HTTP 503: the queue is full" in capsys.readouterr().err
    record = json.loads(out.read_text())
    assert (record["setting"], record["summary"]["num_ok"]) == ("2M", 0)
    assert record["requests"][0][3:] == [None] * 4


@pytest.mark.parametrize("workload", ["turns", "turns-text"])
def test_conversations_are_recorded(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        arguments = f"disagg --url {server.url} --workloads {workload} --num-requests 2 --scale 0.002 --rate-scale 0.5"
        assert main([*arguments.split(), f"--json={out}", "--vocab-size=100"]) == 0
    record = json.loads(out.read_text())
    assert (record["kind"], record["setting"], record["workload"]) == ("turns", "1P1D", workload)
    rows = [dict(zip(record["columns"], row, strict=True)) for row in record["requests"]]
    assert {(row["conversation"], row["turn"]) for row in rows[:8]} == {(0, turn) for turn in range(8)}
    assert len(rows) == record["summary"]["num_requests"] == 16
    assert all(row["ttft_ms"] > 0 and not row["error"] for row in rows)
    shown = capsys.readouterr().out
    assert "later turns: TTFT, ms" in shown
    assert "| 1P1D | " in shown


def test_turns_that_fail_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        server.refuse_all = True
        arguments = f"disagg --url {server.url} --workloads turns --num-requests 2 --scale 0.002 --json {out}"
        assert main([*arguments.split(), "--vocab-size=100"]) == 1
    shown = capsys.readouterr().out
    assert "2 failed: HTTP 503: the queue is full" in shown
    assert "2 conversations, 14 not asked" in shown
    assert json.loads(out.read_text())["requests"][0][6:9] == [None] * 3


def test_workloads_with_caches_and_without_do_not_share_a_cluster() -> None:
    script, workloads = Path(__file__).parents[2] / "benchmarks" / "disagg.sh", "1024x256 turns"
    done = subprocess.run(
        ["bash", script, "."], env=os.environ | {"WORKLOADS": workloads}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "WORKLOADS mixes turns and 1024x256, which is without caches\n")


def test_a_trace_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert main(["disagg", f"--url={server.url}", "--workloads=azure16", f"--data={tmp_path}"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_rows_have_every_column() -> None:
    records = [RequestRecord(0, 0.0, 0.0, 10, 3, [0.1, 0.11, 0.12], 0.12, timings_ms=TIMINGS)]
    summary = summarize(records, {}, [(200.0, 10.0), (400.0, 15.0)])
    row = our_row("1P1D", {"spreads": {"ttft": {"p50_ms": 1, "p90_ms": 2, "p99_ms": 3}}, "attained": {"a": 1, "b": 0.5},
                           "num_requests": 3, "num_ok": 2})  # fmt: skip
    assert row == ["1P1D (1 failed)", "1.0/2.0/3.0", "", "", "", "", "1.00", "0.50"]
    assert all(len(peer_row(peer)) == len(HEADERS) for preset in PRESETS.values() for peer in preset.peers)
    reached = {text: value <= limit for text, value, limit in aims(PRESETS["1024x256"], summary)}
    assert list(reached.values()) == [False, True, True, False], "92 ms beyond the leg; TPOT 10 for 6.6"
    assert len(aims(PRESETS["4096x128"], summary)) == 2, "the peer's tuned row is missing there"
    assert aims(PRESETS["azure16"], summarize([RequestRecord(0, 0.0, 0.0, 1, 1, [0.1], 0.1)], {})) == []


def test_handovers_are_timed_at_each_batch_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    with serving() as server:
        server.timings = TIMINGS
        arguments = f"handover --url {server.url} --tokens 24 --samples 4 --batches 0 2 --every-s 0.01 --json {out}"
        assert main([*arguments.split(), "--vocab-size=100"]) == 0
    idle, busy = (json.loads(line) for line in out.read_text().splitlines())
    assert [(record["tokens"], record["batch"]) for record in (idle, busy)] == [(24, 0), (24, 2)]
    assert busy["summary"]["spreads"]["handover"] == pytest.approx(
        {"count": 4} | dict.fromkeys(("mean_ms", "p50_ms", "p90_ms", "p99_ms", "max_ms"), 1.3)
    )
    shown = capsys.readouterr().out
    assert "handover 1.30 ms (goal: 4 for 1,000 tokens)" in shown
    assert shown.index("announce") < shown.index("reserve") < shown.index("schedule ") < shown.index("= last")


def test_nothing_handed_over_is_a_failure(tmp_path: Path) -> None:
    with serving() as server:
        arguments = f"handover --url {server.url} --tokens 24 --samples 2 --batches 0 --every-s 0.01"
        assert main([*arguments.split(), "--vocab-size=100", f"--json={tmp_path / 'out.jsonl'}"]) == 1


def test_a_shape_has_a_word_for_every_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--shape", "tiny", str(tmp_path / "model")]) == 0
    assert "--load-format dummy" in capsys.readouterr().out
    directory = tmp_path / "model"
    spec = resolve_spec(directory, read_json(directory / "config.json"))
    assert (spec.vocab_size, spec.hidden_size) == (2048, 64)
    tokenizer = Tokenizer.load(directory)
    try:
        words = [tokenizer.token_bytes(token_id) for token_id in range(spec.vocab_size)]
        assert len(set(words)) == tokenizer.vocab_size == CONFIGS["tiny"]["vocab_size"]
        assert all(word.decode().strip() for word in words)
        assert not any(map(tokenizer.is_special, range(spec.vocab_size)))
        assert asyncio.run(tokenizer.encode(" aaab aaba nonsense", max_tokens=100)) == [1, 26, 0]
    finally:
        tokenizer.close()
