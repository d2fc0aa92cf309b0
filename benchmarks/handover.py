"""`python -m benchmarks handover`: the steps of a handoff, as the decode node of a running cluster reports them.

Prompts of a fixed length are sent one after the other to a cluster of prefill and decode nodes: first idle, then while
the decode node runs a batch. `pd_connectors.base.LoadSteps` defines the steps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import uvloop

from benchmarks.flags import add_cluster_flags
from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.cli import positive
from pd_cluster.bench.load import Target, find_model, open_session, run_load
from pd_cluster.bench.report import report_console, spread_table
from pd_cluster.bench.statistics import HANDOVER_STEPS, RequestRecord, Summary, summarize
from pd_cluster.bench.workload import Arrival, prompt_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

UNCOUNTED = 5  # first samples, while the link warms up and the batch starts
SAMPLE_OUTPUT = 8  # tokens
BATCH_INPUT, BATCH_OUTPUT = 128, 2000
_TOGETHER = {
    "handover": "= last announcement to schedulable",
    "join": "then to its first step's end",
    "itl": "a step (ITL)",
    "beyond leg": "TTFT beyond P's own",
}
LIMIT_MS, LIMIT_STEPS = 4.0, 1.5  # goals: p50 of a handover of 1,000 tokens, and of the wait to join a step


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when every sample was handed over, else 1. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks handover", allow_abbrev=False)
    add_cluster_flags(parser, RESULTS / "handover_gpu.jsonl")
    parser.add_argument("--route", choices=("p-first", "d-first"), help="Ask the router for this order.")
    parser.add_argument("--tokens", type=int, default=1000, metavar="N", help="Length of a prompt (default: 1000).")
    parser.add_argument("--samples", type=int, default=50, metavar="N", help="Per batch size (default: 50).")
    parser.add_argument(
        "--batches", nargs="+", type=int, default=[0, 32], metavar="N",
        help="Sequences that the decode node runs meanwhile (default: 0 32).",
    )  # fmt: skip
    parser.add_argument("--every-s", type=positive, default=0.15, metavar="X", help="Between samples (default: 0.15).")
    return run_handover(parser.parse_args(arguments))


def run_handover(namespace: argparse.Namespace) -> int:
    """Returns 0 when every sample was handed over, else 1. Raises StartupError."""
    target = Target(namespace.url.rstrip("/"), "", route=namespace.route or "", timeout_s=namespace.timeout_s)
    status = 0
    for batch in namespace.batches:
        sys.stderr.write(f"{namespace.samples} handovers of {namespace.tokens} tokens, {batch} sequences decoding\n")
        records = uvloop.run(_samples(target, namespace, batch))
        summary = summarize(records, {})
        fields = {
            "tokens": namespace.tokens, "batch": batch, "note": namespace.note, "seed": namespace.seed,
            "summary": asdict(summary),
        }  # fmt: skip
        append_record(namespace.json, "handover", fields)
        print_handover(summary, namespace.tokens, batch)
        num_handed = summary.spreads["handover"].count if "handover" in summary.spreads else 0
        status = status if num_handed == len(records) else 1
    return status


async def _samples(target: Target, namespace: argparse.Namespace, batch: int) -> list[RequestRecord]:
    async with open_session() as session:
        target = replace(target, model=await find_model(session, target.url, target.headers))
    rng = random.Random(f"{namespace.seed}/{batch}")
    vocabulary = range(namespace.vocab_size // 2, namespace.vocab_size)

    def request(index: int, at_s: float, num_input: int, num_output: int) -> tuple[Arrival, list[int]]:
        arrival = Arrival(at_s, num_input, num_output)
        return arrival, prompt_ids(arrival, index, vocabulary, namespace.seed + batch)

    # a random part of the pause, so that samples come at any moment of a decode step
    times = [(index + rng.random()) * namespace.every_s for index in range(UNCOUNTED + namespace.samples)]
    samples = [request(index, at_s, namespace.tokens, SAMPLE_OUTPUT) for index, at_s in enumerate(times)]
    background = [request(-1 - index, 0.0, BATCH_INPUT, BATCH_OUTPUT) for index in range(batch)]
    async with _running(target, background):
        return (await run_load(target, samples))[UNCOUNTED:]


@asynccontextmanager
async def _running(target: Target, requests: list[tuple[Arrival, list[int]]]) -> AsyncIterator[None]:
    """Repeat these requests during the block; then close their connections."""

    async def repeat() -> None:
        while requests:
            await run_load(target, requests)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def print_handover(summary: Summary, tokens: int, batch: int) -> None:
    """Print the steps in order, then the sums."""
    console = report_console()
    console.print(f"a handover of {tokens} tokens, {batch} sequences decoding on D; ms")
    rows = {name: summary.phases[name] for name in HANDOVER_STEPS if name in summary.phases}
    spreads = summary.spreads
    rows |= {title: spreads[name] for name, title in _TOGETHER.items() if name in spreads}
    console.print(spread_table(rows, digits=3))
    if {"handover", "join", "itl"} <= spreads.keys():
        step_ms = spreads["itl"].p50_ms or spreads["itl"].mean_ms  # p50 is 0 when two chunks come at once
        steps = max(0.0, spreads["join"].p50_ms / step_ms - 1) if step_ms else 0.0
        console.print(
            f"p50: handover {spreads['handover'].p50_ms:.2f} ms (goal: {LIMIT_MS:g} for 1,000 tokens), "
            f"wait {steps:.2f} steps (goal: {LIMIT_STEPS:g})"
        )
    for error, count in summary.errors.items():
        console.print(f"{count} failed: {error}", markup=False)
