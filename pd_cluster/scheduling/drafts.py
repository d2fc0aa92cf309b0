"""Adds drafts to the decodes of a step. Pure policy: a draft is accepted only if the draw of its own place gives it.

Drafts come last: they get the tokens, rows and blocks that the step has left, so a drafter changes neither which
sequences a step has nor how much prompts get of it.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol

import msgspec

from pd_cluster.protocol.messages import Work

if TYPE_CHECKING:
    from collections.abc import Sequence as Tokens

    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.scheduling.batch_builder import BatchBuilder
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Sequence

MOST_DRAFTS = 5  # of a sequence in a step


class Drafter(Protocol):
    """Guesses tokens. It knows no request, and its guesses change no answer."""

    def propose(self, token_ids: Tokens[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that may follow `token_ids`, the prompt and the output so far. Pure."""


class Drafting:
    """Proposes drafts for the decodes of steps."""

    def __init__(self, drafter: Drafter, blocks: BlockManager, queues: Queues) -> None:
        self._drafter, self._blocks, self._queues = drafter, blocks, queues

    def add(self, builder: BatchBuilder) -> None:
        """Turn decodes of the step, which is planned otherwise, into decodes with drafts, and order its chunks."""
        for at, chunk in enumerate(builder.chunks):
            seq = self._queues.sequences[chunk.seq_id]
            if _may_draft(seq, chunk, builder) and (drafts := self._propose(seq, chunk, builder)):
                builder.chunks[at] = self._with_drafts(seq, chunk, drafts, builder)
        builder.chunks.sort(key=lambda chunk: chunk.place)

    def _propose(self, seq: Sequence, chunk: SequenceChunk, builder: BatchBuilder) -> tuple[int, ...]:
        """The drafts after the chunk's token. Tokens that running steps draw are guessed, too."""
        prompts = builder.prompts
        room = prompts.cost_left if prompts.is_limited else inf
        most = int(min(MOST_DRAFTS, seq.max_len - chunk.start - 2, builder.budget, builder.rows, room))
        if most <= 0:
            return ()
        num_ahead = seq.num_pending - 1
        drafts = self._drafter.propose(seq.token_ids, num_ahead + most)[num_ahead:]
        start, table = chunk.start + 1, seq.table
        assert table is not None
        if not self._blocks.can_grow(table, start, start + len(drafts)):
            drafts = drafts[: max(0, table.capacity - start)]
        return drafts

    def _with_drafts(
        self, seq: Sequence, chunk: SequenceChunk, drafts: tuple[int, ...], builder: BatchBuilder
    ) -> SequenceChunk:
        count, table, start = len(drafts), seq.table, chunk.start + 1
        assert table is not None
        builder.budget -= count
        builder.rows -= count
        builder.prompts.cost_left -= count
        seq.num_uncertain = count
        new_blocks = chunk.new_blocks
        if start + count > table.capacity:
            growth = self._blocks.grow(table, start, start + count)
            assert not growth.copies, "the block of the chunk's own token is the sequence's own"
            if (begins := _start_of(seq, builder)) is None:
                new_blocks += growth.new_blocks
            else:  # a start names all blocks
                tables = self._blocks.whole(table)
                builder.starts[begins] = msgspec.structs.replace(builder.starts[begins], tables=tables)
        return msgspec.structs.replace(chunk, num_tokens=1 + count, drafts=drafts, new_blocks=new_blocks)


def _start_of(seq: Sequence, builder: BatchBuilder) -> int | None:
    """The place of the sequence's start in the step; None: it has a row already."""
    return next((at for at, start in enumerate(builder.starts) if start.seq_id == seq.seq_id), None)


def _may_draft(seq: Sequence, chunk: SequenceChunk, builder: BatchBuilder) -> bool:
    is_decode = chunk.num_tokens == 1 and chunk.num_samples == 1 and not chunk.reads
    is_free = not (seq.is_beam or seq in builder.unready)
    return is_decode and is_free and seq.request.work not in (Work.PREFILL, Work.READ)
