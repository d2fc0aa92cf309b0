"""The life of a request, from admission to its last token. Pure policy over ids; synchronous; nothing waits.

    add ───────────────────────────────► waiting ──► running ──► finished
    park ──► reserve ──► admit_loaded ──► loaded ──►    │ ▲           (a PREFILL's blocks: held until end_lease)
    │  ▲ └► reserve a prefix ─┐                         │ │
    │  └──── admit_prefix ────┘                         │ │
    └──────── fall_back_to_local ────────► waiting ◄────┘ preempted or swapped

`schedule` decides a step and `update` takes its result; another step may be scheduled in between. Every method is safe
to call on a request that has finished, which exactly one Update with `finished` true says.

`Scheduler` is the only class of this package that others use to change requests. Its parts share no attributes:

    Arrivals    which requests are taken in                              arrivals.py
    Queues      where every sequence and parked request is; the slots        queues.py
    Turns       which sequence is next: groups share slots and memory        turns.py
    KvMemory    which of them get blocks, and which give blocks up           kv_memory.py
    LoadMemory  which loads of parked requests get blocks                    load_memory.py
    Planner     one step over the queues                                     planner.py, yielding.py
    Lifecycle   how sequences part and end                                   lifecycle.py
    StepEffects what a step's result changes                                 step_effects.py
    BeamSequences: how they are the beams of a search                        beam_sequences.py, beam.py
"""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason
from pd_cluster.scheduling.arrivals import Arrivals
from pd_cluster.scheduling.beam_sequences import BeamSequences
from pd_cluster.scheduling.drafts import Drafting
from pd_cluster.scheduling.hash_ahead import HashAhead
from pd_cluster.scheduling.kv_memory import KvMemory
from pd_cluster.scheduling.lent_memory import LentMemory
from pd_cluster.scheduling.lifecycle import Lifecycle, Update
from pd_cluster.scheduling.load_memory import LoadMemory
from pd_cluster.scheduling.planner import Planner
from pd_cluster.scheduling.queues import Queues
from pd_cluster.scheduling.sequence import KvArrival, Request, SequenceStatus
from pd_cluster.scheduling.step_effects import StepEffects
from pd_cluster.scheduling.turns import Turns
from pd_cluster.scheduling.yielding import Yielding

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.drafts import Speculation
    from pd_cluster.scheduling.queue_order import QueueOrder
    from pd_cluster.scheduling.step_budget import StepBudget
    from pd_connectors.base import CachedBlock, LoadSpec, PublishSpec
    from pd_connectors.protocol.feed import NodeLoad
    from pd_connectors.protocol.messages import SampledToken

__all__ = ["Scheduler", "Update"]


class Scheduler:
    """Takes in requests that `Admission` let pass, decides steps, takes their results, and ends requests.

    `retract`: called with a lease before a preemption frees its blocks; takes their announcements back and
    returns the lease's new generation, or None if the lease has ended. `step_budget`: prompts' share of steps with
    decodes. `order`: of prompts that wait. `clock`: seconds. `speculation`: guesses what decodes draw next; None:
    each draws one token a step. `adapters`: None: there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        retract: Callable[[str], int | None],
        step_budget: StepBudget,
        order: QueueOrder,
        clock: Callable[[], float] = time.monotonic,
        speculation: Speculation | None = None,
        adapters: AdapterPlaces | None = None,
    ) -> None:
        self._blocks, self._clock = blocks, clock
        self._turns = Turns()
        self._queues = Queues(config.max_num_seqs, self._turns, adapters)
        self.unready = self._queues.unready
        self._memory = KvMemory(blocks, self._queues, retract, clock, step_budget.model.prefill_s)
        self._load_memory = LoadMemory(blocks, self._queues, self._memory)
        self.lent = LentMemory(blocks, self._queues, self._memory, self._load_memory, clock)
        yielding = Yielding(self._turns, self._queues, self._memory)
        parts = config.max_drafts, blocks, self._memory, self._queues, step_budget
        self._drafting = drafting = None if speculation is None else Drafting(speculation, *parts)
        self._planner = Planner(config, blocks, self._queues, self._memory, yielding, clock, step_budget, drafting)
        self._life = Lifecycle(self._queues, blocks, clock, drafting)
        self._beams = BeamSequences(self._queues, blocks, self._life)
        self._effects = StepEffects(self._queues, self._memory, self._life, self._beams, clock, drafting)
        self._hashes = HashAhead(blocks.block_size, clock)
        self._loads: list[LoadSpec] = []  # for the next batch
        self._arrivals = Arrivals(
            self._queues, self._turns, order, clock, drafting,
            max_waiting=config.max_waiting, max_model_len=max_model_len, eos_token_ids=eos_token_ids,
        )  # fmt: skip

    # gauges

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without a slot, with or without blocks."""
        return len(self._queues.waiting) + len(self._queues.loaded)

    @property
    def load(self) -> NodeLoad:
        """What routers are told, without the times of steps."""
        return self._queues.load(self._blocks)

    @property
    def streams(self) -> tuple[int, int, int]:
        """`Queues.num_streams`, `Queues.num_context` and `Queues.num_promised`."""
        return self._queues.num_streams, self._queues.num_context, self._queues.num_promised

    @property
    def step_tokens(self) -> int:
        """See `Planner.tokens_beside_decodes`."""
        return self._planner.tokens_beside_decodes()

    @property
    def num_queued(self) -> int:
        """The number of requests of which nothing has run yet. `max_waiting` bounds it."""
        return self._turns.num_queued

    @property
    def num_waiting_for_remote_kv(self) -> int:
        """The number of parked requests."""
        return len(self._queues.parked)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may return content. Its batch can still be empty: a lease may hold the memory."""
        return self._queues.has_work or bool(self._loads)

    @property
    def prompts_wait(self) -> bool:
        """Whether the next step will probably admit a prompt."""
        return bool(self._queues.waiting)

    @property
    def idle(self) -> bool:
        """True if there is no request. Leases and quarantines may still hold blocks."""
        return not (self.has_work or self._queues.sequences)

    @property
    def counters(self) -> dict[str, float]:
        """Totals since boot, by metric name without prefix."""
        own = {
            "prefix_cache_evicted_blocks_total": float(self._blocks.num_evicted),
            "draws_sat_out_total": float(self._effects.num_sat_out),
        }
        drafted = {} if self._drafting is None else self._drafting.counters
        return self._memory.counters | self._blocks.host.counters | own | drafted

    # admission

    def add(self, request: Request) -> None:
        """Queue a request for prefill on this node. Raises Overloaded."""
        self._arrivals.begin(request)
        self._queue_for_prefill(request)

    def park(self, request: Request) -> None:
        """Keep a request until its KV comes from another node or a pool. Raises Overloaded."""
        self._arrivals.begin(request)
        request.table = self._blocks.open_table(reverses=request.may_sit_out)
        self._queues.park(request)
        self._load_memory.pin(request)
        self._hashes.expect(request.sequences[0], request.num_loaded_tokens)

    # parked requests

    def pin(self, request: Request) -> int:
        """Pin the cached prefix of a parked prompt. Returns the number of pinned tokens.

        If memory runs short before `reserve`, the pin is dropped, and `reserve` pins the blocks that are still cached.
        """
        return self._load_memory.pin(request) * self._blocks.block_size

    def missing(self, request: Request) -> tuple[list[bytes], tuple[int, ...]]:
        """See `LoadMemory.missing`."""
        return self._load_memory.missing(request)

    def reserve(self, request: Request, prefix: int | None = None) -> LoadSpec | None:
        """Reserve blocks for the load `request.load_id`: for the part of a parked prompt that is not cached.

        `prefix`: of its first so many tokens only (whole blocks). The LoadSpec is part of the next Batch. None: memory
        is short, or a request of higher precedence waits for it; ask again after the next step. Till then none of lower
        precedence gets memory, so the caller must go on asking or call `abort`, `fall_back_to_local` or `drop_load`.
        """
        if request not in self._queues.parked or request.kv is not KvArrival.ABSENT:
            return None
        if (load := self._load_memory.reserve(request, prefix)) is not None:
            if prefix is None:
                request.marks.reserved_s = self._clock()
            self._loads.append(load)
            self._turns.note_turn(request)
        return load

    def admit_prefix(self, request: Request, num_tokens: int) -> None:
        """End the load of a prefix: cache its first `num_tokens`, and free the rest of its blocks.

        The request stays parked. Does nothing if no blocks were reserved.
        """
        self._queues.stop_reserving(request)
        if request.kv is KvArrival.WRITING:
            self._load_memory.keep_prefix(request, num_tokens)

    def drop_load(self, request: Request) -> None:
        """Quarantine the blocks of a failed load until `drain(load_id)`. The request stays parked."""
        self._queues.stop_reserving(request)
        if request.kv is KvArrival.WRITING:
            self._loads = [load for load in self._loads if load.load_id != request.load_id]
            self._load_memory.quarantine(request)

    def drain(self, load_id: str) -> None:
        """Free the blocks of a dropped load, in which nothing can land any more. Unknown ids are ignored."""
        self._blocks.drain(load_id)

    def set_first_tokens(self, request: Request, tokens: tuple[SampledToken, ...]) -> Update | None:
        """Take P's first tokens, one per sequence, at any time after `park`. Not for a request that redraws them.

        Returns None when the tokens are known already, or the request has ended. When the tokens end all sequences, the
        blocks are released, or quarantined if a load writes them: the caller cancels the load, and calls `drain` when
        it has drained.
        """
        if request not in self._queues.parked or request.is_parted:
            return None
        assert not request.redraws
        assert len(tokens) == request.sampling.num_first_tokens, f"{len(tokens)} first tokens"
        if request.beams is not None:
            self._life.begin_stream(request)
            update = self._beams.take(request.sequences[0], tokens[0])
        else:
            update = self._life.give_first_tokens(request, tokens)
        if request.finished:
            self._unpark(request)
        elif request.kv is KvArrival.PRESENT:
            self._unpark_loaded(request)
        return update

    def admit_loaded(self, request: Request) -> None:
        """Publish the kept part of a loaded prompt. Every byte is in and confirmed.

        The request runs as soon as its first tokens are known too, or at once when it redraws them.
        """
        if request.kv is not KvArrival.WRITING:
            return
        self._load_memory.keep_prompt(request)
        request.marks.loaded_s = self._clock()
        if request.is_parted or request.redraws:
            self._unpark_loaded(request)

    def _unpark_loaded(self, request: Request) -> None:
        """Let the sequences of a loaded prompt wait for slots."""
        self._load_memory.hand_over(request)
        self._unpark(request)

    def fall_back_to_local(self, request: Request) -> None:
        """Compute a parked prompt here. Sequences that have parted each go on after their own tokens."""
        if request in self._queues.parked:
            self._unpark(request)
            request.sequences[0].num_cached_tokens = 0  # counted again when it is scheduled
            self._queue_for_prefill(request)

    def _queue_for_prefill(self, request: Request) -> None:
        for seq in request.heads:
            seq.awaits_first_decode = request.is_parted
            self._queues.add(seq, self._memory.num_cached(seq))

    def _unpark(self, request: Request) -> None:
        """Release the blocks that the request itself holds. Blocks that a load writes are quarantined. Idempotent."""
        self.drop_load(request)
        self._queues.unpark(request)
        self._load_memory.close(request)

    # steps

    def schedule(self) -> Batch:
        """Decide the next step. May be called while the step before it runs; results come back in order.

        A batch's `loads` are started only when every step before it has retired: transfers are not ordered with them.
        """
        loads, self._loads = self._loads, []
        batch = self._planner.plan(loads)
        self._hashes.expect_prompts(batch.chunks, self._queues.sequences)
        return batch

    def hash_ahead(self, until_s: float = inf) -> bool:
        """See `HashAhead.run`. Then drafts are prepared: without that they take little more in the step."""
        are_left = self._hashes.run(until_s)
        if self._drafting is not None:
            self._drafting.prepare(lambda: self._clock() >= until_s)
        return are_left

    def sit_out(self, absent: frozenset[int]) -> None:
        """Note the sequences that get no token in the newest step. Call it before the next `schedule`. Idempotent."""
        self._effects.sit_out(absent)

    def publishes(self, batch: Batch, result: StepResult) -> tuple[PublishSpec, ...]:
        """What readers may read when the step has retired; call it before `update`."""
        return self._effects.publishes(batch, result)

    def update(self, batch: Batch, result: StepResult) -> list[Update]:
        """Take a step's result: cache its computed blocks, append its sampled tokens, end the sequences that ended."""
        self._blocks.copies.note_saved(batch.copies.save)
        return self._effects.take(batch, result)

    def check(self) -> None:
        """Raise AssertionError if a block or anything of a sequence is lost. Call it while `idle`."""
        self._blocks.check()
        if self._drafting is not None:
            self._drafting.check()

    def take_news(self) -> list[CachedBlock]:
        """See `KvMemory.take_news`."""
        return self._memory.take_news()

    # ends

    def abort(
        self, request: Request, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> Update | None:
        """End a request, or its sequence `index`, in whatever state. None when that has ended already (or never was).

        Blocks that a load writes are quarantined: the caller cancels the load, and calls `drain` when it has drained.
        A lease of a running PREFILL is ended by the caller *before*: its blocks are freed here.
        """
        update = self._life.abort(request, index, reason)
        if request.finished:
            self._unpark(request)
        return update

    def request_of(self, seq_id: int) -> Request | None:
        """The request of a sequence; None if the sequence has ended."""
        seq = self._queues.sequences.get(seq_id)
        return None if seq is None or seq.status is SequenceStatus.FINISHED else seq.request

    def end_lease(self, lease_id: str) -> Update | None:
        """Free the blocks of a lease that has ended. Unknown ids are ignored.

        If its prompt is still being computed, the request is aborted, and the returned Update says so.
        """
        if (request := self._queues.prefills.get(lease_id)) is not None:
            return self.abort(request)
        self._blocks.end_lease(lease_id)
        return None
