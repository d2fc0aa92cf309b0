"""`python -m benchmarks slo`: what targets of streams and the order of prompts do, simulated without a device.

Schedulers of the engine, two steps deep, on a virtual clock; steps take what the shape's take on an H200
(benchmarks/LOG.md), padded to captured sizes, with noise. The router's own choice says which nodes read and decode.
The steps' model is fitted to other steps of this device and corrected, as in an engine. Not simulated: HTTP,
links that are busy, memory that is short.

With --json the figures are recorded, for the table of simulated clusters beside what was measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.presets import PRESETS, Preset
from benchmarks.records import append_record
from benchmarks.slo.device import SHAPES
from benchmarks.slo.fitted_tables import write_tables
from benchmarks.slo.setting import Setting
from pd_cluster.bench.cli import positive
from pd_cluster.bench.report import report_console
from pd_cluster.planning.search import STEPS_OFF
from pd_cluster.planning.simulated_cluster import Served
from pd_cluster.planning.simulated_node import Rule
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOS = {"200/10": (200.0, 10.0), "400/15": (400.0, 15.0)}  # ms


def rules(ttft_ms: float, tpot_ms: float) -> tuple[Rule, ...]:
    targets = Targets(ttft_ms / 1e3, tpot_ms / 1e3, 3 * tpot_ms / 1e3)
    return (
        Rule("usual gaps", usual=True), Rule("no limit"),
        Rule("slack, fifo", targets=targets), Rule("slack", targets=targets, shortest=True),
        Rule("slack, P reads only", targets=targets, shortest=True, keeps=False),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SimulatedFigures:
    """Of all draws of a workload together: p50, p90 and p99 in ms, and shares of the requests."""

    attained: float
    by_draw: tuple[float, ...]  # the same share, of each draw
    spilled: float  # that D read although there was a P
    kept: float  # that P read and decoded
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    itl: tuple[float, ...]
    by_steps: tuple[float, ...] = ()  # the share of the first draw, with steps 5% shorter and longer


def simulate(
    preset: Preset, setting: Setting, rule: Rule, slo_ms: tuple[float, float], data: Path, seeds: int, limit: int = 0,
    shape: str = SHAPES[0], *, as_planned: bool = False,
) -> SimulatedFigures:  # fmt: skip
    """`limit`: of the requests of a draw; 0: none. Raises StartupError when the trace cannot be read."""
    shares, served = list[float](), list[Served]()

    def share(ours: list[Served]) -> float:
        return statistics.mean(one.ttft_ms <= slo_ms[0] and one.tpot_ms <= slo_ms[1] for one in ours)

    for seed in range(seeds):
        arrivals = preset.arrivals(data, seed)[: limit or None]
        ours = setting.cluster(rule, seed, shape, as_planned=float(as_planned)).serve(arrivals)
        shares.append(share(ours))
        served += ours
    others = (1 - STEPS_OFF, 1 + STEPS_OFF) if as_planned else ()
    first = preset.arrivals(data, 0)[: limit or None]
    by_steps = tuple(share(setting.cluster(rule, 0, shape, as_planned=times).serve(first)) for times in others)
    return SimulatedFigures(
        statistics.mean(shares), tuple(shares),
        statistics.mean(one.reason in ("prefill-busy", "prefill-late") for one in served),
        statistics.mean(one.reason in ("decode-late", "prefill-free") for one in served),
        percentiles([one.ttft_ms for one in served]), percentiles([one.tpot_ms for one in served]),
        percentiles([gap for one in served for gap in gaps_ms(one)]), by_steps,
    )  # fmt: skip


def gaps_ms(one: Served) -> list[float]:
    return [1e3 * (b - a) for a, b in pairwise(one.tokens_s)]


def percentiles(values: list[float]) -> tuple[float, ...]:
    """p50, p90, p99."""
    ordered = sorted(values)
    return tuple(round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3) for share in (0.5, 0.9, 0.99))


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks slo", allow_abbrev=False)
    parser.add_argument("--data", type=Path, default=Path("benchmarks/data"), metavar="DIR", help="Where traces are.")
    parser.add_argument("--workloads", nargs="+", choices=tuple(PRESETS), default=list(PRESETS), metavar="NAME")
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0], help=f"The model's (default: {SHAPES[0]}).")
    parser.add_argument(
        "--settings", nargs="+", default=["1P1D", "2M"], metavar="NAME",
        help="As in 2P1D or 4M; 1P1D-TP2: nodes of two GPUs each (default: 1P1D 2M).",
    )  # fmt: skip
    parser.add_argument(
        "--slos", nargs="+", choices=tuple(SLOS), default=list(SLOS), metavar="TTFT/TPOT",
        help="In ms, of 200/10 and 400/15 (default: both).",
    )  # fmt: skip
    parser.add_argument("--rules", nargs="+", default=[], metavar="NAME", help="Only these.")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="Draws of each workload.")
    parser.add_argument(
        "--rate-scale", type=positive, default=1.0, metavar="X",
        help="Multiplies the rate of arrivals, and their number.",
    )  # fmt: skip
    parser.add_argument("--num-requests", type=int, default=0, metavar="N", help="Fewer of each, for rehearsals.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to which lines are appended.")
    parser.add_argument("--as-planned", action="store_true", help="With the table and the delays of `pd-cluster plan`.")
    parser.add_argument(
        "--write-tables", type=Path, metavar="DIR", help="Write the fitted step tables, and nothing else."
    )
    namespace = parser.parse_args(arguments)
    if namespace.write_tables is not None:
        write_tables(namespace.write_tables)
        return 0
    settings = [Setting.parse(name) for name in namespace.settings]
    for name in namespace.workloads:
        for setting in settings:
            _run(namespace, PRESETS[name].times(namespace.rate_scale), setting)
    return 0


def _run(namespace: argparse.Namespace, preset: Preset, setting: Setting) -> None:
    title = f"{preset.title}, {setting.name}, {namespace.shape}"
    table = Table("rule", "attained", "D read", "P kept", "TTFT", "TPOT", "ITL", title=title)
    for slo in namespace.slos:
        for rule in rules(*SLOS[slo]):
            if namespace.rules and rule.name not in namespace.rules:
                continue
            found = simulate(
                preset, setting, rule, SLOS[slo], namespace.data, namespace.seeds, namespace.num_requests,
                namespace.shape, as_planned=namespace.as_planned,
            )  # fmt: skip
            spreads = ("/".join(f"{value:.1f}" for value in one) for one in (found.ttft, found.tpot, found.itl))
            shares = (f"{found.attained:.3f}", f"{found.spilled:.1%}", f"{found.kept:.1%}")
            table.add_row(f"{slo} {rule.name}", *shares, *spreads)
            if namespace.json is not None:
                fields = {
                    "shape": namespace.shape, "setting": setting.name, "workload": preset.name,
                    "rate_scale": namespace.rate_scale,
                    "num_requests": namespace.num_requests or preset.num_requests, "slo": slo, "rule": rule.name,
                    "figures": asdict(found),
                }  # fmt: skip
                append_record(namespace.json, "slo_simulated", fields)
    report_console().print(table)
    sys.stdout.flush()
