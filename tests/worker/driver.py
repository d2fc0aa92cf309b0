"""A small scheduler for worker tests: first come, first served, with chunks, shared prefixes and scattered blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_connectors.protocol.messages import SampledToken

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def make_executor(
    model: Path | str, *, num_blocks: int = 256, block_size: int = 16, max_num_seqs: int = 16, **options: Any
) -> DeviceExecutor:
    """An executor on CPU in float32. `options` go to ModelConfig."""
    model_options: dict[str, Any] = {"model": str(model), "device": "cpu", "dtype": "float32", **options}
    config = NodeConfig(
        model=ModelConfig(**model_options),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size, swap_gb=0.001),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512),
    )
    return DeviceExecutor.started(config, lambda _: None)


@dataclass
class Generation:
    """One sequence as the driver sees it."""

    seq_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    blocks: list[int]
    computed: int = 0
    started: bool = False
    tokens: list[SampledToken] = field(default_factory=list)

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt, *(token.token_id for token in self.tokens)]

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.params.max_tokens


class Driver:
    """Runs sequences to their max_tokens. Blocks are handed out in random order and never returned."""

    def __init__(self, executor: DeviceExecutor, budget: int = 512, seed: int = 0) -> None:
        self.executor = executor
        self.budget = budget
        self.block_size = executor.block_size
        self.free = random.Random(seed).sample(range(executor.num_blocks), executor.num_blocks)
        self.sequences: list[Generation] = []
        self.steps = 0
        self._departures: list[int] = []

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        seed: int = 0,
        prefix_of: Generation | None = None,
    ) -> Generation:
        """Queue a sequence. With `prefix_of` it shares that one's whole blocks as far as their tokens agree."""
        shared = 0
        if prefix_of is not None:
            theirs = prefix_of.all_ids[: prefix_of.computed]
            limit = min(len(theirs), len(prompt) - 1) // self.block_size * self.block_size
            size = self.block_size
            while shared < limit and list(prompt[shared : shared + size]) == theirs[shared : shared + size]:
                shared += size
        blocks = prefix_of.blocks[: shared // self.block_size] if prefix_of is not None else []
        generation = Generation(len(self.sequences), list(prompt), params, seed, list(blocks), shared)
        self.sequences.append(generation)
        return generation

    def step(self) -> None:
        """Every running sequence decodes; what is left of the budget goes to prompts."""
        budget, starts = self.budget, []
        decodes: list[SequenceChunk] = []
        prefills: list[SequenceChunk] = []
        live = [generation for generation in self.sequences if not generation.done]
        for generation in live:
            remaining = len(generation.all_ids) - generation.computed
            count = min(remaining, budget)
            if not count:
                continue
            budget -= count
            if not generation.started:
                starts.append(self._start(generation))
            chunk = self._chunk(generation, count, 1 if count == remaining else 0)
            (decodes if count == 1 else prefills).append(chunk)
            generation.computed += count
        batch = Batch(self.steps, tuple(starts), tuple(decodes + prefills), tuple(self._departures))
        self._departures = []
        self.steps += 1
        for seq_id, tokens in self.executor.launch(batch).result().samples.items():
            self.sequences[seq_id].tokens.extend(tokens)
        self._departures = [generation.seq_id for generation in live if generation.done]

    def run(self) -> list[list[int]]:
        """Step until every sequence is done. -> each sequence's output ids."""
        while not all(generation.done for generation in self.sequences):
            self.step()
        self.leave()
        return [[token.token_id for token in generation.tokens] for generation in self.sequences]

    def leave(self) -> None:
        """Report the last departures, so that the executor can be used again."""
        self.executor.launch(Batch(self.steps, departures=tuple(self._departures))).result()
        self._departures = []

    def preempt(self, generation: Generation) -> None:
        """Recompute: its row ends and its blocks are forgotten."""
        self._departures.append(generation.seq_id)
        generation.started, generation.computed, generation.blocks = False, 0, []

    def _start(self, generation: Generation) -> SequenceStart:
        generation.started = True
        return SequenceStart(
            generation.seq_id,
            tuple(generation.all_ids),
            len(generation.prompt),
            tuple(generation.blocks),
            generation.params,
            generation.seed,
        )

    def _chunk(self, generation: Generation, count: int, num_samples: int) -> SequenceChunk:
        first = len(generation.blocks)
        needed = -(-(generation.computed + count) // self.block_size)
        new = [self.free.pop() for _ in range(first, needed)]
        generation.blocks += new
        return SequenceChunk(generation.seq_id, generation.computed, count, first, tuple(new), num_samples)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
