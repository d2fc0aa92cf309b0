"""How requests begin, part into their sequences, and end. Whatever ends one, all that it holds goes here, once."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.protocol.messages import FinishReason, SequenceTokens, Work
from pd_cluster.scheduling.sequence import KvArrival, Request, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.planner import Planner
    from pd_connectors.protocol.messages import SampledToken

FINISHED = SequenceStatus.FINISHED


class Update(NamedTuple):
    """What happened to one request: new tokens per sequence, and whether all of it has ended."""

    request: Request
    sequences: tuple[SequenceTokens, ...]
    finished: bool


class Lifecycle:
    """Part of the scheduler, which documents the public side of these methods."""

    def __init__(
        self,
        planner: Planner,
        blocks: BlockManager,
        clock: Callable[[], float],
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.sequences: dict[int, Sequence] = {}  # until finished, and no step that touches it runs
        self._planner = planner
        self._blocks = blocks
        self._clock = clock
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len
        self._arrivals = count()
        self._seq_ids = count()
        self._prefills: dict[str, Request] = {}  # lease id -> PREFILL that has not finished

    def begin(self, request: Request) -> None:
        request.begin(next(self._arrivals), self._clock(), self._seq_ids, self._eos_token_ids, self._max_model_len)
        request.group = self._planner.turns.join(request, request.message.group or request.request_id)
        self.sequences.update((seq.seq_id, seq) for seq in request.sequences)
        if request.lease_id is not None:
            assert request.work is Work.PREFILL, f"a lease on a {request.work.value} request"
            self._prefills[request.lease_id] = request

    # first tokens

    def part(self, request: Request, tokens: tuple[SampledToken, ...]) -> Update:
        """The lead has sampled everybody's first token: the sequences part, sharing the prompt's blocks.

        Of a PREFILL nothing goes on; its blocks now belong to its lease.
        """
        planner, blocks, lead = self._planner, self._blocks, request.sequences[0]
        table = lead.table
        assert table is not None
        request.marks.first_token_s = self._clock()
        if request.lease_id is not None:
            blocks.hold(request.lease_id, table)
            lead.table = None
        for seq in request.sequences[1:]:
            if seq.finish_reason is None and request.work is not Work.PREFILL:
                seq.table = blocks.fork(table)
                seq.num_computed_tokens = seq.num_scheduled_tokens = lead.num_computed_tokens
                planner.enter(seq)
        return self.give_first_tokens(request, tokens)

    def give_first_tokens(self, request: Request, tokens: tuple[SampledToken, ...]) -> Update:
        """Append each live sequence's own; those that it ends have ended."""
        request.first_tokens = tokens
        lead = request.sequences[0]
        lead.num_samples = 1
        reports = []
        for seq, token in zip(request.sequences, tokens, strict=True):
            if seq.finish_reason is not None:
                self._retire(seq)  # aborted before it had a token; a lead went on for the others
                continue
            if seq is not lead:
                seq.part_from(lead)
            seq.append(token.token_id)
            if seq.finish_reason is not None:
                self.end(seq)
            reports.append(SequenceTokens(seq.index, (token,), seq.finish_reason, seq.stop_token_id))
        return Update(request, tuple(reports), request.finished)

    # remote KV

    def drop_load(self, request: Request) -> None:
        self._planner.reserving.discard(request)
        if request.kv is not KvArrival.WRITING:
            return
        load_id, planner = request.load_id, self._planner
        assert load_id is not None
        assert request.table is not None
        planner.loads = [load for load in planner.loads if load.load_id != load_id]
        first_block = request.sequences[0].num_cached_tokens // self._blocks.block_size
        self._blocks.quarantine(load_id, request.table, first_block)
        request.kv = KvArrival.ABSENT

    def unpark(self, request: Request) -> None:
        """End the request's parking: its own hold on blocks is released, or quarantined where a load writes."""
        self.drop_load(request)
        self._planner.parked.discard(request)
        if request.table is not None:
            self._blocks.close(request.table)
            request.table = None

    # ends

    def abort(self, request: Request, index: int | None, reason: FinishReason) -> Update | None:
        reports = []
        for seq in request.sequences:
            if seq.finish_reason is None and index in (None, seq.index):
                seq.finish_reason = reason
                self.end(seq)
                reports.append(SequenceTokens(seq.index, (), reason))
        return Update(request, tuple(reports), request.finished) if reports else None

    def end_lease(self, lease_id: str) -> Update | None:
        request = self._prefills.get(lease_id)
        if request is not None:
            return self.abort(request, None, FinishReason.ABORT)
        self._blocks.end_lease(lease_id)
        return None

    def end(self, seq: Sequence) -> None:
        """A sequence has its finish reason. A lead goes on alone while others wait for the tokens that it samples."""
        request = seq.request
        request.num_live -= 1
        if request.first_tokens:
            self._retire(seq)
        if request.num_live:
            return
        for other in request.sequences:
            self._retire(other)
        if request in self._planner.parked:
            self.unpark(request)
        if request.lease_id is not None:
            self._prefills.pop(request.lease_id, None)
        self._planner.turns.leave(request)

    def _retire(self, seq: Sequence) -> None:
        """Out of every queue, and out of memory as soon as no step that runs touches it. Once."""
        if seq.status is not FINISHED:
            self._planner.remove(seq)
            seq.status = FINISHED
            self.let_go(seq)

    def let_go(self, seq: Sequence) -> None:
        """Free what an ended sequence holds, unless a step still runs (`Scheduler.update` comes back here)."""
        if seq.num_in_flight:
            return
        if seq.table is not None:
            self._blocks.close(seq.table)
            seq.table = None
        self._blocks.free_host(seq.host_block_ids)
        seq.host_block_ids = []
        del self.sequences[seq.seq_id]
