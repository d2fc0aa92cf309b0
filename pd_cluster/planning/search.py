"""Finds the settings that serve a load best: all of them coarsely, the best of these by the fine model."""

from __future__ import annotations

import os
import random
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from multiprocessing import get_context
from statistics import mean
from typing import TYPE_CHECKING, Any

from pd_cluster.planning.coarse import CoarseCluster
from pd_cluster.planning.delays import MEASURED
from pd_cluster.planning.device import Device, ScaledDevice
from pd_cluster.planning.simulated_cluster import WARM, RoleDevices, Served, SimulatedCluster
from pd_cluster.planning.simulated_node import Rule
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.settings import PlannedSetting
    from pd_cluster.planning.step_table import StepTable

BEST, SWEPT = 5, 3  # settings that are simulated finely; and under other rates, beside the best replicas
STEPS_OFF = 0.05  # steps so much shorter and longer are simulated too
MET, LOST = 0.999, 0.5  # attainment from which on lower rates are not simulated, and below which higher ones are not
RATES = ((0.75, 1.25), (0.5, 1.5), (2.0,))  # times the load's, in this order
# Of one fine simulation: a token of an answer takes 8 us, a second of a node 25 ms. 1,000 requests: 0.95 +- 0.007
FINE_TOKENS, FINE_NODE_S, FEWEST = 200_000, 250.0, 100
SHORT, EARLY = 2, 0.8  # so many times fewer for other draws, steps and rates; of them are compared, as more follow
# Of a long trace, for the coarse model. After each window the better half goes on, FINALISTS at least
WINDOWS, WINDOW_REQUESTS = 5, 2_000
FINALISTS = 6


@dataclass(frozen=True, slots=True)
class Sought:
    """A load, its targets in ms (None: none), and the tables by number of ranks."""

    arrivals: list[Arrival]
    ttft_ms: float | None
    tpot_ms: float | None
    tables: dict[int, StepTable]
    seed: int
    rate: float


@dataclass(frozen=True, slots=True)
class FineFigures:
    """Of one simulation."""

    attained: float
    early: float  # the same of the first requests, which other simulations have too
    ttft_ms: tuple[float, float, float]  # p50, p90, p99
    tpot_ms: tuple[float, float, float]
    late: tuple[float, float]  # shares of the requests that miss the first target, and the second
    num_short: int  # times that a request waited for KV memory
    steps: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by role: number, tokens, seconds


@dataclass(slots=True)
class Judged:
    """A setting, its figures, and by what its attainment moves with other draws and steps."""

    setting: PlannedSetting
    figures: FineFigures
    low: float
    high: float
    untargeted: float = 0.0  # attainment of the best if nodes do not know the targets
    by_rate: dict[float, float] | None = None  # attainment by requests a second; None: not simulated

    def moved(self, other: FineFigures) -> float:
        """Attainment under what `other` was simulated with."""
        return max(0.0, min(1.0, self.figures.attained + other.early - self.figures.early))

    def goodput(self, rate: float) -> float:
        """Requests a second and GPU that meet the targets."""
        return self.figures.attained * rate / self.setting.num_gpus


def search(
    sought: Sought, settings: Sequence[PlannedSetting], progress: Callable[[str, int], Any], *, workers: int = 0
) -> list[Judged]:
    """The best BEST, best first, and the best replicas if they are none of them. `progress`: what ends, of how many."""
    workers = workers or len(os.sched_getaffinity(0))
    with ExitStack() as cleanup:
        run: Callable[..., Iterable[Any]] = map
        if workers > 1:
            run = cleanup.enter_context(ProcessPoolExecutor(workers, get_context("spawn"))).map
        totals = dict[str, int]()

        def all_of(what: str, call: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
            rows = list(zip(*columns, strict=True))
            totals[what] = totals.get(what, 0) + len(rows)
            found = []
            for one in run(call, *zip(*rows, strict=True)):
                found.append(one)
                progress(what, totals[what])
            return found

        windows = _windows(sought)
        light = replace(sought, arrivals=[])  # what other processes are sent
        chosen = _chosen(settings, windows, partial(all_of, "coarse", partial(coarsely, light, len(windows) > 1)))
        fine = _fine(windows[0], max(sum(one.roles) for one in chosen))
        short = fine[: max(FEWEST, len(fine) // SHORT)]
        num_early = int(EARLY * len(short))

        def simulate(what: str, jobs: Sequence[tuple[PlannedSetting, list[Arrival], float, int, bool]]) -> list[Any]:
            num, early = len(jobs), what == "draws"  # of which no more is asked
            columns = *zip(*jobs, strict=True), [num_early] * num, [early] * num
            return all_of(what, finely, [light] * num, *columns) if jobs else []

        found = simulate("fine", [(one, fine, 1.0, sought.seed, True) for one in chosen])
        judged = [Judged(one, figures, *[figures.attained] * 2) for one, figures in zip(chosen, found, strict=True)]
        judged.sort(key=lambda one: (-round(one.figures.attained, 2), -one.goodput(sought.rate)))
        variants = _variants(short, sought.seed)
        pairs = [(one, row) for one in judged for row in variants[one.figures.attained >= MET :]]
        pairs.append((judged[0], (short, 1.0, sought.seed, False)))
        found = simulate("draws", [(one.setting, *row) for one, row in pairs])
        judged[0].untargeted = judged[0].moved(found.pop())
        for (one, _), figures in zip(pairs, found, strict=False):
            one.low, one.high = min(one.low, one.moved(figures)), max(one.high, one.moved(figures))
        swept = judged[:SWEPT] + [one for one in judged[SWEPT:] if one.setting.is_replicas]
        for one in swept:
            one.by_rate = {sought.rate: one.figures.attained}
        for scales in RATES:
            rates = [(one, scale) for one in swept for scale in scales if _tells(one, scale)]
            loads = {scale: [replace(one, at_s=one.at_s / scale) for one in short] for scale in scales}
            found = simulate("rates", [(one.setting, loads[scale], 1.0, sought.seed, True) for one, scale in rates])
            for (one, scale), figures in zip(rates, found, strict=True):
                one.by_rate = dict(sorted([*(one.by_rate or {}).items(), (scale * sought.rate, figures.attained)]))
    return judged


def _chosen(
    settings: Sequence[PlannedSetting], windows: Sequence[list[Arrival]], shares_of: Callable[..., list[float]]
) -> list[PlannedSetting]:
    """What the coarse model finds best: after each window the better half goes on to the next one, and replicas."""
    order, shares = list(settings), {setting: list[float]() for setting in settings}
    for window in windows:
        for setting, share in zip(order, shares_of(order, [window] * len(order)), strict=True):
            shares[setting].append(share)
        order.sort(key=lambda setting: -mean(shares[setting]))
        most = max(FINALISTS, len(order) // 2)
        order = [setting for at, setting in enumerate(order) if at < most or setting.is_replicas]
    chosen = order[:BEST]
    return chosen + [one for one in order if one.is_replicas][: not any(one.is_replicas for one in chosen)]


def coarsely(sought: Sought, is_part: bool, setting: PlannedSetting, window: list[Arrival]) -> float:
    """Attainment, and what a request of the load costs less than its targets where that is 1: both in one number.

    `is_part`: of a load, so that the first ones find a cluster that is emptier than it would be.
    """
    targets = rule_of(sought.ttft_ms, sought.tpot_ms).targets
    served = CoarseCluster(setting.roles, devices_of(sought, setting), targets, MEASURED).serve(window)
    begin_s = window[0].at_s + (WARM * (window[-1].at_s - window[0].at_s) if is_part else 0.0)
    counted = [one for one in served if one.arrival.at_s >= begin_s]
    ttft_ms, tpot_ms = sought.ttft_ms or inf, sought.tpot_ms or inf
    met = mean(one.ttft_ms <= ttft_ms and one.tpot_ms <= tpot_ms for one in counted)
    slack = mean(max(one.ttft_ms / ttft_ms, one.tpot_ms / tpot_ms) for one in counted)
    return met - 0.01 * min(1.0, slack)


def _tells(judged: Judged, scale: float) -> bool:
    """Whether a rate beyond those that were simulated says anything."""
    shares = list((judged.by_rate or {}).values())
    return shares[-1] >= LOST if scale > 1 else shares[0] < MET


def finely(
    sought: Sought, setting: PlannedSetting, arrivals: list[Arrival], factor: float, seed: int, with_targets: bool,
    num_early: int, ends_early: bool = False,
) -> FineFigures:  # fmt: skip
    """Figures of all requests, or of the first `num_early` only."""
    rule = rule_of(sought.ttft_ms, sought.tpot_ms) if with_targets else rule_of(None, None)
    cluster = SimulatedCluster(setting.roles, rule, seed, devices_of(sought, setting, factor), MEASURED)
    served = cluster.serve(arrivals, num_early if ends_early else 0)
    ttft, tpot = (sorted(values) for values in zip(*((one.ttft_ms, one.tpot_ms) for one in served), strict=True))
    late = (
        mean(not is_met(one, sought.ttft_ms, None) for one in served),
        mean(not is_met(one, None, sought.tpot_ms) for one in served),
    )
    met = [float(is_met(one, sought.ttft_ms, sought.tpot_ms)) for one in served]
    spreads = _percentiles(ttft), _percentiles(tpot)
    return FineFigures(mean(met), mean(met[:num_early]), *spreads, late, cluster.num_short, cluster.steps)


def devices_of(sought: Sought, setting: PlannedSetting, factor: float = 1.0) -> RoleDevices:
    def device(ranks: int) -> Device:
        table = sought.tables[ranks if ranks in sought.tables else min(sought.tables)]
        return table.device if factor == 1.0 else ScaledDevice(table.device, factor)

    return RoleDevices(*map(device, setting.ranks))


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


def _variants(short: list[Arrival], seed: int) -> list[tuple[list[Arrival], float, int, bool]]:
    """Other steps, and another draw. The first can be no better where all is met."""
    return [
        (short, 1 - STEPS_OFF, seed, True), (short, 1 + STEPS_OFF, seed, True),
        (redrawn(short, seed), 1.0, seed + 1, True),
    ]  # fmt: skip


def _windows(sought: Sought) -> list[list[Arrival]]:
    """Of a long trace: evenly spread, the one with the middle rate first, then those with rates near it."""
    arrivals, size = sought.arrivals, WINDOW_REQUESTS
    if len(arrivals) <= WINDOWS * size:
        return [arrivals]
    starts = [round(at * (len(arrivals) - size) / (WINDOWS - 1)) for at in range(WINDOWS)]
    windows = [arrivals[start : start + size] for start in starts]
    windows.sort(key=lambda window: window[-1].at_s - window[0].at_s)
    return [windows[WINDOWS // 2 + (at + 1) // 2 * (-1) ** at] for at in range(WINDOWS)]


def _fine(arrivals: list[Arrival], num_nodes: int) -> list[Arrival]:
    """The beginning, as far as one simulation goes."""
    left, num, start_s = FINE_TOKENS, 0, arrivals[0].at_s
    until_s = start_s + FINE_NODE_S / num_nodes
    while num < len(arrivals) and (num < FEWEST or (left > 0 and arrivals[num].at_s < until_s)):
        left -= arrivals[num].num_output
        num += 1
    return [replace(one, at_s=one.at_s - start_s) for one in arrivals[:num]]


def _percentiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    at = [min(len(ordered) - 1, int(len(ordered) * share)) for share in (0.5, 0.9, 0.99)]
    return ordered[at[0]], ordered[at[1]], ordered[at[2]]
