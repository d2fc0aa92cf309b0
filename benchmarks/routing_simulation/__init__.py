"""Simulates routers, feeds and nodes with a virtual clock, and the product's own choice between them.

    python -m benchmarks routing_simulation --trace conv.jsonl --prefill 2 8 --routers 1 3 --seeds 10

Each trace is made so dense that its prompts, without any cache, would keep the prefill nodes busy for `--load` of the
time. There are as many decode nodes as prefill nodes. Four policies serve the same arrivals on the same nodes:

    cost           the product: choice, table, ledger and prefix index, over feeds
    least-loaded   the rule before the feed: own charges in bytes, and decode nodes that are clearly sooner
    round-robin    in turn; decode nodes read no prompts
    bound          the cost over exact loads and one cache of all nodes of a role

With `--turns` the product's choice serves the conversations of a preset of `python -m benchmarks disagg`, on prefill
and decode nodes or on mixed ones, scaled by the number of GPUs:

    python -m benchmarks routing_simulation --turns turns --settings 1P1D 2M 2P2D 4M --seeds 3
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from benchmarks.presets import TURNS, TurnsPreset
from benchmarks.records import RESULTS, append_record
from benchmarks.routing_simulation.nodes import prefill_s
from benchmarks.routing_simulation.report import COST, HEADER, LEAST_LOADED, PolicyRow, comparisons
from benchmarks.routing_simulation.trace import SimRequest, copied, read_trace, scaled
from benchmarks.routing_simulation.turns import NUM_BLOCKS, TurnsWorld, cluster_of
from benchmarks.routing_simulation.world import POLICIES, Cluster, SimWorld
from benchmarks.slo.device import SHAPES
from benchmarks.turn_rows import HEADERS, route_lines, turn_row
from pd_cluster.bench.cli import positive
from pd_cluster.bench.turn_statistics import TurnsSummary, summarize_turns
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

LATER_TTFT_MS, LONGEST_GAP_MS = 1000.0, 50.0  # the targets of conversations


def simulate(
    arrivals: Sequence[SimRequest],
    cluster: Cluster,
    load: float,
    seeds: int,
    num_routers: Sequence[int] = (1,),
    policies: Sequence[str] = POLICIES,
) -> dict[tuple[str, int], PolicyRow]:
    """The row of each policy and number of routers. `cluster` says everything else."""
    work_s = sum(prefill_s(one.num_tokens, 0) for one in arrivals)
    speed = load * cluster.num_prefill * arrivals[-1].at_s / work_s
    draws = [scaled(arrivals, speed, Random(seed)) for seed in range(seeds)]
    rows = {}
    for policy in policies:
        for count in num_routers if policy in (COST, LEAST_LOADED) else (1,):
            one = Cluster(**asdict(cluster) | {"policy": policy, "num_routers": count})
            outcomes = [SimWorld(one, draw, Random(seed)).run() for seed, draw in enumerate(draws)]
            rows[policy, count] = PolicyRow.of(policy, count, outcomes)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the rows and their ratios, and append a record for each trace and cluster. Raises StartupError."""
    namespace = _flags().parse_args(arguments)
    if not namespace.trace and not namespace.turns:
        raise StartupError("set --trace or --turns")
    for name in namespace.turns:
        _print_turns(TURNS[name], namespace)
    lines = [HEADER]
    for path in namespace.trace:
        arrivals = copied(read_trace(path), namespace.copies)
        for count in namespace.prefill:
            cluster = Cluster(
                num_prefill=count, num_decode=count, num_blocks=namespace.num_blocks or 5000,
                shortest_first=not namespace.fifo, decode_reads=not namespace.prefill_nodes_only,
            )  # fmt: skip
            rows = simulate(arrivals, cluster, namespace.load, namespace.seeds, namespace.routers, namespace.policies)
            ratios = comparisons(rows)
            lines += [row.text(path.stem, f"{count}P + {count}D") for row in rows.values()]
            lines += ["", ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()), ""]
            sys.stdout.write("\n".join(lines) + "\n")
            lines = []
            fields = asdict(cluster) | {
                "trace": path.stem, "copies": namespace.copies, "load": namespace.load, "seeds": namespace.seeds,
                "note": namespace.note, "ratios": ratios,
                "rows": [[round(v, 4) if isinstance(v, float) else v for v in asdict(row).values()]
                                           for row in rows.values()],
            }  # fmt: skip
            append_record(namespace.json, "routing_simulation", fields)
    return 0


def _print_turns(preset: TurnsPreset, namespace: argparse.Namespace) -> None:
    """A row of each setting and seed, and of each a record."""
    sys.stdout.write(f"{preset.title}\n| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}\n")
    lines = []
    for setting in namespace.settings:
        for seed in range(namespace.seeds):
            summary = simulate_turns(
                preset, setting, seed, namespace.scale, namespace.num_blocks or NUM_BLOCKS, namespace.shape
            )
            sys.stdout.write(f"| {' | '.join(turn_row(setting, summary))} |\n")
            sys.stdout.flush()
            lines += [f"{setting}, seed {seed}: {line}" for line in route_lines(summary)]
            fields = {
                "workload": preset.name, "setting": setting, "seed": seed, "scale": namespace.scale,
                "shape": namespace.shape,
                "note": namespace.note, "summary": asdict(summary),
            }  # fmt: skip
            append_record(namespace.json, "routing_simulation_turns", fields)
    sys.stdout.write("\n".join(["", *lines, ""]))


def simulate_turns(
    preset: TurnsPreset, setting: str, seed: int, scale: float = 1.0, num_blocks: int = NUM_BLOCKS,
    shape: str = SHAPES[0],
) -> TurnsSummary:  # fmt: skip
    """The preset is for two GPUs. Raises StartupError."""
    cluster = cluster_of(setting, num_blocks)
    plan = preset.times((cluster.num_prefill + cluster.num_decode) / 2).scaled(scale)
    conversations = plan.conversations(seed)
    records = TurnsWorld(cluster, conversations, plan.at_once, seed, shape).talk()
    return summarize_turns(records, plan.turns_of(seed), plan.at_once, LATER_TTFT_MS, LONGEST_GAP_MS)


def _flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks routing_simulation", allow_abbrev=False)
    add = parser.add_argument
    add("--trace", type=Path, nargs="+", default=[], metavar="PATH", help="Mooncake's .jsonl or Azure's .csv.")
    add("--turns", nargs="+", default=[], choices=tuple(TURNS), metavar="NAME", help=f"Of {', '.join(TURNS)}.")
    add("--settings", nargs="+", default=["1P1D", "2M", "2P2D", "4M"], metavar="NAME", help="Clusters for --turns.")
    add("--shape", choices=SHAPES, default=SHAPES[0], help=f"The model's, for --turns (default: {SHAPES[0]}).")
    add("--scale", type=positive, default=1.0, metavar="X", help="Factor for the lengths of --turns.")
    add("--copies", type=int, default=1, metavar="N", help="Of each trace, at once; each has other text (default: 1).")
    add(
        "--policies",
        nargs="+",
        default=POLICIES,
        choices=POLICIES,
        metavar="NAME",
        help="Those that run (default: all).",
    )
    add("--prefill", type=int, nargs="+", default=[2, 8], metavar="N", help="Prefill nodes (default: 2 8).")
    add("--routers", type=int, nargs="+", default=[1, 3], metavar="N", help="Routers (default: 1 3).")
    add("--load", type=float, default=0.7, metavar="SHARE", help="Of the prefill nodes, uncached (default: 0.7).")
    add("--seeds", type=int, default=10, metavar="N", help="Draws of the arrivals (default: 10).")
    add(
        "--num-blocks", type=int, default=0, metavar="N",
        help=f"Blocks of 512 tokens a node (default: 5000; with --turns {NUM_BLOCKS}).",
    )  # fmt: skip
    add("--fifo", action="store_true", help="Prefill nodes serve prompts as they came, not the shortest first.")
    add("--prefill-nodes-only", action="store_true", help="Decode nodes read no prompts.")
    add("--json", type=Path, default=RESULTS / "routing_simulation.jsonl", metavar="FILE", help="Records go there.")
    add("--note", default="", metavar="TEXT", help="Kept in the records.")
    return parser
