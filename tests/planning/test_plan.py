"""`pd-cluster plan`: what it searches, what it says, and what it refuses."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from benchmarks.slo.setting import roles_of
from pd_cluster.bench.workload import Length, poisson
from pd_cluster.launch.cli import build_parser, main
from pd_cluster.planning.coarse import CoarseCluster
from pd_cluster.planning.coarse_node import CoarseNode, CoarseStream
from pd_cluster.planning.delays import MEASURED
from pd_cluster.planning.device import steps_at_start
from pd_cluster.planning.plan_report import commands, steps_line, verdict
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.search import (
    FINALISTS,
    LOST,
    WINDOWS,
    FineFigures,
    Judged,
    Sought,
    coarsely,
    finely,
    search,
)
from pd_cluster.planning.settings import PlannedSetting, RankCounts, fits_hosts, settings_of
from pd_cluster.planning.simulated_cluster import RoleDevices
from pd_cluster.planning.step_table import packaged_tables
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from pathlib import Path

TABLE = packaged_tables()["8b-h200-tp1"]
PLAN = "plan --gpus 2 --slo-ttft-ms 200 --slo-tpot-ms 10"
LOAD = " --rate 20 --in 1024 --out 64 --num-requests 10"


def sought_of(num: int, rate: float, prompt: int, answer: int) -> Sought:
    arrivals = poisson(num, rate, Length(prompt, prompt), Length(answer, answer), 0)
    return Sought(arrivals, 200.0, 10.0, {1: TABLE}, 0, rate)


def judged(name: str, attained: float, low: float, high: float) -> Judged:
    figures = FineFigures(attained, attained, (1.0, 2.0, 3.0), (1.0, 2.0, 3.0), (0.0, 0.1), 0)
    return Judged(PlannedSetting(roles_of(name), RankCounts()), figures, low, high)


def test_every_setting_uses_the_gpus_and_has_hosts_for_its_nodes() -> None:
    names = {setting.name for setting in settings_of(4, [1], 8)}
    assert names == {"1P3D", "2P2D", "3P1D", "4M"}
    assert all(setting.num_gpus == 4 for setting in settings_of(4, [1], 8))
    unequal = {setting.name for setting in settings_of(4, [1, 2], 4)}
    assert {"2P1D (TP 1/2)", "1P2D (TP 2/1)", "1P1D (TP 2/2)", "2M (TP 2)"} <= unequal
    assert len(settings_of(64, [1], 8)) < 150
    pair = PlannedSetting(RoleCounts(1, 1), RankCounts(4, 4))
    assert fits_hosts(pair, 8, 4)
    assert not fits_hosts(pair, 8, 6), "one has the first host, the other would be on two"


def test_a_search_is_repeatable_and_ranks_by_attainment() -> None:
    sought = sought_of(16, 26.0, 4000, 20)
    settings = [one for one in settings_of(2, [1], 8) if not one.roles.prefill or not one.roles.mixed]
    first, again = (search(sought, settings, lambda *_: None, workers=1) for _ in range(2))
    assert first == again
    shares = [round(one.figures.attained, 2) for one in first]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 1
    for one in first:
        assert one.low <= one.figures.attained <= one.high
        assert one.by_rate is not None
        rates, attained = zip(*one.by_rate.items(), strict=True)
        assert list(rates) == sorted(rates)
        assert attained[0] > attained[-1], "more requests a second"
        assert all(share >= LOST for rate, share in one.by_rate.items() if 26.0 <= rate < max(rates)), "no higher ones"
        assert rates[0] < 26.0, "not all of the load is met, so lower rates are simulated"
        steps = one.figures.steps
        assert set(steps) == {role for role, number in one.setting.roles._asdict().items() if number}
        assert all(num and tokens >= num and 1e-3 < seconds / num < 0.1 for num, tokens, seconds in steps.values())


def test_rates_below_a_load_that_is_met_are_left_out() -> None:
    [one] = search(sought_of(20, 2.0, 500, 5), settings_of(1, [1], 8), lambda *_: None, workers=1)
    assert one.by_rate is not None
    assert min(one.by_rate) == pytest.approx(2.0)
    assert len(one.by_rate) == 4


@pytest.mark.parametrize("rate", [6.0, 14.0, 30.0])
def test_the_coarse_model_serves_all_and_less_well_with_more_load(rate: float) -> None:
    devices = RoleDevices.alike(TABLE.device)

    def share(roles: RoleCounts, rate: float) -> float:
        arrivals = poisson(150, rate, Length(500, 4000), Length(1, 150), 1)
        served = CoarseCluster(roles, devices, Targets(0.2, 0.01, 0.03), MEASURED).serve(arrivals)
        assert sorted(one.arrival.at_s for one in served) == [one.at_s for one in arrivals]
        return sum(one.ttft_ms <= 200 and one.tpot_ms <= 10 for one in served) / len(served)

    few = 0.02  # answers of 2 to 4 tokens, which the way to the decode node may make late
    assert share(RoleCounts(2, 2), rate) >= share(RoleCounts(1, 1), rate) - few
    assert share(RoleCounts(0, 0, 2), rate) >= share(RoleCounts(0, 0, 2), 2 * rate)


@pytest.mark.parametrize("beyond", [0, 1000])
def test_a_coarse_node_with_as_many_streams_as_a_step_has_tokens_is_slow(beyond: int) -> None:
    model = StepModel(steps_at_start(TABLE.device))
    node = CoarseNode(TABLE.device, model, Targets(1.0, 0.5, 1.5), prompts_first=False)
    for request in range(TABLE.device.step_tokens + beyond):
        node.begin(CoarseStream(request, 100, 10, 0.0))
    node.plan(0.0)
    queue_s, own_s = node.reading_s(1000)
    assert queue_s == 0
    assert own_s > model.prefill_s(1000)


@pytest.mark.parametrize("roles", [RoleCounts(1, 1), RoleCounts(mixed=2)], ids=["1P1D", "2M"])
@pytest.mark.parametrize(("prompt", "answer", "rate"), [(3500, 100, 9.0), (1200, 300, 22.0), (6000, 60, 5.0)])
def test_the_coarse_model_says_what_the_fine_one_does(roles: RoleCounts, prompt: int, answer: int, rate: float) -> None:
    """Loads that were not looked at while the model was made. Two mixed nodes were up to 0.27 apart."""
    sought, setting = sought_of(150, rate, prompt, answer), PlannedSetting(roles, RankCounts())
    fine = finely(sought, setting, sought.arrivals, 1.0, 0, True, 1)
    assert fine.attained == pytest.approx(coarsely(sought, False, setting, sought.arrivals), abs=0.04)


def test_of_a_long_trace_only_the_better_settings_meet_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    steps, size = list[str](), 20
    monkeypatch.setattr("pd_cluster.planning.search.WINDOW_REQUESTS", size)
    sought = sought_of(WINDOWS * size + 1, 400.0, 20, 1)
    settings = [one for one in settings_of(8, [1, 2], 8) if not one.is_replicas][:24]
    search(sought, settings, lambda what, _: steps.append(what), workers=1)
    assert steps.count("coarse") == 24 + 12 + (WINDOWS - 2) * FINALISTS


def test_near_settings_are_one_answer_and_clear_ones_are_not() -> None:
    near = [judged("1P1D", 0.95, 0.93, 0.97), judged("2M", 0.94, 0.92, 0.96)]
    assert "1P1D and 2M are one answer: 0.010 apart" in verdict(near)[0]
    assert "no difference that this plan can tell" in verdict(near)[1]
    clear = [judged("2M", 0.95, 0.93, 0.97), judged("1P1D", 0.7, 0.68, 0.75)]
    assert verdict(clear)[0].startswith("2M is the best by 0.250")
    assert verdict(clear)[1].startswith("Replicas win: 2M 0.950, 1P1D 0.700")
    without = replace(near[0], untargeted=0.99)
    assert "Without targets as flags" in verdict([without, near[1]])[2]


def test_a_plan_for_another_card_or_version_says_so_first() -> None:
    sought = sought_of(2, 1.0, 10, 2)
    assert "ANOTHER CARD than NVIDIA H100" in steps_line(sought, "NVIDIA H100", "8b")
    old = msgspec.structs.replace(TABLE, versions={"pd_cluster": "0.0.9"})
    assert "another version (0.0.9)" in steps_line(replace(sought, tables={1: old}), "", "")
    assert "another" not in steps_line(sought, TABLE.card, "8b")


def test_the_command_that_starts_a_setting_is_one() -> None:
    named = commands(judged("2P1D", 1.0, 1.0, 1.0), sought_of(2, 1.0, 10, 2), "some/model")
    namespace = build_parser().parse_args(shlex.split(named["up"])[1:])
    assert (namespace.prefill, namespace.decode, namespace.mixed, namespace.slo_ttft_ms) == (2, 1, 0, 200.0)
    assert json.loads(named["helm"])["roles"]["prefill"] == {"kind": "prefill", "replicas": 2, "gpus": {"count": 1}}
    assert json.loads(named["ray"])["prefill"] == {"count": 2, "gpus": 1}


@pytest.mark.long
def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(shlex.split(f"{PLAN}{LOAD} --json {out} --plot {tmp_path / 'plan.png'}")) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Steps: 8b on NVIDIA H200, TP 1, measured")
    for part in ("1P1D", "2M", "pd-cluster up --model", "Helm values", "Ray spec", "Not simulated"):
        assert part in shown
    record = json.loads(out.read_text())
    assert {one["name"] for one in record["settings"]} >= {"1P1D", "2M"}
    assert (tmp_path / "plan.png").stat().st_size > 1000


BAD = {
    "a plan needs --trace FILE, or --rate R": PLAN,
    "cannot be read as a trace": f"{PLAN} --trace bad.csv",
    "bad.jsonl cannot be read as a trace": f"{PLAN} --trace bad.jsonl",
    "empty.csv is empty": f"{PLAN} --trace empty.csv",
    "has one request": f"{PLAN} --trace one.csv",
    "the trace none.csv cannot be read": f"{PLAN} --trace none.csv",
    "not a number of requests": f"{PLAN}{LOAD} --rate 0",
    "is not a length": f"{PLAN}{LOAD} --in 9:1",
    "a plan needs --slo-ttft-ms": f"plan --gpus 2{LOAD}",
    "--slo-tpot-ms 1 cannot be met: a request alone takes 4.": f"{PLAN}{LOAD} --slo-tpot-ms 1",
    "--slo-ttft-ms 5 cannot be met": f"{PLAN}{LOAD} --slo-ttft-ms 5",
    "comes before the one above it, after 1 requests": f"{PLAN} --trace back.csv",
    "timeless.jsonl cannot be read as a trace": f"{PLAN} --trace timeless.jsonl",
    "ValueError: -4 is not a number of tokens": f"{PLAN} --trace negative.csv",
    "--num-requests -1 is below 0": f"{PLAN} --trace one.csv --num-requests -1",
    "or both, above 0": f"{PLAN}{LOAD} --slo-ttft-ms inf",
    "--gpus, --gpus-per-host and --tp must be": f"{PLAN}{LOAD} --gpus 0",
    "and --tp must be at least 1": f"{PLAN}{LOAD} --tp 0",
    "a number of ranks, or a limit of a node, that is not": f"{PLAN}{LOAD} --table tp0.json",
    "--json none/plan.json: there is no directory none": f"{PLAN}{LOAD} --json none/plan.json",
    "--plot none/plan.png: there is no directory none": f"{PLAN}{LOAD} --plot none/plan.png",
    "3 ranks cannot share the 8 KV heads": f"{PLAN}{LOAD} --tp 3",
    "there is no step table of 8b with --tp 2": f"{PLAN}{LOAD} --tp 2",
    "nodes of 4 ranks have no room on 2 GPUs": f"{PLAN}{LOAD} --table tp4.json",
    "no step table of 'gpt-7'": f"{PLAN}{LOAD} --model gpt-7",
    "the step tables are of 8b, not of 30b-a3b-fp8": f"{PLAN}{LOAD} --model 30b-a3b-fp8 --table tp4.json",
    "the step table none.json cannot be read": f"{PLAN}{LOAD} --table none.json",
    "is not a step table": f"{PLAN}{LOAD} --table bad.jsonl",
    "does not fit: a node of --tp 1 holds": f"{PLAN}{LOAD} --in 900000",
    "--attainment 2 is not": f"{PLAN}{LOAD} --attainment 2",
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_input_is_one_sentence_and_status_2(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    head, row = "TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03.9799600,{},5\n"
    (tmp_path / "bad.csv").write_text(head + row.format(4) + row.format("many"))
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    (tmp_path / "empty.csv").write_text(head)
    (tmp_path / "one.csv").write_text(head + row.format(4))
    (tmp_path / "back.csv").write_text(head + row.format(4) + row.format(4).replace("18:17", "18:16"))
    (tmp_path / "negative.csv").write_text(head + row.format(-4))
    (tmp_path / "timeless.jsonl").write_text('{"timestamp": NaN, "input_length": 4, "output_length": 5}\n')
    (tmp_path / "tp0.json").write_bytes(msgspec.structs.replace(TABLE, tp=0).to_json())
    (tmp_path / "tp4.json").write_bytes(msgspec.structs.replace(TABLE, tp=4).to_json())
    assert main(shlex.split(BAD[problem])) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("pd-cluster: error: ")
    assert problem in line
