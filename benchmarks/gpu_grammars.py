"""`python -m benchmarks gpu_grammars`: decode steps with rows under schemas, each one of its own, and free ones.

Weights are random, so the answers are unlikely texts: strings of any tokens. `python -m benchmarks vocabulary` makes
the tokenizer.json, and JSONSchemaBench has the schemas (see `structured`). Every row has LENGTH cached tokens before
its first. A row's time is that from its first to its last token, by token, so a draw that it sits out counts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.gpu import node_config
from benchmarks.offline import OfflineEngine
from benchmarks.records import RESULTS, append_record
from benchmarks.shapes import CONFIGS
from benchmarks.structured import read_schemas
from pd_cluster.bench.report import report_console
from pd_cluster.errors import PdError, StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.grammar.grammar_process import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HOSTILE = "start: /([a-zA-Z0-9]{1,3}[.,-]?){500}/"  # a mask takes 4 ms at the median
NUM_ROWS, LENGTH, NUM_TOKENS = 64, 1024, 257
MOST_SCHEMAS = 1000  # of which so many should compile
EOS = 2  # of the vocabulary
LOADS = {"free": 0.0, "all": 1.0, "half": 0.5, "hostile": 1.0}  # share of constrained rows


@dataclass(slots=True)
class GrammarLoad:
    """What one load of NUM_ROWS rows took."""

    name: str
    free_ms: float | None  # a token of a free row, at the median; None: there is none
    constrained_ms: float | None  # the same of a constrained row; of "hostile" without the hostile ones
    sat_out: float  # share of the constrained draws
    ended: float  # share of the constrained tokens after the end of an answer
    waits_ms: list[float] = field(repr=False)  # of each step, for masks

    def wait_ms(self, share: float) -> float:
        """A quantile of the waits."""
        waits = sorted(self.waits_ms)
        return waits[min(len(waits) - 1, int(share * len(waits)))] if waits else 0.0


class GrammarBench:
    """Measures loads on an engine with the vocabulary of its grammars."""

    def __init__(self, engine: OfflineEngine, grammars: Sequence[str], rng: random.Random) -> None:
        """`grammars`: NUM_ROWS."""
        self._engine, self._grammars = engine, grammars
        vocab_size = engine.executor.model.vocab_size
        self._prompts = [rng.choices(range(vocab_size // 2, vocab_size), k=LENGTH) for _ in range(NUM_ROWS)]
        self._waits: list[float] = []

    def measure(self, name: str) -> GrammarLoad:
        """Generate twice, for the caches of prompts and grammars first. Raises RuntimeError."""
        grammars = self._of(name)
        self._generate(grammars, 3)
        self._waits.clear()
        before = self._num_sat_out
        with self._noting_waits():
            took = self._generate(grammars, NUM_TOKENS)
        each_ms = [
            (last - first) / (NUM_TOKENS - 1) * 1e3
            for first, last in zip(took.first_token_s, took.last_token_s, strict=True)
        ]
        free = [ms for ms, grammar in zip(each_ms, grammars, strict=True) if not grammar]
        constrained = [ms for ms, grammar in zip(each_ms, grammars, strict=True) if grammar not in ("", HOSTILE)]
        answers = [tokens for tokens, grammar in zip(took.tokens, grammars, strict=True) if grammar]
        sat_out, drawn = self._num_sat_out - before, sum(map(len, answers))
        return GrammarLoad(
            name,
            statistics.median(free) if free else None,
            statistics.median(constrained) if constrained else None,
            sat_out / (sat_out + drawn) if drawn else 0.0,
            sum(tokens.count(EOS) for tokens in answers) / drawn if drawn else 0.0,
            [wait_s * 1e3 for wait_s in self._waits],
        )

    @property
    def _num_sat_out(self) -> float:
        return self._engine.core._scheduler.counters["draws_sat_out_total"]

    def _of(self, name: str) -> list[str]:
        """The grammar of each row."""
        count = int(LOADS[name] * NUM_ROWS)
        chosen = [grammar if at < count else "" for at, grammar in enumerate(self._grammars)]
        return [HOSTILE] * 4 + chosen[4:] if name == "hostile" else chosen

    def _generate(self, grammars: Sequence[str], num_tokens: int) -> Any:
        samplings = [
            SamplingParams(max_tokens=num_tokens, temperature=0.6, seed=at, ignore_eos=True, grammar=grammar)
            for at, grammar in enumerate(grammars)
        ]
        return self._engine.generate(self._prompts, samplings)

    @contextmanager
    def _noting_waits(self) -> Iterator[None]:
        """Note how long each step with late rows waits for masks."""
        executor: Any = self._engine.executor
        draw_late, runner = executor.draw_late, executor._runner

        def noted() -> float:
            has_late = runner._deferred is not None
            wait_s: float = draw_late()
            self._waits += [wait_s] * has_late
            return wait_s

        executor.draw_late = noted
        try:
            yield
        finally:
            del executor.draw_late


def read_grammars(directory: Path, seed: int, engine: OfflineEngine) -> list[str]:
    """NUM_ROWS different grammars of schemas that compile. Raises StartupError."""
    found: list[str] = []
    executor: Any = engine.executor  # of one device
    kept = executor._grammars
    for _, schema in islice(read_schemas(directory, seed), MOST_SCHEMAS):
        try:
            grammar = write("json", json.dumps(schema), [], coerces_one_of=False)
            compiled = kept.prepare(grammar)
            if not (compiled.exception() or kept.state(compiled).error or grammar in found):
                found.append(grammar)
        except (ValueError, PdError):  # llguidance does not know a keyword
            continue
        if len(found) == NUM_ROWS:
            return found
    raise StartupError(f"--schemas {directory}: {len(found)} of {MOST_SCHEMAS} compile, {NUM_ROWS} are needed")


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_grammars", allow_abbrev=False)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="tokenizer.json.")
    parser.add_argument("--schemas", type=Path, required=True, metavar="DIR", help="Files of JSONSchemaBench.")
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="8b", help="Default: 8b.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="Default: cuda.")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="Times that each load runs (default: 2).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds weights, prompts and schemas.")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "gpu_grammars.jsonl", metavar="FILE",
        help="File to which a line is appended (%(default)s).",
    )  # fmt: skip
    namespace = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as directory:
        results = run(Path(directory), namespace)
    print_loads(results)
    fields = {
        "shape": namespace.shape, "device": namespace.device, "seed": namespace.seed, "num_rows": NUM_ROWS,
        "results": [
            {
                "name": load.name, "free_ms": load.free_ms, "constrained_ms": load.constrained_ms,
                "sat_out": load.sat_out, "ended": load.ended, "wait_ms_p50": load.wait_ms(0.5),
                "wait_ms_p999": load.wait_ms(0.999), "num_waits": len(load.waits_ms),
            }
            for load in results
        ],
    }  # fmt: skip
    append_record(namespace.json, "gpu_grammars", fields)
    return 0


def run(directory: Path, namespace: argparse.Namespace) -> list[GrammarLoad]:
    """Start an engine and measure every load. Raises StartupError."""
    shape = CONFIGS[namespace.shape]
    vocab_size = max(shape["vocab_size"], len(json.loads(namespace.tokenizer.read_text())["model"]["vocab"]))
    shape = shape | {"eos_token_id": EOS, "vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(shape))
    shutil.copy(namespace.tokenizer, directory / "tokenizer.json")
    namespace.kv_cache_dtype, namespace.tp, namespace.budget = "auto", 1, 8192
    namespace.async_scheduling, namespace.cuda_graphs = "auto", True
    config = node_config(str(directory), namespace)
    limits = replace(config.scheduler, max_num_seqs=NUM_ROWS)
    if namespace.device == "cpu":
        model = replace(config.model, device="cpu", dtype="float32", max_model_len=2 * LENGTH)
        config = replace(config, model=model, cache=replace(config.cache, num_blocks=NUM_ROWS * 96))
        limits = replace(limits, async_scheduling="on")
    engine = OfflineEngine(replace(config, scheduler=limits), lambda text: None)
    try:
        started_s = time.perf_counter()
        grammars = read_grammars(namespace.schemas, namespace.seed, engine)
        sys.stderr.write(f"{len(grammars)} grammars in {time.perf_counter() - started_s:.1f} s\n")
        bench = GrammarBench(engine, grammars, random.Random(namespace.seed))
        return [bench.measure(name) for name in LOADS for _ in range(namespace.repeats)]
    finally:
        engine.close()


def print_loads(loads: Sequence[GrammarLoad]) -> None:
    """Print the table."""
    columns = ("free ms", "constrained ms", "sat out", "waits p50 ms", "p99.9 ms", "after the end")
    table = Table("", *columns)
    for load in loads:
        times = ["" if ms is None else f"{ms:.2f}" for ms in (load.free_ms, load.constrained_ms)]
        waits = [f"{load.wait_ms(share):.2f}" for share in (0.5, 0.999)]
        table.add_row(load.name, *times, f"{load.sat_out:.1%}", *waits, f"{load.ended:.0%}")
    report_console().print(table)
