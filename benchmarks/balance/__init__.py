"""`python -m benchmarks balance`: roles that follow the load beside fixed ones, simulated on a virtual clock.

The engine's schedulers, the router's choice and the balance's `decide`, unmodified, which sees the nodes by their feeds
0.01 s late and the requests of the last minute, each 5 s. To simulate hours, steps take --slowness times those of 8B on
an H200; rates, targets, and what the router's feeds and the handover take go with them; and requests have a fourth of
usual tokens, of which each counts as four that are read from KV: streams are as many and last as long as with a fourth
of the slowness. Not simulated: as in `slo`; prefixes.

For each load and number of nodes: attainment by phase of each fixed setting, of the balance from each start, and of a
cluster that takes at the beginning of each phase the roles of the fixed setting that is best in it: what roles could
gain at most, about. And role changes by phase.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from benchmarks.balance.loads import PhasedLoad, loads
from benchmarks.balance.world import BalancedCluster
from benchmarks.records import append_record
from benchmarks.slo.device import DenseDevice
from pd_cluster.balancing.snapshot import BalanceTargets
from pd_cluster.bench.report import report_console
from pd_cluster.planning.delays import MEASURED, Delays
from pd_cluster.planning.device import ScaledDevice
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.simulated_node import Rule
from pd_cluster.scheduling.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Sequence

TTFT_S, TPOT_S = 0.1, 0.010  # targets, for 8B
BALANCE, FORESEEN = "balance", "foreseen"


@dataclass(frozen=True, slots=True)
class BalanceRun:
    """Attainment of the whole run and of each phase, and role changes in each."""

    attained: float
    by_phase: tuple[float, ...]
    changes: tuple[int, ...]


def run_one(
    load: PhasedLoad, roles: RoleCounts, seed: int, slowness: float, *, is_balanced: bool, foreseen: Sequence[int] = ()
) -> BalanceRun:
    """`foreseen`: prefill nodes from the beginning of each phase on."""
    targets = BalanceTargets(slowness * TTFT_S, slowness * TPOT_S)
    rule = Rule("slack", targets=Targets(*targets, 3 * targets.tpot_s), shortest=True)
    device = ScaledDevice(DenseDevice(context_s=132e-9), slowness)
    delays = Delays(*(slowness * one for one in astuple(MEASURED)))
    cluster = BalancedCluster(roles, rule, device, seed, is_balanced=is_balanced, targets=targets, delays=delays)
    for begin_s, num_prefills in zip(load.begins_s, foreseen, strict=False):
        cluster.foresee(begin_s, num_prefills)
    served = cluster.serve(load.arrivals(sum(roles), seed))
    met = [
        (load.phase_at(one.arrival.at_s), one.ttft_ms <= 1e3 * targets.ttft_s and one.tpot_ms <= 1e3 * targets.tpot_s)
        for one in served
    ]
    changes = Counter(load.phase_at(change.at_s) for change in cluster.changes)
    phases = range(len(load.phases))
    by_phase = tuple(statistics.mean(ok for number, ok in met if number == phase) for phase in phases)
    return BalanceRun(statistics.mean(ok for _, ok in met), by_phase, tuple(changes[phase] for phase in phases))


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    names = tuple(loads(1.0))
    parser = argparse.ArgumentParser(prog="python -m benchmarks balance", allow_abbrev=False)
    parser.add_argument("--loads", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--nodes", type=int, default=4, metavar="N")
    text = "Prefill nodes of fixed settings (default: from 1 on, all numbers; none: without)."
    parser.add_argument("--prefills", type=int, nargs="*", metavar="N", help=text)
    text = "Prefill nodes with which a balance begins (default: half of the nodes; none: without)."
    parser.add_argument("--starts", type=int, nargs="*", metavar="N", help=text)
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--slowness", type=float, default=64.0, metavar="X", help="Of steps (default: 64).")
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="Multiplies rates (default: 1).")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to which lines are appended.")
    namespace = parser.parse_args(arguments)
    for name in namespace.loads:
        _compare(namespace, loads(namespace.slowness, namespace.rate_scale)[name])
    return 0


def _compare(namespace: argparse.Namespace, load: PhasedLoad) -> None:
    nodes = namespace.nodes
    fixed = range(1, nodes) if namespace.prefills is None else namespace.prefills
    starts = [nodes // 2] if namespace.starts is None else namespace.starts
    table = Table("setting", "attained", "by phase", "changes by phase", title=f"{load.name}, {nodes} nodes")
    found = {number: _run(namespace, load, table, number, "") for number in fixed}
    for number in starts:
        _run(namespace, load, table, number, BALANCE)
    if found:
        best = [max(found, key=lambda number: found[number][phase]) for phase in range(len(load.phases))]
        _run(namespace, load, table, best[0], FORESEEN, best)
    report_console().print(table)


def _run(
    namespace: argparse.Namespace, load: PhasedLoad, table: Table, prefills: int, how: str, foreseen: Sequence[int] = ()
) -> list[float]:
    """All draws of one setting. -> its mean attainment by phase."""
    setting = RoleCounts(prefills, namespace.nodes - prefills)
    name = f"{how} from {setting.name}" if how else setting.name
    runs, began_s = list[BalanceRun](), time.perf_counter()
    for seed in range(namespace.first_seed, namespace.first_seed + namespace.seeds):
        run = run_one(load, setting, seed, namespace.slowness, is_balanced=how == BALANCE, foreseen=foreseen)
        runs.append(run)
        if namespace.json is not None:
            fields = {
                "load": load.name, "nodes": namespace.nodes, "setting": name, "seed": seed,
                "slowness": namespace.slowness, "rate_scale": namespace.rate_scale, "foreseen": tuple(foreseen),
                "attained": run.attained, "by_phase": run.by_phase, "changes": run.changes,
            }  # fmt: skip
            append_record(namespace.json, "balance_simulated", fields)
    means = [statistics.mean(column) for column in zip(*(run.by_phase for run in runs), strict=True)]
    most = [max(column) for column in zip(*(run.changes for run in runs), strict=True)]
    attained = statistics.mean(run.attained for run in runs)
    table.add_row(name, f"{attained:.3f}", " ".join(f"{one:.3f}" for one in means), " ".join(map(str, most)))
    sys.stderr.write(f"{load.name} {name}: {attained:.3f} in {time.perf_counter() - began_s:.0f} s\n")
    return means
