"""The estimate by the feeds orders numbers of nodes as the simulation of `python -m benchmarks balance` does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pd_cluster.balancing.estimate import LoadEstimate, StepFigures
from pd_cluster.balancing.snapshot import BalanceTargets, EndedRequest, GroupLoad
from pd_cluster.planning.role_counts import RoleCounts
from tests.balancing.snapshots import TARGETS, a_node, nodes_of

EIGHT_B = StepFigures(4.1e-3, 22e-6, 0.75e-9, 10e-6, 33e-9, 256, 896_000)


def estimate(per_s: float, lengths: tuple[int, int], queued: int = 0) -> LoadEstimate:
    rng = random.Random(0)
    rows = ([round(mean * rng.uniform(0.5, 1.5)) for mean in lengths] for _ in range(200))
    seen = [EndedRequest(-1.0, prompt, 0, answer) for prompt, answer in rows]
    return LoadEstimate(EIGHT_B, GroupLoad(per_s, seen, queued, TARGETS))


def shares(of: LoadEstimate) -> list[float]:
    return [of.attained(RoleCounts(prefill, 4 - prefill)).attainment for prefill in (1, 2, 3)]


@pytest.mark.parametrize(
    ("per_s", "lengths", "best"), [(20.8, (6000, 60), 3), (46.0, (2000, 200), 2), (69.0, (300, 800), 1)]
)
def test_what_is_best_is_as_simulated(per_s: float, lengths: tuple[int, int], best: int) -> None:
    found = shares(estimate(per_s, lengths))
    assert max(found) == found[best - 1]
    assert max(found) - min(found) > 0.1


def test_beyond_capacity_one_change_still_seems_to_gain() -> None:
    """A queue at rest would be longer than it can become in a minute: a change seemed to gain 0.06, and none came."""
    rng = random.Random(0)
    seen = [EndedRequest(-1.0, round(1500 * rng.uniform(0.5, 1.5)), 0, 15) for _ in range(200)]
    load = GroupLoad(1.31, seen, 40_000, BalanceTargets(6.4, 0.64))
    of = LoadEstimate(EIGHT_B.times(64), load)
    first, second, third = shares(of)
    assert min(second - first, third - second) > 0.12


def test_where_all_fits_numbers_of_nodes_change_nothing() -> None:
    assert min(shares(estimate(10.0, (2000, 200)))) > 0.99


def test_more_load_and_longer_steps_attain_less() -> None:
    roles, before = RoleCounts(2, 2), 1.1
    for per_s in (5.0, 20.0, 40.0, 50.0, 60.0, 80.0, 200.0):
        told = estimate(per_s, (2000, 200)).attained(roles)
        assert 0 <= told.low <= told.attainment <= min(before, told.high) <= 1
        before = told.attainment
    assert estimate(48.0, (2000, 200), 30_000).attained(roles).attainment < shares(estimate(48.0, (2000, 200)))[1]
    assert estimate(20.0, (2000, 200)).attained(RoleCounts(0, 0, 4)).attainment > 0.9, "mixed nodes read and decode"


def test_figures_are_those_of_nodes_that_have_read_and_decoded() -> None:
    nodes = nodes_of(2, 2)
    figures = StepFigures.of(nodes)
    assert figures is not None
    assert figures.step_s == pytest.approx(0.006 - 4 * 10e-6 - 4000 * 33e-9)
    assert StepFigures.of([replace(node, token_s=0.0) for node in nodes]) is None
    assert StepFigures.of([replace(node, num_streams=0) for node in nodes]) is None
    on_cpu = StepFigures.of([a_node("c", "mixed", step_s=0.004, token_s=0.001, num_streams=3)])
    assert on_cpu is not None
    assert on_cpu.stream_s == 0.001, "there each token takes its time"
