"""How the sequences of a request begin, part, and end. An end frees all that the sequence holds, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_cluster.protocol.messages import FinishReason, SequenceTokens, Work
from pd_cluster.protocol.prompt_outputs import PromptPart
from pd_cluster.scheduling.sequence import Request, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.drafts import Drafting
    from pd_cluster.scheduling.queues import Queues
    from pd_connectors.protocol.messages import SampledToken


class Update(msgspec.Struct, frozen=True, gc=False):
    """New tokens of one request per sequence, and whether all of its sequences have ended.

    `prompt`: what is newly known of the request's prompt. Such an update has no tokens.
    """

    request: Request
    sequences: tuple[SequenceTokens, ...]
    finished: bool
    prompt: PromptPart | None = None


class Lifecycle:
    """Applies first tokens and ends to requests.

    Invariant: a sequence with a finish reason is FINISHED, in no queue and without blocks, except that a lead goes on
    while its siblings wait for the tokens that it samples, and that blocks stay until no running step touches them.
    """

    def __init__(
        self, queues: Queues, blocks: BlockManager, clock: Callable[[], float], drafting: Drafting | None = None
    ) -> None:
        self._drafting = drafting
        self._queues = queues
        self._blocks = blocks
        self._clock = clock

    def part(self, request: Request) -> None:
        """Part the sequences of a request when its lead has sampled. Those that live share the prompt's blocks.

        The blocks of a PREFILL now belong to its lease.
        """
        blocks, lead = self._blocks, request.sequences[0]
        table = lead.table
        assert table is not None
        request.is_parted = True
        request.marks.first_token_s = request.marks.stream_s = self._clock()
        if request.lease_id is not None:
            blocks.hold(request.lease_id, table)
            lead.table = None
        for seq in request.sequences[1:]:
            if seq.finish_reason is None and request.work is not Work.PREFILL and not seq.is_beam:
                seq.table = blocks.fork(table)
                seq.num_computed_tokens = seq.num_scheduled_tokens = lead.num_computed_tokens
                self._queues.enter(seq)

    def begin_stream(self, request: Request) -> None:
        """Note that the first tokens are known."""
        request.is_parted = True
        request.marks.stream_s = request.marks.stream_s or self._clock()

    def give_first_tokens(self, request: Request, tokens: tuple[SampledToken, ...]) -> Update:
        """Append the first token of each live sequence, and end the sequences that it completes."""
        self.begin_stream(request)
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
            self._queues.num_context += request.is_stream
            if seq.finish_reason is not None:
                self.end(seq)
            reports.append(SequenceTokens(seq.index, (token,), seq.finish_reason, seq.stop_token_id))
        return Update(request, tuple(reports), request.finished)

    def take_entries(self, parts: dict[int, PromptPart]) -> list[Update]:
        """Updates with the log-probabilities of a step, to send before any token or end of the same requests."""
        updates = []
        for seq_id, part in parts.items():
            seq = self._queues.sequences[seq_id]
            if part.entries and seq.finish_reason is None and (new := seq.take_entries(part)).entries:
                updates.append(Update(seq.request, (), finished=False, prompt=new))
        return updates

    def end_read(self, seq: Sequence, part: PromptPart | None) -> Update:
        """End a READ, the prompt of which is computed."""
        request = seq.request
        request.marks.first_token_s = self._clock()
        seq.finish_reason = FinishReason.STOP
        self.end(seq)
        return Update(request, (), finished=True, prompt=part or PromptPart())

    def abort(self, request: Request, index: int | None, reason: FinishReason) -> Update | None:
        """End the sequences of a request that go on, or the one of them with this index. None: there is none.

        A beam search ends with any of its beams: a round waits for a candidate of each, and would wait for ever.
        """
        reports = []
        index = None if request.beams is not None else index
        for seq in request.sequences:
            if seq.finish_reason is None and index in (None, seq.index):
                seq.finish_reason = reason
                self.end(seq)
                if seq.index < request.sampling.n:  # the client knows no more beams
                    reports.append(SequenceTokens(seq.index, (), reason))
        return Update(request, tuple(reports), request.finished) if reports else None

    def end(self, seq: Sequence) -> None:
        """End a sequence that has its finish reason. A lead goes on while others wait for their first tokens."""
        request = seq.request
        self._queues.end_one(seq)
        if request.is_parted:
            self._retire(seq)
        if request.num_live:
            return
        for other in request.sequences:
            self._retire(other)
        self._queues.leave(request)

    def _retire(self, seq: Sequence) -> None:
        """Take the sequence out of its queue, and out of memory if no running step touches it. Idempotent."""
        if seq.status is not SequenceStatus.FINISHED:
            self._queues.remove(seq)
            self._queues.unready.discard((seq.seq_id,))
            seq.status = SequenceStatus.FINISHED
            self.let_go(seq)

    def let_go(self, seq: Sequence) -> None:
        """Free what a finished sequence holds, once: now, or when the last step that touches it has ended."""
        if not seq.num_in_flight:
            if seq.table is not None:
                self._blocks.close(seq.table)
            self._blocks.free_host(seq.host_blocks)
            self._queues.forget(seq)
            if self._drafting is not None:
                self._drafting.forget(seq.seq_id)
