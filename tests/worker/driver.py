"""A small scheduler for worker tests: first come, first served, with chunks, shared prefixes and scattered blocks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_kernels.fp8_cache import FP8

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_connectors.protocol.messages import SampledToken
    from pd_connectors.protocol.slabs import KvSlabs

DEAD = -1
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def make_executor(
    model: Path | str, *, num_blocks: int = 256, block_size: int = 16, max_num_seqs: int = 16,
    speculation: str = "none", **options: Any,
) -> DeviceExecutor:  # fmt: skip
    """An executor on CPU in float32. `options` go to ModelConfig."""
    model_options: dict[str, Any] = {"model": str(model), "device": "cpu", "dtype": "float32", **options}
    config = NodeConfig(
        model=ModelConfig(**model_options),
        cache=CacheConfig(num_blocks=num_blocks, block_size=block_size, swap_gb=0.001),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512, speculation=speculation),
    )
    return DeviceExecutor.started(config, lambda _: None)


@dataclass
class Generation:
    """One sequence as the driver sees it."""

    seq_id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    tables: list[list[int]]  # by KV group; DEAD: given back
    computed: int = 0
    started: bool = False
    tokens: list[SampledToken] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        """Of the first KV group."""
        return self.tables[0]

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt, *(token.token_id for token in self.tokens)]

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.params.max_tokens


class SlabPools:
    """Gives the blocks of each KV group in random order, from slabs that one group owns at a time."""

    def __init__(self, slabs: KvSlabs, seed: int) -> None:
        self._random, self._slabs = random.Random(seed), slabs
        self._unowned = self._random.sample(range(slabs.num_slabs), slabs.num_slabs)
        self._free: list[list[int]] = [[] for _ in slabs.per_slab]
        self._holders: Counter[tuple[int, int]] = Counter()

    def take(self, group: int) -> int:
        if not self._free[group]:
            self._own(group, self._unowned.pop())
        block = self._free[group].pop()
        self.share(group, block)
        return block

    def tables(self, num_blocks: int) -> tuple[NewBlocks, ...]:
        """New blocks of every group, from the first one on."""
        groups = range(len(self._free))
        return tuple(NewBlocks(group, 0, tuple(self.take(group) for _ in range(num_blocks))) for group in groups)

    def share(self, group: int, block: int) -> None:
        self._holders[group, block] += 1

    def adopt(self, tables: list[list[int]]) -> None:
        """Hold blocks of another engine's numbers, before any other."""
        for group, blocks in enumerate(tables):
            for slab in {block // self._slabs.per_slab[group] for block in blocks}:
                self._unowned.remove(slab)
                self._own(group, slab)
            self._free[group] = [block for block in self._free[group] if block not in blocks]
            for block in blocks:
                self.share(group, block)

    def drop(self, group: int, block: int) -> bool:
        """Give a block back. -> whether it is free now. A slab with free blocks only is unowned."""
        self._holders[group, block] -= 1
        if self._holders[group, block]:
            return False
        free, count = self._free[group], self._slabs.per_slab[group]
        free.append(block)
        slab = block // count
        if sum(one // count == slab for one in free) == count:
            self._free[group] = [one for one in free if one // count != slab]
            self._unowned.append(slab)
        return True

    def _own(self, group: int, slab: int) -> None:
        count = self._slabs.per_slab[group]
        self._free[group] += self._random.sample(range(slab * count, (slab + 1) * count), count)


class Driver:
    """Runs sequences to their max_tokens. Blocks are handed out in random order.

    Without `frees` they are never returned: every group's table has the whole sequence. With it a table begins at the
    first block that its group reads, dead blocks are given back, and all blocks that no sequence holds are NaN.
    """

    def __init__(self, executor: DeviceExecutor, budget: int = 512, seed: int = 0, *, frees: bool = False) -> None:
        self.executor = executor
        self.budget = budget
        self.block_size = executor.block_size
        self.groups = executor.layout.groups
        self.pools = SlabPools(executor.slabs, seed)
        self.frees = frees
        self.num_freed_early = [0] * len(self.groups)  # blocks of sequences that went on
        if frees:
            for group, tensor in enumerate(executor._cache.tensors):
                poison(tensor)
                executor._runner.rows._tables.arrays[group][:] = self.pools.take(group)  # a block that stays NaN
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
        tables: list[list[int]] = [[] for _ in self.groups]
        if prefix_of is not None:
            tables = [table[: shared // self.block_size] for table in prefix_of.tables]
        if self.frees:  # as a cache hit
            for group, (kind, table) in enumerate(zip(self.groups, tables, strict=True)):
                first = kind.first_block(shared)
                table[:first] = [DEAD] * min(first, len(table))
                for block in table[first:]:
                    assert block != DEAD, "the prefix is not cached"
                    self.pools.share(group, block)
        generation = Generation(len(self.sequences), list(prompt), params, seed, tables, shared)
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
        if self.frees:
            for generation in live:
                self._free_dead(generation)
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
        generation.started, generation.computed, generation.tables = False, 0, [[] for _ in self.groups]

    def _start(self, generation: Generation) -> SequenceStart:
        generation.started = True
        tables = []
        for group, table in enumerate(generation.tables):
            first = next((index for index, block in enumerate(table) if block != DEAD), len(table))
            tables.append(NewBlocks(group, first, tuple(table[first:])))
        return SequenceStart(
            generation.seq_id,
            tuple(generation.all_ids),
            len(generation.prompt),
            tuple(tables),
            generation.params,
            generation.seed,
        )

    def _chunk(self, generation: Generation, count: int, num_samples: int) -> SequenceChunk:
        needed = -(-(generation.computed + count) // self.block_size)
        new_blocks = []
        for group, table in enumerate(generation.tables):
            new = [self.pools.take(group) for _ in range(len(table), needed)]
            if new:
                new_blocks.append(NewBlocks(group, len(table), tuple(new)))
            table += new
        return SequenceChunk(generation.seq_id, generation.computed, count, tuple(new_blocks), num_samples)

    def _free_dead(self, generation: Generation) -> None:
        for group, (kind, table) in enumerate(zip(self.groups, generation.tables, strict=True)):
            stop = len(table) if generation.done else kind.first_block(generation.computed)
            for block in table[:stop]:
                if block != DEAD and self.pools.drop(group, block):
                    poison(self.executor._cache.tensors[group][block])
                    self.num_freed_early[group] += not generation.done
            table[:stop] = [DEAD] * stop


def poison(blocks: torch.Tensor) -> None:
    """Fill blocks with NaN."""
    if blocks.dtype is FP8:
        blocks.view(torch.uint8).fill_(0x7F)
    else:
        blocks.fill_(torch.nan)


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
