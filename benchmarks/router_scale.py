"""`python -m benchmarks router_scale`: a router process beside very many nodes that speak HTTP and compute nothing.

Half of the nodes are prefill nodes. They share one core and one process with the client, the router has the other core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import uvloop

from benchmarks.records import append_record
from benchmarks.router_load import run_round
from benchmarks.router_processes import MeasuredRouter, cpu_ns, resident_mb, running_nodes, running_router

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KNOWN_DEADLINE_S = 120.0  # until the feed of each node is read
LOOK_S = 0.5  # between two looks at that
CONCURRENCY = 32  # of the requests of which the CPU is counted; a third as many come one after the other
NUM_VIEWS = 5  # of each page, of which the median counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures, and write a record if asked."""
    args = _parser().parse_args(arguments)
    with contextlib.ExitStack() as running:
        prefill, decode = running.enter_context(running_nodes(args.nodes // 2, news_s=args.news_ms / 1000))
        path = Path(running.enter_context(TemporaryDirectory())) / "nodes.json"
        nodes = [{"url": url, "role": "prefill"} for url in prefill] + [
            {"url": url, "role": "decode"} for url in decode
        ]
        path.write_text(json.dumps(nodes))
        flags = ["--nodes-file", str(path), "--workers", str(args.workers), "--log-level", "error"]
        command = [sys.executable, "-m", "pd_router", *flags, *([f"@{args.tree}"] if args.tree else [])]
        begun_s = time.monotonic()
        router = running.enter_context(running_router("", command))
        figures = {"ready_s": time.monotonic() - begun_s}
        _await_feeds(router, args.nodes)
        figures["known_s"] = time.monotonic() - begun_s
        figures |= measure(router, args)
    for name, value in figures.items():
        sys.stdout.write(f"{name:20} {value:10.2f}\n")
    if args.json:
        fields = {"nodes": args.nodes, "news_ms": args.news_ms, "workers": args.workers, "note": args.note}
        append_record(Path(args.json), "router_scale", fields | {k: round(v, 3) for k, v in figures.items()})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks router_scale", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--nodes", type=int, default=1000, metavar="N", help="Nodes, half of them prefill nodes (default: 1000).")
    add("--news-ms", type=float, default=0.0, metavar="MS", help="The load of each changes so often. 0: never.")
    add("--workers", type=int, default=1, metavar="N", help="Processes of the router (default: 1).")
    add("--requests", type=int, default=600, metavar="N", help="JSON answers (default: 600).")
    add("--watch-s", type=float, default=10.0, metavar="S", help="Time without requests (default: 10).")
    add("--tree", metavar="DIR", help="Run the router of another source tree.")
    add("--json", metavar="FILE", help="Append a record.")
    add("--note", default="", metavar="TEXT", help="Kept in the record.")
    return parser


def measure(router: MeasuredRouter, args: argparse.Namespace) -> dict[str, float]:
    """CPU of the router without requests and for each of them, times of answers and pages, and memory."""
    idle = _cpu_share(router, lambda: time.sleep(args.watch_s))
    uvloop.run(run_round(router.url, args.requests // 3, CONCURRENCY, wants_stream=False))  # warms up
    begun_s, before_ns = time.monotonic(), cpu_ns(router.pid)
    rounds = [uvloop.run(run_round(router.url, args.requests, CONCURRENCY, wants_stream=False))]
    spent_s = (cpu_ns(router.pid) - before_ns) / 1e9 - idle * (time.monotonic() - begun_s)
    rounds.append(uvloop.run(run_round(router.url, args.requests // 3, 1, wants_stream=False)))
    if any(seen.num_failed for seen in rounds):
        raise SystemExit(f"{[seen.num_failed for seen in rounds]} answers failed")
    ranked_ms = sorted(1e3 * took_s for took_s in rounds[1].latencies_s)
    pages = {f"{path}_ms": statistics.median(_view_ms(router, path) for _ in range(NUM_VIEWS)) for path in PAGES}
    return {
        "idle_cpu_percent": 100 * idle,
        "request_cpu_us": spent_s / args.requests * 1e6,
        "answer_p50_ms": ranked_ms[len(ranked_ms) // 2],
        "answer_p99_ms": ranked_ms[len(ranked_ms) * 99 // 100],
        **pages,
        "rss_mb": resident_mb(router.pid),
    }


PAGES = ("/nodes", "/metrics", "/dashboard/state")


def _cpu_share(router: MeasuredRouter, meanwhile: Callable[[], None]) -> float:
    """Of a core."""
    begun_s, before_ns = time.monotonic(), cpu_ns(router.pid)
    meanwhile()
    return (cpu_ns(router.pid) - before_ns) / 1e9 / (time.monotonic() - begun_s)


def _view_ms(router: MeasuredRouter, path: str) -> float:
    begun_s = time.perf_counter()
    with urllib.request.urlopen(router.url + path, timeout=KNOWN_DEADLINE_S) as answer:
        answer.read()
    return (time.perf_counter() - begun_s) * 1e3


def _await_feeds(router: MeasuredRouter, num_nodes: int) -> None:
    """Raises SystemExit if they are not read in time."""
    ends_at, num_live = time.monotonic() + KNOWN_DEADLINE_S, 0
    while time.monotonic() < ends_at:
        with contextlib.suppress(OSError), urllib.request.urlopen(router.url + "/nodes", timeout=10.0) as answer:
            nodes = json.load(answer)["nodes"]
            num_live = sum(node["healthy"] and node["load"]["feed"] == "live" for node in nodes)
            if num_live == num_nodes:
                return
        time.sleep(LOOK_S)
    raise SystemExit(f"the router knows {num_live} of {num_nodes} nodes after {KNOWN_DEADLINE_S:g} s")
