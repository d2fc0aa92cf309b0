"""What share of the requests that a cluster has seen lately nodes of given roles would serve within their targets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.bench.workload import Arrival
from pd_cluster.planning.device import ScaledDevice
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.simulated_cluster import RoleDevices, Served, SimulatedCluster
from pd_cluster.planning.simulated_node import Rule
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from pd_cluster.planning.device import Device
    from pd_cluster.planning.step_table import StepTable

__all__ = ["Forecast", "ObservedLoad", "RoleCounts", "SeenRequest", "forecast"]

STEPS_OFF = 0.05  # steps so much shorter and longer are simulated too


class SeenRequest(NamedTuple):
    """One request of the last minutes."""

    offset_s: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class ObservedLoad:
    """Requests in the order of their arrival, and what they may wait in ms. None: no target."""

    arrivals: tuple[SeenRequest, ...]
    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """A share of the requests: of the draws, and the least and most of these and of steps STEPS_OFF off."""

    attainment: float
    low: float
    high: float


def forecast(load: ObservedLoad, roles: RoleCounts, table: StepTable, seed: int) -> Forecast:
    """Simulate the load twice, the second time with other requests at the same times, and with other steps.

    Without requests or targets everything is within them. Raises StartupError when `roles` have no node that decodes.
    """
    roles.check()
    if not load.arrivals:
        return Forecast(1.0, 1.0, 1.0)
    first = [Arrival(*one) for one in load.arrivals]
    lengths = [(one.num_input, one.num_output) for one in first]
    random.Random(seed).shuffle(lengths)
    second = [Arrival(one.at_s, *pair) for one, pair in zip(first, lengths, strict=True)]
    draws = [_share(load, drawn, roles, table.device, seed + at) for at, drawn in enumerate((first, second))]
    others = [_share(load, first, roles, ScaledDevice(table.device, 1 + off), seed) for off in (-STEPS_OFF, STEPS_OFF)]
    return Forecast(mean(draws), min(draws + others), max(draws + others))


def rule_of(ttft_ms: float | None, tpot_ms: float | None) -> Rule:
    """How nodes behave with these targets as their flags: as `pd-cluster up` starts them."""
    ttft_s, tpot_s = ((ms / 1e3 if ms else inf) for ms in (ttft_ms, tpot_ms))
    if ttft_s == tpot_s == inf:
        return Rule("no targets", usual=True, shortest=True)
    return Rule("targets", Targets(ttft_s, tpot_s, 3 * tpot_s), shortest=True)


def is_met(one: Served, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    return one.ttft_ms <= (ttft_ms or inf) and one.tpot_ms <= (tpot_ms or inf)


def _share(load: ObservedLoad, arrivals: list[Arrival], roles: RoleCounts, device: Device, seed: int) -> float:
    rule = rule_of(load.ttft_ms, load.tpot_ms)
    served = SimulatedCluster(roles, rule, seed, RoleDevices.alike(device)).serve(arrivals)
    return sum(is_met(one, load.ttft_ms, load.tpot_ms) for one in served) / len(served)
