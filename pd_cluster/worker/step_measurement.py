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
from pd_cluster.scheduling.step_cost import SIZES_BESIDE, tokens_beside_decodes, tokens_of_prompts
from pd_cluster.scheduling.step_model import StepWork, keys_of
from pd_cluster.worker.capacity import MOST_STEP_TOKENS, STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.config import NodeConfig, SchedulerConfig
    from pd_cluster.worker.executor import ModelDescription, Pending
    from pd_connectors.protocol.slabs import KvSlabs

DECODES = 32
CONTEXT = 1024  # tokens of a decoding sequence, and of a prompt in steps of prompts only
MOST_DECODES = (4, 12, 64, 128)  # of steps that a StepModel is fitted to, beside 1 and DECODES
SIZES_OF_MODEL = (128, 256, 512, 1024)  # tokens of its steps with DECODES decodes
SIZES_OF_PROMPTS = (STEP_TOKENS, 2 * STEP_TOKENS, MOST_STEP_TOKENS)
STEPS = 6  # of a measurement; the first two do not count: the device waits for their inputs
BEHIND = 4096  # tokens before a chunk, where the time of keys is measured
MOST_KEYS = 16  # keys that cost as much as a token: times as many as by FLOPs. 8,000 for Qwen3-30B-A3B, by FLOPs 1,555
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

    def seconds(self, num_decodes: int, prompts: Sequence[int], behind: int = 0, context: int = CONTEXT) -> float:
        """The median of steps: decodes after `context` tokens, and chunks of `prompts` tokens after `behind`."""
        context = min(context, self.max_len - STEPS)
        batches, ends = self._batches(num_decodes, prompts, behind, context), list[float]()
        pending = self.launch(next(batches))
        for batch in batches:
            launched = self.launch(batch)
            pending.result()
            ends.append(time.perf_counter())
            pending = launched
        pending.result()
        seconds = statistics.median([end - start for start, end in pairwise(ends[1:])])
        num_keys = sum(keys_of(size, behind) for size in prompts)
        self.samples.append((StepWork(num_decodes, num_decodes * context, sum(prompts), num_keys), seconds))
        return seconds

    def _batches(self, num_decodes: int, prompts: Sequence[int], behind: int, context: int) -> Iterator[Batch]:
        """The steps, and then the departure of their sequences. A chunk draws no token, as its prompt goes on."""
        starts = self._starts([context] * num_decodes + [behind + size + 1 for size in prompts] * STEPS)
        gone: Sequence[int] = ()
        for step in range(STEPS):
            ids = range(num_decodes + step * len(prompts), num_decodes + (step + 1) * len(prompts))
            chunks = [SequenceChunk(index, context - 1 + step, 1, num_samples=1) for index in range(num_decodes)]
            chunks += [SequenceChunk(index, behind, size) for index, size in zip(ids, prompts, strict=True)]
            new = islice(starts, len(ids) + num_decodes * (step == 0))
            yield Batch(step, tuple(new), tuple(chunks), tuple(gone))
            gone = ids
        yield Batch(STEPS, departures=(*range(num_decodes), *gone))

    def _starts(self, lengths: Sequence[int]) -> Iterator[SequenceStart]:
        """Sequences of random tokens, which have different blocks while the cache has enough."""
        tokens = random.Random(0).choices(range(self.vocab_size), k=2 * max(lengths))
        groups = range(len(self.slabs.per_slab))
        blocks = [cycle(range(self.slabs.num_blocks(group))) for group in groups]
        for index, length in enumerate(lengths):
            first = index * 31 % max(lengths)
            most = min(length + STEPS, self.max_len)  # a row has no room for more
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
) -> tuple[NodeConfig, ModelDescription]:
    """`config` and `model` with what was measured. Where that fails sizes are the defaults.

    `may_fail`: False: other ranks may wait for ever in a step that failed here, so it raises.
    """
    limits = config.scheduler
    try:
        if limits.max_tokens_beside_decodes < 0 and config.tokens_beside_decodes_on(model.device):
            limits, keys = limit_beside_decodes(limits, timer, model.keys_per_token, progress)
            model = replace(model, measured_keys=keys)
        if limits.has_targets:
            measure_for_model(limits, timer)
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


def limit_beside_decodes(
    limits: SchedulerConfig, timer: StepTimer, keys: int, progress: Callable[[str], None]
) -> tuple[SchedulerConfig, int]:
    """`limits` with `max_tokens_beside_decodes`, and the keys that cost a step as much as a token, as measured.

    `keys`: `ModelSpec.keys_per_token`. What cannot be measured, because sequences are few or short, is as given.
    """
    num_decodes = min(DECODES, limits.max_num_seqs - 1)
    most = min(limits.max_num_batched_tokens, num_decodes + timer.max_len - 1)
    sizes = [size for size in SIZES_BESIDE if size <= most]
    if not num_decodes or not sizes:
        return limits, keys

    def measure(size: int, behind: int = 0) -> float:
        return timer.seconds(num_decodes, [size - num_decodes] if size > num_decodes else [], behind)

    cost = tokens_beside_decodes(num_decodes, sizes, measure)
    if keys and BEHIND + cost.tokens <= timer.max_len:
        alone, near, far = cost.seconds[num_decodes], cost.seconds[cost.tokens], measure(cost.tokens, BEHIND)
        keys = round(min(max(keys, BEHIND * (near - alone) / max(far - near, 1e-9)), MOST_KEYS * keys))
    progress(
        f"max_tokens_beside_decodes {cost.tokens} (tokens of a step with {num_decodes} decodes: {cost.text}; "
        f"{keys:,} keys cost as much as a token)"
    )
    return replace(limits, max_tokens_beside_decodes=cost.tokens), keys


def measure_for_model(limits: SchedulerConfig, timer: StepTimer) -> None:
    """Measure the steps that tell a StepModel's terms apart, as far as sequences are many and long enough."""
    decodes = min(DECODES, limits.max_num_seqs - 1)
    for num_decodes in sorted({1, decodes, *(min(most, limits.max_num_seqs) for most in MOST_DECODES)} - {0}):
        timer.seconds(num_decodes, [])
    if not decodes:
        return
    timer.seconds(decodes, [], context=BEHIND)
    most = min(limits.max_num_batched_tokens, decodes + timer.max_len - 1)
    sizes = [size for size in SIZES_OF_MODEL if decodes + 1 < size <= most]
    for size in sizes:
        timer.seconds(decodes, [size - decodes])
    if sizes and BEHIND + sizes[0] <= timer.max_len:
        timer.seconds(decodes, [sizes[0] - decodes], BEHIND)


def limit_of_prompts(limits: SchedulerConfig, timer: StepTimer, progress: Callable[[str], None]) -> SchedulerConfig:
    """`limits` with a `max_num_batched_tokens` from STEP_TOKENS to the present one, as measured.

    Where sequences are too few or too short for steps of STEP_TOKENS it is the smallest.
    """
    most, num_seqs, length = limits.max_num_batched_tokens, limits.max_num_seqs, min(CONTEXT, timer.max_len - 1)
    sizes = [size for size in SIZES_OF_PROMPTS if num_seqs <= size <= min(most, num_seqs * length)]
    if not sizes:
        return unmeasured_limit_of_prompts(limits)
    cost = tokens_of_prompts(sizes, lambda size: timer.seconds(0, [length] * (size // length)))
    progress(f"max_num_batched_tokens {cost.tokens} (tokens of a step of prompts: {cost.text})")
    return replace(limits, max_num_batched_tokens=cost.tokens)


def unmeasured_limit_of_prompts(limits: SchedulerConfig) -> SchedulerConfig:
    """`limits` with the `max_num_batched_tokens` of a dense model, or the present one where that is less."""
    tokens = min(limits.max_num_batched_tokens, max(STEP_TOKENS, limits.max_num_seqs))
    return replace(limits, max_num_batched_tokens=tokens)
