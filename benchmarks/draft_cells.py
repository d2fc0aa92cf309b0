"""`python -m benchmarks draft_cells`: tokens a second with drafts through those without, by an H200's prices.

The scheduler plans steps for streams that write recorded answers, as in `recorded_answers`. Each step takes what it
took on one H200 (8B, 1,024 tokens before), and the host takes its time after a step with drafts. So a rule of drafts
is judged without a device, in seconds. A second round counts: what the node learned in the first is kept.
"""

from __future__ import annotations

import argparse
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from operator import truediv
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.table import Table

from benchmarks.recorded_answers import NAMES
from benchmarks.recorded_texts import UNMATCHED, AnswerMaker, encoder
from pd_cluster.bench.report import report_console
from pd_cluster.config import SchedulerConfig
from pd_cluster.drafting.indexes import Indexes
from pd_cluster.drafting.lookup_drafter import LookupDrafter
from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import StepResult
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.draft_prices import DraftPrices
from pd_cluster.scheduling.drafts import Speculation
from pd_cluster.scheduling.queue_order import Fifo
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.sequence import Request
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.scheduling.targets import Targets
from pd_connectors.protocol.layout import KVGroup, KVKind
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.recorded_texts import RecordedAnswer
    from pd_cluster.scheduling.batch import Batch, SequenceChunk
    from pd_cluster.scheduling.scheduler import Update

CONTEXT, BLOCK, VOCAB = 1024, 64, 128_256
STREAMS = (1, 32, 64, 128)  # of which one H200's times are known: those of a plain step
STEP_S = (4.2e-3, 5.35e-3, 6.8e-3, 9.3e-3)
GAP_S, LAUNCH_S = (0.4e-3, 1.15e-3, 1.5e-3, 2.05e-3), (4e-4, 7e-4, 8e-4, 8e-4)  # of the host after one with drafts
TASKS = {name: task for task, name in NAMES.items()}
MEASURED = ((1, 1), (1, 7), (8, 3), (32, 1), (32, 3), (32, 7), (64, 3), (128, 1), (128, 2))  # at start: streams, drafts


class CellRound(NamedTuple):
    """What streams took for their answers."""

    rate: float  # tokens a second
    num_steps: int
    num_drafted: int  # of them, with drafts
    num_drafts: int
    slowest_ms: float  # between the tokens of the slowest stream, of those that match nothing if there are any


class SimulatedH200:
    """Seconds of steps. host: its times after a step with drafts, as a share of those that were measured."""

    def __init__(self, host: float) -> None:
        self._host, self._prices = host, DraftPrices()

    def gap_s(self, num_streams: int) -> float:
        """From the end of a step with drafts to the next launch."""
        return self._host * float(np.interp(num_streams, STREAMS, GAP_S))

    def launch_s(self, num_streams: int) -> float:
        """Of a launch that no step covers."""
        return self._host * float(np.interp(num_streams, STREAMS, LAUNCH_S))

    def step_s(self, work: StepWork) -> float:
        """On the device."""
        rows = work.num_decodes + work.num_tokens
        drafts_s = self._prices.seconds(work.drafts) - LAUNCH_S[1] if work.num_drafts else 0.0
        return float(np.interp(rows, STREAMS, STEP_S)) + 16e-6 * work.num_tokens + drafts_s

    def measured(self) -> list[tuple[StepWork, float]]:
        """What a node measures at its start, launches included."""
        works = [StepWork(num, num * CONTEXT) for num in STREAMS]
        works += [StepWork(8, 8 * CONTEXT, 512, 512 * CONTEXT)]
        works += [StepWork(num, num * CONTEXT, 0, 0, num * each, num * each * CONTEXT, num) for num, each in MEASURED]
        return [(one, self.step_s(one) + (self.launch_s(one.num_decodes) if one.num_drafts else 0)) for one in works]


class AnsweringNode:
    """A scheduler that writes recorded answers on a virtual clock. drafts: whether it looks them up."""

    def __init__(self, device: SimulatedH200, num_streams: int, *, drafts: bool) -> None:
        group = KVGroup(KVKind.FULL, (0,), (1, 1, 2, BLOCK, 1), "float32", BLOCK)
        num_blocks = 4 * num_streams * (CONTEXT + 512) // BLOCK + 64
        self._device, self._now_s, self._gap_s = device, 0.0, device.gap_s(num_streams)
        self._pool, config = ThreadPoolExecutor(1), SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
        self._model = model = StepModel(device.measured())
        self._scheduler = Scheduler(
            config,
            BlockManager((group,), KvSlabs(1, num_blocks * group.block_bytes, (num_blocks,)), prefix_caching=True),
            max_model_len=CONTEXT + 1024,
            eos_token_ids=frozenset(),
            retract=lambda _: None,
            clock=lambda: self._now_s,
            step_budget=StepBudget(Targets(), model, lambda: self._now_s, lambda: 0.0),
            order=Fifo(),
            speculation=Speculation(
                LookupDrafter(Indexes(self._pool)), model, lambda: self._gap_s, most_rows=config.most_captured_rows
            ) if drafts else None,
        )  # fmt: skip
        self._texts: list[tuple[SampledToken, ...]] = []  # by the id of their sequences, which are counted from 0

    def run(self, answers: Sequence[RecordedAnswer], longest: int = 1 << 20) -> CellRound:
        """So many streams at a time until each answer has ended, up to `longest` tokens, as in `closed_loop`."""
        scheduler, begun, ends = self._scheduler, list[tuple[Request, float]](), dict[Request, float]()
        counts, num_open, num_tokens, num_counted = [0, 0, 0], 0, 0, len(answers)
        flights = deque[tuple["Batch", StepWork, float]]()  # launched, and seconds of their launch that none covered
        was_uncertain, lens = False, [min(len(one.answer), longest) for one in answers]
        while len(ends) < num_counted:
            for _ in range(num_open, num_counted):
                begun.append((self._begin(answers[len(begun) % num_counted], longest), self._now_s))
            num_open, counted = num_counted, {request for request, _ in begun[:num_counted]}
            while len(flights) < 2 and not (flights and flights[-1][1].num_drafts):
                waited_s = 0.0
                if not flights and was_uncertain:
                    self._now_s += self._gap_s
                    waited_s = self._device.launch_s(num_counted)
                if not (batch := scheduler.schedule()).chunks:
                    break
                flights.append((batch, StepWork.of(batch.chunks), waited_s))
                scheduler.hash_ahead(self._now_s + 1.0)
                self._pool.submit(int).result()
            batch, work, waited_s = flights.popleft()
            seconds = waited_s + self._device.step_s(work)
            self._now_s += seconds
            for update in self._update(batch):
                if update.request in counted:
                    num_tokens += sum(len(part.tokens) for part in update.sequences)
                if update.finished:
                    num_open -= 1
                    if update.request in counted:
                        ends[update.request] = self._now_s
            if work.num_drafts or not was_uncertain:
                self._model.note(work, seconds)
            was_uncertain = work.num_drafts > 0
            counts = [counts[0] + 1, counts[1] + was_uncertain, counts[2] + work.num_drafts]
        for request, _ in begun:
            if not request.finished:
                scheduler.abort(request)
        for batch, _, _ in flights:
            self._update(batch)
        taken_s = [ends[request] - begun_s for request, begun_s in begun[:num_counted]]
        paces = list(map(truediv, taken_s, lens))
        quiet = [pace for pace, one in zip(paces, answers, strict=True) if one.task == UNMATCHED]
        slowest_s = max(quiet or paces)
        rate, (num_steps, num_drafted, num_drafts) = num_tokens * num_counted / sum(taken_s), counts
        return CellRound(rate, num_steps, num_drafted, num_drafts, 1e3 * slowest_s)

    def _begin(self, answer: RecordedAnswer, longest: int) -> Request:
        self._texts.append(tuple(map(SampledToken, (*answer.prompt, *answer.answer, 0, 0))))
        sampling = SamplingParams(max_tokens=min(len(answer.answer), longest), seed=0)
        request = Request.from_message(AddRequest(f"{len(self._texts)}", list(answer.prompt), sampling))
        self._scheduler.add(request)
        return request

    def _update(self, batch: Batch) -> list[Update]:
        drawn = {one.seq_id: self._run_of(one) for one in batch.chunks if one.num_samples}
        return self._scheduler.update(batch, StepResult(batch.step, drawn))

    def _run_of(self, chunk: SequenceChunk) -> tuple[SampledToken, ...]:
        """The right drafts, and the token after them."""
        whole, end = self._texts[chunk.seq_id], chunk.start + chunk.num_tokens
        start = place = end - len(chunk.drafts)
        while place < end and whole[place].token_id == chunk.drafts[place - start]:
            place += 1
        return whole[start : place + 1]


def measure_cell(maker: AnswerMaker, task: str, num_streams: int, host: float, longest: int) -> tuple[CellRound, ...]:
    """Without drafts and with."""
    found = []
    for drafts in (False, True):
        answers = maker.answers(TASKS.get(task, task), num_streams, CONTEXT // BLOCK * BLOCK + 1, longest)
        node = AnsweringNode(SimulatedH200(host), num_streams, drafts=drafts)
        node.run(answers, 1)  # fills the cache
        node.run(answers)
        found.append(node.run(answers))
    return tuple(found)


def main(arguments: Sequence[str]) -> int:
    """Simulate and print. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks draft_cells", allow_abbrev=False)
    add = parser.add_argument
    add("--tasks", nargs="+", default=["mixed", "rewrite", "patch", "json", "unmatched", "beside"], metavar="NAME")
    add("--batches", nargs="+", type=int, default=[8, 32, 128], metavar="N", help="Streams (default: 8 32 128).")
    add("--hosts", nargs="+", type=float, default=[1.0, 0.55], metavar="X", help="Shares of the measured host's times.")
    add("--output-len", type=int, default=256, metavar="N", help="Tokens of an answer, at most (default: 256).")
    namespace = parser.parse_args(arguments)
    maker = AnswerMaker(encoder(None, VOCAB), VOCAB)
    table = Table("host", "streams", "task", "ratio", "steps", "with drafts", "drafts", "slowest")
    for host in namespace.hosts:
        for num in namespace.batches:
            for task in namespace.tasks:
                none, lookup = measure_cell(maker, task, num, host, namespace.output_len)
                counts = (f"{none.num_steps} / {lookup.num_steps}", f"{lookup.num_drafted}", f"{lookup.num_drafts}")
                slowest = f"{lookup.slowest_ms / none.slowest_ms:.2f}"
                table.add_row(f"{host:g}", f"{num}", task, f"{lookup.rate / none.rate:.3f}", *counts, slowest)
    report_console().print(table)
    return 0
