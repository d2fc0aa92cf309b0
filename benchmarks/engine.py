"""`python -m benchmarks engine`: throughput on CPU beside transformers, interleaved in one run.

Speeds vary between machines and days: compare only the ratios within a run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.table import Table

from benchmarks.contestants import (
    Contestant,
    ContinuousTransformers,
    OurEngine,
    StaticTransformers,
    Task,
    build_random_model,
)
from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.report import report_console
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCABULARY = range(3, 32000)  # without the special ids of Llama


@dataclass(frozen=True, slots=True)
class Result:
    """A contestant's rounds. `agreement`: share of its tokens that equal our engine's at the same position."""

    name: str
    seconds: tuple[float, ...]
    tokens_per_round: int
    agreement: float

    @property
    def rate(self) -> float:
        """Median output tokens per second."""
        return self.tokens_per_round / statistics.median(self.seconds)


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record. Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks engine", allow_abbrev=False)
    parser.add_argument("--num-requests", type=int, default=32, metavar="N", help="Default: 32.")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="Tokens (default: 128).")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="Tokens (default: 128).")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Rounds; the median counts (default: 3).")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Compute threads (default: 1).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds weights and prompts.")
    parser.add_argument("--no-peers", action="store_true", help="Measure the engine only, not transformers.")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "engine_cpu.jsonl", metavar="FILE",
        help="File to which a line is appended (%(default)s).",
    )  # fmt: skip
    return run_engine(parser.parse_args(arguments))


def run_engine(namespace: argparse.Namespace) -> int:
    """Measure, print and record. Returns 0. Raises StartupError."""
    task = Task(namespace.num_requests, namespace.input_len, namespace.output_len, namespace.threads)
    if min(asdict(task).values()) < 1 or namespace.repeats < 1:
        raise StartupError("--num-requests, --input-len, --output-len, --threads and --repeats must be at least 1")
    torch.set_num_threads(task.threads)
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as directory:
        num_parameters = build_random_model(Path(directory), namespace.seed)
        contestants: list[Contestant] = []
        try:
            contestants.append(OurEngine(Path(directory), task))
            if not namespace.no_peers:
                contestants.append(StaticTransformers(Path(directory), task))
                contestants.append(ContinuousTransformers(Path(directory), task))
            results = measure(contestants, task, namespace.repeats, namespace.seed)
        finally:
            for contestant in contestants:
                contestant.close()
    print_results(results, task, num_parameters)
    fields = {
        "task": asdict(task), "num_parameters": num_parameters, "seed": namespace.seed,
        "results": [{**asdict(result), "rate": result.rate} for result in results],
    }  # fmt: skip
    append_record(namespace.json, "engine_cpu", fields)
    return 0


def measure(contestants: list[Contestant], task: Task, repeats: int, seed: int) -> list[Result]:
    """Run rounds: in each, all contestants in turn get the same prompts. The first round is a warm-up."""
    rng = random.Random(seed)
    seconds: list[list[float]] = [[] for _ in contestants]
    equal = [0 for _ in contestants]
    for round_number in range(repeats + 1):
        prompts = [rng.choices(VOCABULARY, k=task.input_len) for _ in range(task.num_requests)]
        reference: list[list[int]] = []
        for index, contestant in enumerate(contestants):
            sys.stderr.write(f"round {round_number} of {repeats}: {contestant.name}\n")
            start_s = time.perf_counter()
            outputs = contestant.generate(prompts)
            elapsed_s = time.perf_counter() - start_s
            if [len(output) for output in outputs] != [task.output_len] * task.num_requests:
                raise RuntimeError(f"{contestant.name} did not generate {task.output_len} tokens for every prompt")
            reference = reference or outputs
            if round_number > 0:
                seconds[index].append(elapsed_s)
                equal[index] += _equal_tokens(outputs, reference)
    tokens = task.num_requests * task.output_len
    return [
        Result(contestant.name, tuple(seconds[index]), tokens, equal[index] / (tokens * repeats))
        for index, contestant in enumerate(contestants)
    ]


def print_results(results: list[Result], task: Task, num_parameters: int) -> None:
    """Print the table, with ratios to our engine."""
    title = (
        f"{task.num_requests} x ({task.input_len} in, {task.output_len} out), greedy, fp32, {task.threads} thread(s), "
        f"random Llama of {num_parameters / 1e6:.0f}M parameters"
    )
    console = report_console()
    table = Table("", "output tokens/s", "range", "ours is", "equal tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    ours = results[0].rate
    for result in results:
        rates = [result.tokens_per_round / value for value in result.seconds]
        spread = f"{min(rates):.0f}..{max(rates):.0f}"
        ratio = "" if result is results[0] else f"{ours / result.rate:.2f} x"
        table.add_row(result.name, f"{result.rate:.0f}", spread, ratio, f"{result.agreement:.1%}")
    console.print(title)
    console.print(table)


def _equal_tokens(outputs: list[list[int]], reference: list[list[int]]) -> int:
    return sum(
        ours == theirs
        for output, expected in zip(outputs, reference, strict=True)
        for ours, theirs in zip(output, expected, strict=True)
    )
