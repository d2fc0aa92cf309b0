"""The simulation of targets: they hold where a limit that knows none misses them."""

from __future__ import annotations

import json
from math import inf
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from benchmarks.slo import gaps_ms, main, rules
from benchmarks.slo.device import DEVICES
from benchmarks.slo.setting import Setting
from pd_cluster.bench.workload import Length, poisson
from pd_cluster.errors import StartupError
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.scheduling.step_model import StepWork, keys_of

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.planning.simulated_cluster import Served
    from pd_cluster.planning.simulated_node import Rule


def served(rule: Rule, setting: str) -> list[Served]:
    arrivals = poisson(24, 16.0, Length(500, 4000), Length(20, 60), seed=3)
    return Setting.parse(setting).cluster(rule, seed=1).serve(arrivals)


@pytest.mark.parametrize("setting", ["1M", "1P1D"])
def test_a_target_holds_where_steps_without_limit_miss_it(setting: str) -> None:
    by_name = {rule.name: rule for rule in rules(200, 10)}
    without, within = served(by_name["no limit"], setting), served(by_name["slack"], setting)
    assert max(max(gaps_ms(one)) for one in without) > 40
    assert max(one.tpot_ms for one in without) > 10 or setting == "1P1D"
    late = [one for one in within if one.tpot_ms > 10.1]
    assert len(late) <= 2 * (setting == "1P1D"), "few: a handover is one of their gaps"
    assert max(max(gaps_ms(one)[1:]) for one in within) <= 32, "the first gap is a handover"


def test_a_prefill_node_keeps_streams_that_its_decode_node_would_be_late_with() -> None:
    """Of a mixture's answers one decode node has too many for 10 ms."""
    arrivals = poisson(100, 60.0, Length(300, 300), Length(200, 200), seed=3)
    by_name = {rule.name: rule for rule in rules(200, 10)}

    def figures(rule: Rule) -> tuple[float, float]:
        ours = Setting.parse("1P1D").cluster(rule, 1, "30b-a3b-fp8").serve(arrivals)
        return mean(one.tpot_ms <= 10 for one in ours), mean(one.reason == "decode-late" for one in ours)

    alone, with_p = figures(by_name["slack, P reads only"]), figures(by_name["slack"])
    assert alone[1] == 0.0
    assert 0.1 < with_p[1] < 0.5
    assert with_p[0] > alone[0] + 0.3


def test_the_steps_of_a_mixture_are_as_measured() -> None:
    device = DEVICES["30b-a3b-fp8", 1]
    for num_decodes, measured_ms in ((32, 9.02), (128, 12.8), (256, 16.7)):
        step_s = device.seconds(StepWork(num_decodes, 1024 * num_decodes))
        assert 1e3 * step_s == pytest.approx(measured_ms, rel=0.03)
    for num_decodes, measured_ms in ((5, 4.8), (13, 7.1), (25, 8.8), (33, 9.7), (41, 10.4), (64, 11.7)):
        step_s = device.seconds(StepWork(num_decodes, 1150 * num_decodes))
        assert 1e3 * step_s == pytest.approx(measured_ms, rel=0.03)
    beside_s = device.seconds(StepWork(26, 26 * 1150, 1024, keys_of(1024, 0)))
    assert 1e3 * beside_s == pytest.approx(23.0, rel=0.02)
    assert 1e3 * device.seconds(StepWork(num_tokens=1024, num_keys=keys_of(1024, 0))) == pytest.approx(15.8, rel=0.02)
    assert 25 < 1e3 * device.seconds(StepWork(3, 3 * 4160, 2045, keys_of(2045, 2045))) < 30
    assert 1024 / device.seconds(StepWork(num_tokens=1024)) > 0.5 * 105e3


def test_settings_have_any_number_of_nodes() -> None:
    assert Setting.parse("3P1D") == Setting("3P1D", RoleCounts(3, 1))
    assert Setting.parse("1P1D-TP2") == Setting("1P1D-TP2", RoleCounts(1, 1), num_ranks=2)
    assert [Setting.parse(name).num_gpus for name in ("2P2D", "4M", "1P1D-TP2")] == [4, 4, 4]
    for name in ("", "2P", "0M", "1P1D-TP3", "1P1D-TP", "1P1D-TPx"):
        with pytest.raises(StartupError, match=r"is not like 2P1D|nodes have one rank"):
            Setting.parse(name)


def test_nodes_of_a_role_share_its_prompts_and_streams() -> None:
    """Of 48 requests at once each decode node gets its half; with half the prefill nodes first tokens come later."""
    arrivals = poisson(48, inf, Length(1000, 1000), Length(20, 20), seed=3)
    [slack] = [rule for rule in rules(200, 10) if rule.name == "no limit"]

    def mean_ttft_ms(name: str) -> float:
        cluster = Setting.parse(name).cluster(slack, seed=1)
        found = mean(one.ttft_ms for one in cluster.serve(arrivals))
        streams = [len(node.on_token) for node in cluster.nodes["decode"]]
        assert max(streams) - min(streams) <= 4, streams
        loads = [node.load for node in (*cluster.nodes["prefill"], *cluster.nodes["decode"])]
        assert all(load.num_running == load.num_waiting == load.queued_tokens == 0 for load in loads)
        return found

    assert mean_ttft_ms("2P2D") < 0.8 * mean_ttft_ms("1P2D")
    assert mean_ttft_ms("1P1D-TP2") < 0.8 * mean_ttft_ms("1P1D")


def test_the_table_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    flags = [
        "--workloads",
        "1024x256",
        "--settings",
        "1M",
        "--rules",
        "usual gaps",
        "--seeds",
        "1",
        "--num-requests",
        "6",
    ]
    assert main([*flags, "--rate-scale", "2", "--slos", "200/10", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "1024 in, 256 out, 20/s x 2, 1M" in shown
    assert "200/10 usual gaps" in shown
    record = json.loads(out.read_text())
    assert (record["kind"], record["setting"], record["rate_scale"], record["slo"]) == (
        "slo_simulated",
        "1M",
        2,
        "200/10",
    )
    assert record["figures"]["attained"] == record["figures"]["by_draw"][0] == 1.0
