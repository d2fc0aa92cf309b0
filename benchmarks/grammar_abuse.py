"""`python -m benchmarks grammar_abuse`: a stream's ITL beside clients that send hostile grammars, on a running cluster.

In each round the stream runs alone, then beside neighbours without a grammar, then beside neighbours with hostile ones.
The second says what neighbours cost at all: each adds a row to a step. A neighbour sends its next request, with a
new grammar, as soon as it has the answer to the one before.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
import uvloop

from benchmarks.flags import add_cluster_flags
from benchmarks.hostile_grammars import HOSTILE
from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.load import Target, find_model, open_session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

GOAL = 1.2  # times the 99th percentile of the gaps of the stream alone
ALONE, FREE, HOSTILE_PHASE = "alone", "free neighbours", "hostile neighbours"
HEAD_START_S = 1.0  # of the neighbours, which are then in a steady state
PROMPT = "Once upon a time there was a small town by the sea. It was cold and"


@dataclass(slots=True)
class Phase:
    """Gaps between the chunks of the stream, in seconds, and the neighbours' answers by status."""

    gaps_s: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def percentile_ms(self, share: float) -> float:
        return float(np.percentile(self.gaps_s, share)) * 1e3


@dataclass(frozen=True, slots=True)
class Experiment:
    """One stream and its neighbours, at one router."""

    session: aiohttp.ClientSession
    target: Target
    phase_s: float
    num_tokens: int  # of one answer of the stream
    num_neighbours: int
    numbers: Iterator[int] = field(default_factory=count)

    async def measure(self, fields_of: Callable[[int], dict[str, Any]], rounds: int) -> dict[str, Phase]:
        """The phases, each of all rounds together."""
        phases = {ALONE: Phase(), FREE: Phase(), HOSTILE_PHASE: Phase()}
        for _ in range(rounds):
            await self._stream(phases[ALONE])
            for name, more in ((FREE, lambda _: {}), (HOSTILE_PHASE, fields_of)):
                async with self._neighbours(more, phases[name].statuses):
                    await asyncio.sleep(HEAD_START_S)
                    await self._stream(phases[name])
        return phases

    async def _stream(self, phase: Phase) -> None:
        """Answers one after the other, and their gaps after the second chunk: D has the sequence from there on."""
        end_s = time.perf_counter() + self.phase_s
        while time.perf_counter() < end_s:
            body = self._body(self.num_tokens) | {"stream": True}
            async with self._post(body) as response:
                response.raise_for_status()
                times_s = [time.perf_counter() async for line in response.content if line.startswith(b"data: {")]
            phase.gaps_s += np.diff(times_s)[1:].tolist()

    @asynccontextmanager
    async def _neighbours(
        self, fields_of: Callable[[int], dict[str, Any]], statuses: Counter[int]
    ) -> AsyncIterator[None]:
        async def neighbour() -> None:
            while True:
                async with self._post(self._body(64) | fields_of(next(self.numbers))) as response:
                    await response.read()
                statuses[response.status] += 1

        tasks = [asyncio.create_task(neighbour()) for _ in range(self.num_neighbours)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _body(self, max_tokens: int) -> dict[str, Any]:
        prompt = f"{next(self.numbers)} {PROMPT}"
        return {"model": self.target.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": 1}

    def _post(self, body: dict[str, Any]) -> Any:
        is_chat = "response_format" in body
        if is_chat:
            body = body | {"messages": [{"role": "user", "content": body["prompt"]}]}
            del body["prompt"]
        path = "chat/completions" if is_chat else "completions"
        timeout = aiohttp.ClientTimeout(total=self.target.timeout_s)
        data = orjson.dumps(body)
        return self.session.post(
            f"{self.target.url}/v1/{path}", data=data, headers=self.target.headers, timeout=timeout
        )


def summary(phases: dict[str, Phase]) -> dict[str, Any]:
    """Percentiles in ms, their ratios to the stream alone, and the neighbours' answers."""
    alone = phases[ALONE].percentile_ms(99)
    return {
        name: {
            "gaps": len(phase.gaps_s),
            "p50_ms": round(phase.percentile_ms(50), 2),
            "p99_ms": round(phase.percentile_ms(99), 2),
            "p99_ratio": round(phase.percentile_ms(99) / alone, 2),
            "statuses": {str(status): number for status, number in sorted(phase.statuses.items())},
        }
        for name, phase in phases.items()
    }


async def abuse(namespace: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The summary of each kind. Raises StartupError."""
    found = {}
    async with open_session() as session:
        url = namespace.url.rstrip("/")
        target = Target(url, await find_model(session, url, {}), route=namespace.route, timeout_s=namespace.timeout_s)
        experiment = Experiment(session, target, namespace.phase_s, namespace.tokens, namespace.neighbours)
        for name in namespace.kind or HOSTILE:
            found[name] = summary(await experiment.measure(HOSTILE[name][0], namespace.rounds))
            sys.stdout.write(f"{name}: {found[name]}\n")
            sys.stdout.flush()
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if the 99th percentile rose to more than GOAL times beside one kind, else 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks grammar_abuse", allow_abbrev=False)
    add_cluster_flags(parser, RESULTS / "grammar_abuse.jsonl")
    parser.add_argument("--route", choices=("p-first", "d-first"), default="", help="Ask the router for this order.")
    parser.add_argument("--kind", action="append", choices=HOSTILE, help="Of grammar; repeat it (default: all).")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="Of three phases (default: 3).")
    parser.add_argument("--phase-s", type=float, default=5.0, metavar="X", help="Seconds of a phase (default: 5).")
    parser.add_argument(
        "--tokens", type=int, default=256, metavar="N", help="Of an answer of the stream (default: 256)."
    )
    parser.add_argument("--neighbours", type=int, default=4, metavar="N", help="Requests at once (default: 4).")
    namespace = parser.parse_args(arguments)
    found = uvloop.run(abuse(namespace))
    fields = {
        "route": namespace.route, "rounds": namespace.rounds, "phase_s": namespace.phase_s,
        "neighbours": namespace.neighbours, "note": namespace.note, "kinds": found,
    }  # fmt: skip
    append_record(namespace.json, "grammar_abuse", fields)
    return int(any(phases[HOSTILE_PHASE]["p99_ratio"] > GOAL for phases in found.values()))
