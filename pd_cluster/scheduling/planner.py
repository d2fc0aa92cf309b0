"""What the next step computes. There is no prefill phase and no decode phase: every sequence has tokens left.

    1  running sequences with one token left (decodes), best rank first; short of memory, the worst rank is preempted
    2  running sequences with more (prefill chunks), while the prompts' share of the token budget lasts
    3  unless something was preempted: sequences that wait, in turn (`turns`), while slots, memory and budget last

Before all that, groups that hold many slots yield some to those that wait with fewer.

A long prompt never takes the token of a sequence whose KV has come and that finds a slot: that decodes at once. Where
steps with decodes are limited (`max_tokens_beside_decodes`), prompts get what the limit leaves, and a minimum
(`PrefillBudget`).

Running sequences take memory from parked prefix pins, then from the worst-ranked holder. Those that wait (admissions
here, reservations for loads) hold nothing and are served strictly by their claims, so that no stream of small ones can
starve a large one. Holders that cannot be preempted (leases, loads) end within a deadline of their own.
Nothing here reads a sampled token: a step can be planned while the one before it runs.
"""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING

from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.batch_builder import BatchBuilder
from pd_cluster.scheduling.portion import Portions, in_rotation
from pd_cluster.scheduling.prefill_budget import PrefillBudget
from pd_cluster.scheduling.ranked_queue import RankedQueue
from pd_cluster.scheduling.sequence import KvArrival, Request, Sequence, SequenceStatus
from pd_cluster.scheduling.turns import Turns
from pd_cluster.scheduling.yielding import Yielding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.turns import Group
    from pd_connectors.base import LoadSpec

PREEMPTIONS = ("preemptions_recompute_total", "preemptions_swap_total")
HITS = ("prefix_cache_queried_tokens_total", "prefix_cache_hit_tokens_total")
RUNNING, SWAPPED = SequenceStatus.RUNNING, SequenceStatus.SWAPPED


class Planner:
    """The queues, and the plan of one step over them. `Scheduler` decides what enters and leaves the queues."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_tokens_beside_decodes: int,
        keys_per_token: int,
        on_preempt: Callable[[Sequence], None],
        clock: Callable[[], float],
        *,
        rests: bool = False,
    ) -> None:
        self.turns = Turns()
        self._yielding = Yielding(self, blocks, rests=rests)
        self._has_portions = rests
        self.running: RankedQueue[Sequence] = RankedQueue()
        self.waiting: RankedQueue[Sequence] = RankedQueue()  # hold no device blocks
        self.loaded: RankedQueue[Sequence] = RankedQueue()  # hold their prompt's KV and wait for a slot
        self.parked: RankedQueue[Request] = RankedQueue()  # wait for remote KV; until reserved they hold a prefix pin
        self.reserving: RankedQueue[Request] = RankedQueue()  # parked, and refused blocks for want of memory
        self.loads: list[LoadSpec] = []  # for the next batch
        self.departures: list[int] = []  # for the next batch
        self.counters = dict.fromkeys((*PREEMPTIONS, *HITS), 0.0)
        self._config = config
        self._blocks = blocks
        self._max_tokens_beside_decodes = max_tokens_beside_decodes
        self._keys_per_token = keys_per_token
        self._on_preempt = on_preempt
        self._clock = clock
        self.short_of_memory: Sequence | None = None  # the last one without blocks; nothing passes it
        self.watermark = max(1, blocks.num_blocks // 100)  # kept for those that run already
        self._next_step = 0

    # queues

    @property
    def num_free_slots(self) -> int:
        return self._config.max_num_seqs - len(self.running)

    def queue(self, seq: Sequence) -> None:
        """It waits for a slot, with its KV (`loaded`) or without."""
        (self.waiting if seq.table is None else self.loaded).add(seq)
        seq.request.group.waiting.add(seq)

    def run(self, seq: Sequence) -> None:
        """Give the sequence, which has its blocks, a slot."""
        self._unqueue(seq)
        seq.status = RUNNING
        self.running.add(seq)
        self.turns.take_slot(seq.request)

    def _unqueue(self, seq: Sequence) -> None:
        if seq.request.group.waiting.discard(seq) and not self.waiting.discard(seq):
            self.loaded.discard(seq)

    def enter(self, seq: Sequence) -> None:
        """A sequence whose prompt's KV is here runs if there is a slot, else it waits for one."""
        if self.num_free_slots > 0:
            self.run(seq)
        else:
            seq.status = SequenceStatus.WAITING
            self.queue(seq)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of whichever queue it is in, and its row out of the worker."""
        if self.running.discard(seq):
            self.turns.return_slot(seq.request)
        else:
            self._unqueue(seq)
        if seq.in_worker:
            seq.in_worker = False
            self.departures.append(seq.seq_id)

    # memory

    def may_reserve(self, request: Request) -> bool:
        """Whether nothing with a better claim waits for memory."""
        claim, short = request.claim, self.short_of_memory
        if any(other.claim < claim for other in self.reserving):
            return False
        return short is None or short not in self.waiting or claim < short.request.group.claim(short.rank)

    def make_room(self, num_blocks: int, claimant: Request | None) -> bool:
        """Whether what waits may take `num_blocks`; drops the pins of others for it, worst rank first."""
        spare = self.watermark if self.running or self.loaded else 0
        while self._blocks.num_available < num_blocks + spare:
            if not self._drop_pin(claimant):
                return False
        return True

    def _drop_pin(self, keep: Request | None = None) -> bool:
        """Let a parked request's prefix become evictable. What is left of it is pinned again when it reserves."""
        for request in reversed(self.parked):
            table = request.table
            if request is not keep and request.kv is KvArrival.ABSENT and table is not None and table.ids:
                self._blocks.close(table)
                request.table = self._blocks.open_table()
                return True
        return False

    def _victim(self, draft: BatchBuilder) -> Sequence | None:
        """The worst-ranked holder of blocks that this step has not planned, or one of a group that owes it a slot."""
        worst = self.loaded.last
        for seq in reversed(self.running):
            if worst is not None and worst.rank > seq.rank:
                break
            if seq.planned_step != draft.step:
                worst = seq
                break
        return worst if worst is None else self._yielding.debtor(worst, draft) or worst

    def preempt(self, seq: Sequence, draft: BatchBuilder) -> None:
        """Take the sequence's blocks. Its reader, if it has a lease, is told first."""
        request, table, blocks = seq.request, seq.table, self._blocks
        assert table is not None
        assert not seq.num_in_flight
        if request.lease_id is not None:
            self._on_preempt(seq)
        self.remove(seq)
        num_held = blocks.blocks_for(seq.num_computed_tokens)
        if request.lease_id is None and 0 < num_held <= blocks.num_host_free:
            pairs = blocks.swap_out(table, num_held)
            draft.swap_out += pairs
            seq.host_block_ids = [host for _, host in pairs]
            seq.status = SWAPPED
            self.counters["preemptions_swap_total"] += 1
        else:
            blocks.close(table)
            seq.num_computed_tokens = 0
            seq.status = SequenceStatus.PREEMPTED
            self.counters["preemptions_recompute_total"] += 1
        seq.table = None
        seq.num_scheduled_tokens = seq.num_computed_tokens
        seq.num_announced_tokens = 0
        self.queue(seq)

    # planning

    def plan(self) -> Batch:
        """The next step's batch. It counts as running until `Scheduler.update` has seen its result."""
        config = self._config
        draft = BatchBuilder(step=self._next_step, budget=config.max_num_batched_tokens, rows=config.max_num_seqs)
        self._next_step += 1
        if self._has_portions and self.turns.has_shared:
            draft.portions = Portions()
        if self.turns.anyone_is_rich and (self.waiting or self.loaded):
            self._yielding.even_out(draft)
        resting = self._yielding.resting()
        prefills = self._plan_decodes(draft, resting)
        draft.prompts = self._prompt_share(draft)
        for seq in prefills:
            may_run = seq.status is RUNNING and seq.seq_id not in draft.held
            may_run = may_run and draft.has_rows(seq) and draft.has_portion(seq)
            if may_run and draft.prompts.admits(seq.num_scheduled_tokens):
                draft.add_chunk(seq, self._blocks)
        if not draft.preempted and not draft.held and (self.waiting or self.loaded):
            self._admit(draft)
        if resting is not None and not draft.chunks:  # for nothing
            self._plan_decodes(draft, None)
        batch = draft.batch(self.departures, self.loads)
        self.departures, self.loads = [], []
        return batch

    def _prompt_share(self, draft: BatchBuilder) -> PrefillBudget:
        """What prompts may take of this step. Its decodes, and loaded sequences that may enter, come first."""
        config = self._config
        num_entering = min(len(self.loaded), self.num_free_slots)
        num_decodes = config.max_num_batched_tokens - draft.budget + num_entering
        has_limit = num_decodes or self.parked  # who is parked decodes soon, and must not wait for a long step
        limit = self._max_tokens_beside_decodes if has_limit else 0
        return PrefillBudget.beside(num_decodes, config.max_num_batched_tokens, limit, self._keys_per_token)

    def _plan_decodes(self, draft: BatchBuilder, resting: Group | None) -> list[Sequence]:
        """Plan every decode but of the group that rests; return the running sequences with more than one token left."""
        step, chunks, prefills, portions = draft.step, draft.chunks, [], draft.portions
        running = tuple(self.running) if resting is None else self._without(resting)
        for seq in running if portions is None else in_rotation(running):
            if draft.held and seq.seq_id in draft.held:
                continue
            num_known = len(seq.token_ids) + seq.num_pending
            start = seq.num_scheduled_tokens
            if num_known - start > 1:
                prefills.append(seq)
            elif num_known >= seq.max_len or (seq.num_samples > 1 and seq.num_pending) or seq.status is not RUNNING:
                continue  # its last token, or its first ones, are being sampled; or it was preempted just now
            elif portions is not None and not portions.has_row(seq):
                continue
            elif start < seq.table.capacity and seq.in_worker and start >= seq.num_prompt_tokens:  # type: ignore[union-attr]
                seq.num_scheduled_tokens = num_known
                seq.num_pending += 1
                seq.num_in_flight += 1
                seq.planned_step = step
                if portions is not None:
                    portions.take_row(seq)
                chunks.append(SequenceChunk(seq.seq_id, start, 1, 0, (), 1))
                draft.budget -= 1
            elif draft.has_rows(seq) and self._make_writable(seq, draft):
                draft.add_chunk(seq, self._blocks)
        return prefills

    def _without(self, resting: Group) -> tuple[Sequence, ...]:
        return tuple(seq for seq in self.running if seq.request.group is not resting)

    def _make_writable(self, seq: Sequence, draft: BatchBuilder) -> bool:
        """Preempt until the sequence can write its next token, or it is its own turn to yield."""
        while not self._can_write(seq):
            if self._drop_pin():
                continue
            victim = self._victim(draft)
            if victim is None or not self._may_take(seq, victim):
                return False
            if victim.num_in_flight:  # a step that still runs touches its blocks: it is left out now, and yields next
                draft.held.add(victim.seq_id)
                return False
            self.preempt(victim, draft)
            draft.preempted = True
            if victim is seq:
                return False
        return True

    def _may_take(self, seq: Sequence, victim: Sequence) -> bool:
        """Whether a running sequence may have the blocks of another: by rank, unless one's group owes the other's.

        What a group owes counts for nothing where its sequence has the better priority: `debtor` takes nothing from
        that one either, so that both would wait for each other for ever.
        """
        own, other = seq.request.group, victim.request.group
        is_owed = own.owes(other) and seq.rank[0] >= victim.rank[0]
        return other.owes(own) or (victim.rank >= seq.rank and not is_owed)

    def _can_write(self, seq: Sequence) -> bool:
        table, start = seq.table, seq.num_scheduled_tokens
        assert table is not None
        return start < table.capacity or self._blocks.can_grow(table, start, start + 1)

    # admission

    def in_turn(self) -> Iterator[Sequence]:
        """The sequences that wait for a slot."""
        return self.turns.in_turn(merge(tuple(self.loaded), tuple(self.waiting), key=lambda seq: seq.rank))

    def _admit(self, draft: BatchBuilder) -> None:
        """In turn. Short of slots nothing passes; short of memory, or of the prompts' share of the budget, only those
        sequences may that hold their memory already.

        Who is short of memory stays first to get it until it is asked again, which takes some budget.
        """
        is_short = False
        for seq in self.in_turn():
            if not draft.budget or draft.preempted or self.num_free_slots <= 0:
                return
            if seq.table is not None:
                if draft.has_rows(seq) and draft.has_portion(
                    seq
                ):  # a lead whose first tokens are drawn again samples n
                    self._enter_loaded(seq, draft)
            elif (
                not is_short
                and not self._awaits_sibling(seq)
                and draft.has_rows(seq)
                and draft.has_portion(seq)
                and (seq.num_remaining_tokens == 1 or draft.prompts.admits(len(seq.token_ids)))
            ):
                is_short = not self._find_memory(seq, draft)
                if is_short:
                    self.short_of_memory = seq
                else:
                    self.run(seq)
                    draft.add_chunk(seq, self._blocks)
            if is_short and not self.loaded:
                return

    def _enter_loaded(self, seq: Sequence, draft: BatchBuilder) -> None:
        """Its KV is here; it needs room for one token. With nobody running, worse-ranked ones make room."""
        while not self._can_write(seq):
            if self._drop_pin():
                continue
            victim = self.loaded.last
            if self.running or victim is None or victim is seq:
                return
            self.preempt(victim, draft)
            draft.preempted = True
        self.run(seq)
        if seq.request.marks.decode_scheduled_s is None:
            seq.request.marks.decode_scheduled_s = self._clock()
        draft.add_chunk(seq, self._blocks)

    def _awaits_sibling(self, seq: Sequence) -> bool:
        """Sequences of one request compute its prompt one after the other, so that the rest find it cached."""
        request = seq.request
        if not request.first_tokens or not self._blocks.prefix_caching:
            return False
        return any(s.status is RUNNING and s.num_computed_tokens < s.num_prompt_tokens for s in request.sequences)

    def _find_memory(self, seq: Sequence, draft: BatchBuilder) -> bool:
        """All blocks that the sequence's tokens need, so that no prompt is preempted for want of its own end.

        One token at least is left to compute: somebody has to produce the logits.
        """
        claim = seq.request.group.claim(seq.rank)
        if any(request.claim < claim for request in self.reserving):
            return False
        blocks, num_tokens = self._blocks, len(seq.token_ids)
        table = blocks.open_table()
        reusable = seq.num_computed_tokens if seq.status is SWAPPED else num_tokens - 1
        hashes = seq.hash_blocks(reusable // blocks.block_size, blocks.block_size)
        num_cached = blocks.match(table, hashes)
        if not self.make_room(blocks.blocks_for(num_tokens) - num_cached, seq.request):
            blocks.close(table)
            return False
        if seq.status is SWAPPED:
            draft.swap_in += blocks.swap_in(table, seq.host_block_ids)
            seq.host_block_ids = []
        else:
            seq.num_computed_tokens = seq.num_scheduled_tokens = num_cached * blocks.block_size
            self._count_hit(seq)
        blocks.grow(table, seq.num_scheduled_tokens, num_tokens)
        seq.table = table
        return True

    def _count_hit(self, seq: Sequence) -> None:
        """A request's hit is what it found when it first came; what it finds after a preemption is its own."""
        marks = seq.request.marks
        if marks.scheduled_s is None and marks.loaded_s is None:
            marks.scheduled_s = self._clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.counters["prefix_cache_queried_tokens_total"] += seq.num_prompt_tokens
            self.counters["prefix_cache_hit_tokens_total"] += seq.num_cached_tokens
