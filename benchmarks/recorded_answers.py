"""`python -m benchmarks recorded_answers`: drafts by lookup beside none, where a model writes recorded answers.

Random weights repeat nothing. So the texts are made of this repository (`recorded_texts.py`), and the benchmark's own
sampler raises the recorded token of each row (`recorded_sampler.py`). What a step costs, what is looked up, how many
drafts are worth it, and what is given back are the product's.

    ratio      tokens a second with drafts through those without, of one engine in turn: of the medians of rounds, and
               the least and the most of pairs of rounds
    tokens     of a stream in a step, as its client sees events
    TPOT       of streams of all rounds, ms: p50 and p99; "quiet" ones are those of the task that matches nothing

A case is a shape, a context, a number of streams and a task, or several that "+" joins: their streams take turns.
A first round with drafts does not count: chances are learned in it. Streams that end are followed by others, prompts
are cached but for their last token, so all steps are of decodes. Each case is recorded when it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.closed_loop import ClosedLoop, fill_cache
from benchmarks.offline import OfflineEngine
from benchmarks.recorded_sampler import RecordedTokens
from benchmarks.recorded_texts import TASKS, UNMATCHED, AnswerMaker, encoder
from benchmarks.records import RESULTS, append_record
from benchmarks.shapes import CONFIGS
from pd_cluster.bench.report import report_console
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.closed_loop import LoopResult
    from benchmarks.recorded_texts import RecordedAnswer

MIXED, BESIDE = "+".join(TASKS), f"rewrite+{UNMATCHED}"
NAMES = {MIXED: "mixed", BESIDE: "beside"}
BLOCK = 64  # tokens of a KV block; a prompt is so many of them, and one token
COUNTERS = {
    "steps": "engine_steps_total",
    "runs": "spec_decode_num_drafts_total",
    "drafts": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """What is measured at once."""

    shape: str
    context: int
    batch: int
    task: str

    @property
    def name(self) -> str:
        return NAMES.get(self.task, self.task)


@dataclass(frozen=True, slots=True)
class RecordedRound:
    """What one setting gave in one round."""

    rate: float  # tokens a second
    seconds: float
    num_tokens: int  # that counted
    counts: dict[str, int]  # by name of COUNTERS
    num_right: int  # streams that wrote what is recorded
    num_streams: int
    tpot_ms: dict[str, tuple[float, ...]]  # of streams that ended, by task
    run: float  # tokens of a stream's event

    @classmethod
    def of(cls, result: LoopResult) -> RecordedRound:
        tpot, streams = dict[str, list[float]](), result.streams
        for stream in streams:
            if stream.is_over and (seconds := stream.tpot_s) is not None:
                tpot.setdefault(stream.answer.task, []).append(1e3 * seconds)
        return cls(
            rate=result.rate,
            seconds=result.seconds,
            num_tokens=result.num_tokens,
            counts={name: int(result.counters.get(counter, 0)) for name, counter in COUNTERS.items()},
            num_right=sum(stream.is_right for stream in streams),
            num_streams=len(streams),
            tpot_ms={task: tuple(found) for task, found in tpot.items()},
            run=sum(len(one.tokens) for one in streams) / max(1, sum(one.num_events for one in streams)),
        )


def tpot(rounds: Sequence[RecordedRound], task: str = "") -> tuple[float, float]:
    """p50 and p99, ms, of the streams of a task in all these rounds; "": of all tasks. NaN: there are none."""
    tpots = [each for one in rounds for name, times in one.tpot_ms.items() for each in times if task in ("", name)]
    if not (found := sorted(tpots)):
        return float("nan"), float("nan")
    return found[len(found) // 2], found[min(len(found) - 1, int(0.99 * len(found)))]


@dataclass(frozen=True, slots=True)
class RecordedResult:
    """The rounds of a case."""

    case: RecordedCase
    none: list[RecordedRound]
    lookup: list[RecordedRound]

    @property
    def rates(self) -> tuple[float, float]:
        """Without drafts and with: the medians."""
        none, lookup = (statistics.median(one.rate for one in rounds) for rounds in (self.none, self.lookup))
        return none, lookup

    @property
    def ratio(self) -> float:
        none, lookup = self.rates
        return lookup / none

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most ratio of two rounds, one after the other."""
        ratios = [lookup.rate / none.rate for none, lookup in zip(self.none, self.lookup, strict=True)]
        return min(ratios), max(ratios)

    @property
    def acceptance(self) -> float | None:
        num_drafts = sum(one.counts["drafts"] for one in self.lookup)
        return sum(one.counts["accepted"] for one in self.lookup) / num_drafts if num_drafts else None

    @property
    def is_right(self) -> bool:
        return all(one.num_right == one.num_streams for one in (*self.none, *self.lookup))

    @property
    def row(self) -> list[str]:
        """Of the table."""
        case, none, lookup = self.case, self.none[-1], self.lookup[-1]
        rounds, share = (none, lookup), "" if self.acceptance is None else f"{self.acceptance:.0%}"
        p50s, p99s = zip(tpot(self.none), tpot(self.lookup), strict=True)
        quiet = [tpot(each, UNMATCHED)[1] for each in (self.none, self.lookup)] if UNMATCHED in none.tpot_ms else []
        return [
            f"{case.shape} {case.context} B {case.batch} {case.name}", _pair(self.rates, 0),
            f"{self.ratio:.3f}", "{:.3f}-{:.3f}".format(*self.spread), f"{lookup.run:.2f}", share,
            _pair([one.counts["steps"] for one in rounds], 0), str(lookup.counts["drafts"]),
            _pair(p50s, 2), _pair(p99s, 2), _pair(quiet, 2), "" if self.is_right else "WRONG",
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        rounds = {"none": self.none, "lookup": self.lookup}
        return {
            **asdict(self.case), "name": self.case.name, "ratio": self.ratio, "spread": self.spread,
            "acceptance": self.acceptance, "is_right": self.is_right,
            "tpot_ms": {name: tpot(found) for name, found in rounds.items()},
            "tpot_quiet_ms": {name: tpot(found, UNMATCHED) for name, found in rounds.items()},
            "rounds": {name: [_recorded(one) for one in found] for name, found in rounds.items()},
        }  # fmt: skip


COLUMNS = (
    "case", "tokens/s", "ratio", "rounds", "a run", "accepted", "steps", "drafts", "TPOT p50", "p99", "quiet p99", "",
)  # fmt: skip


def _pair(numbers: Sequence[float], digits: int) -> str:
    """Without drafts and with."""
    return " / ".join(f"{number:,.{digits}f}" for number in numbers)


def _recorded(one: RecordedRound) -> dict[str, Any]:
    tpots = {task: tpot([one], task) for task in one.tpot_ms}
    return {**asdict(one), "tpot_ms": tpots}


@dataclass(slots=True)
class RecordedBench:
    """Measures cases on an engine that writes recorded answers."""

    engine: OfflineEngine
    recorded: RecordedTokens
    maker: AnswerMaker
    output_len: int
    repeats: int
    least: int  # answers of a round, at least

    def measure(self, case: RecordedCase) -> RecordedResult:
        """Raises RuntimeError."""
        num = max(case.batch, self.least, len(case.task.split("+")))
        answers = self.maker.answers(case.task, num, case.context // BLOCK * BLOCK + 1, self.output_len)
        self.recorded.set(answers)
        fill_cache(self.engine, answers, self.recorded.seeds)
        self._round(case, answers, drafts=True)
        result = RecordedResult(case, [], [])
        for number in range(self.repeats):  # in turn, so that a machine that becomes slower favours neither
            for drafts in (False, True) if number % 2 == 0 else (True, False):
                found = RecordedRound.of(self._round(case, answers, drafts=drafts))
                (result.lookup if drafts else result.none).append(found)
        return result

    def _round(self, case: RecordedCase, answers: list[RecordedAnswer], *, drafts: bool) -> LoopResult:
        engine = self.engine
        loop = ClosedLoop(engine, answers, self.recorded.seeds, case.batch, len(answers))
        with nullcontext() if drafts else engine.without_drafts():
            gc.collect()
            return loop.run()


def node_config(directory: Path, namespace: argparse.Namespace) -> NodeConfig:
    """Of a node that drafts, with random weights."""
    on_gpu = namespace.device == "cuda"
    most, longest = max(namespace.batches), _longest(namespace)
    num_blocks = 2 * max(most, namespace.least, len(TASKS)) * (-(-longest // BLOCK) + 1) + 8
    cache = CacheConfig(gpu_memory_utilization=0.9) if on_gpu else CacheConfig(num_blocks=num_blocks, block_size=BLOCK)
    return NodeConfig(
        model=ModelConfig(
            model=str(directory), load_format="dummy", device=namespace.device, max_model_len=longest,
            dtype="bfloat16" if on_gpu else "float32", num_threads=1,
        ),
        cache=cache,
        scheduler=SchedulerConfig(
            max_num_seqs=max(most, namespace.max_num_seqs), speculation="lookup", max_drafts=namespace.max_drafts
        ),
        handoff=HandoffConfig(connector="none"),
    )  # fmt: skip


def _longest(namespace: argparse.Namespace) -> int:
    return int(max(namespace.contexts) + 2 * BLOCK + namespace.output_len)


def measure_recorded(shape: str, namespace: argparse.Namespace) -> Iterator[RecordedResult]:
    """Start an engine of the shape and measure its cases, as long as there is time. Raises StartupError."""
    started_s = time.perf_counter()
    vocab_size = CONFIGS[shape]["vocab_size"]
    maker = AnswerMaker(encoder(namespace.tokenizer, vocab_size), vocab_size)
    num_answers = max(*namespace.batches, namespace.least, len(TASKS) + 1)
    recorded = RecordedTokens(num_answers, _longest(namespace), vocab_size, namespace.device)
    with tempfile.TemporaryDirectory(prefix="pd-bench-") as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIGS[shape]), encoding="utf-8")
        with recorded.installed():
            engine = OfflineEngine(
                node_config(Path(directory), namespace), lambda line: _tell(f"{shape}: {line}", started_s)
            )
    try:
        bench = RecordedBench(engine, recorded, maker, namespace.output_len, namespace.repeats, namespace.least)
        _tell(f"{shape}: started", started_s)
        for context in namespace.contexts:
            # Short ones, not counted: further programs may be compiled
            replace(bench, output_len=16).measure(RecordedCase(shape, context, min(namespace.batches), MIXED))
            for task in namespace.tasks:
                for batch in sorted(namespace.batches, reverse=True):  # the prompts of fewer are cached then
                    if time.perf_counter() - started_s > namespace.within:
                        _tell(f"{shape}: no time for {context} {batch} {task}", started_s)
                        continue
                    yield (result := bench.measure(RecordedCase(shape, context, batch, task)))
                    _tell("  ".join(result.row), started_s)
    finally:
        engine.close()


def _tell(line: str, started_s: float) -> None:
    sys.stderr.write(f"{time.perf_counter() - started_s:6.1f} s  {line}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record. Returns 0; 1 if a stream wrote something else than its recorded answer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recorded_answers", allow_abbrev=False)
    add = parser.add_argument
    tasks = ("mixed", *TASKS, "beside", UNMATCHED)
    add("--shapes", nargs="+", default=["8b"], choices=CONFIGS, metavar="NAME", help="Default: 8b.")
    add("--contexts", nargs="+", type=int, default=[1024], metavar="N", help="Tokens of prompts (default: 1024).")
    add("--batches", nargs="+", type=int, default=[1, 8, 32, 128], metavar="N", help="Streams (default: 1 8 32 128).")
    add(
        "--tasks", nargs="+", default=tasks, metavar="NAME",
        help=f"{', '.join(tasks)}, or several that + joins (default: all).",
    )  # fmt: skip
    add("--tokenizer", type=Path, metavar="DIR", help="With a tokenizer.json. Default: pieces of text, about as long.")
    add("--output-len", type=int, default=256, metavar="N", help="Tokens of an answer, at most (default: 256).")
    add("--repeats", type=int, default=3, metavar="N", help="Rounds with drafts and without that count (default: 3).")
    add("--least", type=int, default=3, metavar="N", help="Answers of a round, at least (default: 3).")
    add("--within", type=float, default=1e9, metavar="S", help="Begin no case after so many seconds of a shape.")
    add("--device", default="cuda", choices=("cpu", "cuda"), help="Default: cuda.")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="Of the node (default: 256).")
    add("--max-drafts", type=int, default=16, metavar="N", help="Of a stream in a step (default: 16).")
    add("--note", default="", metavar="TEXT", help="Written to the record.")
    add("--json", type=Path, default=RESULTS / "recorded_answers.jsonl", metavar="FILE", help="(%(default)s)")
    namespace = parser.parse_args(arguments)
    joined = {name: task for task, name in NAMES.items()}
    namespace.tasks = [joined.get(task, task) for task in namespace.tasks]
    known = {*TASKS, UNMATCHED}
    if unknown := {one for task in namespace.tasks for one in task.split("+")} - known:
        raise StartupError(f"--tasks: there is no {', '.join(sorted(unknown))}")
    if min(namespace.output_len, namespace.repeats, namespace.least, *namespace.batches, *namespace.contexts) < 1:
        raise StartupError("--output-len, --repeats, --least, --batches and --contexts must be at least 1")
    return run(namespace)


def run(namespace: argparse.Namespace) -> int:
    """See `main`."""
    results = list[RecordedResult]()
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(namespace).items()}
    config.pop("json")
    for shape in namespace.shapes:
        for result in measure_recorded(shape, namespace):
            results.append(result)
            fields = {"config": config, "load": os.getloadavg()[0], "results": [result.record()]}
            append_record(namespace.json, "recorded_answers", fields)
        gc.collect()
    table = Table(*COLUMNS)
    for result in results:
        table.add_row(*result.row)
    console = report_console()
    console.print("recorded answers")
    console.print(table)
    return int(not all(one.is_right for one in results))
