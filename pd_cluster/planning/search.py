"""Finds the settings that serve a load best: all of them coarsely, the best of these by the fine model."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from multiprocessing import get_context
from statistics import mean
from typing import TYPE_CHECKING, Any

from pd_cluster.planning.coarse import serve_coarsely
from pd_cluster.planning.delays import MEASURED
from pd_cluster.planning.device import Device, ScaledDevice
from pd_cluster.planning.forecast import STEPS_OFF, is_met, redrawn, rule_of
from pd_cluster.planning.simulated_cluster import WARM, RoleDevices, SimulatedCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.bench.workload import Arrival
    from pd_cluster.planning.settings import PlannedSetting
    from pd_cluster.planning.step_table import StepTable

BEST, SWEPT = 5, 3  # settings that are simulated finely; and under other rates, beside the best replicas
MET = 0.999  # of a load from which on lower rates are not simulated: they are met, too
RATES = (0.5, 0.75, 1.25, 1.5, 2.0)  # times the load's
FINE_TOKENS = 300_000  # of answers that one fine simulation has, about: 20 us each
SHORT = 3  # so many times fewer for other draws, steps and rates
WINDOWS, WINDOW_REQUESTS = 5, 5_000  # of a long trace, for the coarse model


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
    untargeted: float = 0.0  # attainment if nodes do not know the targets
    by_rate: dict[float, float] | None = None  # attainment by requests a second; None: not simulated

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
            pool = cleanup.enter_context(ProcessPoolExecutor(workers, get_context("spawn")))
            run = pool.map

        def all_of(what: str, call: Callable[..., Any], *columns: Iterable[Any]) -> list[Any]:
            rows = list(zip(*columns, strict=True))
            found = []
            for one in run(call, *zip(*rows, strict=True)):
                found.append(one)
                progress(what, len(rows))
            return found

        windows = _windows(sought)
        light = replace(sought, arrivals=[])  # what other processes are sent
        num = len(settings)
        coarse = all_of("coarse", coarsely, [light] * num, settings, [windows] * num)
        order = sorted(zip(coarse, settings, strict=True), key=lambda pair: -pair[0])
        chosen = [setting for _, setting in order[:BEST]]
        chosen += [one for _, one in order if one.is_replicas][: not any(one.is_replicas for one in chosen)]
        fine = _fine(windows[len(windows) // 2] if len(windows) > 1 else sought.arrivals, 1)
        short = _fine(fine, SHORT)
        jobs = [(setting, *rest) for setting in chosen for rest in _variants(fine, short, sought.seed)]
        found = all_of("fine", finely, [light] * len(jobs), *zip(*jobs, strict=True))
        size = len(jobs) // len(chosen)
        judged = [_judged(setting, found[at * size : (at + 1) * size]) for at, setting in enumerate(chosen)]
        judged.sort(key=lambda one: (-round(one.figures.attained, 2), -one.goodput(sought.rate)))
        swept = judged[:SWEPT] + [one for one in judged[SWEPT:] if one.setting.is_replicas]
        rates = [(one, scale) for one in swept for scale in RATES if scale > 1 or one.figures.attained < MET]
        at_rates = {scale: [replace(one, at_s=one.at_s / scale) for one in short] for scale in RATES}
        jobs = [(one.setting, at_rates[scale], 1.0, sought.seed, True) for one, scale in rates]
        found = all_of("rates", finely, [light] * len(jobs), *zip(*jobs, strict=True))
        for one in swept:
            ours = [(scale, f.attained) for (which, scale), f in zip(rates, found, strict=True) if which is one]
            one.by_rate = {scale * sought.rate: share for scale, share in sorted([*ours, (1.0, one.figures.attained)])}
    return judged


def coarsely(sought: Sought, setting: PlannedSetting, windows: list[list[Arrival]]) -> float:
    """Attainment, and what a request of the load costs less than its targets where that is 1: both in one number."""
    ttft_s, tpot_s = (ms / 1e3 if ms else inf for ms in (sought.ttft_ms, sought.tpot_ms))
    shares = []
    for window in windows:
        served = serve_coarsely(window, setting.roles, devices_of(sought, setting), ttft_s, tpot_s, MEASURED)
        begin_s = window[0].at_s + (WARM * (window[-1].at_s - window[0].at_s) if len(windows) > 1 else 0.0)
        counted = [one for one in served if one.arrival.at_s >= begin_s]
        met = mean(one.ttft_ms <= 1e3 * ttft_s and one.tpot_ms <= 1e3 * tpot_s for one in counted)
        slack = mean(max(one.ttft_ms / 1e3 / ttft_s, one.tpot_ms / 1e3 / tpot_s) for one in counted)
        shares.append(met - 0.01 * min(1.0, slack))
    return mean(shares)


def finely(
    sought: Sought, setting: PlannedSetting, arrivals: list[Arrival], factor: float, seed: int, with_targets: bool
) -> FineFigures:
    rule = rule_of(sought.ttft_ms, sought.tpot_ms) if with_targets else rule_of(None, None)
    cluster = SimulatedCluster(setting.roles, rule, seed, devices_of(sought, setting, factor), MEASURED)
    served = cluster.serve(arrivals)
    ttft, tpot = (sorted(values) for values in zip(*((one.ttft_ms, one.tpot_ms) for one in served), strict=True))
    late = (
        mean(not is_met(one, sought.ttft_ms, None) for one in served),
        mean(not is_met(one, None, sought.tpot_ms) for one in served),
    )
    attained = mean(is_met(one, sought.ttft_ms, sought.tpot_ms) for one in served)
    return FineFigures(float(attained), _percentiles(ttft), _percentiles(tpot), late, cluster.num_short, cluster.steps)


def devices_of(sought: Sought, setting: PlannedSetting, factor: float = 1.0) -> RoleDevices:
    def device(ranks: int) -> Device:
        table = sought.tables[ranks if ranks in sought.tables else min(sought.tables)]
        return table.device if factor == 1.0 else ScaledDevice(table.device, factor)

    return RoleDevices(*map(device, setting.ranks))


def _variants(fine: list[Arrival], short: list[Arrival], seed: int) -> list[tuple[list[Arrival], float, int, bool]]:
    """The load; and of its beginning the same, another draw, other steps, and nodes without targets."""
    return [
        (fine, 1.0, seed, True), (short, 1.0, seed, True), (redrawn(short, seed), 1.0, seed + 1, True),
        (short, 1 - STEPS_OFF, seed, True), (short, 1 + STEPS_OFF, seed, True), (short, 1.0, seed, False),
    ]  # fmt: skip


def _judged(setting: PlannedSetting, found: list[FineFigures]) -> Judged:
    whole, base, *others, untargeted = found
    moves = [0.0, *(one.attained - base.attained for one in others)]
    low, high = (max(0.0, min(1.0, whole.attained + move)) for move in (min(moves), max(moves)))
    off = max(0.0, min(1.0, whole.attained + untargeted.attained - base.attained))
    return Judged(setting, whole, low, high, off)


def _windows(sought: Sought) -> list[list[Arrival]]:
    """Of a long trace: evenly spread, in the order of their rates."""
    arrivals, size = sought.arrivals, WINDOW_REQUESTS
    if len(arrivals) <= WINDOWS * size:
        return [arrivals]
    starts = [round(at * (len(arrivals) - size) / (WINDOWS - 1)) for at in range(WINDOWS)]
    windows = [arrivals[start : start + size] for start in starts]
    return sorted(windows, key=lambda window: window[0].at_s - window[-1].at_s)


def _fine(arrivals: list[Arrival], times: int) -> list[Arrival]:
    """The beginning, as far as one simulation goes; at least 100 requests."""
    left, num = FINE_TOKENS / times, 0
    while num < len(arrivals) and (left > 0 or num < 100):
        left -= arrivals[num].num_output
        num += 1
    start_s = arrivals[0].at_s
    return [replace(one, at_s=one.at_s - start_s) for one in arrivals[:num]]


def _percentiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    at = [min(len(ordered) - 1, int(len(ordered) * share)) for share in (0.5, 0.9, 0.99)]
    return ordered[at[0]], ordered[at[1]], ordered[at[2]]
