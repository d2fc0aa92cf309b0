"""Load-test statistics on numbers that can be checked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from pd_cluster.bench.statistics import RequestRecord, meets, spread, summarize

RECORDED = Path(__file__).with_name("recorded_run.json")


def record(sent_s: float, chunks_s: list[float], num_output: int, **changes: object) -> RequestRecord:
    found = RequestRecord(0, sent_s, sent_s, 10, num_output, chunks_s, chunks_s[-1] if chunks_s else sent_s)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.long
def test_one_request() -> None:
    one = record(1.0, [1.2, 1.3, 1.5, 1.6], num_output=5)
    assert one.ttft_s == pytest.approx(0.2)
    assert one.ttst_s == pytest.approx(0.3)
    assert one.itl_s == pytest.approx([0.1, 0.2, 0.1])
    assert one.tpot_s == pytest.approx(0.4 / 4), "tokens count, not chunks: two came in one chunk"
    assert one.e2e_s == pytest.approx(0.6)


def test_the_tokens_of_a_chunk_share_the_time_before_it() -> None:
    one = record(1.0, [1.2, 1.3, 1.6, 1.7], num_output=6, tokens_so_far=[1, 2, 5, 6])
    assert one.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.1])
    assert one.gaps_s == pytest.approx([0.1, 0.3, 0.1])
    assert one.tpot_s == pytest.approx(0.5 / 5)
    found = summarize([one], {})
    assert found.spreads["itl"].count == 5
    assert found.spreads["longest gap"].max_ms == pytest.approx(300.0)


@pytest.mark.parametrize("told", [[], [5], [1, 2, 3, 4], [7, 7, 7, 7]])
def test_chunks_of_single_tokens_have_the_gaps_between_chunks(told: list[int]) -> None:
    """To the last bit, however the server counted: not at all, at the end, each, or wrong."""
    times_s = [0.4102, 0.4183007, 0.42671, 0.61]
    one = record(0.1, times_s, num_output=4, tokens_so_far=told)
    assert one.itl_s == [after - before for before, after in pairwise(times_s)]


@pytest.mark.parametrize("counts", [False, True])
def test_a_recorded_run_of_single_tokens_has_its_figures(counts: bool) -> None:
    """The figures are those of the release that counted events."""
    run = json.loads(RECORDED.read_text())
    records = [RequestRecord(**fields) for fields in run["requests"]]
    for one in records:
        assert one.num_output == len(one.chunk_times_s)
        one.tokens_so_far = list(range(1, one.num_output + 1)) if counts else []
    found = summarize(records, {}).spreads
    assert found.keys() == run["spreads"].keys() | {"longest gap"}
    for name, figures in run["spreads"].items():
        assert asdict(found[name]) == pytest.approx(figures, rel=1e-12), name
    assert found["longest gap"].max_ms == found["itl"].max_ms


def test_a_single_token_has_no_gaps() -> None:
    one = record(0.0, [0.5], num_output=1)
    assert (one.ttst_s, one.tpot_s, one.itl_s) == (None, None, [])


def test_percentiles_interpolate() -> None:
    found = spread([value / 1000 for value in range(1, 101)])
    assert found is not None
    assert (found.count, found.p50_ms, found.p90_ms, found.p99_ms) == pytest.approx((100, 50.5, 90.1, 99.01))
    assert (found.mean_ms, found.max_ms) == pytest.approx((50.5, 100.0))
    assert spread([]) is None


@pytest.mark.parametrize(
    ("objectives", "met"),
    [({"ttft": 200.0}, True), ({"ttft": 199.0}, False), ({"ttft": 200.0, "tpot": 99.0}, False), ({"e2e": 601.0}, True)],
)
def test_objectives(objectives: dict[str, float], met: bool) -> None:
    assert meets(record(0.0, [0.2, 0.3, 0.4, 0.6], num_output=5), objectives) is met


def test_a_failed_request_meets_nothing() -> None:
    assert not meets(record(0.0, [0.1], 1, error="HTTP 503"), {"ttft": 1000.0})
    assert not meets(record(0.0, [], 0), {"ttft": 1000.0})


def test_summary() -> None:
    records = [
        record(0.0, [0.1, 0.2], 2, route="p-first; reason=default", num_cached=5),
        record(1.0, [1.3, 1.4], 2, route="p-first; reason=default"),
        record(2.0, [2.1], 1, error="the stream broke off", end_s=4.0),
        record(3.0, [], 0, end_s=3.0),
    ]
    found = summarize(records, {"ttft": 200.0})
    assert (found.num_requests, found.num_ok, found.duration_s) == (4, 2, 4.0)
    assert found.errors == {"the stream broke off": 1, "no output": 1}
    assert found.routes == {"p-first; reason=default": 2}
    assert (found.input_tokens, found.output_tokens, found.output_rate) == (20, 4, 1.0)
    assert found.cached_share == 0.25
    assert found.spreads["ttft"].p50_ms == pytest.approx(200.0)
    assert found.goodput == pytest.approx(0.25), "one good answer in four seconds"
    assert found.attainment == 0.25, "failures count in the denominator"


def test_what_a_server_tells() -> None:
    remote = {
        "admit": 1.0,
        "first_decode": 5.0,
        "queue": 12.0,
        "transfer": 3.0,
        "prefill_leg": 10.0,
        "announce": 0.5,
        "reserve": 0.0,
        "link": 2.0,
    }
    handed = record(0.0, [0.016, 0.02], 2, timings_ms=remote)
    assert [handed.leg_s, handed.handover_s, handed.join_s] == pytest.approx([0.010, 0.0025, 0.006])
    local = record(0.0, [0.016, 0.02], 2, timings_ms={"queue": 4.0, "prefill": 8.0})
    assert local.leg_s == pytest.approx(0.012)
    assert (local.handover_s, local.join_s) == (None, None)
    silent = record(0.0, [0.1, 0.2], 2)
    assert (silent.leg_s, silent.handover_s) == (None, None)
    found = summarize([handed, local, silent], {}, [(15.0, 5.0), (20.0, 5.0)])
    assert found.spreads["beyond leg"].count == 2
    assert found.spreads["beyond leg"].max_ms == pytest.approx(6.0)
    assert found.phases["queue"].mean_ms == pytest.approx(8.0)
    assert found.attained == {"15/5": 0.0, "20/5": pytest.approx(2 / 3)}


def test_without_objectives_there_is_no_goodput() -> None:
    found = summarize([record(0.0, [0.1], 1)], {})
    assert (found.goodput, found.attainment) == (None, None)
    assert not math.isnan(found.request_rate)
