"""Measures steps after the warm-up, and decides by them the sizes of steps that no flag tells."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.scheduling.targets import USUAL_CONTEXT, USUAL_DECODES, usual_gap_s
from pd_cluster.worker.capacity import MOST_STEP_TOKENS, STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.config import NodeConfig, SchedulerConfig
    from pd_cluster.worker.executor import ModelDescription, Pending
    from pd_connectors.protocol.slabs import KvSlabs

MOST_DECODES = (4, 12, 64, 128)  # of steps that a StepModel is fitted to, beside 1 and USUAL_DECODES
SIZES_OF_MODEL = (128, 256, 512, 1024)  # tokens of its steps with USUAL_DECODES decodes
SIZES_OF_PROMPTS = (STEP_TOKENS, 2 * STEP_TOKENS, MOST_STEP_TOKENS)
STEPS = 6  # of a measurement; the first two do not count: the device waits for their inputs
NUM_BEFORE = 4096  # tokens before a chunk, where the time of keys is measured
# (decodes, drafts of each, tokens before each) of the steps that the prices of drafts are fitted to: each segment of
# rows has some. On a CPU each token takes its time, so few are measured, and with them few steps without drafts
DRAFTS = (
    *((num, drafts, USUAL_CONTEXT) for num, drafts in ((1, 1), (1, 7), (8, 3), (32, 1), (32, 3), (32, 7), (64, 3))),
    *((128, drafts, USUAL_CONTEXT) for drafts in (1, 2)),
    (32, 3, NUM_BEFORE),
)
CPU_CONTEXT = 128
# Two lengths, because on a CPU what is before a token takes more of a step than on a GPU
CPU_DRAFTS = (
    *((num, drafts, CPU_CONTEXT) for num, drafts in ((1, 0), (8, 0), (8, 1), (1, 8), (4, 0), (4, 2))),
    (1, 0, USUAL_CONTEXT),
)
# After so long no further one begins. Where a CPU's only one was (1, 0), eight drafts beside eight decodes seemed to
# cost 11% of a step, and took 46% (135M parameters in float32)
DRAFTS_S, CPU_DRAFTS_S = 3.0, 3.0
# Larger steps hold up the first token of short prompts, and the announcement of long ones, for this gain at least.
# Qwen3-30B-A3B read 66, 74 and 81 thousand tokens/s in steps of 2,048, 4,096 and 8,192; with a faster kernel for
# experts 75 and 77 in the first two
LEAST_GAIN = 1.07
# Drawn, not greedy: sequences with equal tokens would choose equal experts
SAMPLING = SamplingParams(max_tokens=1, temperature=1.0)


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Times steps of an executor, two under way at a time. Overwrites the cache.

    `samples`: what was measured, for a StepModel.
    """

    launch: Callable[[Batch], Pending]
    slabs: KvSlabs
    block_size: int
    max_len: int
    vocab_size: int
    samples: list[tuple[StepWork, float]] = field(default_factory=list)

    def seconds(self, num_decodes: int, prompts: Sequence[int], before: int = 0, context: int = USUAL_CONTEXT) -> float:
        """The median of steps: decodes after `context` tokens, and chunks of `prompts` tokens after `before`."""
        ends = self.ends(num_decodes, prompts, before, context)
        seconds = statistics.median([end - start for start, end in pairwise(ends[2:])])
        num_keys, context = sum(keys_of(size, before) for size in prompts), min(context, self.max_len - STEPS)
        self.samples.append((StepWork(num_decodes, num_decodes * context, sum(prompts), num_keys), seconds))
        return seconds

    def ends(self, num_decodes: int, prompts: Sequence[int], before: int, context: int) -> list[float]:
        """When these steps began, and then when each of them ended."""
        batches = self._batches(num_decodes, prompts, before, min(context, self.max_len - STEPS))
        ends = [time.perf_counter()]
        pending = self.launch(next(batches))
        for batch in batches:
            launched = self.launch(batch)
            pending.result()
            ends.append(time.perf_counter())
            pending = launched
        pending.result()
        return ends

    def seconds_with_drafts(self, num_decodes: int, num_drafts: int, context: int = USUAL_CONTEXT) -> float:
        """The median of steps of decodes with so many drafts each, from launch to end: no other runs beside one."""
        context = min(context, self.max_len - STEPS * (1 + num_drafts))
        tokens, ids = random.Random(num_drafts), range(num_decodes)
        new = tuple(self._starts([context] * num_decodes, STEPS * (1 + num_drafts)))
        ends, times = dict.fromkeys(ids, context), list[float]()
        for step in range(STEPS):
            runs = {index: tuple(tokens.choices(range(self.vocab_size), k=num_drafts)) for index in ids}
            chunks = [
                SequenceChunk(index, ends[index] - 1, 1 + num_drafts, num_samples=1, drafts=run)
                for index, run in runs.items()
            ]
            batch, new = Batch(step, new, tuple(chunks)), ()
            started_s = time.perf_counter()
            drawn = self.launch(batch).result().samples
            times.append(time.perf_counter() - started_s)
            for index, run in drawn.items():
                ends[index] += len(run)
        self.launch(Batch(STEPS, departures=tuple(ids))).result()
        seconds, num = statistics.median(times[2:]), num_decodes * num_drafts
        draft_keys = num_decodes * keys_of(num_drafts, context)
        self.samples.append((StepWork(num_decodes, num_decodes * context, 0, 0, num, draft_keys, num_decodes), seconds))
        return seconds

    def _batches(self, num_decodes: int, prompts: Sequence[int], before: int, context: int) -> Iterator[Batch]:
        """The steps, and then the departure of their sequences. A chunk draws no token, as its prompt goes on."""
        starts = self._starts([context] * num_decodes + [before + size + 1 for size in prompts] * STEPS)
        gone: Sequence[int] = ()
        for step in range(STEPS):
            ids = range(num_decodes + step * len(prompts), num_decodes + (step + 1) * len(prompts))
            chunks = [SequenceChunk(index, context - 1 + step, 1, num_samples=1) for index in range(num_decodes)]
            chunks += [SequenceChunk(index, before, size) for index, size in zip(ids, prompts, strict=True)]
            new = islice(starts, len(ids) + num_decodes * (step == 0))
            yield Batch(step, tuple(new), tuple(chunks), tuple(gone))
            gone = ids
        yield Batch(STEPS, departures=(*range(num_decodes), *gone))

    def _starts(self, lengths: Sequence[int], room: int = STEPS) -> Iterator[SequenceStart]:
        """Sequences of random tokens, which have different blocks while the cache has enough. `room`: after them."""
        tokens = random.Random(0).choices(range(self.vocab_size), k=2 * max(lengths))
        groups = range(len(self.slabs.per_slab))
        blocks = [cycle(range(self.slabs.num_blocks(group))) for group in groups]
        for index, length in enumerate(lengths):
            first = index * 31 % max(lengths)
            most = min(length + room, self.max_len)  # a row has no room for more
            count = -(-most // self.block_size)
            owned = tuple(NewBlocks(group, 0, tuple(islice(blocks[group], count))) for group in groups)
            yield SequenceStart(index, tuple(tokens[first : first + length]), length, owned, SAMPLING, index)


def measure_sizes(
    config: NodeConfig,
    model: ModelDescription,
    timer: StepTimer,
    progress: Callable[[str], None],
    *,
    measures_budget: bool,
    may_fail: bool,
    most_drafts: int = 0,
) -> tuple[NodeConfig, ModelDescription]:
    """`config` and `model` with what was measured. Where that fails sizes are the defaults.

    may_fail: False: other ranks may wait for ever in a step that failed here, so it raises.
    most_drafts: of a sequence in a step; 0: there are none.
    """
    limits = config.scheduler
    try:
        on_cpu, is_decode = model.device == "cpu", config.server.role == "decode"
        keeps = config.server.role == "prefill"  # streams, while it has time to spare
        if not on_cpu and (limits.has_targets or is_decode or keeps or most_drafts):
            measure_for_model(limits, timer)
        if most_drafts:
            measure_drafts(limits, timer, most_drafts, on_cpu=on_cpu)
        if is_decode and not (on_cpu or limits.has_targets):
            gap_s = usual_gap_s(StepModel(timer.samples))
            progress(f"steps beside streams take {gap_s * 1e3:.1f} ms at most; --slo-itl-ms sets another time")
        if measures_budget:
            limits = limit_of_prompts(limits, timer, progress)
        model = replace(model, step_times=tuple(timer.samples))
    except Exception as error:  # of a kernel, memory, a watcher: a node with default sizes serves all the same
        if not may_fail:
            raise
        progress(f"default sizes of steps: their measurement failed ({type(error).__name__}: {error})")
        if measures_budget:
            limits = unmeasured_limit_of_prompts(limits)
    return replace(config, scheduler=limits), model


def measure_for_model(limits: SchedulerConfig, timer: StepTimer) -> None:
    """Measure the steps that tell a StepModel's terms apart, as far as sequences are many and long enough."""
    decodes = min(USUAL_DECODES, limits.max_num_seqs - 1)
    for num_decodes in sorted({1, decodes, *(min(most, limits.max_num_seqs) for most in MOST_DECODES)} - {0}):
        timer.seconds(num_decodes, [])
    if not decodes:
        return
    timer.seconds(decodes, [], context=NUM_BEFORE)
    most = min(limits.max_num_batched_tokens, decodes + timer.max_len - 1)
    sizes = [size for size in SIZES_OF_MODEL if decodes + 1 < size <= most]
    for size in sizes:
        timer.seconds(decodes, [size - decodes])
    if sizes and NUM_BEFORE + sizes[0] <= timer.max_len:
        timer.seconds(decodes, [sizes[0] - decodes], NUM_BEFORE)


def measure_drafts(limits: SchedulerConfig, timer: StepTimer, most: int, *, on_cpu: bool) -> None:
    """Measure the steps that tell the prices of drafts apart, as far as the node may run them. most: of a sequence."""
    sizes, within_s = (CPU_DRAFTS, CPU_DRAFTS_S) if on_cpu else (DRAFTS, DRAFTS_S)
    ends_s = time.perf_counter() + within_s
    for num_decodes, num_drafts, context in draft_sizes(sizes, limits, timer.max_len, most):
        if time.perf_counter() > ends_s:
            return
        if num_drafts:
            timer.seconds_with_drafts(num_decodes, num_drafts, context)
        else:
            timer.seconds(num_decodes, [], context=context)


def draft_sizes(
    sizes: Sequence[tuple[int, int, int]], limits: SchedulerConfig, max_len: int, most: int
) -> list[tuple[int, int, int]]:
    """Those of `sizes` that a node may run, with at most `most` drafts of each sequence.

    A step has as many rows beyond one a sequence as there are slots. Context is shortened, but not that of keys.
    """
    cut = dict.fromkeys((num, min(drafts, most), context) for num, drafts, context in sizes)
    return [
        (num, drafts, context)
        for num, drafts, context in cut
        if num * max(1, drafts) <= limits.max_num_seqs
        and num * (1 + drafts) <= limits.max_num_batched_tokens
        and STEPS * (1 + drafts) + (context if context == NUM_BEFORE else 1) <= max_len
    ]


def limit_of_prompts(limits: SchedulerConfig, timer: StepTimer, progress: Callable[[str], None]) -> SchedulerConfig:
    """`limits` with a `max_num_batched_tokens` from STEP_TOKENS to the present one, as measured.

    It is the one after which the next size does not read prompts LEAST_GAIN times as fast.

    Where sequences are too few or too short for steps of STEP_TOKENS it is the smallest.
    """
    most, num_seqs, length = limits.max_num_batched_tokens, limits.max_num_seqs, min(USUAL_CONTEXT, timer.max_len - 1)
    sizes = [size for size in SIZES_OF_PROMPTS if num_seqs <= size <= min(most, num_seqs * length)]
    if not sizes:
        return unmeasured_limit_of_prompts(limits)
    chosen, seconds = sizes[0], dict[int, float]()
    for size in sizes:
        seconds[size] = timer.seconds(0, [length] * (size // length))
        if size > chosen and size / seconds[size] < LEAST_GAIN * chosen / seconds[chosen]:
            break
        chosen = size
    measured = ", ".join(f"{size:,}: {one_s * 1e3:.1f} ms" for size, one_s in seconds.items())
    progress(f"max_num_batched_tokens {chosen} (tokens of a step of prompts: {measured})")
    return replace(limits, max_num_batched_tokens=chosen)


def unmeasured_limit_of_prompts(limits: SchedulerConfig) -> SchedulerConfig:
    """`limits` with the `max_num_batched_tokens` of a dense model, or the present one where that is less."""
    tokens = min(limits.max_num_batched_tokens, max(STEP_TOKENS, limits.max_num_seqs))
    return replace(limits, max_num_batched_tokens=tokens)
