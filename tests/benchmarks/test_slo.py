"""The simulation of targets: they hold where a limit that knows none misses them."""

from __future__ import annotations

import pytest

from benchmarks.slo import Rule, Served, SimulatedCluster, main, rules
from pd_cluster.bench.workload import Length, poisson


def served(rule: Rule, setting: str) -> list[Served]:
    arrivals = poisson(24, 16.0, Length(500, 4000), Length(20, 60), seed=3)
    return SimulatedCluster(setting, rule, seed=1).serve(arrivals)


@pytest.mark.parametrize("setting", ["1M", "1P1D"])
def test_a_target_holds_where_steps_without_limit_miss_it(setting: str) -> None:
    by_name = {rule.name: rule for rule in rules(200, 10)}
    without, within = served(by_name["no limit"], setting), served(by_name["slack"], setting)
    assert max(max(one.gaps_ms) for one in without) > 40
    assert max(one.tpot_ms for one in without) > 10 or setting == "1P1D"
    late = [one for one in within if one.tpot_ms > 10]
    assert len(late) <= 2 * (setting == "1P1D"), "few: a handover is one of their gaps"
    assert max(max(one.gaps_ms[1:]) for one in within) <= 32, "the first gap is a handover"


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workloads", "1024x256", "--settings", "1M", "--rules", "192", "--seeds", "1", "--num-requests", "6"]
    assert main(flags) == 0
    assert "200/10 192" in capsys.readouterr().out
