"""`python -m benchmarks draft_host`: what drafts by lookup take of a node's step loop, without a model.

The scheduler plans steps for many sequences and takes their results. In place of a device there are recorded texts: a
draft is right if it is the recorded token. So many sequences draft at once; `none` and `lookup` take turns.

    edits      each answer is its prompt's file with one name changed
    unmatched  no pair of tokens comes twice
    common     32 tokens in any order, so each pair stands at many places

A step's time is the CPU time of this thread in `schedule` and `update`, its median over the steps of a round. What
drafts add is the difference of a round's two medians; it holds the further tokens that come out of each step. What
`lookup` does meanwhile, while the device computes, is not in it: at most SPARE_S a step.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from pd_cluster.bench.edits import edit_of
from pd_cluster.bench.report import report_console
from pd_cluster.bench.workload import Arrival
from pd_cluster.config import SchedulerConfig
from pd_cluster.drafting.indexes import Indexes
from pd_cluster.drafting.lookup_drafter import LookupDrafter
from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import StepResult
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.drafts import Speculation
from pd_cluster.scheduling.queue_order import Fifo
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.sequence import Request
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import Targets
from pd_connectors.protocol.layout import KVGroup, KVKind
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.scheduling.batch import Batch, SequenceChunk

TOKEN = re.compile(r"[A-Za-z]{1,5}|[0-9]{1,3}| *[^\sA-Za-z0-9]|\s+")  # about those of large vocabularies
FILE_TOKENS, BLOCK, MOST_LEN = 1200, 64, 4096
WARM_STEPS, STEPS = 40, 100  # of decodes in a round: those that do not count, and those that do
GAP_S = 0.5e-3  # in which the device waits for the host after a step with drafts
SPARE_S = 8e-3  # of the host while the device computes a step


@dataclass(frozen=True, slots=True)
class RecordedText:
    """Tokens of a prompt, and of what is drawn after it."""

    prompt: list[int]
    whole: tuple[SampledToken, ...]


def texts_of(case: str, num: int) -> list[RecordedText]:
    """So many different ones, the same at each call."""
    rng, ids, texts = random.Random(7), dict[str, int](), list[RecordedText]()
    for at in range(num):
        if case == "edits":
            edit = edit_of(Arrival(0.0, FILE_TOKENS, FILE_TOKENS), at, 0, predicts=False)
            parts = (edit.text, edit.text.replace(edit.old, edit.new))
            prompt, answer = ([ids.setdefault(one, len(ids)) for one in TOKEN.findall(part)] for part in parts)
        else:
            most = 1 << 20 if case == "unmatched" else 32
            prompt, answer = ([rng.randrange(most) for _ in range(FILE_TOKENS)] for _ in range(2))
        texts.append(RecordedText(prompt, tuple(map(SampledToken, prompt + answer))))
    return texts


@dataclass(slots=True)
class DraftRound:
    """Steps of one setting: their seconds, and what came out of them."""

    seconds: list[float] = field(default_factory=list)
    spare: list[float] = field(default_factory=list)  # of what is done while the device computes
    num_tokens: int = 0
    num_drafts: int = 0

    @property
    def step_us(self) -> float:
        return 1e6 * statistics.median(self.seconds)

    @property
    def spare_s(self) -> float:
        return statistics.median(self.spare)


class RecordedNode:
    """A scheduler, with recorded texts in place of what its steps draw. drafts: whether it looks them up."""

    def __init__(self, texts: list[RecordedText], *, drafts: bool) -> None:
        group = KVGroup(KVKind.FULL, (0,), (1, 1, 2, BLOCK, 1), "float32", BLOCK)
        num_blocks = len(texts) * MOST_LEN // BLOCK
        slabs = KvSlabs(1, num_blocks * group.block_bytes, (num_blocks,))
        model, self._pool = StepModel(), ThreadPoolExecutor(1)
        drafter = LookupDrafter(Indexes(self._pool)) if drafts else None
        self._scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_waiting=len(texts)),
            BlockManager((group,), slabs, prefix_caching=True),
            max_model_len=MOST_LEN,
            eos_token_ids=frozenset(),
            retract=lambda _: None,
            step_budget=StepBudget(Targets(), model, time.monotonic, lambda: 0.0),
            order=Fifo(),
            speculation=None if drafter is None else Speculation(drafter, model, lambda: GAP_S),
        )
        self._texts = dict(enumerate(texts))  # by the id of their sequences, which are counted from 0
        for at, text in enumerate(texts):
            sampling = SamplingParams(max_tokens=len(text.whole) - len(text.prompt), seed=at)
            self._scheduler.add(Request.from_message(AddRequest(f"{at}", text.prompt, sampling)))

    def run(self) -> DraftRound:
        """The steps of a round, all of decodes."""
        num_warm = 0
        while num_warm < WARM_STEPS:
            num_warm += not self._scheduler.prompts_wait
            self._step(DraftRound())
            self._pool.submit(int).result()  # the indexes are made, so that all rounds draft alike
        found = DraftRound()
        gc.collect()
        gc.freeze()
        for _ in range(STEPS):
            self._step(found)
        gc.unfreeze()
        self._pool.shutdown()
        return found

    def _step(self, found: DraftRound) -> None:
        started_s = time.thread_time()
        batch = self._scheduler.schedule()
        planned_s = time.thread_time()
        result = self._draw(batch)
        drawn_s = time.thread_time()
        self._scheduler.hash_ahead(time.monotonic() + SPARE_S)  # as while the device computes
        rested_s = time.thread_time()
        self._scheduler.update(batch, result)
        found.seconds.append(time.thread_time() - rested_s + planned_s - started_s)
        found.spare.append(rested_s - drawn_s)
        found.num_tokens += sum(map(len, result.samples.values()))
        found.num_drafts += sum(len(chunk.drafts) for chunk in batch.chunks)

    def _draw(self, batch: Batch) -> StepResult:
        return StepResult(batch.step, {one.seq_id: self._run_of(one) for one in batch.chunks if one.num_samples})

    def _run_of(self, chunk: SequenceChunk) -> tuple[SampledToken, ...]:
        """The right drafts, and the token after them."""
        whole, end = self._texts[chunk.seq_id].whole, chunk.start + chunk.num_tokens
        start = place = end - len(chunk.drafts)
        while place < end and whole[place].token_id == chunk.drafts[place - start]:
            place += 1
        return whole[start : place + 1]


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks draft_host", allow_abbrev=False)
    cases = ("edits", "unmatched", "common")
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases, metavar="NAME", help="Default: all.")
    parser.add_argument("--sequences", type=int, default=64, metavar="N", help="That draft at once (default: 64).")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="Of each setting (default: 9).")
    namespace = parser.parse_args(arguments)
    columns = ("texts", "none, us a step", "lookup", "drafts add", "least", "most", "meanwhile", "tokens", "drafts")
    table = Table(*columns)
    for case in namespace.cases:
        texts, pairs = texts_of(case, namespace.sequences), list[tuple[DraftRound, DraftRound]]()
        for _ in range(namespace.rounds):
            pairs.append((RecordedNode(texts, drafts=False).run(), RecordedNode(texts, drafts=True).run()))
        added = sorted(lookup.step_us - none.step_us for none, lookup in pairs)
        steps = [statistics.median(one.step_us for one in rounds) for rounds in zip(*pairs, strict=True)]
        last = pairs[-1][1]
        spare_us = 1e6 * statistics.median(lookup.spare_s for _, lookup in pairs)
        shown = (*steps, statistics.median(added), added[0], added[-1], spare_us)
        counts = (last.num_tokens / STEPS, last.num_drafts / STEPS)
        table.add_row(case, *(f"{number:.0f}" for number in (*shown, *counts)))
    report_console().print(table)
    return 0
