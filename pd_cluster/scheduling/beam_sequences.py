"""Lets the sequences of a request be the beams of a search.

Each beam is a sequence with its own tokens and block table. A round is over when each of them has its candidates, so
that no beam has more than one step under way. Then the first child of a beam keeps its sequence, every further child
takes the sequence of a beam that has no child, and shares its parent's blocks (copy-on-write).

A beam with candidates has nothing to compute until its round is over. If a sibling waits for a slot or for blocks
meanwhile, it yields its own (`Planner`), and is in no queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason, SequenceTokens
from pd_cluster.scheduling.lifecycle import Update
from pd_cluster.scheduling.sequence import SequenceStatus

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.lifecycle import Lifecycle
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request, Sequence
    from pd_connectors.protocol.messages import SampledToken


class BeamSequences:
    """Applies the rounds of searches to sequences.

    Invariant: between rounds all live beams of a request have equally many tokens, and `num_pending` counts the one
    that the round chooses.
    """

    def __init__(self, queues: Queues, blocks: BlockManager, life: Lifecycle) -> None:
        self._queues = queues
        self._blocks = blocks
        self._life = life

    def take(self, seq: Sequence, candidates: SampledToken) -> Update | None:
        """Note the candidates after a beam. Returns the answers if that ends the search."""
        request = seq.request
        search = request.beams
        assert search is not None
        search.candidates[seq] = candidates
        seq.num_pending = 1
        if len(search.candidates) < len(search.order):
            return None
        rows, search.candidates = search.candidates, {}
        steps = search.policy.advance([rows[one] for one in search.order])
        if not steps:
            return self._end(request)
        length, parents = len(seq.token_ids), search.order
        kept = {parents[step.parent] for step in steps}
        free = [one for one in request.sequences if one not in kept]
        search.order = []
        for step in steps:
            parent = parents[step.parent]
            if parent in kept:
                kept.discard(parent)
                self._go_on(parent, step.token_id)
                search.order.append(parent)
            else:
                search.order.append(free.pop())
                self._fork(search.order[-1], parent, [*parent.token_ids[:length], step.token_id])
        return None

    def _go_on(self, seq: Sequence, token_id: int) -> None:
        """Let a beam go on in its own sequence."""
        seq.token_ids.append(token_id)
        self._queues.num_context += 1
        seq.num_pending = 0
        if seq.in_worker:
            self._queues.note_beam_step(seq, seq)
        elif seq.request not in self._queues.parked:
            self._queues.add(seq)

    def _fork(self, seq: Sequence, parent: Sequence, token_ids: list[int]) -> None:
        """Let a sequence go on after `parent`; its own beam ends. The last of `token_ids` is new."""
        queues, blocks, keeps_row = self._queues, self._blocks, seq.in_worker and parent.in_worker
        if not keeps_row:
            queues.remove(seq)
        if seq.table is not None:
            blocks.close(seq.table)
        blocks.free_host(seq.host_blocks)
        seq.host_blocks = ()
        queues.num_context -= seq.num_context
        seq.token_ids, seq.block_hashes = token_ids, parent.block_hashes[:]
        queues.num_context += seq.num_context
        seq.num_pending = seq.num_computed_tokens = 0
        seq.table = None
        if parent.table is not None:
            seq.table = blocks.fork(parent.table)
            seq.num_computed_tokens = parent.num_computed_tokens
        seq.num_scheduled_tokens = seq.num_computed_tokens
        if keeps_row:
            queues.note_beam_step(seq, parent)
        elif seq.request not in queues.parked:
            if seq.table is None:
                seq.status = SequenceStatus.PREEMPTED
                queues.add(seq)
            else:
                seq.status = SequenceStatus.WAITING
                queues.enter(seq)

    def _end(self, request: Request) -> Update:
        """Report the best beams, and end the sequences."""
        assert request.beams is not None
        reports = []
        for index, one in enumerate(request.beams.policy.finished[: request.sampling.n]):
            reason = FinishReason.LENGTH if one.stop_token_id is None else FinishReason.STOP
            reports.append(SequenceTokens(index, one.beam.tokens, reason, one.stop_token_id))
        for seq in request.sequences:
            seq.finish_reason = FinishReason.STOP
            self._life.end(seq)
        return Update(request, tuple(reports), finished=True)
