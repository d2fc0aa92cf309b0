"""Reports of a load test: tables for the terminal, and a JSON record with the machine and the commit."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import pd_cluster

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pd_cluster.bench.statistics import RequestRecord, Spread, Summary
    from pd_cluster.bench.turn_statistics import TurnsSummary

SCHEMA = 1
FILE_WIDTH = 120
QUERY_DEADLINE_S = 20.0
PACKAGES = ("torch", "transformers", "vllm", "nixl-cu13")
_TITLES = {
    "ttft": "TTFT, ms",
    "ttst": "time to second token, ms",
    "leg": "prefill node's own, ms",
    "beyond leg": "TTFT beyond that, ms",
    "handover": "handover, ms",
    "predicted": "TTFT as predicted, ms",
    "tpot": "TPOT, ms",
    "itl": "ITL, ms",
    "longest gap": "longest gap of a stream, ms",
    "e2e": "end to end, ms",
    "client lag": "client lag, ms",
}


def environment() -> dict[str, Any]:
    """The commit, whether the tree differs from it, versions, processor and GPUs."""
    here = Path(pd_cluster.__file__).parent
    commit, _, mark = os.environ.get("PD_BENCH_COMMIT", "").partition("-")  # "abc123-dirty": a copy without history
    dirty = bool(mark)
    if not commit:
        commit = _output("git", "-C", str(here), "rev-parse", "HEAD")
        dirty = bool(_output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"))
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty if commit else None,
        "version": pd_cluster.__version__,
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "gpus": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines(),
    }


def serve_record(
    config: dict[str, Any], summary: Summary | TurnsSummary, records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """The JSON record of a load test. The summary can be computed again from its times."""
    return {
        "schema": SCHEMA,
        "kind": "serve",
        "environment": environment(),
        "config": config,
        "summary": asdict(summary),
        "requests": [asdict(record) for record in records],
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write the record as one line. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")


def report_console() -> Console:
    """A console on standard output: as wide as the terminal, or FILE_WIDTH in a file."""
    console = Console(file=sys.stdout, highlight=False)
    return console if console.is_terminal else Console(file=sys.stdout, highlight=False, width=FILE_WIDTH)


def print_summary(summary: Summary) -> None:
    """Print the load test's tables."""
    console = report_console()
    console.print(
        f"{summary.num_ok} of {summary.num_requests} requests in {summary.duration_s:.1f} s: "
        f"{summary.request_rate:.2f} requests/s, {summary.output_rate:.0f} output tokens/s, "
        f"{summary.input_tokens} tokens in ({summary.cached_share:.0%} cached), {summary.output_tokens} out"
    )
    rows = {title: found for name, title in _TITLES.items() if (found := summary.spreads.get(name)) is not None}
    console.print(spread_table(rows, digits=1))
    if summary.goodput is not None and summary.attainment is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in summary.objectives_ms.items())
        console.print(f"goodput {summary.goodput:.2f} requests/s, {summary.attainment:.1%} of all within {limits}")
    for pair, share in summary.attained.items():
        console.print(f"{share:.1%} of all within {pair} ms (TTFT/TPOT)")
    for route, count in sorted(summary.routes.items()):
        console.print(f"route {route}: {count}")
    _print_errors(console, summary.errors)


def print_turns(summary: TurnsSummary) -> None:
    """Print the tables of conversations."""
    console, whole = report_console(), summary.whole
    window = "all" if summary.window_s is None else "sent from {:.1f} to {:.1f} s".format(*summary.window_s)
    left_out = 1 - whole.num_requests / summary.num_requests
    console.print(
        f"{summary.num_requests} requests, {summary.num_conversations} conversations, {summary.num_unasked} not asked; "
        f"{whole.num_requests} count ({window}; {left_out:.0%} left out): {whole.request_rate:.2f} requests/s, "
        f"{whole.output_rate:.0f} output tokens/s, {whole.input_tokens} tokens in ({whole.cached_share:.0%} cached)"
    )
    rows = {_TITLES[name]: whole.spreads.get(name) for name in ("tpot", "longest gap", "client lag")}
    for name, part in summary.parts.items():
        rows |= {f"{name}: {_TITLES[kind]}": part.spreads.get(kind) for kind in ("ttft", "predicted")}
    console.print(spread_table({title: one for title, one in rows.items() if one}, digits=1))
    for name, part in summary.parts.items():
        uncached = part.input_tokens * (1 - part.cached_share) / max(1, part.num_ok)
        ratio = part.spreads.get("real of predicted")
        told = f", real / predicted p50 {ratio.p50_ms / 1e3:.2f}, p90 {ratio.p90_ms / 1e3:.2f}" if ratio else ""
        console.print(f"{name}: {part.num_ok} requests, {uncached:.0f} uncached tokens each{told}", markup=False)
    again = f"{summary.found_history:.1%} of the prompts before, {summary.found_answers:.1%} of their answers"
    console.print(f"found again in the cache by later turns: {again}")
    for name, share in summary.attained.items():
        console.print(f"{share:.1%} within the target of {name}")
    _print_errors(console, summary.errors)


def _print_errors(console: Console, errors: Mapping[str, int]) -> None:
    for error, count in sorted(errors.items()):
        console.print(f"[red]{count} failed:[/red] ", end="")
        console.print(error, markup=False)


def spread_table(rows: Mapping[str, Spread], digits: int) -> Table:
    """A table with a row per sample: mean and percentiles."""
    table = Table("", "mean", "p50", "p90", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for title, found in rows.items():
        values = (found.mean_ms, found.p50_ms, found.p90_ms, found.p99_ms, found.max_ms)
        table.add_row(title, *(f"{value:.{digits}f}" for value in values))
    return table


def _output(*command: str) -> str:
    """The command's output; "" if the command is missing or fails (no git checkout, no GPU)."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=QUERY_DEADLINE_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
