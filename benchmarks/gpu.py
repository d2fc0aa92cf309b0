"""`python -m benchmarks gpu`: decode, prefill and a mixed load of a shape, compared with the machine's ceilings.

Weights are random: time depends on them only by the experts that tokens choose, and these are counted. A decode step's
time is (time for 129 tokens - time for 1) / 128 with the prompts in the prefix cache, so that the common part is short
and cancels. All other measurements use new prompts. The peer's figures are for the same shapes and method on one H200:
compare with them on that GPU only.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from benchmarks.ceilings import Ceilings, ModelCosts, measure_ceilings
from benchmarks.gpu_rows import DRAWS, KINDS, MIXED_SEQUENCES, SHAPES, GpuRow, Shape, shape_of_ranks
from benchmarks.kernel_times import profile_steps
from benchmarks.offline import OfflineEngine
from benchmarks.records import RESULTS, append_record
from benchmarks.routing import ExpertsHit, RoutingCounter
from pd_cluster.bench.report import report_console
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PEER = "vLLM 0.25.1"
MAX_MODEL_LEN = 16_384
DECODED = 128  # steps of a decode measurement
COUNTED = 48  # tokens of each sequence while experts are counted; 256 prompts that are not cached take 32 steps
MIXED_LENGTHS, MIXED_TEMPERATURE = (100, 1024), 0.6
DEFAULT_SHAPES = ("8b", "0.6b")
GREEDY = MappingProxyType({"temperature": 0.0})


@dataclass(frozen=True, slots=True)
class Measured:
    """The samples of a row, in its unit."""

    row: GpuRow
    samples: tuple[float, ...]
    roofline: float | None  # in the same unit; None: depends on the schedule
    hit: ExpertsHit | None = None  # by the steps of a decode row; None: not a mixture

    @property
    def value(self) -> float:
        return statistics.median(self.samples)

    @property
    def share(self) -> float | None:
        """Share of the roofline; 1 is the limit."""
        if self.roofline is None:
            return None
        return self.value / self.roofline if self.row.is_rate else self.roofline / self.value

    @property
    def gain(self) -> float | None:
        """Ratio to the peer; above 1 is better."""
        if self.row.peer is None:
            return None
        return self.value / self.row.peer if self.row.is_rate else self.row.peer / self.value

    def record(self) -> dict[str, Any]:
        low, high = self.value, max(self.samples)
        if len(self.samples) > 1:
            high = statistics.quantiles(self.samples, n=10, method="inclusive")[-1]
        return {
            "name": self.row.name, **asdict(self.row), "samples": self.samples, "p50": low, "p90": high,
            "roofline": self.roofline, "share": self.share, "gain": self.gain,
            "experts_hit": self.hit and {**asdict(self.hit), "is_valid": self.hit.is_valid},
        }  # fmt: skip


@dataclass(slots=True)
class GpuBench:
    """Measures a shape on an engine."""

    engine: OfflineEngine
    costs: ModelCosts
    ceilings: Ceilings
    repeats: int
    routing: RoutingCounter
    rng: random.Random = field(default_factory=random.Random)
    num_ranks: int = 1  # the work is divided among them; what a rank reads beside its part is not counted

    def measure(self, row: GpuRow) -> Measured:
        """Measure a row. Raises RuntimeError."""
        match row.kind:
            case "decode":
                roofline_s = self._decode_s(row)
                prompts = self._cached_prompts(row)
                return Measured(row, self._decode(prompts), roofline_s * 1e3, self._hit(row, prompts))
            case "draws":
                samples = self._decode(self._cached_prompts(row), DRAWS[row.draws])
                return Measured(row, samples, self._decode_s(row) * 1e3)
            case "prefill":
                roofline_s = self._prefill_s([row.length] * row.count)
                return Measured(row, self._prefill(row), row.count * row.length / roofline_s)
            case "prompt":
                return Measured(row, self._prompt(row), self._prefill_s([row.length]) * 1e3)
        return Measured(row, self._mixed(), None)

    def warm_up(self) -> None:
        """Run prompts of many lengths, so that no row includes a first call."""
        lengths = [2**power + power for power in range(4, 13)]
        self._generate(self._prompts(lengths), 2)
        for length in (1024, 4096):
            self._generate(self._prompts([length] * 4), 2)
            self._generate(self._prompts([length]), 1)
        self._mix(8)

    def profile(self, row: GpuRow) -> str:
        """The kernels of a decode row's step. Raises RuntimeError."""
        prompts = self._cached_prompts(row)
        return profile_steps(lambda num_tokens: self._generate(prompts, num_tokens))

    def _decode_s(self, row: GpuRow) -> float:
        return self.costs.decode_s(row.count, row.length + DECODED / 2, self.ceilings) / self.num_ranks

    def _prefill_s(self, lengths: list[int]) -> float:
        return self.costs.prefill_s(lengths, self.ceilings) / self.num_ranks

    def _generate(self, prompts: list[list[int]], num_tokens: int, draws: Mapping[str, Any] = GREEDY) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **draws)
        return self.engine.generate(prompts, [sampling] * len(prompts)).seconds

    def _prompts(self, lengths: list[int]) -> list[list[int]]:
        vocabulary = range(self.costs.spec.vocab_size)
        return [self.rng.choices(vocabulary, k=length) for length in lengths]

    def _cached_prompts(self, row: GpuRow) -> list[list[int]]:
        prompts = self._prompts([row.length] * row.count)
        self._generate(prompts, 1)  # fills the cache
        self._generate(prompts, 2)  # reads from it
        return prompts

    def _hit(self, row: GpuRow, prompts: list[list[int]]) -> ExpertsHit | None:
        """Count the experts of a few steps of a decode row, with cached prompts."""
        if self.costs.spec.experts is None:
            return None
        with self.engine.without_graphs(), self.routing.counting(row.count) as counts:
            self._generate(prompts, COUNTED)
        return ExpertsHit(statistics.fmean(counts or [0]), self.costs.experts_hit(row.count))

    def _decode(self, prompts: list[list[int]], draws: Mapping[str, Any] = GREEDY) -> tuple[float, ...]:
        return tuple(
            (self._generate(prompts, DECODED + 1, draws) - self._generate(prompts, 1, draws)) / DECODED * 1e3
            for _ in range(self.repeats)
        )

    def _prefill(self, row: GpuRow) -> tuple[float, ...]:
        num_tokens = row.count * row.length
        return tuple(
            num_tokens / self._generate(self._prompts([row.length] * row.count), 1) for _ in range(self.repeats)
        )

    def _prompt(self, row: GpuRow) -> tuple[float, ...]:
        return tuple(self._generate(self._prompts([row.length]), 1) * 1e3 for _ in range(max(5, self.repeats)))

    def _mixed(self) -> tuple[float, ...]:
        self._mix(1)  # not counted
        return tuple(self._mix(1) for _ in range(max(1, self.repeats // 2)))

    def _mix(self, divisor: int) -> float:
        """Output tokens/s of the mixed load, with all lengths divided by `divisor`."""
        low, high = (length // divisor for length in MIXED_LENGTHS)
        prompts = self._prompts([self.rng.randint(low, high) for _ in range(MIXED_SEQUENCES)])
        samplings = [
            SamplingParams(
                max_tokens=self.rng.randint(low, high), temperature=MIXED_TEMPERATURE, ignore_eos=True, seed=index
            )
            for index in range(MIXED_SEQUENCES)
        ]
        done = self.engine.generate(prompts, samplings)
        return done.num_tokens / done.seconds


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", allow_abbrev=False)
    parser.add_argument(
        "--shapes", nargs="+", default=list(DEFAULT_SHAPES), metavar="NAME",
        help=f"{', '.join(SHAPES)} (default: {' and '.join(DEFAULT_SHAPES)}).",
    )  # fmt: skip
    parser.add_argument(
        "--rows", nargs="+", default=list(KINDS), metavar="KIND",
        help="decode, draws, prefill, prompt and mixed (default: all).",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="Samples per row (default: 3).")
    parser.add_argument("--budget", type=int, default=8192, metavar="N", help="Tokens of a step (default: 8192).")
    parser.add_argument(
        "--profile", nargs="+", type=int, default=[], metavar="B",
        help="Print the kernels of a step of B decodes too, for rows of the shape.",
    )  # fmt: skip
    parser.add_argument("--async-scheduling", choices=("auto", "on", "off"), default="auto", help="A node's flag.")
    parser.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=True, help="A node's flag (default: on)."
    )
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="A node's flag.")
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="A node's flag: GPUs of the engine (default: 1)."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds weights and prompts.")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "engine_gpu.jsonl", metavar="FILE",
        help="File to which a line is appended per shape (%(default)s).",
    )  # fmt: skip
    return run_gpu_table(parser.parse_args(arguments))


def run_gpu_table(namespace: argparse.Namespace) -> int:
    """Returns 0. Raises StartupError."""
    unknown = [name for name in namespace.shapes if name not in SHAPES]
    unknown += [kind for kind in namespace.rows if kind not in KINDS]
    if unknown or namespace.repeats < 1:
        raise StartupError(f"--shapes are of {', '.join(SHAPES)}, --rows of {', '.join(KINDS)}, --repeats at least 1")
    if not torch.cuda.is_available():
        raise StartupError("torch finds no CUDA device")
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    for name in namespace.shapes:
        shape = shape_of_ranks(name, namespace.tp)
        print_results(shape, measure_shape(shape, ceilings, namespace), ceilings)
    return 0


def node_config(directory: str, namespace: argparse.Namespace, most: int = MAX_MODEL_LEN) -> NodeConfig:
    """The engine's settings for the table. `most`: tokens of a sequence that the model takes."""
    return NodeConfig(
        model=ModelConfig(
            model=directory, load_format="dummy", dtype="bfloat16", device="cuda",
            max_model_len=min(MAX_MODEL_LEN, most), seed=namespace.seed, kv_cache_dtype=namespace.kv_cache_dtype,
            tp=namespace.tp,
        ),
        cache=CacheConfig(gpu_memory_utilization=0.9),
        scheduler=SchedulerConfig(
            max_num_seqs=MIXED_SEQUENCES, max_num_batched_tokens=namespace.budget,
            async_scheduling=namespace.async_scheduling, cuda_graphs=namespace.cuda_graphs,
        ),
        handoff=HandoffConfig(connector="none"),
    )  # fmt: skip


def measure_shape(shape: Shape, ceilings: Ceilings, namespace: argparse.Namespace) -> list[Measured]:
    """Measure all rows of a shape, then append the record."""
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as directory:
        Path(directory, "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
        most = shape.config.get("max_position_embeddings", MAX_MODEL_LEN)
        config = node_config(directory, namespace, most)
        progress: list[str] = []

        def hear(text: str) -> None:
            progress.append(text)
            sys.stderr.write(f"{shape.name}: {text}\n")

        routing = RoutingCounter()
        with routing.installed("cuda"):
            engine = OfflineEngine(config, hear)
    try:
        kv_itemsize = 1 if namespace.kv_cache_dtype == "fp8" else 2
        costs = ModelCosts(engine.executor.model.spec, shape.weight_bytes, kv_itemsize)
        rng = random.Random(namespace.seed)
        bench = GpuBench(engine, costs, ceilings, namespace.repeats, routing, rng, namespace.tp)
        bench.warm_up()
        results = []
        for row in shape.rows:
            if row.kind in namespace.rows:
                results.append(bench.measure(row))
                sys.stderr.write(f"{shape.name}: {row.name}: {results[-1].value:.2f}\n")
            if row.kind == "decode" and row.count in namespace.profile:
                sys.stdout.write(f"{shape.name}: {row.name}\n{bench.profile(row)}")
    finally:
        engine.close()
    del engine, bench
    gc.collect()
    torch.cuda.empty_cache()
    fields = {
        "shape": shape.name, "config": asdict(config), "progress": progress, "seed": namespace.seed,
        "ceilings": asdict(ceilings), "peer": PEER, "results": [result.record() for result in results],
    }  # fmt: skip
    append_record(namespace.json, "engine_gpu", fields)
    return results


def print_results(shape: Shape, results: list[Measured], ceilings: Ceilings) -> None:
    """Print the table."""
    console = report_console()
    console.print(
        f"{shape.name} shape, weights of {8 * shape.weight_bytes} bits{shape.form and ', experts in '}{shape.form}, "
        "random; ceilings: "
        f"read {ceilings.read / 1e12:.2f} TB/s, copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"products {ceilings.matrix / 1e12:.0f} TFLOP/s in bf16, {ceilings.quantized / 1e12:.0f} in fp8"
    )
    hits = [result.hit for result in results if result.hit is not None]
    columns = ["ours", "range", "roofline", "of it", PEER, "ours is", *["experts hit"] * bool(hits)]
    table = Table("", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for result in results:
        digits = 0 if result.row.is_rate else 2
        low, high = min(result.samples), max(result.samples)
        table.add_row(
            result.row.name,
            f"{result.value:,.{digits}f}",
            f"{low:,.{digits}f}..{high:,.{digits}f}",
            "" if result.roofline is None else f"{result.roofline:,.{digits}f}",
            "" if result.share is None else f"{result.share:.0%}",
            "" if result.row.peer is None else f"{result.row.peer:,.{digits}f}",
            "" if result.gain is None else f"{result.gain:.2f} x",
            *[result.hit.text if result.hit else ""] * bool(hits),
        )
    console.print(table)
