"""`pd-cluster bench serve`: makes a workload, sends it, reports."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pd_cluster.bench.edits import edit_of
from pd_cluster.bench.load import Prompt, Target, find_model, find_vocabulary, open_session, run_load
from pd_cluster.bench.plot import check_plotting, plot_serve
from pd_cluster.bench.report import print_summary, serve_record, write_json
from pd_cluster.bench.statistics import RequestRecord, Summary, summarize
from pd_cluster.bench.workload import Arrival, Length, at_rate, poisson, prompt_ids, read_trace, rescale
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    import aiohttp

    from pd_cluster.bench.turn_statistics import TurnsSummary

DEFAULT_RATE = 1.0
INPUT, OUTPUT = Length(512, 512), Length(128, 128)
DEFAULT_NUM_REQUESTS = 100
FIRST_ORDINARY_ID = 256  # with --vocab-size: lower ids are often special tokens or single bytes


def run_serve(namespace: argparse.Namespace) -> int:
    """Returns 0 when every request was answered, else 1. Raises StartupError."""
    if namespace.plot:
        check_plotting()
    is_edits = namespace.workload == "edits"
    if namespace.prediction and not is_edits:
        raise StartupError("--prediction needs --workload edits")
    arrivals = _arrivals(namespace)
    target = target_of(namespace, ignore_eos=not (namespace.stop_at_eos or is_edits))
    warmups = [replace(item, at_s=0.0, prefix_blocks=()) for item in arrivals[: namespace.warmup]]
    make = partial(edit_of, seed=namespace.seed, predicts=namespace.prediction) if is_edits else None
    target, records = uvloop.run(measure(target, arrivals, warmups, namespace.vocab_size, namespace.seed, make))
    summary = summarize(records, dict(namespace.goodput), namespace.slo)
    print_summary(summary)
    rate = f"{namespace.rate:g}/s" if namespace.rate else "as recorded" if namespace.trace else f"{DEFAULT_RATE:g}/s"
    write_report(
        namespace, target, summary, summary, records, f"{namespace.trace.name if namespace.trace else 'Poisson'} {rate}"
    )
    return 0 if summary.num_ok == summary.num_requests else 1


def write_report(
    namespace: argparse.Namespace, target: Target, summary: Summary | TurnsSummary, plotted: Summary,
    records: Sequence[RequestRecord], load: str,
) -> None:  # fmt: skip
    """The files of --json and --plot. `load`: for the plot's title. Raises StartupError."""
    title = f"{target.model}: {len(records)} requests, {load}, {plotted.output_rate:.0f} output tokens/s"
    try:
        if namespace.json:
            write_json(namespace.json, serve_record(_config(namespace, target), summary, records))
        if namespace.plot:
            plot_serve(namespace.plot, plotted, records, title, getattr(summary, "window_s", None))
    except OSError as error:
        raise StartupError(f"the report cannot be written: {error}") from error


def target_of(namespace: argparse.Namespace, *, ignore_eos: bool) -> Target:
    return Target(
        url=namespace.url.rstrip("/"),
        model=namespace.model,
        temperature=namespace.temperature,
        ignore_eos=ignore_eos,
        route=namespace.route or "",
        api_key=namespace.api_key,
        timeout_s=namespace.timeout_s,
        counts_tokens=True,
    )


def _arrivals(namespace: argparse.Namespace) -> list[Arrival]:
    if namespace.trace:
        rows = read_trace(namespace.trace, namespace.num_requests, namespace.max_input_len)
        scale, cap = namespace.trace_scale, namespace.max_output_len
        rows = rescale(rows, rate=namespace.rate, length_scale=scale, max_output=cap)
        return at_rate(rows, namespace.rate or DEFAULT_RATE, namespace.seed) if namespace.trace_poisson else rows
    num_requests = namespace.num_requests or DEFAULT_NUM_REQUESTS
    if num_requests < 1:
        raise StartupError("--num-requests must be at least 1")
    rate = namespace.rate or DEFAULT_RATE
    lengths = namespace.input_len or INPUT, namespace.output_len or OUTPUT
    return poisson(num_requests, rate, *lengths, namespace.seed)


async def measure(
    target: Target,
    arrivals: list[Arrival],
    warmups: list[Arrival],
    vocab_size: int,
    seed: int,
    make: Callable[[Arrival, int], Prompt] | None = None,
) -> tuple[Target, list[RequestRecord]]:
    """Send the warm-ups, then the load. Returns the target with its model's name, and a record per arrival.

    make: the prompt of an arrival and its number; None: random ids below `vocab_size`, or, if that is 0, of ordinary
    text, from the server. Raises StartupError.
    """
    async with open_session() as session:
        target, vocabulary = await prepare(session, target, vocab_size, needs_vocabulary=make is None)
    make = make or partial(prompt_ids, vocabulary=vocabulary, seed=seed)
    requests = [(item, make(item, index)) for index, item in enumerate(arrivals)]
    # not the measured prompts, which would be in the prefix cache then
    others = [(item, make(item, -1 - index)) for index, item in enumerate(warmups)]
    if others:
        await run_load(target, others)
    with undisturbed(len(requests)) as bar:
        return target, await run_load(target, requests, bar.advance)


async def prepare(
    session: aiohttp.ClientSession, target: Target, vocab_size: int, *, needs_vocabulary: bool = True
) -> tuple[Target, list[int]]:
    """The target with its model's name, and the ids that prompts are drawn from. Raises StartupError."""
    if not target.model:
        target = replace(target, model=await find_model(session, target.url, target.headers))
    vocabulary = list(range(min(FIRST_ORDINARY_ID, vocab_size // 2), vocab_size))
    return target, vocabulary if vocabulary or not needs_vocabulary else await find_vocabulary(session, target)


@contextmanager
def undisturbed(total: int) -> Iterator[RequestsBar]:
    """Without garbage collections, which would read millions of objects in prompts and delay requests.

    What exists now is not searched for garbage later either: the command ends after its report.
    """
    gc.collect()
    gc.freeze()
    with RequestsBar(total) as bar:
        yield bar


def _config(namespace: argparse.Namespace, target: Target) -> dict[str, Any]:
    """The flags as JSON, without the key."""
    flags = {name: value for name, value in vars(namespace).items() if name != "api_key"}
    flags["model"] = target.model
    plain = (str, int, float, bool, list, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in flags.items()}


class RequestsBar:
    """A progress bar on a terminal, a line per tenth elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._failed = 0
        self._console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console) if self._console.is_terminal else None
        self._task = self._progress.add_task("requests", total=total) if self._progress else None

    def __enter__(self) -> RequestsBar:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, record: RequestRecord) -> None:
        self._done += 1
        self._failed += not record.ok
        text = f"requests ({self._failed} failed)" if self._failed else "requests"
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=self._done, description=text)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            sys.stderr.write(f"{self._done}/{self._total} {text}\n")
