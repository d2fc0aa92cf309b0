"""Collects one step's batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.adapter_places import AdapterPlaces
from pd_cluster.scheduling.batch import Batch, BeamStep, BlockCopies, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.scheduling.prefill_budget import PrefillBudget
from pd_cluster.scheduling.unready import Unready
from pd_connectors.base import LoadSpec, PublishSpec

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.sequence import Sequence

# Tokens of a step with a prompt of a better priority that worse ones may fill up: a GPU computes so many while it reads
# the weights (8B on an H200: 8 us each, 22 beyond 256). Without it a short prompt shared a step of 2,048 tokens, 46 ms.
FILL = 128


@dataclass(slots=True, kw_only=True)
class BatchBuilder:
    """The parts of one step, and the rest of its token budget."""

    step: int
    budget: int  # tokens left
    unready: Unready = field(default_factory=Unready)  # their chunks end before the last known token
    prompts: PrefillBudget = field(default_factory=PrefillBudget)  # the share of `budget` for chunks of prompts
    # Rows of logits left for the first tokens of requests with n > 1. In all, a step has as many extra rows as
    # there are slots
    rows: int = 0
    starts: list[SequenceStart] = field(default_factory=list)
    chunks: list[SequenceChunk] = field(default_factory=list)
    swap_out: list[tuple[int, int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)
    copy_on_write: list[tuple[int, int, int]] = field(default_factory=list)
    save: list[tuple[int, int, int]] = field(default_factory=list)
    load: list[tuple[int, int, int]] = field(default_factory=list)
    may_outlast: bool = False
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)
    begun: list[PublishSpec] = field(default_factory=list)
    publishes: list[PublishSpec] = field(default_factory=list)
    preempted: bool = False
    held: set[int] = field(
        default_factory=set
    )  # sequences that give their blocks up as soon as no running step touches them
    # Blocks by group for which the blocks of these sequences were found to make no room
    in_vain: tuple[list[int], set[int]] = field(default_factory=lambda: ([], set()))
    num_tokens: int = 0  # of prompts, in `chunks`
    best_priority: float = inf  # of these prompts

    def batch(self, departures: tuple[int, ...], beam_steps: tuple[BeamStep, ...], loads: list[LoadSpec]) -> Batch:
        """The finished batch, decodes first."""
        adapters = self.adapters.take_fill()
        if self.starts:  # a sequence that entered last may have a decode
            self.chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
        return Batch(
            step=self.step,
            starts=tuple(self.starts),
            chunks=tuple(self.chunks),
            beam_steps=beam_steps,
            departures=departures,
            copies=BlockCopies(
                tuple(self.swap_out),
                tuple(self.swap_in),
                tuple(self.copy_on_write),
                tuple(self.save),
                tuple(self.load),
                self.may_outlast or bool(adapters),
            ),
            loads=tuple(loads),
            begun=tuple(self.begun),
            publishes=tuple(self.publishes),
            adapters=adapters,
        )

    @property
    def is_of_decodes(self) -> bool:
        """Whether each chunk is of one token, with a token drawn after it."""
        return not self.num_tokens and all(chunk.num_samples for chunk in self.chunks)

    def has_rows(self, seq: Sequence) -> bool:
        """Whether this step has logits rows for all tokens that the sequence would sample. A lead samples n."""
        return seq.num_samples == 1 or seq.num_samples <= self.rows

    def limit_to_fill(self, seq: Sequence) -> None:
        """Leave prompts little if the step has one of a better priority than the sequence's, which is next."""
        if seq.priority > self.best_priority:
            self.prompts.tokens_left = min(self.prompts.tokens_left, max(0, FILL - self.num_tokens))

    def add_chunk(self, seq: Sequence, blocks: BlockManager) -> None:
        """Add a chunk: the last token, or as many as prompts may have. Its blocks exist or can be allocated.

        The last token of an unready sequence is left out. It must not be the only one.
        """
        table, start, num_remaining = seq.table, seq.num_scheduled_tokens, seq.num_remaining_tokens
        assert table is not None
        num_tokens = 1
        if num_remaining > 1:
            num_tokens = self.prompts.take(start, num_remaining - (seq in self.unready))
            self.num_tokens += num_tokens
            self.best_priority = min(self.best_priority, seq.priority)
        end = start + num_tokens
        new_blocks: tuple[NewBlocks, ...] = ()
        if end > table.capacity:
            growth = blocks.grow(table, start, end)
            self.copy_on_write += growth.copies
            new_blocks = growth.new_blocks
        if not seq.in_worker:
            new_blocks = ()  # SequenceStart names all blocks
            self._add_start(seq, blocks.whole(table))
        num_samples = 0
        if num_tokens == num_remaining:
            num_samples = seq.num_samples
            if num_samples > 1:
                self.rows -= num_samples
            seq.num_pending += 1
        seq.num_scheduled_tokens = end
        seq.num_in_flight += 1
        seq.planned_step = self.step
        self.budget -= num_tokens
        self.prompts.tokens_left = min(self.prompts.tokens_left, self.budget)
        reads, states = seq.reads(start, end), None
        if blocks.states is not None:
            states = blocks.states.plan(table, start, end, seq.num_prompt_tokens, draws=num_samples > 0)
        self.chunks.append(SequenceChunk(seq.seq_id, start, num_tokens, new_blocks, num_samples, reads, (), states))
        if seq.request.lease_id is not None:
            self._announce(seq, table, seq.request.lease_id, blocks)

    def _add_start(self, seq: Sequence, tables: tuple[NewBlocks, ...]) -> None:
        seq.in_worker = True
        request = seq.request
        if request.lease_id is not None:
            self.begun.append(PublishSpec(request.lease_id, (), 0, request.lease_generation))
        seeds: tuple[int, ...] = ()
        if seq.num_samples > 1:
            seeds = tuple(map(request.seed_of, range(seq.num_samples)))
        self.starts.append(
            SequenceStart(
                seq_id=seq.seq_id,
                token_ids=tuple(seq.token_ids),
                num_prompt_tokens=seq.num_prompt_tokens,
                tables=tables,
                sampling=request.sampling,
                seed=seq.seed,
                num_sample_seeds=seeds,
                outputs=request.message.outputs if seq.index == 0 else None,
                adapter=self.adapters.slot(seq),
            )
        )

    def _announce(self, seq: Sequence, table: BlockTable, lease_id: str, blocks: BlockManager) -> None:
        """Once this step has retired, the lease's reader may read every whole block, or the whole prompt."""
        num_tokens = seq.num_scheduled_tokens
        if num_tokens < seq.num_prompt_tokens:
            num_tokens -= num_tokens % blocks.block_size
        if num_tokens > seq.num_announced_tokens:
            seq.num_announced_tokens = num_tokens
            runs = blocks.handed_over(table, seq.num_prompt_tokens, num_tokens)
            self.publishes.append(PublishSpec(lease_id, runs, num_tokens, seq.request.lease_generation))
