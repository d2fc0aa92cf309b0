"""What the result of a step changes in the sequences that it computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import SequenceTokens
from pd_cluster.scheduling.lifecycle import Update
from pd_cluster.scheduling.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.beam_sequences import BeamSequences
    from pd_cluster.scheduling.drafts import Drafting
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.lifecycle import Lifecycle
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request, Sequence
    from pd_connectors.base import PublishSpec
    from pd_connectors.protocol.messages import SampledToken

FINISHED = SequenceStatus.FINISHED


class StepEffects:
    """Applies the results of steps to sequences, in the order of the steps. `clock`: seconds."""

    def __init__(
        self,
        queues: Queues,
        memory: KvMemory,
        life: Lifecycle,
        beams: BeamSequences,
        clock: Callable[[], float],
        drafting: Drafting | None = None,
    ) -> None:
        """`drafting`: None: no chunk has drafts."""
        self._queues = queues
        self._memory = memory
        self._life = life
        self._beams = beams
        self._clock = clock
        self._drafting = drafting
        self.num_sat_out = 0  # draws that sequences have sat out

    def sit_out(self, absent: frozenset[int]) -> None:
        """Note the sequences that get no token in the newest step. Call it before the next `schedule`. Idempotent."""
        for seq_id in absent:
            if (seq := self._queues.sequences[seq_id]).status is not FINISHED and not seq.is_absent:
                self._memory.sit_out(seq)
                self._queues.unready.add(seq)

    def publishes(self, batch: Batch, result: StepResult) -> tuple[PublishSpec, ...]:
        """What readers may read when the step has retired; call it before `take`.

        The prompts of absent sequences are left out: the step that draws their token announces all of them.
        """
        leases = {self._queues.sequences[seq_id].request.lease_id for seq_id in result.absent}
        return tuple(publish for publish in batch.publishes if publish.lease_id not in leases)

    def take(self, batch: Batch, result: StepResult) -> list[Update]:
        """Take a step's result: cache its computed blocks, append its sampled tokens, end the sequences that ended."""
        self._queues.adapters.note_filled(batch.adapters)
        self.sit_out(result.absent)
        self.num_sat_out += len(result.absent)
        updates = self._life.take_entries(result.prompts) if result.prompts else []
        shared: dict[Request, list[SequenceTokens]] = {}  # of requests with several sequences
        samples, sequences, drafting, num_drawn = result.samples, self._queues.sequences, self._drafting, 0
        for chunk in batch.chunks:
            seq = sequences[chunk.seq_id]
            request = seq.request
            seq.num_in_flight -= 1
            if seq.status is FINISHED:  # ended while the step ran
                self._life.let_go(seq)
                continue
            num_computed = chunk.start + chunk.num_tokens
            if is_absent := seq.seq_id in result.absent:
                num_computed = chunk.start if chunk.states else num_computed - 1
            if drafting is not None and chunk.drafts:
                num_computed -= len(chunk.drafts)
                drafting.take(seq, chunk, 0 if is_absent else len(samples[chunk.seq_id]))
            seq.num_computed_tokens = num_computed
            if seq.num_queued_tokens:
                self._queues.count_queued(seq, num_computed)
            if num_computed >= seq.table.due:  # type: ignore[union-attr]
                self._memory.publish_computed(seq)
            if is_absent:
                seq.is_absent = False
            if is_absent or not chunk.num_samples:
                if not seq.num_samples and num_computed == seq.num_prompt_tokens:
                    updates.append(self._life.end_read(seq, result.prompts.get(seq.seq_id)))
                continue
            seq.num_pending -= 1
            if seq.awaits_first_decode:
                seq.awaits_first_decode = False
                request.marks.mark_first_decode(self._clock())
            if not request.is_parted:
                self._life.part(request)
                if chunk.num_samples > 1:
                    updates.append(self._life.give_first_tokens(request, result.first_samples[chunk.seq_id]))
                    continue
            tokens = samples[chunk.seq_id]
            if seq.is_beam:
                if (answers := self._beams.take(seq, tokens[0])) is not None:
                    updates.append(answers)
                continue
            if len(tokens) == 1:
                seq.append(tokens[0].token_id)
            else:
                tokens = self._append_run(seq, tokens)
            num_drawn += request.is_stream * len(tokens)
            if seq.finish_reason is not None:
                self._life.end(seq)
            report = SequenceTokens(seq.index, tokens, seq.finish_reason, seq.stop_token_id)
            if len(request.sequences) == 1:
                updates.append(Update(request, (report,), request.num_live == 0))
            else:
                shared.setdefault(request, []).append(report)
        self._queues.num_context += num_drawn
        updates += [Update(request, tuple(reports), request.finished) for request, reports in shared.items()]
        return updates

    def _append_run(self, seq: Sequence, tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Append accepted drafts and the token after them, which may name computed blocks. -> those that were."""
        tokens = seq.append_run(tokens)
        if len(tokens) > 1 and seq.num_computed_tokens >= seq.table.due:  # type: ignore[union-attr]
            self._memory.publish_computed(seq)
        return tokens
