"""The life of a request, from admission to its last token. Pure policy over ids; synchronous; nothing waits.

    add ───────────────────────────────► waiting ──► running ──► finished
    park ──► reserve ──► admit_loaded ──► loaded ──►    │ ▲           (a PREFILL's blocks: held until end_lease)
    │  ▲ └► reserve a prefix ─┐                         │ │
    │  └──── admit_prefix ────┘                         │ │
    └──────── fall_back_to_local ────────► waiting ◄────┘ preempted or swapped

`schedule` decides a step and `update` takes its result; another step may be scheduled in between. Every method is safe
to call on a request that has finished. A request is finished by exactly one Update with `finished` true, whether that
comes from `update`, `set_first_tokens`, `admit_loaded`, `abort` or `end_lease`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pd_cluster.errors import InvalidRequest, Overloaded
from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.scheduling.lifecycle import FINISHED, Lifecycle, Update
from pd_cluster.scheduling.planner import Planner
from pd_cluster.scheduling.sequence import KvArrival, Request, Sequence, SequenceStatus
from pd_cluster.scheduling.turns import crowd_limit
from pd_connectors.base import LoadSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_connectors.base import CachedBlock
    from pd_connectors.protocol.messages import SampledToken

__all__ = ["Scheduler", "Update"]


class Scheduler:
    """See the module's docstring.

    `on_preempt` is called with a leased sequence before its blocks are freed: it takes back what was announced of them
    (`retract`) and sets the request's `lease_generation` to the new one. `max_tokens_beside_decodes`: 0: no limit.
    `keys_per_token`: of such steps, a prompt's token costs as much again behind so many others; 0: it does not.
    `rests`: see `Yielding` and `Portions`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        on_preempt: Callable[[Sequence], None],
        max_tokens_beside_decodes: int = 0,
        keys_per_token: int = 0,
        rests: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._max_model_len = max_model_len
        self._clock = clock
        self._planner = Planner(
            config, blocks, max_tokens_beside_decodes, keys_per_token, on_preempt, clock, rests=rests
        )
        self._life = Lifecycle(self._planner, blocks, clock, eos_token_ids, max_model_len)
        self._news: list[CachedBlock] = []

    # gauges

    @property
    def num_running(self) -> int:
        return len(self._planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, whether or not they hold blocks."""
        return len(self._planner.waiting) + len(self._planner.loaded)

    @property
    def num_queued(self) -> int:
        """Requests of which nothing has run yet: what `max_waiting` bounds."""
        return self._planner.turns.num_queued

    @property
    def num_waiting_for_remote_kv(self) -> int:
        """Requests."""
        return len(self._planner.parked)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to say. Its batch can still be empty: memory may be held by a lease."""
        planner = self._planner
        return bool(planner.running or planner.waiting or planner.loaded or planner.loads or planner.departures)

    @property
    def prompts_wait(self) -> bool:
        """Whether the next step will probably enter a prompt."""
        return bool(self._planner.waiting)

    @property
    def idle(self) -> bool:
        """No request is anywhere; only leases and quarantines may still hold blocks."""
        return not (self.has_work or self._planner.parked or self._life.sequences)

    @property
    def counters(self) -> dict[str, float]:
        """Totals since boot, by metric name without prefix."""
        return {**self._planner.counters, "prefix_cache_evicted_blocks_total": float(self._blocks.num_evicted)}

    # admission

    def validate(self, request: Request) -> None:
        """Raises InvalidRequest when the request could never be served here, however long it waited.

        Each of n sequences must fit the cache alone: they share it by preemption when they do not fit together. The
        last token's KV is never computed.
        """
        num_prompt, n, num_output = len(request.prompt_token_ids), request.sampling.n, request.max_output_tokens
        longest = self._max_model_len
        if not num_prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if num_prompt >= longest:
            raise InvalidRequest(f"the prompt has {num_prompt} tokens; at most {longest - 1} fit this model", "prompt")
        if num_prompt + num_output > longest:
            raise InvalidRequest(
                f"{num_prompt} prompt tokens and max_tokens {num_output} exceed the model's {longest}", "max_tokens"
            )
        if n > self._config.max_num_seqs:
            raise InvalidRequest(f"n is {n}; this engine runs {self._config.max_num_seqs} sequences at once", "n")
        blocks = self._blocks
        if blocks.blocks_for(num_prompt + num_output - 1) > blocks.num_blocks:
            raise InvalidRequest(
                f"{num_prompt} prompt and {num_output} output tokens need more than this engine's KV cache of "
                f"{blocks.num_blocks * blocks.block_size} tokens",
                "max_tokens" if blocks.blocks_for(num_prompt) <= blocks.num_blocks else "prompt",
            )

    def add(self, request: Request) -> None:
        """Queue a request whose prompt is computed here. Raises Overloaded."""
        self._begin(request)
        self._planner.queue(request.sequences[0])

    def park(self, request: Request) -> int:
        """Keep a request until its KV comes, from another node or from a pool. Raises Overloaded. Returns `pin`'s."""
        self._begin(request)
        request.sequences[0].status = SequenceStatus.WAITING_FOR_REMOTE_KV
        request.table = self._blocks.open_table()
        self._planner.parked.add(request)
        return self.pin(request)

    def pin(self, request: Request) -> int:
        """How many of a parked prompt's tokens this engine's cache holds.

        They are pinned; when memory runs short before `reserve`, the pin is given up and `reserve` takes what is left.
        """
        return self._pin(request) * self._blocks.block_size

    def _begin(self, request: Request) -> None:
        turns = self._planner.turns
        if not turns.may_queue(request.message.group or request.request_id, self._config.max_waiting):
            limit = self._config.max_waiting
            raise Overloaded(
                f"{turns.num_queued} prompts are waiting; the queue holds {limit}, one request's {crowd_limit(limit)}"
            )
        self._life.begin(request)

    def _pin(self, request: Request) -> int:
        """Whole blocks that the cache holds of what is kept: of all the prompt, when no logits are needed of it.

        A redraw, which may be known only after the first pin, writes into the last token's block: never a cached one.
        """
        assert request.table is not None
        size = self._blocks.block_size
        num_whole = request.num_kept_tokens // size
        self._blocks.truncate(request.table, num_whole)
        return self._blocks.match(request.table, request.sequences[0].hash_blocks(num_whole, size))

    # remote KV

    def missing(self, request: Request) -> tuple[list[bytes], int]:
        """What a pool may be asked for: the hashes of a parked prompt's whole blocks, and how many of them are here.

        Without the block of its last token, which somebody must compute for the logits. ([], 0): ask for nothing.
        """
        size = self._blocks.block_size
        num_whole = (len(request.prompt_token_ids) - 1) // size
        num_here = self._pin(request)
        if num_here >= num_whole or not self._blocks.prefix_caching:
            return [], 0
        return request.sequences[0].hash_blocks(num_whole, size)[:], num_here

    def reserve(self, request: Request, prefix: int | None = None) -> LoadSpec | None:
        """Blocks for what the cache lacks of a parked prompt, or of its first `prefix` tokens (whole blocks), for the
        load `request.load_id`.

        The LoadSpec is part of the next Batch. None: memory is short, or somebody of better rank waits for it; ask
        again after the next step. Until then nobody of worse rank is given memory, so a request must not be forgotten
        in this state (`abort`, `fall_back_to_local` or `drop_load` end it).
        """
        planner, table = self._planner, request.table
        if request not in planner.parked or request.kv is not KvArrival.ABSENT:
            return None
        assert request.load_id is not None
        assert table is not None
        num_tokens = len(request.prompt_token_ids) if prefix is None else prefix
        first_block = self._pin(request)
        if prefix is not None:  # since the search the cache may have got more of it than was found
            num_tokens = max(prefix, first_block * self._blocks.block_size)
        num_new = self._blocks.blocks_for(num_tokens) - first_block
        planner.reserving.discard(request)
        if not planner.may_reserve(request) or not planner.make_room(num_new, request):
            planner.reserving.add(request)
            return None
        self._blocks.grow(table, first_block * self._blocks.block_size, num_tokens)
        request.kv = KvArrival.WRITING
        if prefix is None:
            request.marks.reserved_s = self._clock()
        request.sequences[0].num_cached_tokens = first_block * self._blocks.block_size
        load = LoadSpec(request.load_id, self._blocks.runs(table, first_block, len(table.ids)), num_tokens)
        planner.loads.append(load)
        planner.turns.note_turn(request)
        return load

    def admit_prefix(self, request: Request, num_tokens: int) -> None:
        """The load of a prefix is over: its first `num_tokens` are here and cached, the rest of its blocks are free.

        The request stays parked. Harmless when nothing was reserved.
        """
        self._planner.reserving.discard(request)
        if request not in self._planner.parked or request.kv is not KvArrival.WRITING:
            return
        assert request.table is not None
        lead, size = request.sequences[0], self._blocks.block_size
        request.kv = KvArrival.ABSENT
        num_blocks = max(lead.num_cached_tokens, num_tokens) // size
        self._blocks.truncate(request.table, num_blocks)
        self._blocks.publish(request.table, lead.hash_blocks(num_blocks, size))
        lead.num_cached_tokens = 0  # counted when it is scheduled, or loaded

    def drop_load(self, request: Request) -> None:
        """The load failed. Its blocks are quarantined until `drain(load_id)`; the request stays parked."""
        self._life.drop_load(request)

    def drain(self, load_id: str) -> None:
        """Nothing can land in the blocks of a dropped load any more. Unknown ids are ignored."""
        self._blocks.drain(load_id)

    def set_first_tokens(self, request: Request, tokens: tuple[SampledToken, ...]) -> Update | None:
        """P's first tokens, one per sequence, at any time after `park`. None when they are known already, or too late.
        Not for a request that redraws them.

        A sequence that they end has ended. When that is all of them the blocks are released, or quarantined if a load
        writes them: the caller cancels it, and calls `drain` when it has drained.
        """
        if request not in self._planner.parked or request.first_tokens:
            return None
        assert not request.redraws
        assert len(tokens) == request.sampling.n, f"{len(tokens)} first tokens for n = {request.sampling.n}"
        update = self._life.give_first_tokens(request, tokens)
        if request.kv is KvArrival.PRESENT:
            self._unpark_loaded(request)
        return update

    def admit_loaded(self, request: Request, first_tokens: tuple[SampledToken, ...] = ()) -> Update | None:
        """Every byte is in and confirmed. What is kept of the prompt is published. The request runs as soon as its
        first tokens are known too, or at once when it redraws them.

        Returns an Update when these `first_tokens` were news.
        """
        if request not in self._planner.parked or request.kv is not KvArrival.WRITING:
            return None
        assert request.table is not None
        lead, size, num_kept = request.sequences[0], self._blocks.block_size, request.num_kept_tokens
        request.kv = KvArrival.PRESENT
        request.marks.loaded_s = self._clock()
        self._blocks.publish(request.table, lead.hash_blocks(num_kept // size, size))
        for seq in request.sequences:
            seq.num_cached_tokens = lead.num_cached_tokens
            seq.num_external_tokens = num_kept - lead.num_cached_tokens
        if first_tokens and not request.first_tokens:
            return self.set_first_tokens(request, first_tokens)
        if request.first_tokens or request.redraws:
            self._unpark_loaded(request)
        return None

    def _unpark_loaded(self, request: Request) -> None:
        """Each sequence that goes on gets the prompt's blocks and queues for its slots."""
        if request not in self._planner.parked:
            return  # its first tokens ended it
        assert request.table is not None
        for seq in request.heads:
            seq.table = self._blocks.fork(request.table)
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = seq.num_scheduled_tokens = request.num_kept_tokens
            seq.awaits_first_decode = True
            self._planner.queue(seq)
        self._life.unpark(request)

    def fall_back_to_local(self, request: Request) -> None:
        """Compute a parked prompt here. First tokens that are known stay: each sequence continues after its own."""
        if request not in self._planner.parked:
            return
        self._life.unpark(request)
        request.sequences[0].num_cached_tokens = 0  # counted again when it is scheduled
        for seq in request.heads:
            seq.status = SequenceStatus.WAITING
            seq.awaits_first_decode = bool(request.first_tokens)
            self._planner.queue(seq)

    # steps

    def schedule(self) -> Batch:
        """Decide the next step. May be called while the step before it runs; results come back in order.

        A batch's `loads` are started only when every step before it has retired: transfers are not ordered with them.
        """
        return self._planner.plan()

    def update(self, batch: Batch, result: StepResult) -> list[Update]:
        """Take a step's result: cache what it computed, append what it sampled, end what ended."""
        updates: list[Update] = []
        shared: dict[Request, list[SequenceTokens]] = {}  # of requests with several sequences
        block_size, samples = self._blocks.block_size, result.samples
        for chunk in batch.chunks:
            seq = self._life.sequences[chunk.seq_id]
            request = seq.request
            seq.num_in_flight -= 1
            if seq.status is FINISHED:  # ended while the step ran
                self._life.let_go(seq)
                continue
            seq.num_computed_tokens = num_computed = chunk.start + chunk.num_tokens
            if num_computed // block_size > len(seq.table.path):  # type: ignore[union-attr]
                self._publish(seq)
            if not chunk.num_samples:
                continue
            seq.num_pending -= 1
            tokens = samples[chunk.seq_id]
            if seq.awaits_first_decode:
                seq.awaits_first_decode = False
                request.mark_first_decode(self._clock())
            if not request.first_tokens:
                updates.append(self._life.part(request, tokens))
                continue
            seq.append(tokens[0].token_id)
            if seq.finish_reason is not None:
                self._life.end(seq)
            report = SequenceTokens(seq.index, tokens, seq.finish_reason, seq.stop_token_id)
            if len(request.sequences) == 1:
                updates.append(Update(request, (report,), request.num_live == 0))
            else:
                shared.setdefault(request, []).append(report)
        updates += [Update(request, tuple(reports), request.finished) for request, reports in shared.items()]
        return updates

    def _publish(self, seq: Sequence) -> None:
        assert seq.table is not None
        size = self._blocks.block_size
        self._news += self._blocks.publish(seq.table, seq.hash_blocks(seq.num_computed_tokens // size, size))

    def take_news(self) -> list[CachedBlock]:
        """Blocks that steps have computed and the cache did not know, since the last call. What they hold is certain
        only until the next `schedule` or `reserve`."""
        news, self._news = self._news, []
        return news

    # ends

    def abort(
        self, request: Request, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> Update | None:
        """End a request, or its sequence `index`, in whatever state. None when that has ended already (or never was).

        Blocks that a load writes are quarantined: the caller cancels the load, and calls `drain` when it has drained.
        A lease of a running PREFILL is ended by the caller *before*: its blocks are freed here.
        """
        return self._life.abort(request, index, reason)

    def end_lease(self, lease_id: str) -> Update | None:
        """No read of the lease can be confirmed any more: free its blocks. Unknown ids are ignored.

        When its prompt is still being computed, that is aborted, and the Update says so.
        """
        return self._life.end_lease(lease_id)
