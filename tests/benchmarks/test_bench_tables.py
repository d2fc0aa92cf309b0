"""The tables of `docs/benchmarks.md` are those of the records."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.__main__ import main
from benchmarks.presets import PRESETS
from benchmarks.tables import DOCUMENT, fill
from tests.cluster import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SPREAD = {"count": 1, "mean_ms": 1.0, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 3.0}
PLACE = "before\n<!-- table: {} -->\nold\n<!-- end -->\nafter\n"


def test_the_page_says_what_was_measured() -> None:
    text = (ROOT / DOCUMENT).read_text()
    assert fill(text, ROOT / "benchmarks" / "results") == text, "run `python -m benchmarks tables`"
    assert text.count("<!-- table: ") == 19


def disagg_record(setting: str, ttft_ms: float, **changes: Any) -> dict[str, Any]:
    summary = {
        "spreads": {"ttft": SPREAD | {"p50_ms": ttft_ms}}, "attained": {"200/10": 0.5, "400/15": 1.0},
        "num_requests": 400, "num_ok": 400,
    }  # fmt: skip
    return {
        "environment": {"commit": "0123456789", "dirty": False}, "workload": "1024x256", "setting": setting,
        "scale": 1.0, "requests": [[]] * PRESETS["1024x256"].num_requests, "summary": summary, **changes,
    }  # fmt: skip


def test_the_last_whole_run_of_a_setting_counts(tmp_path: Path) -> None:
    records = [
        disagg_record("1P1D", 50.0), disagg_record("2M", 30.0), disagg_record("1P1D", 40.0),
        disagg_record("1P1D", 5.0, scale=0.1), disagg_record("1P1D", 6.0, requests=[[]]),
    ]  # fmt: skip
    (tmp_path / "disagg_gpu.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = fill(PLACE.format("disagg"), tmp_path)
    rows = [line for line in found.splitlines() if line.startswith("|")]
    assert rows[2].startswith("| *1024 in, 256 out, 20/s* |")
    assert rows[3].startswith("| **1P1D**, 0123456 | 40.0/2.0/3.0 |")
    assert rows[4].startswith("| **2M**, 0123456 | 30.0/2.0/3.0 |")
    assert len(rows) == 3 + 2 + 3, "our two settings, the peer's three"
    assert found.startswith("before\n<!-- table: disagg -->\nTwo H200s")
    assert found.endswith("<!-- end -->\nafter\n")
    assert fill(found, tmp_path) == found


def test_simulated_shares_stand_beside_measured_ones(tmp_path: Path) -> None:
    """Of the same rate: a run of two GPUs is none of four."""
    figures = {"attained": 0.994, "ttft": [1.0, 99.6, 3.0], "tpot": [1.0, 2.0, 7.04]}
    common = {"workload": "1024x256", "rule": "slack", "rate_scale": 2.0, "figures": figures}
    told = (("2P2D", "200/10", 800), ("4M", "200/10", 800), ("4M", "400/15", 800), ("1P3D", "200/10", 6))
    records = [common | {"setting": setting, "slo": slo, "num_requests": num} for setting, slo, num in told]
    (tmp_path / "slo_simulated.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    spreads = {"ttft": SPREAD | {"p90_ms": 88.0}, "tpot": SPREAD | {"p99_ms": 6.0}}
    summary = {"summary": {"spreads": spreads, "attained": {"200/10": 0.5}}}
    runs = [
        disagg_record("4M", 40.0, **summary, rate_scale=2.0, requests=[[]] * 800),
        disagg_record("2P2D", 40.0, **summary),
    ]
    (tmp_path / "disagg_gpu_slo.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    found = fill(PLACE.format("slo-simulated-4"), tmp_path).splitlines()
    assert found[2].endswith("| 2P2D | 4M |")
    assert found[4] == "| 1024 in, 256 out, 20/s x 2 | *0.99*, 100, 7.0 | *0.99*, 100, 7.0; **0.50**, 88, 6.0 |"


def test_runs_of_two_settings_stand_in_one_row(tmp_path: Path) -> None:
    """A trace of its own is another row, and so are other targets."""
    runs = [("1P1D", "200/10", "", 0.631), ("2M", "200/10", "", 0.5), ("1P1D", "200/10", "", 0.626),
            ("1P1D", "400/15", "", 0.9), ("2M", "200/10", "Other", 0.4)]  # fmt: skip
    records = [
        {"setting": setting, "slo": slo, "trace": trace, "workload": "azure28", "rate_scale": 0.5, "scale": 1.0,
         "summary": {"attained": {slo: share}, "spreads": {"ttft": {"p90_ms": share * 100}, "tpot": {"p99_ms": 7.0}}}}
        for setting, slo, trace, share in runs
    ]  # fmt: skip
    records.append(records[0] | {"scale": 0.1})  # a rehearsal
    (tmp_path / "disagg_gpu_runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = fill(PLACE.format("disagg-runs"), tmp_path).splitlines()
    assert found[4] == "| Azure conversation, 28/s | 200/10 | 0.63, 0.63 | 63, 7.0 | 0.50 | 50, 7.0 |"
    assert found[5] == "| Azure conversation, 28/s | 400/15 | 0.90 | 90, 7.0 | | |"
    assert found[6] == "| *Other*, 14/s | 200/10 | | | 0.40 | 40, 7.0 |"


def test_handovers_by_batch_size(tmp_path: Path) -> None:
    record = {
        "environment": {"commit": "0123456789", "dirty": True}, "tokens": 1000, "batch": 32,
        "summary": {"phases": {"link": SPREAD}, "spreads": {"handover": SPREAD}},
    }  # fmt: skip
    (tmp_path / "handover_gpu.jsonl").write_text(json.dumps(record) + "\n")
    found = fill(PLACE.format("handover"), tmp_path)
    assert "| 1000 tokens, 32 decoding, 0123456 with changes | | | | 1.00 / 2.00 | | | 1.00 / 2.00 | | |" in found


def test_without_records_there_is_no_table(tmp_path: Path) -> None:
    for name in ("engine-cpu", "engine-gpu", "disagg", "handover", "slo-simulated"):
        assert fill(PLACE.format(name), tmp_path) == PLACE.format(name).replace("old\n", "")


def test_an_unknown_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "a.md"
    document.write_text(PLACE.format("other"))
    assert main(["tables", str(document), f"--results={tmp_path}"]) == 2
    assert "unknown table 'other'" in capsys.readouterr().err
    assert document.read_text() == PLACE.format("other")
