"""`python -m benchmarks drafts`: answers of a model with drafts by lookup and without, in turn in one process.

    equal      answers of both settings with the same tokens. A draft changes no answer; sums in another order may
    accepted   drafts that were the next token, of all that steps have verified
    stream     tokens a second of a stream from its first to its last, with drafts through without: the mean of all.
               All prompts are sent at once, so the longest answer ends a batch, whatever the others gain
    ratio      tokens a second with drafts, through those without: the median of rounds, each with both settings

A first round does not count: it fills the prefix caches, so that the others measure the answers, and both engines learn
in it how long steps take, and one what drafts are worth. An answer ends as the model ends it. Each case is recorded
when it ends, in a line of its own: a run that is ended by hand keeps those before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

import pd_cluster
from benchmarks.draft_tasks import make_tasks
from benchmarks.offline import OfflineEngine
from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.report import report_console
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.draft_tasks import Question

SETTINGS = ("none", "lookup")
DEMO_MODEL = Path(pd_cluster.__file__).parent / "demo_model"
COUNTERS = {
    "steps": "engine_steps_total",
    "runs": "spec_decode_num_drafts_total",
    "drafts": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}
AT_PLACE = "spec_decode_num_accepted_tokens_per_pos_total|position="


@dataclass(frozen=True, slots=True)
class DraftPrompt:
    """Token ids of a prompt, and of what is predicted of its answer."""

    token_ids: list[int]
    prediction: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked in one round: `batch` prompts at a time."""

    task: str
    batch: int
    temperature: float


@dataclass(slots=True)
class Sample:
    """One setting in one round of a case."""

    seconds: float = 0.0  # until the last token of each batch, added up
    tokens: list[list[int]] = field(default_factory=list)  # of each answer
    stream_rates: list[float] = field(default_factory=list)  # tokens a second of each answer of two tokens or more
    counts: dict[str, int] = field(default_factory=dict)  # by name of COUNTERS
    accepted_at: list[int] = field(default_factory=list)  # by place in a run of drafts
    load: float = 0.0  # of the machine, mean of a minute

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds

    def record(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds, "stream_rates": self.stream_rates, "tokens": self.num_tokens,
            "rate": self.rate, "load": self.load, **self.counts,
            "accepted_at": self.accepted_at,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredTask:
    """The rounds of a case: samples by setting, in turn."""

    case: Case
    rounds: list[dict[str, Sample]]

    @property
    def num_answers(self) -> int:
        return sum(len(samples["none"].tokens) for samples in self.rounds)

    @property
    def num_equal(self) -> int:
        """Answers with the same tokens in both settings."""
        pairs = (zip(*(samples[name].tokens for name in SETTINGS), strict=True) for samples in self.rounds)
        return sum(one == other for round_pairs in pairs for one, other in round_pairs)

    @property
    def ratio(self) -> float:
        """Tokens a second with drafts, through those without."""
        return statistics.median(samples["lookup"].rate / samples["none"].rate for samples in self.rounds)

    @property
    def stream_ratio(self) -> float | None:
        """The mean of streams' rates with drafts, through that without. None: an answer had one token only."""
        pairs = [(samples["lookup"].stream_rates, samples["none"].stream_rates) for samples in self.rounds]
        ratios = [statistics.mean(on) / statistics.mean(off) for on, off in pairs if on and off]
        return statistics.median(ratios) if ratios else None

    def rate(self, setting: str) -> float:
        """Median tokens a second."""
        return statistics.median(samples[setting].rate for samples in self.rounds)

    def total(self, name: str, setting: str = "lookup") -> int:
        """Of all rounds: a name of COUNTERS, or tokens."""
        samples = [samples[setting] for samples in self.rounds]
        return sum(one.num_tokens if name == "tokens" else one.counts[name] for one in samples)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts of all; None: there were none."""
        num_drafts = self.total("drafts")
        return self.total("accepted") / num_drafts if num_drafts else None

    @property
    def text(self) -> str:
        """One line."""
        case, (off, on) = self.case, (self.total("tokens", name) / self.total("steps", name) for name in SETTINGS)
        return (
            f"{case.task}, {case.batch} at a time, temperature {case.temperature:g}: {self.num_equal} of "
            f"{self.num_answers} equal, {off:.2f} and {on:.2f} tokens a step, {self.total('accepted')} of "
            f"{self.total('drafts')} drafts accepted, {self.ratio:.2f} x"
        )

    @property
    def accepted_at(self) -> list[int]:
        """Accepted drafts by place in a run of drafts."""
        return [sum(places) for places in zip(*(one["lookup"].accepted_at for one in self.rounds), strict=True)]

    def record(self) -> dict[str, Any]:
        case = self.case
        return {
            "task": case.task, "batch": case.batch, "temperature": case.temperature, "answers": self.num_answers,
            "equal": self.num_equal, "tokens": self.total("tokens"),
            "steps": {name: self.total("steps", name) for name in SETTINGS},
            "drafts": self.total("drafts"), "runs": self.total("runs"), "accepted": self.total("accepted"),
            "acceptance": self.acceptance, "accepted_at": self.accepted_at,
            "rate": {name: self.rate(name) for name in SETTINGS}, "ratio": self.ratio,
            "stream_ratio": self.stream_ratio,
            "samples": {name: [samples[name].record() for samples in self.rounds] for name in SETTINGS},
        }  # fmt: skip


@dataclass(slots=True)
class DraftBench:
    """Measures cases on two engines of one model, which differ in their drafts."""

    engines: dict[str, OfflineEngine]
    output_len: int
    seed: int

    def measure(self, case: Case, prompts: list[DraftPrompt], repeats: int) -> MeasuredTask:
        """A round that does not count, and `repeats` that do. Raises RuntimeError when a request is refused."""
        rounds = list[dict[str, Sample]]()
        for number in range(repeats + 1):
            # The same number of rounds begin with each: a machine that becomes busy meets both
            names = SETTINGS if number % 2 else SETTINGS[::-1]
            samples = {name: self._sample(self.engines[name], case, prompts, number) for name in names}
            if number:
                rounds.append(samples)
        return MeasuredTask(case, rounds)

    def _sample(self, engine: OfflineEngine, case: Case, prompts: list[DraftPrompt], number: int) -> Sample:
        """One setting, one round. Seeds differ between rounds, and not between settings."""
        before, sample = engine.counters(), Sample()
        for start in range(0, len(prompts), case.batch):
            asked = prompts[start : start + case.batch]
            seeds = range(self.seed + 1000 * number + start, self.seed + 1000 * number + start + len(asked))
            samplings = [
                SamplingParams(max_tokens=self.output_len, temperature=case.temperature, seed=seed) for seed in seeds
            ]
            generated = engine.generate([one.token_ids for one in asked], samplings, [one.prediction for one in asked])
            sample.seconds += generated.seconds
            sample.tokens += generated.tokens
            times = zip(generated.tokens, generated.first_token_s, generated.last_token_s, strict=True)
            sample.stream_rates += [(len(one) - 1) / (last - first) for one, first, last in times if last > first]
        counters = engine.counters()
        gained = {name: int(value - before.get(name, 0)) for name, value in counters.items()}
        sample.counts = {name: gained.get(counter, 0) for name, counter in COUNTERS.items()}
        places = {int(name.removeprefix(AT_PLACE)): num for name, num in gained.items() if name.startswith(AT_PLACE)}
        sample.accepted_at = [places[place] for place in sorted(places)]
        sample.load = os.getloadavg()[0]
        return sample


def read_prompts(model: Path, questions: Sequence[Question], num_prompts: int) -> list[DraftPrompt]:
    """Render and tokenize questions as chats, in turn until there are enough. Raises StartupError."""
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    except Exception as error:  # the library's, many kinds
        raise StartupError(f"the tokenizer in {model} cannot be loaded: {error}") from error
    prompts = list[DraftPrompt]()
    for question in islice(cycle(questions), num_prompts):
        messages = [{"role": "user", "content": question.text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(DraftPrompt(token_ids, tuple(tokenizer.encode(question.prediction, add_special_tokens=False))))
    return prompts


def make_engine(namespace: argparse.Namespace, speculation: str, num_tokens: int) -> OfflineEngine:
    """An engine with room for `num_tokens` in its cache. Raises StartupError."""
    block_size = 16 if namespace.device == "cpu" else 64
    config = NodeConfig(
        model=ModelConfig(
            model=str(namespace.model), device=namespace.device, dtype=namespace.dtype,
            max_model_len=namespace.max_model_len, num_threads=namespace.threads,
        ),
        cache=CacheConfig(
            num_blocks=2 + max(namespace.max_model_len, num_tokens) // block_size, block_size=block_size
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=namespace.max_num_seqs, speculation=speculation, max_drafts=namespace.max_drafts
        ),
        handoff=HandoffConfig(connector="none"),
    )  # fmt: skip

    def progress(text: str) -> None:
        sys.stderr.write(f"{speculation}: {text}\n")

    return OfflineEngine(config, progress)


def print_results(results: list[MeasuredTask]) -> None:
    """A row a case."""
    console = report_console()
    columns = (
        "task",
        "batch",
        "temp.",
        "equal",
        "tokens a step",
        "drafts",
        "accepted",
        "tokens/s off",
        "on",
        "ratio",
        "stream",
    )
    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for one in results:
        share = "" if one.acceptance is None else f"{one.acceptance:.0%}"
        steps = " / ".join(f"{one.total('tokens', name) / one.total('steps', name):.2f}" for name in SETTINGS)
        table.add_row(
            one.case.task, str(one.case.batch), f"{one.case.temperature:g}", f"{one.num_equal} of {one.num_answers}",
            steps, str(one.total("drafts")), share, f"{one.rate('none'):.1f}", f"{one.rate('lookup'):.1f}",
            f"{one.ratio:.2f} x", "" if one.stream_ratio is None else f"{one.stream_ratio:.2f} x",
        )  # fmt: skip
    console.print(table)
    for one in results:
        if num_runs := one.total("runs"):
            shares = " ".join(f"{num / num_runs:.2f}" for num in one.accepted_at)
            console.print(f"{one.case}: {num_runs} runs, accepted by place: {shares}")


def main(arguments: Sequence[str]) -> int:
    """Measure, print and record. Returns 0; 1 if an answer was another with drafts. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks drafts", allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=Path, default=DEMO_MODEL, metavar="DIR", help="Model directory. Default: the demo model.")
    add("--tasks", nargs="+", metavar="NAME", help="Some of edit, predicted, json and prose. Default: all.")
    add("--files", nargs="*", type=Path, default=[], metavar="FILE", help="Texts that are to be edited, a task each.")
    add(
        "--num-prompts",
        type=int,
        default=8,
        metavar="N",
        help="Of each task; beyond its 8 questions they come again (default: 8).",
    )
    add("--output-len", type=int, default=128, metavar="N", help="Tokens of an answer, at most (default: 128).")
    add("--batches", nargs="+", type=int, default=[1, 8], metavar="N", help="Prompts sent at once (default: 1 8).")
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.7], metavar="X", help="Default: 0 0.7.")
    add("--repeats", type=int, default=2, metavar="N", help="Rounds that count (default: 2).")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="Default: cpu.")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="Default: auto.")
    add("--threads", type=int, default=1, metavar="N", help="Compute threads (default: 1).")
    add("--max-num-seqs", type=int, default=0, metavar="N", help="Of a node. 0: its own choice.")
    add("--max-drafts", type=int, default=16, metavar="N", help="Of a sequence in a step (default: 16).")
    add("--max-model-len", type=int, default=2048, metavar="N", help="Tokens of prompt and answer (default: 2048).")
    add("--seed", type=int, default=0, metavar="N", help="Seeds the draws.")
    add("--note", default="", metavar="TEXT", help="Written to the record.")
    add("--json", type=Path, default=RESULTS / "drafts.jsonl", metavar="FILE", help="Appended to (%(default)s).")
    return run(parser.parse_args(arguments))


def run(namespace: argparse.Namespace) -> int:
    """See `main`."""
    if min(namespace.num_prompts, namespace.output_len, namespace.repeats, *namespace.batches) < 1:
        raise StartupError("--num-prompts, --output-len, --repeats and --batches must be at least 1")
    try:
        tasks = make_tasks(namespace.files)
    except OSError as error:
        raise StartupError(f"--files: {error}") from error
    if empty := [name for name, questions in tasks.items() if not questions]:
        raise StartupError(f"--files: there is no text for {', '.join(empty)}")
    if unknown := set(namespace.tasks or ()) - set(tasks):
        raise StartupError(f"--tasks: there is no {', '.join(sorted(unknown))}")
    names = [name for name in tasks if not namespace.tasks or name in namespace.tasks or name not in make_tasks(())]
    prompts = {name: read_prompts(namespace.model, tasks[name], namespace.num_prompts) for name in names}
    longest = sum(len(one.token_ids) + 2 * namespace.output_len for found in prompts.values() for one in found)
    engines, results = dict[str, OfflineEngine](), list[MeasuredTask]()
    try:
        for setting in SETTINGS:
            engines[setting] = make_engine(namespace, setting, 2 * longest)
        bench, fields = DraftBench(engines, namespace.output_len, namespace.seed), _fields(namespace)
        for batch in namespace.batches:
            for temperature in namespace.temperatures:
                for name in names:
                    case = Case(name, batch, temperature)
                    results.append(bench.measure(case, prompts[name], namespace.repeats))
                    append_record(namespace.json, "drafts", {**fields, "results": [results[-1].record()]})
                    sys.stderr.write(f"{results[-1].text}\n")
    finally:
        for engine in engines.values():
            engine.close()
    print_results(results)
    return int(any(one.num_equal < one.num_answers for one in results))


def _fields(namespace: argparse.Namespace) -> dict[str, Any]:
    """Of a run, in the record of each of its cases."""
    config = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(namespace).items()
        if name not in ("json", "files", "model")
    }
    return {"config": config, "model": namespace.model.name, "files": [path.name for path in namespace.files]}
