"""The simulation of roles: by the product's own code, repeatable, and right about which roles a load needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.slo.setting import roles_of
from pd_cluster.bench.workload import Arrival
from pd_cluster.errors import StartupError
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.search import FineFigures, Sought, finely
from pd_cluster.planning.settings import PlannedSetting, RankCounts
from pd_cluster.planning.step_table import packaged_tables

TABLE = packaged_tables()["8b-h200-tp1"]


def load_of(num: int, rate: float, prompt: int, answer: int) -> list[Arrival]:
    return [Arrival(at / rate, prompt, answer) for at in range(num)]


def of(
    load: list[Arrival], roles: RoleCounts, seed: int, *, targets: tuple[float | None, float | None] = (200.0, 10.0)
) -> FineFigures:
    sought, setting = Sought([], *targets, {1: TABLE}, seed, 1.0), PlannedSetting(roles, RankCounts())
    return finely(sought, setting, load, 1.0, seed, True, len(load) // 2)


def test_two_simulations_with_one_seed_are_equal_and_those_of_another_are_not() -> None:
    load = load_of(16, 12.0, 3000, 40)
    assert of(load, RoleCounts(1, 1), 5) == of(load, RoleCounts(1, 1), 5) != of(load, RoleCounts(1, 1), 6)


def test_more_load_is_served_less_well_and_more_nodes_serve_it_better() -> None:
    slow, fast = load_of(24, 8.0, 4000, 20), load_of(24, 26.0, 4000, 20)
    pair, four = RoleCounts(1, 1), RoleCounts(2, 2)
    crowded = of(fast, pair, 1)
    assert of(slow, pair, 1).attained > crowded.attained
    assert of(fast, four, 1).attained > crowded.attained
    assert crowded.early > crowded.attained, "the first ones found an empty cluster"


def test_each_target_counts_by_itself() -> None:
    load = load_of(24, 26.0, 4000, 20)
    first, later, both = (
        of(load, RoleCounts(1, 1), 1, targets=targets).attained
        for targets in ((200.0, None), (None, 4.0), (200.0, 4.0))
    )
    assert 0.1 < first < 0.9, "two nodes read 23 of these prompts a second"
    assert later < 0.1, "a step of one stream takes longer"
    assert both <= min(first, later)
    assert of(load, RoleCounts(1, 1), 0, targets=(None, None)).attained == 1.0


def test_roles_without_a_node_that_decodes_are_refused() -> None:
    with pytest.raises(StartupError, match="no node that decodes"):
        of(load_of(2, 1.0, 10, 2), RoleCounts(3), 0)
    for name in ("", "2P", "0M", "2D1P", "P1D"):
        with pytest.raises(StartupError, match="no node that decodes, or is not like"):
            roles_of(name)
    for name in ("2P1D", "4M", "1P2D+1M", "3D"):
        assert roles_of(name).name == name


@pytest.mark.long
def test_neither_torch_nor_a_changed_class_is_in_its_process() -> None:
    """The simulator uses scheduler, budgets and the router's choice as they are: it subclasses and patches nothing."""
    code = """
import sys, inspect
import pd_cluster.scheduling.scheduler, pd_cluster.scheduling.step_budget, pd_router.policy.cost_policy
def own():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith(("pd_cluster.scheduling", "pd_router.")):
            for kind in vars(module).values():
                if inspect.isclass(kind) and kind.__module__ == name:
                    found[kind] = dict(vars(kind))
    return found
before = own()
from tests.planning.test_forecast import load_of, of, RoleCounts
of(load_of(12, 12.0, 3000, 20), RoleCounts(1, 1, 1), 0)
assert "torch" not in sys.modules, "torch"
for kind, members in before.items():
    assert {k: v for k, v in vars(kind).items() if not k.startswith("__")} == {
        k: v for k, v in members.items() if not k.startswith("__")}, kind
    for child in kind.__subclasses__():
        assert not child.__module__.startswith("pd_cluster.planning"), child
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
