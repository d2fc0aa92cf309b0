"""The simulation of roles that follow the load: equal twice, roles follow prompts, and stay where all fits."""

from __future__ import annotations

import pytest

from benchmarks.balance import run_one
from benchmarks.balance.loads import EVENLY, PROMPTS, LoadSpan, PhasedLoad, loads
from pd_cluster.planning.role_counts import RoleCounts

SLOWNESS = 64.0
ROLES = RoleCounts(1, 3)


def test_loads_are_drawn_from_their_seed_in_their_phases() -> None:
    for load in loads(SLOWNESS).values():
        arrivals = load.arrivals(4, 0)
        assert arrivals == load.arrivals(4, 0) != load.arrivals(4, 1)
        assert {load.phase_at(one.at_s) for one in arrivals} == set(range(len(load.phases)))


@pytest.mark.long
def test_roles_follow_prompts() -> None:
    load = PhasedLoad("prompts", (LoadSpan(240.0, 21 / SLOWNESS, PROMPTS),))
    found = [run_one(load, ROLES, 0, SLOWNESS, is_balanced=is_balanced) for is_balanced in (False, True, True)]
    assert found[1] == found[2]
    assert (found[0].changes, found[1].changes) == ((0,), (2,))


@pytest.mark.long
def test_no_role_changes_where_all_fits() -> None:
    load = PhasedLoad("even", (LoadSpan(120.0, 24 / SLOWNESS, EVENLY),))
    run = run_one(load, RoleCounts(2, 2), 0, SLOWNESS, is_balanced=True)
    assert (run.attained, run.changes) == (1.0, (0,))


@pytest.mark.long
def test_roles_change_with_the_load_where_it_is_foreseen() -> None:
    load = PhasedLoad("even", tuple(LoadSpan(40.0, 24 / SLOWNESS, EVENLY) for _ in range(3)))
    assert load.begins_s == [0.0, 40.0, 80.0]
    assert run_one(load, RoleCounts(2, 2), 0, SLOWNESS, is_balanced=False, foreseen=(2, 3, 1)).changes == (0, 1, 2)
