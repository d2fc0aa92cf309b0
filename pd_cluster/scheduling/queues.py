"""Where every live sequence and every parked request is.

waiting    no slot, no device blocks
loaded     no slot; its prompt's KV is in its blocks
running    a slot and blocks
parked     a request with KV that may still come from another node or a pool; its sequences are in no queue
reserving  a parked request that asked for blocks and was refused
"""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING

from pd_cluster.scheduling.adapter_places import AdapterPlaces
from pd_cluster.scheduling.batch import BeamStep
from pd_cluster.scheduling.ordered_queue import OrderedQueue
from pd_cluster.scheduling.sequence import Request, Sequence, SequenceStatus
from pd_cluster.scheduling.unready import Unready
from pd_connectors.protocol.feed import NodeLoad

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.turns import Turns


class Queues:
    """The queues and the slots. The attributes are for reading; only the methods change them.

    Invariants:

    - a sequence is in at most one of `waiting`, `loaded` and `running`, and at most `max_num_seqs` run;
    - a group's `num_slots` counts its running sequences, and its `waiting` holds those in `waiting` and `loaded`;
    - `reserving` is a part of `parked`;
    - a sequence that leaves its queue while the worker has a row for it departs in the next batch, once.
    """

    def __init__(self, max_num_seqs: int, turns: Turns, adapters: AdapterPlaces | None = None) -> None:
        assert max_num_seqs > 0, "the configuration's capacity is not decided"
        self.max_num_seqs = max_num_seqs
        self._turns = turns
        self._departures: list[int] = []
        self._beam_steps: list[BeamStep] = []
        self.waiting: OrderedQueue[Sequence] = OrderedQueue()
        self.loaded: OrderedQueue[Sequence] = OrderedQueue()
        self.running: OrderedQueue[Sequence] = OrderedQueue()
        self.parked: OrderedQueue[Request] = OrderedQueue()
        self.reserving: OrderedQueue[Request] = OrderedQueue()
        self.sequences: dict[int, Sequence] = {}  # by id, until finished and untouched by any running step
        self.prefills: dict[str, Request] = {}  # PREFILL requests that have not finished, by lease id
        self.unready, self.adapters = Unready(), adapters or AdapterPlaces()
        self.num_live = 0  # sequences that have not ended
        self.num_searches = 0  # beam searches
        self.num_context = 0  # known tokens of the live sequences of requests with `is_stream`
        self.num_promised = 0  # tokens that these may have at their ends
        self.num_queued_keys = 0  # tokens before each of the following, summed
        self.num_queued_tokens = 0  # known tokens that no step has computed and that are not cached, without decodes

    @property
    def num_free_slots(self) -> int:
        return self.max_num_seqs - len(self.running)

    @property
    def has_waiting(self) -> bool:
        """Whether a sequence waits for a slot."""
        return bool(self.waiting or self.loaded)

    @property
    def has_work(self) -> bool:
        """Whether the next batch may have content."""
        return bool(self.running or self.waiting or self.loaded or self._departures)

    @property
    def num_streams(self) -> int:
        """The live sequences of which this node generates more than the first token."""
        return self.num_live - sum(request.num_live for request in self.prefills.values())

    @property
    def mean_context(self) -> int:
        """Known tokens of one of these."""
        return self.num_context // max(1, self.num_streams)

    def load(self, blocks: BlockManager) -> NodeLoad:
        """What routers are told, without the times of steps. Every sequence that has no slot counts as waiting."""
        num_running = len(self.running)
        return NodeLoad(
            queued_tokens=self.num_queued_tokens,
            num_running=num_running,
            num_waiting=max(0, self.num_live - num_running),
            num_slots=self.max_num_seqs,
            free_blocks=blocks.num_free_tokens // blocks.block_size,
            num_blocks=blocks.num_tokens // blocks.block_size,
            block_size=blocks.block_size,
            queued_keys=self.num_queued_keys,
        )

    def in_turn(self) -> Iterator[Sequence]:
        """The sequences that wait for a slot and have their adapter, in the order of their turns."""
        all_in_turn = self._turns.in_turn(
            merge(tuple(self.loaded), tuple(self.waiting), key=lambda seq: seq.precedence)
        )
        return filter(self.adapters.admits, all_in_turn) if self.adapters.in_host else all_in_turn

    def take_departures(self) -> tuple[int, ...]:
        """Ids of the sequences that left the worker since the last call."""
        departures, self._departures = tuple(self._departures), []
        return departures

    def note_beam_step(self, seq: Sequence, parent: Sequence) -> None:
        """Note that the sequence's row becomes that of `parent`, with the sequence's last token."""
        self._beam_steps.append(BeamStep(seq.seq_id, parent.seq_id, seq.token_ids[-1]))

    def take_beam_steps(self) -> tuple[BeamStep, ...]:
        """What `note_beam_step` noted since the last call."""
        steps, self._beam_steps = tuple(self._beam_steps), []
        return steps

    # requests

    def join(self, request: Request) -> None:
        """Register a request that has its sequences. None of them is in a queue yet."""
        request.group = self._turns.join(request, request.message.group or request.request_id)
        self.adapters.join(request)
        self.sequences.update((seq.seq_id, seq) for seq in request.sequences)
        self.num_live += request.num_live
        if request.is_stream:
            self.num_context += sum(seq.num_context for seq in request.sequences)
            self.num_promised += sum(seq.max_len for seq in request.sequences)
        self.num_searches += request.beams is not None
        if request.lease_id is not None:
            self.prefills[request.lease_id] = request

    def end_one(self, seq: Sequence) -> None:
        """Count a sequence that ends, once. It may stay in its queue for others of its request."""
        seq.request.num_live -= 1
        self.num_live -= 1
        if seq.request.is_stream:
            self.num_context -= seq.num_context
            self.num_promised -= seq.max_len

    def leave(self, request: Request) -> None:
        """Remove a request that has ended. Its sequences stay registered until `forget`."""
        self.adapters.leave(request)
        if request.lease_id is not None:
            self.prefills.pop(request.lease_id, None)
        self.num_searches -= request.beams is not None
        self._turns.leave(request)

    def forget(self, seq: Sequence) -> None:
        """Remove a sequence that has ended and that no running step touches."""
        del self.sequences[seq.seq_id]

    def park(self, request: Request) -> None:
        self.parked.add(request)

    def unpark(self, request: Request) -> None:
        """Idempotent."""
        self.stop_reserving(request)
        self.parked.discard(request)

    def refuse(self, request: Request) -> None:
        """Note that a parked request was refused blocks and will ask again."""
        self.reserving.add(request)

    def stop_reserving(self, request: Request) -> None:
        """Note that a request was given blocks, or does not ask any more. Idempotent."""
        self.reserving.discard(request)

    # sequences

    def add(self, seq: Sequence, num_cached: int = 0) -> None:
        """Let the sequence wait for a slot: in `loaded` with its block table, in `waiting` without.

        `num_cached`: the tokens that it would find cached now.
        """
        (self.waiting if seq.table is None else self.loaded).add(seq)
        self.count_queued(seq, max(seq.num_computed_tokens, num_cached))
        seq.request.group.waiting.add(seq)

    def run(self, seq: Sequence) -> None:
        """Give the sequence, which has its blocks, a slot."""
        self._stop_waiting(seq)
        seq.status = SequenceStatus.RUNNING
        self.running.add(seq)
        self.adapters.run(seq)
        self.count_queued(seq, seq.num_computed_tokens)
        self._turns.take_slot(seq.request)

    def enter(self, seq: Sequence) -> None:
        """Run a sequence that has its prompt's KV if a slot is free; otherwise let it wait for one."""
        if self.num_free_slots > 0 and self.adapters.is_ready(seq):
            self.run(seq)
        else:
            self.add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take the sequence out of its queue, if it is in one, and its row out of the worker."""
        self._count(seq, 0, 0)
        if self.running.discard(seq):
            self._turns.return_slot(seq.request)
        else:
            self._stop_waiting(seq)
        if seq.in_worker:
            seq.in_worker = False
            self._departures.append(seq.seq_id)

    def count_queued(self, seq: Sequence, num_computed: int) -> None:
        """Count what a sequence has to compute before it decodes, of which `num_computed` tokens are done."""
        num_tokens = max(0, len(seq.token_ids) - seq.request.is_parted - num_computed)
        self._count(seq, num_tokens, num_tokens * (num_tokens + 2 * num_computed) // 2)

    def _count(self, seq: Sequence, num_tokens: int, num_keys: int) -> None:
        self.num_queued_tokens += num_tokens - seq.num_queued_tokens
        self.num_queued_keys += num_keys - seq.num_queued_keys
        seq.num_queued_tokens, seq.num_queued_keys = num_tokens, num_keys

    def _stop_waiting(self, seq: Sequence) -> None:
        if seq.request.group.waiting.discard(seq) and not self.waiting.discard(seq):
            self.loaded.discard(seq)
