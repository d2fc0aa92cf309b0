"""`python -m benchmarks ranks`: what frames to the ranks of a node and their acknowledgements cost, without a model.

Real processes of ranks (`timed_rank`) behind the engine's own RankLink. A step's frame is handed over, its step lasts a
given time on each rank, and then the acknowledgements of all ranks are awaited, as the step loop does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.report import report_console
from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.worker.rank_frames import PhaseFrame, RankStart, StepFrame
from pd_cluster.worker.rank_link import RankLink
from pd_kernels.values import StepSize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BLOCK, CONTEXT, STEP_TOKENS = 64, 4096, 2048
DECODES = (1, 32, 256)
PROMPT = 8192
UNCOUNTED = 20  # first steps of a batch
STEP_DEADLINE_S = 5.0
LIMIT_MS = 0.1  # goal: a step's frame and acknowledgement together


@dataclass(frozen=True, slots=True)
class Times:
    """Of the steps of one batch, in milliseconds as p50 and p99; CPU in milliseconds a step."""

    frame_bytes: int
    frame: tuple[float, float]  # from the hand-over of the step until the last rank has decoded it
    sent: tuple[float, float]  # of that rank 0's own part: encoding, and writing to each rank's socket
    acknowledged: tuple[float, float]  # from the step's end on the last rank until rank 0 knows of it
    together_ms: float  # p50 of both
    cpu_rank_0: float
    cpu_rank: float  # of the other ranks, mean


def decodes(step: int, count: int) -> Batch:
    """One of `count` sequences of some 4,096 tokens gets a new block every 64 steps."""
    chunks = [
        SequenceChunk(seq_id, place := CONTEXT + seq_id + step, 1, (NewBlocks(0, place // BLOCK, (seq_id,)),), 1)
        if (CONTEXT + seq_id + step) % BLOCK == 0
        else SequenceChunk(seq_id, CONTEXT + seq_id + step, 1, num_samples=1)
        for seq_id in range(count)
    ]
    return Batch(step, chunks=tuple(chunks))


def prompt(step: int, length: int) -> Batch:
    """The first chunk of a new sequence, with all of its tokens and the chunk's blocks, beside 32 decodes."""
    beside, blocks = decodes(step, 32), tuple(range(length // BLOCK))
    tokens = tuple((7919 * place + step) % 128_256 for place in range(length))
    start = SequenceStart(1000 + step, tokens, length, (NewBlocks(0, 0, blocks),), SamplingParams(max_tokens=128), step)
    chunk = SequenceChunk(start.seq_id, 0, STEP_TOKENS - 32)
    return Batch(step, (start,), (*beside.chunks, chunk), (start.seq_id - 1,))


@contextmanager
def running_ranks(size: int) -> Iterator[RankLink]:
    """Raises the link's error when a rank does not start or ends."""
    with tempfile.TemporaryDirectory(prefix="pd-ranks-") as directory:
        address = f"ipc://{directory}/r"

        def spawn(rank: int) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([sys.executable, "-m", "benchmarks.timed_rank"], stdin=subprocess.PIPE)
            assert process.stdin is not None
            start = RankStart(NodeConfig(model=ModelConfig(tp=size)), rank, address, 0)
            process.stdin.write(msgspec.json.encode(start) + b"\n")
            process.stdin.flush()
            return process

        link = RankLink(size, address, lambda error: None)
        try:
            link.start(spawn)
            link.send(PhaseFrame("describe"))
            link.results()
            link.serve()
            yield link
        finally:
            link.close()


def ask(link: RankLink, phase: str, *arguments: float) -> list[tuple[list[float], list[float], float]]:
    link.send(PhaseFrame(phase, arguments))
    return link.results()


def measure(link: RankLink, batches: Sequence[Batch], step_s: float) -> Times:
    """One step after the other. Raises RankLost."""
    graph = StepSize(len(batches[0].chunks), 0, 1, has_decodes=True)
    ask(link, "steps", step_s)
    cpu_before = [found[2] for found in ask(link, "noted")]
    own_before, given, sent, known = time.process_time(), list[float](), list[float](), list[float]()
    for batch in batches:
        given.append(time.monotonic())
        link.send_step(StepFrame.of(batch, graph, (), ()), STEP_DEADLINE_S)
        sent.append(time.monotonic())
        link.take_retired()
        known.append(time.monotonic())
    own_s, noted = time.process_time() - own_before, ask(link, "noted")
    decoded = [max(times) for times in zip(*(found[0] for found in noted), strict=True)]
    ended = [max(times) for times in zip(*(found[1] for found in noted), strict=True)]
    frame, acknowledged = _between(given, decoded), _between(ended, known)
    cpu_s = statistics.mean(found[2] - before for found, before in zip(noted, cpu_before, strict=True))
    return Times(
        len(msgspec.msgpack.encode(StepFrame.of(batches[-1], graph, (), ()))), _spread(frame),
        _spread(_between(given, sent)), _spread(acknowledged),
        statistics.median(a + b for a, b in zip(frame, acknowledged, strict=True)),
        1e3 * own_s / len(batches), 1e3 * cpu_s / len(batches),
    )  # fmt: skip


def _between(begins_s: list[float], ends_s: list[float]) -> list[float]:
    return [1e3 * (end - begin) for begin, end in zip(begins_s, ends_s, strict=True)][UNCOUNTED:]


def _spread(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def idle_cpu(link: RankLink, seconds: float) -> float:
    """Share of a core that an idle rank uses: its heartbeats. Mean of the ranks."""
    before = ask(link, "noted")
    time.sleep(seconds)
    after = ask(link, "noted")
    return statistics.mean(b[2] - a[2] for a, b in zip(before, after, strict=True)) / seconds


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks ranks", allow_abbrev=False, description=__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="Default: 2 4.")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="Of each batch (default: 500).")
    parser.add_argument("--step-ms", type=float, default=5.0, metavar="X", help="A step's time (default: 5).")
    parser.add_argument(
        "--idle-s", type=float, default=5.0, metavar="X", help="For the CPU of idle ranks (default: 5)."
    )
    parser.add_argument("--json", type=Path, default=RESULTS / "ranks_cpu.jsonl", metavar="FILE",
                        help="File to which a line is appended (%(default)s).")  # fmt: skip
    namespace = parser.parse_args(arguments)
    if min(namespace.ranks) < 2 or namespace.steps <= UNCOUNTED:
        raise StartupError(f"--ranks must be 2 or more, --steps more than {UNCOUNTED}")
    for size in namespace.ranks:
        with running_ranks(size) as link:
            found = {}
            for count in DECODES:
                batches = [decodes(step, count) for step in range(namespace.steps)]
                found[f"{count} decodes"] = measure(link, batches, namespace.step_ms / 1e3)
            batches = [prompt(step, PROMPT) for step in range(namespace.steps)]
            found[f"a prompt of {PROMPT:,}"] = measure(link, batches, namespace.step_ms / 1e3)
            idle = idle_cpu(link, namespace.idle_s)
        print_times(size, found, idle)
        fields = {
            "ranks": size, "steps": namespace.steps, "step_ms": namespace.step_ms, "load": os.getloadavg()[0],
            "idle_cpu": idle, "results": {name: asdict(times) for name, times in found.items()},
        }  # fmt: skip
        append_record(namespace.json, "ranks_cpu", fields)
    return 0


def print_times(size: int, found: dict[str, Times], idle: float) -> None:
    """Print a row for each batch."""
    title = f"{size} ranks, p50 / p99 in us; a rank that idles uses {idle:.2%} of a core"
    table = Table(
        "", "bytes", "frame", "of it sending", "acknowledged", "both", "CPU rank 0", "CPU a rank", title=title
    )
    for name, times in found.items():
        pairs = (f"{1e3 * p50:.0f} / {1e3 * p99:.0f}" for p50, p99 in (times.frame, times.sent, times.acknowledged))
        rest = (times.together_ms, times.cpu_rank_0, times.cpu_rank)
        table.add_row(name, f"{times.frame_bytes:,}", *pairs, *(f"{1e3 * value:.0f}" for value in rest))
    report_console().print(table)
