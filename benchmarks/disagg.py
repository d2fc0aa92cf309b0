"""`python -m benchmarks disagg`: workloads on a running cluster, five of them compared with the peer's figures.

Start the cluster first, without prefix caches, so that every request is prefilled:

    python -m benchmarks model --shape 8b MODEL
    pd-cluster up --model MODEL --load-format dummy --no-prefix-caching --prefill 1 --decode 1      # or --mixed 2

Those of conversations (`--workloads turns turns-open turns-text`) need prefix caches. Their lines go to a file of their
own. A line is appended after each workload, so that an interrupted run can continue with `--workloads`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from rich.table import Table

from benchmarks.flags import add_cluster_flags
from benchmarks.presets import AZURE_FILE, MOONCAKE_FILE, PEER, PRESETS, TURNS, PeerRow, Preset, TurnsPreset
from benchmarks.records import RESULTS, append_record
from benchmarks.turn_rows import COLUMNS, turn_columns, turn_row
from benchmarks.turn_rows import HEADERS as TURN_HEADERS
from pd_cluster.bench.cli import positive
from pd_cluster.bench.load import Target, fetch, open_session
from pd_cluster.bench.report import print_turns, report_console
from pd_cluster.bench.serve import measure
from pd_cluster.bench.serve_turns import measure_turns
from pd_cluster.bench.statistics import RequestRecord, Summary, summarize
from pd_cluster.bench.turn_statistics import summarize_turns
from pd_cluster.bench.workload import Arrival, at_rate, rescale
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOS_MS = ((200.0, 10.0), (400.0, 15.0))
LATER_TTFT_MS, LONGEST_GAP_MS = 1000.0, 50.0  # the targets of conversations
DISAGG_FILE, TURNS_FILE = RESULTS / "disagg_gpu.jsonl", RESULTS / "turns_gpu.jsonl"
TURN_WARMUPS = 8  # conversations of two turns
WARMUPS, WARMUP_OUTPUT = 32, 64  # requests at twice the rate, to warm up links and compiled kernels
_ROLES = (("prefill", "P"), ("decode", "D"), ("mixed", "M"))


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when every request of every workload was answered, else 1. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks disagg", allow_abbrev=False)
    add_cluster_flags(parser, DISAGG_FILE)
    parser.add_argument(
        "--workloads", nargs="+", choices=(*PRESETS, *TURNS), default=list(PRESETS), metavar="NAME",
        help=f"Of {', '.join(PRESETS)} (default: all of these), {', '.join(TURNS)}.",
    )  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=Path("benchmarks/data"), metavar="DIR",
        help=f"Directory of {AZURE_FILE} and {MOONCAKE_FILE} (default: %(default)s).",
    )  # fmt: skip
    parser.add_argument("--setting", default="", metavar="TEXT", help="Default: the router's nodes, as in 1P1D.")
    parser.add_argument("--scale", type=positive, default=1.0, metavar="X", help="Multiplies lengths, for rehearsals.")
    parser.add_argument(
        "--rate-scale", type=positive, default=1.0, metavar="X",
        help="Multiplies the rates and the numbers of requests: 2 for twice as many GPUs.",
    )  # fmt: skip
    parser.add_argument("--num-requests", type=int, default=0, metavar="N", help="Fewer of each, for rehearsals.")
    return run_disagg(parser.parse_args(arguments))


def run_disagg(namespace: argparse.Namespace) -> int:
    """Returns 0 when every request of every workload was answered, else 1. Raises StartupError."""
    target = Target(namespace.url.rstrip("/"), "", timeout_s=namespace.timeout_s)
    setting = namespace.setting or uvloop.run(_setting(target))
    num_failed = 0
    for name in namespace.workloads:
        if name in TURNS:
            num_failed += _run_turns(TURNS[name].times(namespace.rate_scale), target, setting, namespace)
            continue
        preset = PRESETS[name].times(namespace.rate_scale)
        arrivals = _scaled(preset.arrivals(namespace.data, namespace.seed), namespace)
        sys.stderr.write(f"{setting}: {preset.title}: {len(arrivals)} requests in {arrivals[-1].at_s:.0f} s\n")
        warmups = _warmups(arrivals, preset.rate, namespace.seed)
        target, records = uvloop.run(measure(target, arrivals, warmups, namespace.vocab_size, namespace.seed))
        summary = summarize(records, {}, SLOS_MS)
        _write(namespace, setting, preset, target, summary, records)
        print_preset(preset, [our_row(setting, asdict(summary))])
        for text, value, limit in aims(preset, summary):
            sys.stdout.write(
                f"{'reached' if value <= limit else 'missed '}  {text}: {value:.1f}, at most {limit:.1f}\n"
            )
        for error, count in summary.errors.items():
            sys.stderr.write(f"{count} failed: {error}\n")
        num_failed += summary.num_requests - summary.num_ok
    return 1 if num_failed else 0


def _run_turns(preset: TurnsPreset, target: Target, setting: str, namespace: argparse.Namespace) -> int:
    """Returns the number of failures. Raises StartupError."""
    plan = preset.scaled(namespace.scale)
    if namespace.num_requests:
        plan = replace(
            plan, num_conversations=namespace.num_requests, at_once=min(plan.at_once, namespace.num_requests)
        )
    sys.stderr.write(f"{setting}: {preset.title}: {sum(plan.turns_of(namespace.seed))} requests\n")
    vocab_size, seed = namespace.vocab_size, namespace.seed
    target, records = uvloop.run(measure_turns(target, plan, vocab_size, seed, TURN_WARMUPS, is_text=preset.is_text))
    summary = summarize_turns(records, plan.turns_of(seed), plan.at_once, LATER_TTFT_MS, LONGEST_GAP_MS)
    fields = {
        "setting": setting, "workload": preset.name, "model": target.model, "note": namespace.note,
        "scale": namespace.scale, "rate_scale": namespace.rate_scale, "seed": namespace.seed,
        "summary": asdict(summary), "columns": list(COLUMNS), "requests": [turn_columns(one) for one in records],
    }  # fmt: skip
    append_record(TURNS_FILE if namespace.json == DISAGG_FILE else namespace.json, "turns", fields)
    print_turns(summary)
    sys.stdout.write("".join(f"| {' | '.join(cells)} |\n" for cells in (TURN_HEADERS, turn_row(setting, summary))))
    return sum(summary.errors.values())


async def _setting(target: Target) -> str:
    """The router's nodes, as in "1P1D" or "2M". Raises StartupError."""
    async with open_session() as session:
        answer = await fetch(session, "GET", f"{target.url}/nodes", target.headers, None)
    try:
        roles = Counter(node["role"] for node in answer["nodes"])
    except (KeyError, TypeError) as error:
        raise StartupError(f"{target.url}/nodes lists no nodes: set --setting") from error
    return "".join(f"{roles[role]}{letter}" for role, letter in _ROLES if roles[role])


def _scaled(arrivals: list[Arrival], namespace: argparse.Namespace) -> list[Arrival]:
    """The arrivals, reduced for a rehearsal by --num-requests and --scale."""
    few = arrivals[: namespace.num_requests or None]
    return few if namespace.scale == 1.0 else rescale(few, rate=None, length_scale=namespace.scale, max_output=0)


def _warmups(arrivals: list[Arrival], rate: float, seed: int) -> list[Arrival]:
    short = [replace(item, num_output=min(item.num_output, WARMUP_OUTPUT)) for item in arrivals[-WARMUPS:]]
    return at_rate(short, 2 * rate, seed)


def _write(
    namespace: argparse.Namespace,
    setting: str,
    preset: Preset,
    target: Target,
    summary: Summary,
    records: list[RequestRecord],
) -> None:
    """Raises StartupError."""
    fields = {
        "setting": setting, "workload": preset.name,
        "model": target.model, "note": namespace.note, "scale": namespace.scale,
        "rate_scale": namespace.rate_scale, "seed": namespace.seed,
        "summary": asdict(summary), "columns": list(_COLUMNS), "requests": [_columns(item) for item in records],
    }  # fmt: skip
    append_record(namespace.json, "disagg", fields)


_COLUMNS = ("sent_s", "num_input", "num_output", "ttft_ms", "ttst_ms", "tpot_ms", "leg_ms")


def _columns(item: RequestRecord) -> list[Any]:
    """A request's _COLUMNS; null for a missing value. All times of a failed request are null."""
    times = (item.ttft_s, item.ttst_s, item.tpot_s, item.leg_s) if item.ok else (None,) * 4
    return [
        round(item.sent_s, 3), item.num_input, item.num_output,
        *(None if value is None else round(value * 1e3, 2) for value in times),
    ]  # fmt: skip


def aims(preset: Preset, summary: Summary) -> list[tuple[str, float, float]]:
    """Goals of a disaggregated cluster: (name, ms, limit). Empty if the nodes report no timings."""
    found = summary.spreads
    if "handover" not in found:
        return []
    ttft, ttst, itl, tpot = found["ttft"], found["ttst"], found["itl"], found["tpot"]
    goals = [
        ("TTFT beyond the prefill node's own, p50", found["beyond leg"].p50_ms, 10.0),
        ("second token, p50, for TTFT + 3 steps", ttst.p50_ms, ttft.p50_ms + 3 * itl.p50_ms),
    ]
    if not preset.name.startswith(("4096", "mooncake")):
        goals.append(("ITL p99, for 1.5 x its p50", itl.p99_ms, 1.5 * itl.p50_ms))
    tuned = [peer for peer in preset.peers if peer.setting == "1P1D tuned"]
    return goals + [("TPOT p99, for the tuned peer's", tpot.p99_ms, peer.tpot[2]) for peer in tuned]


# the table


def our_row(setting: str, summary: dict[str, Any]) -> list[str]:
    """The table's row of a record's `summary`."""
    spreads, attained = summary["spreads"], summary["attained"]

    def cell(name: str, *percentiles: int) -> str:
        found = spreads.get(name)
        return "" if found is None else "/".join(f"{found[f'p{rank}_ms']:.1f}" for rank in percentiles)

    failed = summary["num_requests"] - summary["num_ok"]
    return [
        f"{setting} ({failed} failed)" if failed else setting,
        cell("ttft", 50, 90, 99), cell("leg", 50, 99), cell("ttst", 50, 99), cell("tpot", 50, 90, 99),
        cell("itl", 50, 99), *(f"{share:.2f}" for share in attained.values()),
    ]  # fmt: skip


def peer_row(row: PeerRow) -> list[str]:
    """The table's row of the peer."""

    def cell(values: tuple[float, ...] | None) -> str:
        return "" if values is None else "/".join(f"{value:g}" for value in values)

    return [
        f"{row.setting}, {PEER}", cell(row.ttft), cell(row.leg), "", cell(row.tpot), cell(row.itl),
        *(f"{share:.2f}" for share in row.attained),
    ]  # fmt: skip


HEADERS = (
    "", "TTFT p50/90/99", "leg p50/99", "2nd token p50/99", "TPOT p50/90/99", "ITL p50/99",
    *(f"{ttft:g}/{tpot:g}" for ttft, tpot in SLOS_MS),
)  # fmt: skip


def print_preset(preset: Preset, ours: list[list[str]]) -> None:
    """Print a workload's part of the table, in ms."""
    table = Table(*HEADERS, title=preset.title)
    for row in (*ours, *map(peer_row, preset.peers)):
        table.add_row(*row)
    report_console().print(table)
