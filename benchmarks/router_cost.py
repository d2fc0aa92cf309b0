"""CPU that a router spends on a request, beside other routers in the same sitting.

Fake nodes and the client share one core, the router under test has another. Rounds are interleaved, so that a change of
the machine's speed meets all contestants alike. Read ratios: absolute times are those of a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from benchmarks.records import append_record
from benchmarks.router_load import hold_connections, run_round
from benchmarks.router_nodes import PAUSES
from benchmarks.router_processes import (
    ROUTER_CORE,
    MeasuredRouter,
    await_ready,
    cpu_ns,
    free_port,
    resident_mb,
    running_nodes,
    running_router,
)
from pd_http.files import raise_file_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NUM_ALONE = 50  # requests one after the other, for the latency; a tenth of paced ones, which take seconds
LONG_DEADLINE_S = 3600.0  # of a tenth of --long
NUM_PARTS = 10  # of --long, between which memory is read
ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: http
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: decode, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: decode
    connect_timeout: 1s
    load_assignment:
      cluster_name: decode
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {target}}}}}}}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rounds, print a table, and write a record if asked."""
    args = _parser().parse_args(arguments)
    with contextlib.ExitStack() as running:
        (prefill,), (decode,) = running.enter_context(running_nodes(chunk_s=args.chunk_ms / 1000))
        contestants = [MeasuredRouter("direct", decode)]
        starts = [("pd-cluster", [sys.executable, "-m", "pd_router", *_own_flags(prefill, decode), *args.own])]
        if args.vllm_router:
            starts.append(("vllm-router", _vllm_router(args.vllm_router, prefill, decode)))
        if args.floor:
            starts.append(("floor", [sys.executable, "-m", "benchmarks.router_floor", prefill, decode]))
        for path in args.other or ():
            name, _, tree = path.partition("=")
            starts.append((name, [sys.executable, "-m", "pd_router", *_own_flags(prefill, decode), f"@{tree}"]))
        for name, command in starts:
            contestants.append(running.enter_context(running_router(name, command)))
        if args.envoy:
            contestants.append(running.enter_context(_envoy(args.envoy, decode)))
        uvloop.run(_measure(contestants, args))
        idle = uvloop.run(_with_idle(contestants[1], args)) if args.idle else None
        long = uvloop.run(_long(contestants[1], args)) if args.long else None
    _print(contestants)
    if idle:
        sys.stdout.write(
            f"{args.idle} idle connections, {idle['num_open']} of them still open after {idle['num_requests']} requests"
            f" of which {idle['num_failed']} failed: {idle['kb_each']:.1f} KB each\n"
        )
    if long:
        sys.stdout.write(f"{args.long} requests more, RSS MB after each tenth: {long}\n")
    if args.json:
        fields = {
            "rounds": args.rounds,
            "requests": args.requests,
            "chunk_ms": args.chunk_ms,
            "cpu_us": {one.name: _medians(one.cpu_us, 1) for one in contestants if one.pid},
            "p50_ms": {one.name: _medians(one.p50_ms, 3) for one in contestants},
            "rss_mb": {one.name: [round(one.rss_mb[at], 1) for at in (0, -1)] for one in contestants if one.pid},
            "idle": idle,
            "long": {"requests": args.long, "rss_mb": long} if long else None,
        }
        append_record(Path(args.json), "router_cost", fields)
    return 0


def _medians(values: dict[str, list[float]], digits: int) -> dict[str, float]:
    return {kind: round(statistics.median(some), digits) for kind, some in values.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks router_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="Interleaved rounds.")
    parser.add_argument(
        "--requests", type=int, default=2000, help="JSON answers of a round; a quarter as many streams."
    )
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--chunk-ms", type=float, default=0.0, help="Between the chunks of a stream. 0: none.")
    parser.add_argument("--vllm-router", metavar="PATH", help="The command vllm-router.")
    parser.add_argument("--envoy", metavar="PATH", help="The command envoy: one leg, no policy.")
    parser.add_argument("--floor", action="store_true", help="A relay in Python that understands nothing.")
    parser.add_argument("--idle", type=int, default=0, help="Idle connections at our router during one more round.")
    parser.add_argument(
        "--long", type=int, default=0, help="JSON answers of our router after the rounds, for its memory."
    )
    parser.add_argument("--other", action="append", metavar="NAME=TREE", help="Our router of another source tree.")
    parser.add_argument("--own", action="append", default=[], metavar="FLAG", help="A flag for our router.")
    parser.add_argument("--json", metavar="FILE", help="Append a record.")
    return parser


async def _measure(contestants: list[MeasuredRouter], args: argparse.Namespace) -> None:
    kinds = {"json": (False, args.requests), "stream": (True, max(1, args.requests // 4))}
    for turn in range(args.rounds + 1):  # the first warms up
        for kind, (wants_stream, num_requests) in kinds.items():
            for contestant in contestants:
                before_ns = cpu_ns(contestant.pid)
                seen = await run_round(contestant.url, num_requests, args.concurrency, wants_stream=wants_stream)
                spent_ns = cpu_ns(contestant.pid) - before_ns
                if seen.num_failed:
                    raise SystemExit(f"{contestant.name}: {seen.num_failed} of {num_requests} {kind} answers failed")
                num_alone = NUM_ALONE if not args.chunk_ms else NUM_ALONE // 10
                alone = await run_round(contestant.url, num_alone, 1, wants_stream=wants_stream, fields=PAUSES)
                if turn:
                    contestant.cpu_us.setdefault(kind, []).append(spent_ns / num_requests / 1e3)
                    times_s = alone.first_s if wants_stream else alone.latencies_s
                    contestant.p50_ms.setdefault(kind, []).append(statistics.median(times_s) * 1e3)
        for contestant in contestants:
            contestant.rss_mb.append(resident_mb(contestant.pid))


async def _long(router: MeasuredRouter, args: argparse.Namespace) -> list[float]:
    """Memory over many JSON answers. Raises SystemExit if one failed."""
    rss_mb = []
    for _ in range(NUM_PARTS):
        seen = await run_round(
            router.url, args.long // NUM_PARTS, args.concurrency, wants_stream=False, deadline_s=3600
        )
        if seen.num_failed:
            raise SystemExit(f"{seen.num_failed} answers failed")
        rss_mb.append(round(resident_mb(router.pid), 1))
    return rss_mb


async def _with_idle(router: MeasuredRouter, args: argparse.Namespace) -> dict[str, float]:
    """Open the idle connections, send a round of each kind beside them, and see that all are still open."""
    raise_file_limit()
    before_mb = resident_mb(router.pid)
    idle = await hold_connections(router.url, args.idle)
    taken_mb = resident_mb(router.pid) - before_mb
    rounds = [
        await run_round(router.url, args.requests // 4, args.concurrency, wants_stream=wants_stream)
        for wants_stream in (False, True)
    ]
    num_open = sum(not one.is_closing() for one in idle)
    for one in idle:
        one.close()
    return {
        "connections": args.idle,
        "num_open": num_open,
        "kb_each": round(taken_mb * 1e3 / num_open, 2) if num_open else 0.0,
        "num_requests": sum(len(one.latencies_s) for one in rounds),
        "num_failed": sum(one.num_failed for one in rounds),
    }


def _print(contestants: list[MeasuredRouter]) -> None:
    direct = contestants[0]
    sys.stdout.write(
        f"{'':14}{'CPU us: JSON':>14}{'stream':>10}{'added p50 ms: JSON':>20}{'stream':>10}{'RSS MB':>16}\n"
    )
    for one in contestants:
        cpu = [f"{statistics.median(one.cpu_us[kind]):.0f}" if one.pid else "" for kind in ("json", "stream")]
        added = [
            statistics.median(one.p50_ms[kind]) - statistics.median(direct.p50_ms[kind]) for kind in ("json", "stream")
        ]
        rss = f"{one.rss_mb[0]:.0f} to {one.rss_mb[-1]:.0f}" if one.pid else ""
        sys.stdout.write(f"{one.name:14}{cpu[0]:>14}{cpu[1]:>10}{added[0]:>20.2f}{added[1]:>10.2f}{rss:>16}\n")


@contextlib.contextmanager
def _envoy(path: str, decode: str) -> Iterator[MeasuredRouter]:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "envoy.yaml"
        config.write_text(ENVOY.format(port=port, target=decode.rpartition(":")[2]))
        command = ["taskset", "-c", str(ROUTER_CORE), path, "-c", str(config), "--concurrency", "1", "-l", "error"]
        process = subprocess.Popen(command)
        try:
            url = f"http://127.0.0.1:{port}"
            await_ready(process, url)
            yield MeasuredRouter("envoy, 1 leg", url, process.pid)
        finally:
            process.kill()
            process.wait()


def _own_flags(prefill: str, decode: str) -> list[str]:
    return ["--prefill", prefill, "--decode", decode, "--log-level", "error"]


def _vllm_router(path: str, prefill: str, decode: str) -> list[str]:
    return [path, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--log-level", "error",
            "--prometheus-port", str(free_port())]  # fmt: skip
