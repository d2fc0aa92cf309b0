"""What share of the requests that a cluster has seen lately nodes of given roles would serve within their targets."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import inf
from statistics import mean
from typing import TYPE_CHECKING

from pd_cluster.planning.device import ScaledDevice
from pd_cluster.planning.simulated_cluster import RoleDevices, Served, SimulatedCluster
from pd_cluster.planning.simulated_node import Rule
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.role_counts import RoleCounts
    from pd_cluster.planning.step_table import StepTable

STEPS_OFF = 0.05  # steps so much shorter and longer are simulated too


@dataclass(frozen=True, slots=True)
class Forecast:
    """A share of the requests: of the draws, and the least and most of these and of steps STEPS_OFF off."""

    attainment: float
    low: float
    high: float


def forecast(
    arrivals: Sequence[Arrival], ttft_ms: float | None, tpot_ms: float | None, roles: RoleCounts, table: StepTable,
    seed: int,
) -> Forecast:  # fmt: skip
    """Simulate the load twice, the second time with other requests at the same times, and with other steps.

    Without requests or targets (None) everything is within them. Raises StartupError when `roles` have no node that
    decodes.
    """
    roles.check()
    if not arrivals:
        return Forecast(1.0, 1.0, 1.0)

    def share(loads: Sequence[Arrival], factor: float, seed: int) -> float:
        devices = RoleDevices.alike(ScaledDevice(table.device, factor))
        served = SimulatedCluster(roles, rule_of(ttft_ms, tpot_ms), seed, devices).serve(loads)
        return mean(is_met(one, ttft_ms, tpot_ms) for one in served)

    draws = [share(arrivals, 1.0, seed), share(redrawn(arrivals, seed), 1.0, seed + 1)]
    others = [share(arrivals, 1.0 + off, seed) for off in (-STEPS_OFF, STEPS_OFF)]
    return Forecast(mean(draws), min(draws + others), max(draws + others))


def redrawn(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Other requests of the same ones, at the same times."""
    lengths = [(one.num_input, one.num_output) for one in arrivals]
    random.Random(seed).shuffle(lengths)
    return [replace(one, num_input=a, num_output=b) for one, (a, b) in zip(arrivals, lengths, strict=True)]


def rule_of(ttft_ms: float | None, tpot_ms: float | None) -> Rule:
    """How nodes behave with these targets as their flags: as `pd-cluster up` starts them."""
    ttft_s, tpot_s = ((ms / 1e3 if ms else inf) for ms in (ttft_ms, tpot_ms))
    if ttft_s == tpot_s == inf:
        return Rule("no targets", usual=True, shortest=True)
    return Rule("targets", Targets(ttft_s, tpot_s, 3 * tpot_s), shortest=True)


def is_met(one: Served, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    return one.ttft_ms <= (ttft_ms or inf) and one.tpot_ms <= (tpot_ms or inf)
