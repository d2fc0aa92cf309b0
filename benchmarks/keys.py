"""`python -m benchmarks keys`: a quiet key's first token beside a greedy key, on a running cluster.

The router has `--api-keys` with both keys, which are read from $QUIET_KEY and $GREEDY_KEY. Requests of the quiet key
arrive at a fixed rate, first alone and then beside the greedy key. A refused request comes again when its Retry-After
is over, until it is served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

from benchmarks.vectors import text
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

GOAL = 1.5  # times the 99th percentile of the first token alone
RAMP_S = 5.0  # for which the greedy key runs before the quiet one is measured beside it


@dataclass
class KeyTally:
    """What became of a key's requests."""

    ttft_s: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by the router's message
    failed: Counter[int] = field(default_factory=Counter)  # by status, without 429
    waits_s: list[int] = field(default_factory=list)  # of Retry-After
    retries: int = 0
    retries_refused: int = 0

    def report(self) -> dict[str, object]:
        times = np.percentile(self.ttft_s, (50, 99)) * 1e3 if self.ttft_s else (float("nan"),) * 2
        counts = {
            "served": len(self.ttft_s), "ttft_p50_ms": round(times[0], 1), "ttft_p99_ms": round(times[1], 1),
            "failed": dict(self.failed), "refused": dict(self.refused),
        }  # fmt: skip
        if not self.retries:
            return counts
        waits = {"retry_after_s_p50": float(np.median(self.waits_s)), "retry_after_s_max": max(self.waits_s)}
        return counts | waits | {"retries": self.retries, "retries_refused": self.retries_refused}


class KeyClient:
    """Sends requests of one key."""

    def __init__(self, session: aiohttp.ClientSession, flags: argparse.Namespace, key: str, seed: int) -> None:
        self.tally = KeyTally()
        self._session, self._flags = session, flags
        self._headers = {"authorization": f"Bearer {key}"}
        self._random = random.Random(seed)

    async def ask(self) -> None:
        """One request, again and again as it is told, until it is served."""
        flags, is_retry = self._flags, False
        body = {
            "model": flags.model, "prompt": text(self._random, flags.words), "stream": True, "ignore_eos": True,
            "max_tokens": self._random.randint(1, 2 * flags.output),
        }  # fmt: skip
        while (wait_s := await self._send(body, is_retry=is_retry)) is not None:
            self.tally.waits_s.append(wait_s)
            await asyncio.sleep(wait_s + self._random.uniform(0, 0.2))
            is_retry = True

    async def _send(self, body: dict[str, object], *, is_retry: bool) -> int | None:
        """Seconds after which to come again; None: it is over."""
        tally, began_s = self.tally, time.perf_counter()
        url = f"{self._flags.url}/v1/completions"
        async with self._session.post(url, json=body, headers=self._headers) as answer:
            is_refused = answer.status == 429
            tally.retries += is_retry
            tally.retries_refused += is_retry and is_refused
            if is_refused:
                message = (await answer.json())["error"]["message"]
                tally.refused[message.rpartition(";")[0]] += 1
                return int(answer.headers["retry-after"])
            if answer.status != 200:
                tally.failed[answer.status] += 1
                return None
            await answer.content.readany()
            tally.ttft_s.append(time.perf_counter() - began_s)
            await answer.read()
        return None

    async def arrive(self, rate: float, count: int) -> None:
        """`count` requests, `rate` of them in a second in the mean."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await asyncio.sleep(self._random.expovariate(rate))
                group.create_task(self.ask())

    async def insist(self) -> None:
        """Ask again after each answer, until cancelled."""
        while True:
            await self.ask()


async def measure(flags: argparse.Namespace, quiet_key: str, greedy_key: str) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await KeyClient(session, flags, quiet_key, flags.seed).arrive(flags.rate, 5)  # warm
        alone, beside = (KeyClient(session, flags, quiet_key, flags.seed + one) for one in (1, 2))
        await alone.arrive(flags.rate, flags.num_requests)
        greedy = KeyClient(session, flags, greedy_key, flags.seed + 3)
        work = [greedy.arrive(flags.greedy_rate, sys.maxsize)] if flags.greedy_rate else []
        tasks = [asyncio.create_task(one) for one in work or [greedy.insist() for _ in range(flags.clients)]]
        await asyncio.sleep(RAMP_S)
        await beside.arrive(flags.rate, flags.num_requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tallies = {"alone": alone.tally, "beside": beside.tally, "greedy": greedy.tally}
    ratio = float(np.percentile(beside.tally.ttft_s, 99) / np.percentile(alone.tally.ttft_s, 99))
    report = {"p99_ratio": round(ratio, 2), **{name: tally.report() for name, tally in tallies.items()}}
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    is_served = not any(tally.failed for tally in tallies.values()) and not alone.tally.refused + beside.tally.refused
    return int(ratio > GOAL or not is_served)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if the quiet key's p99 rose to more than GOAL times, or it was refused."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks keys", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The router (default: %(default)s).")
    parser.add_argument("--model", default="demo_model", metavar="NAME", help="Default: %(default)s.")
    parser.add_argument("--rate", type=float, default=1.0, metavar="X", help="Of the quiet key, in a second (1).")
    parser.add_argument("--num-requests", type=int, default=60, metavar="N", help="Of the quiet key, each time (60).")
    parser.add_argument("--clients", type=int, default=200, metavar="N", help="Of the greedy key (default: 200).")
    parser.add_argument("--greedy-rate", type=float, default=0.0, metavar="X", help="Instead: arrivals in a second.")
    parser.add_argument("--words", type=int, default=256, metavar="N", help="Of a prompt (default: 256).")
    parser.add_argument("--output", type=int, default=32, metavar="N", help="Tokens, in the mean (default: 32).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds texts and arrivals.")
    flags = parser.parse_args(arguments)
    keys = [os.environ.get(name, "") for name in ("QUIET_KEY", "GREEDY_KEY")]
    if not all(keys):
        raise StartupError("$QUIET_KEY and $GREEDY_KEY must be keys of the router's --api-keys")
    return asyncio.run(measure(flags, *keys))
