"""The README is short, plain and true: its links exist, and its figures are those of the records."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from benchmarks.chart import panels, peer_disaggregated
from benchmarks.presets import PRESETS
from benchmarks.tables import latest_runs
from tests.cluster import ROOT

README = (ROOT / "README.md").read_text()
MAX_LINES, MAX_CHARS = 150, 120
RESULTS = ROOT / "benchmarks" / "results"
RUNS = latest_runs(RESULTS)
WORDS = " ".join(README.split())


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_CHARS and not line.startswith("|")] == []


def test_it_names_no_commit() -> None:
    assert [word for word in re.findall(r"\b[0-9a-f]{7,40}\b", README) if re.search("[a-f]", word)] == []


def test_its_links_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", README)
    paths = {first or second for first, second in targets if not (first or second).startswith("http")}
    assert len(paths) > 10
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def spread(setting: str, workload: str, name: str, percentile: str) -> float:
    """Milliseconds of one run of ours."""
    return float(RUNS[workload, setting]["summary"]["spreads"][name][percentile])


def share(setting: str, workload: str) -> str:
    """Of the requests within 200 ms TTFT and 10 ms TPOT."""
    return f"{RUNS[workload, setting]['summary']['attained']['200/10']:.0%}"


def test_its_claim_about_streams_is_measured() -> None:
    ours = [spread("1P1D", name, "itl", "p99_ms") for name in PRESETS]
    replicas = [spread("2M", name, "itl", "p99_ms") for name in PRESETS]
    assert f"(ITL) is **at most {max(ours):.1f} ms**" in WORDS
    later = spread("1P1D, no flags", "azure28", "itl", "p99_ms")
    assert f"(Azure at 28/s without any flag, in a later run: {later:.1f} ms)" in WORDS
    assert f"same two GPUs: {min(replicas):.0f} to {max(replicas):.0f} ms" in WORDS
    theirs = [row.itl[1] for preset in PRESETS.values() for row in preset.peers if row.setting == "2M"]
    assert f"two replicas of vLLM 0.25.1: {min(theirs):.0f} to {max(theirs):.0f} ms" in WORDS
    rows = [peer_disaggregated(preset) for preset in PRESETS.values()]
    tuned = [row.itl[1] for row in rows if row.setting == "1P1D tuned"]
    default = sorted(row.itl[1] for row in rows if row.setting == "1P1D default")
    assert f"{min(tuned):.1f} to {max(tuned):.1f} ms where it was tuned" in WORDS
    assert f"{default[0]:g} and {default[1]:g} ms with its defaults" in WORDS
    gains = [other / one for one, other in zip(ours, replicas, strict=True)]
    assert f"ITL p99 is {min(gains):.0f} to {max(gains):.0f} times smaller" in WORDS


def test_its_claim_about_first_tokens_is_measured() -> None:
    ours = [spread("1P1D", name, "beyond leg", "p50_ms") for name in PRESETS]
    assert {f"{value:.0f}" for value in ours} == {"4"}
    assert "the client has the first token **4 ms** after the prefill node has it" in WORDS
    tuned = [row for preset in PRESETS.values() for row in preset.peers if row.setting == "1P1D tuned"]
    gaps = [row.ttft[0] - row.leg[0] for row in tuned if row.leg is not None]
    assert f"with vLLM 0.25.1, tuned: {min(gaps):.0f} to {max(gaps):.0f} ms" in WORDS


def test_its_account_of_the_chart_is_measured() -> None:
    itl, ttft = (panel.figures for panel in panels(RESULTS))
    for text, values in (
        ("the p90 of the time to the first token (TTFT) is {} ms", [one.ours.disaggregated for one in ttft]),
        ("vLLM 0.25.1 has {} ms", [one.peer.disaggregated for one in ttft]),
        ("first token sooner: {} ms", [one.ours.replicas for one in ttft]),
        ("vLLM's {} ms.", [one.peer.replicas for one in ttft]),
    ):
        assert text.format(f"{min(values):.0f} to {max(values):.0f}") in WORDS
    assert all(one.ours.replicas < one.ours.disaggregated for one in ttft)
    assert sum(one.peer.replicas < one.ours.replicas for one in itl) == 4
    assert "Under four of the five loads vLLM's two replicas have a lower ITL p99 than two replicas of ours." in WORDS


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [(1, "**{} to {} faster** than vLLM 0.25.1"), (2, "on two as one node (`--tp 2`) {} to {}.")],
)
def test_its_claim_about_the_engine_is_measured(num_ranks: int, text: str) -> None:
    found = map(json.loads, (RESULTS / "engine_gpu.jsonl").read_text().splitlines())
    ours = (one for one in found if (one["shape"], one["config"]["model"].get("tp", 1)) == ("8b", num_ranks))
    gains = [[row["gain"] - 1 for row in one["results"] if row["gain"] is not None] for one in ours]
    last = [some for some in gains if some][-1]
    assert text.format(f"{min(last):.0%}", f"{max(last):.0%}") in WORDS


@pytest.mark.parametrize(
    ("workload", "text"),
    [
        (
            "4096x128",
            "{ours} meet 200 ms to the first token and a mean of 10 ms per token, and TTFT p90 is {ttft:.0f} ms;",
        ),
        ("4096x128", "ms; replicas {theirs} and {replicas:.0f} ms."),
        ("1024x256", "all meet both either way; TTFT p90 is {ttft:.0f} ms, replicas {replicas:.0f} ms."),
    ],
)
def test_its_advice_is_measured(workload: str, text: str) -> None:
    ttft, replicas = (spread(setting, workload, "ttft", "p90_ms") for setting in ("1P1D", "2M"))
    ours, theirs = share("1P1D", workload), share("2M", workload)
    assert text.format(ours=ours, theirs=theirs, ttft=ttft, replicas=replicas) in WORDS
    assert "all" not in text.split() or (ours, theirs) == ("100%", "100%")


def median_share(setting: str, workload: str) -> str:
    """The same of nodes with these targets: the median of the runs."""
    found = map(json.loads, (RESULTS / "disagg_gpu_runs.jsonl").read_text().splitlines())
    wanted = (setting, workload, "", "200/10")
    shares = [
        one["summary"]["attained"]["200/10"]
        for one in found
        if (one["setting"], one["workload"], one["trace"], one["slo"]) == wanted
    ]
    return f"{statistics.median(shares):.0%}"


LOADS = ("4096x128", "azure28", "mooncake3", "1024x256", "azure16")


@pytest.mark.parametrize(("name", "setting"), [("prefill + decode", "1P1D"), ("two replicas", "2M")])
def test_its_advice_with_targets_is_measured(name: str, setting: str) -> None:
    shares = " | ".join(median_share(setting, workload) for workload in LOADS)
    assert f"| {name} | {shares} |" in WORDS


def test_its_claim_about_streams_with_targets_is_measured() -> None:
    runs = latest_runs(RESULTS, "disagg_gpu_slo.jsonl")
    gains = [
        runs[name, "2M"]["summary"]["spreads"]["itl"]["p99_ms"]
        / runs[name, "1P1D"]["summary"]["spreads"]["itl"]["p99_ms"]
        for name in LOADS
    ]
    assert f"ITL p99 is only {min(gains):.1f} to {max(gains):.1f} times smaller" in WORDS
