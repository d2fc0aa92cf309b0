"""Workloads are decided by their seed, and traces by their rows."""

from __future__ import annotations

import ast
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.bench.edits import CHARS_PER_TOKEN, FUNCTION, edit_of
from pd_cluster.bench.workload import Arrival, Length, at_rate, poisson, prompt_ids, read_trace, rescale
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:54.6805900,879,55
"""


def test_poisson_has_the_rate_and_repeats() -> None:
    arrivals = poisson(4000, 20.0, Length(100, 1024), Length(8, 8), seed=1)
    assert arrivals == poisson(4000, 20.0, Length(100, 1024), Length(8, 8), seed=1)
    assert arrivals != poisson(4000, 20.0, Length(100, 1024), Length(8, 8), seed=2)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    assert (sum(gap**2 for gap in gaps) / len(gaps)) == pytest.approx(2 * mean**2, rel=0.2), "exponential gaps"
    assert {arrival.num_output for arrival in arrivals} == {8}
    lengths = [arrival.num_input for arrival in arrivals]
    assert (min(lengths) >= 100, max(lengths) <= 1024) == (True, True)
    assert sum(lengths) / len(lengths) == pytest.approx(562, rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {arrival.at_s for arrival in poisson(10, float("inf"), Length(1, 1), Length(1, 1), 0)} == {0.0}


@pytest.mark.long
@given(st.text(max_size=12))
def test_lengths_parse_or_are_refused(text: str) -> None:
    try:
        length = Length.parse(text)
    except ValueError:
        return
    assert 1 <= length.low <= length.high


def test_an_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert read_trace(path, 0) == [Arrival(0.0, 374, 44), Arrival(4.0, 396, 109), Arrival(8.0, 879, 55)]
    assert len(read_trace(path, 2)) == 2


def test_a_mooncake_trace_shares_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 9]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(path, 0)
    assert (first.at_s, second.at_s) == (0.0, 0.5)
    a, b = (prompt_ids(arrival, index, range(50_000), 0) for index, arrival in enumerate((first, second)))
    assert (len(a), len(b)) == (1100, 1100)
    assert a[:1024] == b[:1024]
    assert a[1024:] != b[1024:]


def test_scaling_keeps_prefixes_equal(tmp_path: Path) -> None:
    arrivals = [Arrival(0.0, 2048, 100, (0, 1, 2, 3)), Arrival(3.0, 2048, 100, (0, 1, 7, 8))]
    small = rescale(arrivals, rate=2.0, length_scale=16 / 512, max_output=2)
    assert [arrival.num_input for arrival in small] == [64, 64]
    assert [arrival.num_output for arrival in small] == [2, 2]
    assert small[1].at_s == pytest.approx(0.5), "one gap at two a second"
    a, b = (prompt_ids(arrival, index, range(50_000), 0) for index, arrival in enumerate(small))
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]


def test_recorded_times_stay_without_a_rate() -> None:
    arrivals = [Arrival(0.0, 4, 4), Arrival(3.0, 4, 4)]
    assert rescale(arrivals, rate=None, length_scale=1.0, max_output=0) == arrivals


def test_lengths_of_a_trace_at_poisson_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    short = read_trace(path, 0, max_input=400)
    assert [row.num_input for row in short] == [374, 396]
    with pytest.raises(StartupError, match="but for prompts above 10 tokens"):
        read_trace(path, 0, max_input=10)
    times = [row.at_s for row in poisson(2, 5.0, Length(1, 1), Length(1, 1), 7)]
    assert at_rate(short, 5.0, 7) == [replace(row, at_s=at_s) for row, at_s in zip(short, times, strict=True)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.txt", "", "must end in .csv or .jsonl"),
        ("a.csv", "A,B\n1,2\n", "KeyError"),
        ("a.csv", "", "is empty"),
        ("a.jsonl", "{", "cannot be read as a trace"),
        ("a.jsonl", "[]\n", "cannot be read as a trace"),
    ],
)
def test_unreadable_traces(name: str, text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(StartupError, match=says):
        read_trace(path, 0)


def test_prompts_repeat_and_differ() -> None:
    arrival = Arrival(0.0, 20, 1)
    assert prompt_ids(arrival, 3, range(1000), 5) == prompt_ids(arrival, 3, range(1000), 5)
    assert prompt_ids(arrival, 3, range(1000), 5) != prompt_ids(arrival, 4, range(1000), 5)


@pytest.mark.parametrize("num_tokens", [1, 50, 800])
def test_edits_are_programs_of_the_asked_length(num_tokens: int) -> None:
    arrival, longest = Arrival(0.0, num_tokens, 8), 2 * len(FUNCTION)
    edits = [edit_of(arrival, index, 3, predicts=False) for index in range(20)]
    assert edits == [edit_of(arrival, index, 3, predicts=False) for index in range(20)]
    assert len({edit.text for edit in edits} | {edit_of(arrival, 0, 4, predicts=False).text}) == 21
    for edit in edits:
        assert edit.old != edit.new
        assert edit.new not in edit.text
        assert edit.old in {node.name for node in ast.parse(edit.text).body if isinstance(node, ast.FunctionDef)}
        assert 0 <= len(edit.text) - CHARS_PER_TOKEN * num_tokens < longest
