"""Plans the next step. There is no prefill phase and no decode phase: every sequence has tokens left to compute.

    1  running sequences with one token left (decodes), by precedence; short of memory, the last one is preempted
    2  running sequences with more (prefill chunks), while the prompts' share of the token budget lasts
    3  unless something was preempted: sequences that wait, in turn (`turns`), while slots, memory and budget last
    4  drafts for decodes (`drafts`), of what is left

Prompts that wait go before running chunks of a worse priority, and a step with a prompt of a better priority takes
chunks of worse ones only as far as they hardly prolong it (`batch_builder.FILL`). A chunk that is passed so in many
steps in a row goes first in one (`passed_prompts`).

Before all that, groups that hold many slots yield some to groups that wait with fewer (`yielding`).

Sequences that have just got their KV and find a slot are counted before prompt chunks, so a long prompt never delays
their first decode. Where steps with decodes are limited (`StepBudget`), prompts get what the limit leaves, and a
minimum (`PrefillBudget`).

A chunk of an unready sequence ends before its last known token (`unready`).

Nothing here reads a sampled token, so a step can be planned while the step before it runs.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from operator import ge
from typing import TYPE_CHECKING

from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.batch_builder import BatchBuilder
from pd_cluster.scheduling.passed_prompts import PassedPrompts
from pd_cluster.scheduling.prefill_budget import PrefillBudget
from pd_cluster.scheduling.sequence import KvArrival, SequenceStatus
from pd_cluster.scheduling.step_budget import is_stream
from pd_cluster.scheduling.step_model import StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.drafts import Drafting
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.step_budget import StepBudget
    from pd_cluster.scheduling.yielding import Yielding
    from pd_connectors.base import LoadSpec

RUNNING = SequenceStatus.RUNNING


class Planner:
    """Makes a batch from the queues, and moves sequences into and out of slots for it.

    Invariant: a sequence gets at most one chunk per step, within the token budget, and the blocks that a chunk writes
    belong to its sequence alone. The arguments are documented by `Scheduler`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        queues: Queues,
        memory: KvMemory,
        yielding: Yielding,
        clock: Callable[[], float],
        step_budget: StepBudget,
        drafting: Drafting | None = None,
    ) -> None:
        self._drafting = drafting
        self._config = config
        self._blocks = blocks
        self._queues = queues
        self._memory = memory
        self._yielding = yielding
        self._clock = clock
        self._step_budget = step_budget
        self._passed = PassedPrompts()
        self._next_step = 0
        blocks.copies.step_tokens = config.max_num_batched_tokens

    def plan(self, loads: list[LoadSpec]) -> Batch:
        """The next step's batch, with these loads. Its sequences count as in flight until its result is known."""
        config = self._config
        builder = BatchBuilder(
            step=self._next_step,
            budget=config.max_num_batched_tokens,
            rows=config.max_num_seqs,
            unready=self._queues.unready,
            adapters=self._queues.adapters,
        )
        self._next_step += 1
        builder.adapters.begin(self._queues.running)
        self._yielding.even_out(builder)
        prefills = self._plan_decodes(builder)
        if prefills or self._queues.waiting:
            builder.prompts = self._prefill_budget(builder)
        has_turn = self._plan_turn(builder, prefills)
        self._plan_chunks(builder, prefills)
        if not builder.preempted and not builder.held and self._queues.has_waiting:
            self._admit(builder)
            self._yield_beam(builder)
        self._passed.note(prefills, builder.best_priority, is_turn=has_turn)
        if self._drafting is not None:
            self._drafting.add(builder)
        if self._blocks.host.is_cache:
            self._plan_copies(builder)  # last: nothing else may take what these copies read
        batch = builder.batch(self._queues.take_departures(), self._queues.take_beam_steps(), loads)
        if builder.preempted and not builder.held and not batch.moves_worker:
            return self.plan(loads)  # what has yielded never ran: the next step can begin at once
        return batch

    def _plan_copies(self, builder: BatchBuilder) -> None:
        copies, step_s = self._blocks.copies, inf
        if builder.chunks:
            step_s = self._step_budget.model.seconds(StepWork.of(builder.chunks))  # 14 us for 256
        has_streams = any(map(is_stream, self._queues.running))
        running = self._queues.running if self._blocks.host.victims else ()
        written = {seq.table: seq.num_scheduled_tokens for seq in running if seq.table is not None}
        builder.save, builder.load = copies.plan(written, step_s=step_s, has_streams=has_streams)
        builder.may_outlast = bool(builder.load) or not builder.chunks or copies.copy_s(builder.save) > step_s

    def tokens_beside_decodes(self) -> int:
        """The prompt tokens that a step may take at present beside the decodes. 0: it has none, or no limit."""
        num_decodes = sum(map(is_stream, self._queues.running))
        if not num_decodes:
            return 0
        return self._step_budget.lasting(num_decodes, self._config.max_num_batched_tokens, self._queues)

    def _prefill_budget(self, builder: BatchBuilder) -> PrefillBudget:
        """The share of this step for prompts: what its decodes, and loaded sequences that may enter, leave."""
        config, queues = self._config, self._queues
        num_entering = min(len(queues.loaded), queues.num_free_slots)
        num_decodes = config.max_num_batched_tokens - builder.budget + num_entering
        # A parked request that decodes soon must not wait for a long step
        if not num_decodes and not any(request.is_stream for request in queues.parked):
            return PrefillBudget.whole(config.max_num_batched_tokens)
        return self._step_budget.beside(num_decodes, num_entering, config.max_num_batched_tokens, queues)

    # running sequences

    def _plan_decodes(self, builder: BatchBuilder) -> list[Sequence]:
        """Plan every decode. Returns the running sequences with more than one token left."""
        step, chunks, prefills = builder.step, builder.chunks, []
        running = tuple(self._queues.running)
        if pending := self._blocks.copies.pending:
            running = tuple(seq for seq in running if seq.table not in pending)
        if builder.unready:
            now_s = self._clock()
            running = tuple(seq for seq in running if not builder.unready.holds(seq, now_s))
        for seq in running:
            if builder.held and seq.seq_id in builder.held:
                continue
            num_known = len(seq.token_ids) + seq.num_pending
            start = seq.num_scheduled_tokens
            if num_known - start > 1:
                prefills.append(seq)
            elif num_known >= seq.max_len or seq.status is not RUNNING:
                continue  # a running step samples its last token, or it was just preempted
            elif seq.num_pending and (seq.num_uncertain or seq.num_samples > 1):
                continue  # a running step samples its first ones, or several; or the host chooses its token
            elif start < seq.table.capacity and seq.in_worker and start >= seq.num_prompt_tokens:  # type: ignore[union-attr]
                seq.num_scheduled_tokens = num_known
                seq.num_pending += 1
                seq.num_in_flight += 1
                seq.planned_step = step
                chunks.append(SequenceChunk(seq.seq_id, start, 1, (), 1))
                builder.budget -= 1
            elif builder.has_rows(seq) and self._make_writable(seq, builder):
                builder.add_chunk(seq, self._blocks)
        return prefills

    def _plan_turn(self, builder: BatchBuilder, prefills: list[Sequence]) -> bool:
        """Plan a chunk of the running prompt that has been passed too often, if there is one. Returns whether it is."""
        first = self._queues.waiting.first
        able = [seq for seq in prefills if self._may_run(seq, builder)]
        seq = self._passed.of_turn(able, None if first is None else first.priority)
        if seq is None or not builder.prompts.admits(seq.num_scheduled_tokens):
            return False
        builder.add_chunk(seq, self._blocks)
        return True

    def _may_run(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """Whether this step may have a chunk of a running prompt."""
        may_run = seq.status is RUNNING and seq.seq_id not in builder.held and seq.planned_step != builder.step
        return may_run and builder.has_rows(seq)

    def _plan_chunks(self, builder: BatchBuilder, prefills: list[Sequence]) -> None:
        """Plan chunks of the running prompts, in order of precedence, after what waits with a better priority."""
        passed = None
        for seq in prefills:
            priority, first = seq.priority, self._queues.waiting.first
            if passed != priority and first is not None and first.priority < priority:
                passed = priority
                if not builder.preempted and not builder.held:
                    self._admit(builder, before=priority)
            may_run = self._may_run(seq, builder)
            builder.limit_to_fill(seq)
            if may_run and builder.prompts.admits(seq.num_scheduled_tokens):
                builder.add_chunk(seq, self._blocks)

    def _make_writable(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """Preempt until the sequence can write its next token, or is itself the next to yield: False."""
        if self._memory.can_write(seq):
            return True
        if self._memory.is_shared and not self._can_take(seq, builder):
            return False
        while not self._memory.can_write(seq):
            if self._memory.drop_pin():
                continue
            victim = self._victim(builder)
            if victim is None or not self._may_take(seq, victim):
                return False
            # a running step touches its blocks: it is left out of this step and yields in the next
            if victim.num_in_flight:
                builder.held.add(victim.seq_id)
                return False
            self._preempt(victim, builder)
            if victim is seq:
                return False
        return True

    def _can_take(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """Whether what the sequence may take makes room for its next token; else it yields alone, or waits."""
        holders = chain(reversed(self._queues.running), reversed(self._queues.loaded))
        may_yield = (one for one in holders if one is not seq and one.planned_step != builder.step)
        takeable = [one for one in may_yield if self._may_take(seq, one)]
        needs, taken = self._memory.needs(seq, takeable), {one.seq_id for one in takeable}
        least, most = builder.in_vain  # fewer sequences make no room for more: to find it out takes milliseconds
        is_in_vain = taken <= most and bool(least) and all(map(ge, needs, least))
        if not is_in_vain and self._memory.can_gain(needs, takeable):
            return True
        if not is_in_vain:
            builder.in_vain = (needs, taken)
        self._yield_alone(seq, takeable, builder)
        return False

    def _yield_alone(self, seq: Sequence, takeable: list[Sequence], builder: BatchBuilder) -> None:
        """Preempt a sequence that the blocks of `takeable` do not help, if that helps it or one that waits.

        Else, and while anything goes on, it waits: for a lease or a load to end.
        """
        memory, queues = self._memory, self._queues
        if builder.chunks or any(other.num_in_flight for other in queues.running):
            return
        if seq.is_beam:  # it shares its blocks with its siblings, which wait for it
            self._preempt(seq, builder)
            return
        first = queues.waiting.first
        may_go_on = (other for other in (first, *queues.loaded) if other is not None and other is not seq)
        helps = any(memory.can_gain(memory.needs(other, [seq]), [seq]) for other in may_go_on)
        if helps or memory.can_gain(self._blocks.needs_of(len(seq.token_ids)), (seq, *takeable)):
            self._preempt(seq, builder)

    def _victim(self, builder: BatchBuilder) -> Sequence | None:
        """The last holder of blocks that this step has not planned, or one of a group that owes it a slot."""
        worst = self._queues.loaded.last
        for seq in reversed(self._queues.running):
            if worst is not None and worst.precedence > seq.precedence:
                break
            if seq.planned_step != builder.step:
                worst = seq
                break
        return worst if worst is None else self._yielding.debtor(worst, builder) or worst

    def _may_take(self, seq: Sequence, victim: Sequence) -> bool:
        """Whether a running sequence may have another's blocks: by precedence, unless one's group owes the other's.

        A debt does not count where the debtor's sequence has the better priority. `Yielding.debtor` does not take that
        sequence either; if the debt counted here, both would wait for each other for ever.
        """
        own, other = seq.request.group, victim.request.group
        is_owed = own.owes(other) and seq.priority >= victim.priority
        return other.owes(own) or (victim.precedence >= seq.precedence and not is_owed)

    def _preempt(self, victim: Sequence, builder: BatchBuilder) -> None:
        builder.swap_out += self._memory.preempt(victim)
        builder.preempted = True

    # sequences that wait

    def _admit(self, builder: BatchBuilder, before: float = inf) -> None:
        """Let sequences of a better priority than `before` enter in turn. Without a free slot, none passes another.

        Without memory, or prompts' share of the budget, only sequences that hold their blocks pass others.
        A sequence that was refused blocks stays first in line for them until it asks again, which takes some budget.
        """
        is_short = False
        for seq in self._queues.in_turn():
            if not builder.budget or builder.preempted or self._queues.num_free_slots <= 0 or seq.priority >= before:
                return
            if builder.unready and builder.unready.holds(seq, self._clock()):
                continue
            may_run = builder.has_rows(seq)  # a lead that redraws samples n tokens
            if seq.table is not None:
                if may_run:
                    self._enter_loaded(seq, builder)
            elif may_run and not is_short and not self._awaits_sibling(seq):
                is_short = not self._enter_waiting(seq, builder)
            if is_short and not self._queues.loaded:
                return

    def _enter_waiting(self, seq: Sequence, builder: BatchBuilder) -> bool:
        """Let a sequence without blocks enter if the prompts' share admits it. False: it was refused blocks."""
        if seq.num_remaining_tokens > 1:
            builder.limit_to_fill(seq)
            if not builder.prompts.admits(len(seq.token_ids)):
                return True
        copies = self._memory.admit(seq)
        if copies is None:
            return False
        builder.swap_in += copies
        self._queues.run(seq)
        if self._blocks.copies.holds_up(seq.table, seq.num_scheduled_tokens):  # type: ignore[arg-type]
            seq.planned_step = builder.step  # it computes from the next step on, or a later one
            if seq.table not in self._blocks.copies.pending:  # then no other one takes its place, and blocks for it
                builder.prompts.take(seq.num_scheduled_tokens, seq.num_remaining_tokens)
        elif not builder.unready.holds(seq, self._clock()):  # else it may be cached but for its last token
            builder.add_chunk(seq, self._blocks)
        return True

    def _enter_loaded(self, seq: Sequence, builder: BatchBuilder) -> None:
        """Let a sequence with its KV enter; it needs room for one token.

        If nothing runs, loaded sequences of lower precedence are preempted for it. It yields itself, with KV that has
        just been transferred, only if no memory is lent.
        """
        queues = self._queues
        if self._memory.is_shared and not self._memory.can_write(seq):
            worse = [] if queues.running else [other for other in queues.loaded if other.precedence > seq.precedence]
            if not self._memory.can_gain(self._memory.needs(seq, worse), worse):
                if not queues.running and not self._is_memory_lent:
                    self._yield_alone(seq, worse, builder)
                return
        while not self._memory.can_write(seq):
            if self._memory.drop_pin():
                continue
            victim = queues.loaded.last
            if queues.running or victim is None or victim is seq:
                return
            self._preempt(victim, builder)
        queues.run(seq)
        marks = seq.request.marks
        if marks.decode_scheduled_s is None:
            marks.decode_scheduled_s = self._clock()
        builder.add_chunk(seq, self._blocks)

    @property
    def _is_memory_lent(self) -> bool:
        """Whether a lease or a load holds blocks. Each ends."""
        return self._blocks.is_lent or any(one.kv is not KvArrival.ABSENT for one in self._queues.parked)

    def _yield_beam(self, builder: BatchBuilder) -> None:
        """Preempt a beam that only waits for its siblings, if one of these needs a slot or blocks and none can run.

        Otherwise two searches, each with some beams that hold memory and one that lacks it, would wait for ever.
        """
        if not self._queues.num_searches or builder.swap_in:  # no step copies blocks both out and in
            return
        for seq in reversed(self._queues.running):
            if seq.num_pending and not seq.num_in_flight and seq.request.is_stuck:
                self._preempt(seq, builder)
                return

    def _awaits_sibling(self, seq: Sequence) -> bool:
        """Sequences of one request compute its prompt one after the other, so that the rest find it cached."""
        request = seq.request
        if not request.is_parted or not self._blocks.prefix_caching:
            return False
        return any(s.status is RUNNING and s.num_computed_tokens < s.num_prompt_tokens for s in request.sequences)
