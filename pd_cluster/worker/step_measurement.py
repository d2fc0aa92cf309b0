"""Measures steps after the warm-up, and decides by them the sizes of steps that no flag tells."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import TYPE_CHECKING

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.scheduling.step_cost import SIZES_BESIDE, tokens_beside_decodes, tokens_of_prompts
from pd_cluster.worker.capacity import STEP_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.worker.executor import Pending

DECODES = 32
CONTEXT = 1024  # tokens of a decoding sequence, and of a prompt in steps of prompts only
STEPS = 6  # of a measurement; the first two do not count: the device waits for their inputs
# Drawn, not greedy: sequences with equal tokens would choose equal experts
SAMPLING = SamplingParams(max_tokens=1, temperature=1.0)


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Times steps of an executor, two under way at a time. Overwrites the cache."""

    launch: Callable[[Batch], Pending]
    num_blocks: int
    block_size: int
    max_len: int
    vocab_size: int

    def seconds(self, num_decodes: int, prompts: Sequence[int]) -> float:
        """The median of steps of `num_decodes` decodes behind CONTEXT tokens and first chunks of `prompts` tokens."""
        context = min(CONTEXT, self.max_len - STEPS)
        known = [context] * num_decodes + [size + 1 for size in prompts] * STEPS  # a chunk in a prompt draws no token
        starts = self._starts(known)
        pending, ends, gone = None, list[float](), tuple[int, ...]()
        for step in range(STEPS):
            first = num_decodes + step * len(prompts)
            ids = tuple(range(first, first + len(prompts)))
            decodes = (SequenceChunk(index, context - 1 + step, 1, num_samples=1) for index in range(num_decodes))
            chunks = (*decodes, *(SequenceChunk(*chunk) for chunk in zip(ids, [0] * len(ids), prompts, strict=True)))
            new = islice(starts, len(ids) + num_decodes * (step == 0))
            launched = self.launch(Batch(step, tuple(new), chunks, gone))
            if pending is not None:
                pending.result()
                ends.append(time.perf_counter())
            pending, gone = launched, ids
        assert pending is not None
        pending.result()
        ends.append(time.perf_counter())
        self.launch(Batch(STEPS, departures=(*range(num_decodes), *gone))).result()
        return statistics.median([end - start for start, end in pairwise(ends[1:])])

    def _starts(self, lengths: Sequence[int]) -> Iterator[SequenceStart]:
        """Sequences of random tokens, which have different blocks while the cache has enough."""
        tokens = random.Random(0).choices(range(self.vocab_size), k=2 * max(lengths))
        blocks = cycle(range(self.num_blocks))
        for index, length in enumerate(lengths):
            first = index * 31 % max(lengths)
            owned = tuple(islice(blocks, -(-(length + STEPS) // self.block_size)))
            yield SequenceStart(index, tuple(tokens[first : first + length]), length, owned, SAMPLING, index)


def limit_beside_decodes(limits: SchedulerConfig, timer: StepTimer, progress: Callable[[str], None]) -> SchedulerConfig:
    """`limits` with `max_tokens_beside_decodes` as measured; as they are if no step can have prompts beside decodes."""
    num_decodes = min(DECODES, limits.max_num_seqs - 1)
    most = min(limits.max_num_batched_tokens, num_decodes + timer.max_len - 1)
    sizes = [size for size in SIZES_BESIDE if size <= most]
    if not num_decodes or not sizes:
        return limits

    def measure(size: int) -> float:
        return timer.seconds(num_decodes, [size - num_decodes] if size > num_decodes else [])

    cost = tokens_beside_decodes(num_decodes, sizes, measure)
    progress(f"max_tokens_beside_decodes {cost.tokens} (tokens of a step with {num_decodes} decodes: {cost.text})")
    return replace(limits, max_tokens_beside_decodes=cost.tokens)


def limit_of_prompts(limits: SchedulerConfig, timer: StepTimer, progress: Callable[[str], None]) -> SchedulerConfig:
    """`limits` with a `max_num_batched_tokens` from STEP_TOKENS to the present one, as measured."""
    most = limits.max_num_batched_tokens
    sizes = [size for size in (STEP_TOKENS, 2 * STEP_TOKENS, 4 * STEP_TOKENS) if size <= most]
    length = min(CONTEXT, timer.max_len - 1)
    sizes = [size for size in sizes if limits.max_num_seqs * length >= size >= limits.max_num_seqs]
    if not sizes:
        return limits

    def measure(size: int) -> float:
        return timer.seconds(0, [length] * (size // length))

    cost = tokens_of_prompts(sizes, measure)
    progress(f"max_num_batched_tokens {cost.tokens} (tokens of a step of prompts: {cost.text})")
    return replace(limits, max_num_batched_tokens=cost.tokens)
