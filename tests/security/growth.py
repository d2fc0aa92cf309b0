"""Resident memory of every process of a cluster (1 P, 1 D, 1 router) while short prompts of varied length pass through.

    python -m tests.security.growth --requests 50000 --from 10000 [--concurrency 16] [--out growth.jsonl]

One line of JSON per sample: the number of finished requests, the seconds since the start, MB of each process. The exit
status is 1 when a process ends with more than `--tolerance` above its memory at request `--from`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil

from tests.cluster import Launched, Launcher
from tests.patient_node import IMPATIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VOCAB_SIZE = 3072  # of the demo model; ids below FIRST_ID are special
FIRST_ID = 10
MEBIBYTE = float(1 << 20)
LAST_SHARE = 0.2  # of the samples: the end of the curve is their median, so that one burst is no growth
CACHE_GB = 0.2  # of a node: the prefix cache is full long before request 10,000
LONGEST_PROMPT = 600  # tokens


@dataclass(frozen=True)
class Load:
    """What is sent. Lengths are drawn from [1, longest], so that steps have all numbers of tokens."""

    num_requests: int
    concurrency: int = 16
    longest: int = LONGEST_PROMPT
    sample_every: int = 500
    seed: int = 0


@dataclass
class Curve:
    """Samples: (finished requests, seconds, {process: MB})."""

    samples: list[tuple[int, float, dict[str, float]]] = field(default_factory=list)

    def growth(self, first: int) -> dict[str, float]:
        """Of each process, its memory at the end over its memory at request `first`, less 1."""
        later = [sizes for count, _, sizes in self.samples if count >= first]
        num_last = max(1, int(len(later) * LAST_SHARE))
        begin, end = later[:num_last], later[-num_last:]
        return {
            name: statistics.median(s[name] for s in end) / statistics.median(s[name] for s in begin) - 1
            for name in later[0]
        }


def resident_mb(processes: Mapping[str, psutil.Process]) -> dict[str, float]:
    """Resident memory of each process in MB, shared pages included."""
    return {name: round(process.memory_info().rss / MEBIBYTE, 2) for name, process in processes.items()}


def processes_of(nodes: Mapping[str, Launched], router: Launched) -> dict[str, psutil.Process]:
    """The API process and the engine of each node, and the router."""
    found = {"router": psutil.Process(router.pid)}
    for role, node in nodes.items():
        engines = [child for child in node.family() if "pd_cluster.engine.process" in child.cmdline()]
        found |= {f"{role} api": psutil.Process(node.pid), f"{role} engine": engines[0]}
    return found


async def drive(url: str, load: Load, on_sample: Callable[[int], None]) -> None:
    """Send all requests, `concurrency` at a time. Raises RuntimeError for an answer that is no 200."""
    rng = random.Random(load.seed)
    num_sent = num_done = 0
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            nonlocal num_sent, num_done
            while num_sent < load.num_requests:
                num_sent += 1
                body = request_body(rng, load.longest)
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise RuntimeError(f"{response.status}: {text[:500]}")
                num_done += 1
                if num_done % load.sample_every == 0:
                    on_sample(num_done)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(client())


def request_body(rng: random.Random, longest: int) -> dict[str, Any]:
    """A prompt of random ids and length, short answers, half of them streamed."""
    return {
        "prompt": rng.choices(range(FIRST_ID, VOCAB_SIZE), k=rng.randint(1, longest)),
        "max_tokens": rng.randint(1, 6),
        "temperature": 0,
        "ignore_eos": True,
        "stream": rng.random() < 0.5,
    }


def measure(
    load: Load, flags: tuple[str, ...] = (), environment: Mapping[str, str] = IMPATIENT, out: Path | None = None
) -> Curve:
    """Run a cluster under `load`."""
    curve = Curve()
    started_s = time.monotonic()
    with Launcher() as launcher:
        common = (f"--kv-cache-gb={CACHE_GB}", *flags)
        nodes = {
            role: launcher.node(role, *common, environment=environment, real=True) for role in ("prefill", "decode")
        }
        router = launcher.router(prefill=[nodes["prefill"]], decode=[nodes["decode"]], real=True)
        processes = processes_of(nodes, router)

        def on_sample(num_done: int) -> None:
            sizes = resident_mb(processes)
            curve.samples.append((num_done, time.monotonic() - started_s, sizes))
            line = json.dumps({"requests": num_done, "seconds": round(time.monotonic() - started_s, 1), **sizes})
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            if out is not None:
                with out.open("a") as file:
                    file.write(line + "\n")

        on_sample(0)
        asyncio.run(drive(router.url, load, on_sample))
    return curve


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--from", dest="first", type=int, default=10_000, help="the request after which memory is flat")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--longest", type=int, default=LONGEST_PROMPT, help="tokens of the longest prompt")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--out", type=Path, help="append the samples to this file")
    options = parser.parse_args()
    load = Load(options.requests, options.concurrency, options.longest, max(1, options.requests // 100))
    growth = measure(load, out=options.out).growth(options.first)
    sys.stdout.write(json.dumps({"growth": {name: round(value, 4) for name, value in growth.items()}}) + "\n")
    return int(max(growth.values()) > options.tolerance)


if __name__ == "__main__":
    sys.exit(main())
