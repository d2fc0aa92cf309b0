"""Watches what the drafts of each step take: nothing that another sequence wants."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch_builder import BatchBuilder
    from pd_cluster.scheduling.drafts import Drafting


def watch(drafting: Drafting) -> None:
    """Let every `add` raise AssertionError unless the step is what it was but for drafts.

    It preempts no sequence and takes blocks for drafted ones only; none while memory is short. What running sequences
    take next stays there. With one group each drafted sequence evicts one block at most.
    """
    add, blocks, memory, queues = drafting.add, drafting._blocks, drafting._memory, drafting._queues

    def next_needs() -> list[int]:
        tables = [(seq.table, seq.num_scheduled_tokens) for seq in queues.running if seq.table is not None]
        needs = [blocks.needs(table, start, start + 1) for table, start in tables]
        return [sum(counts) for counts in zip([0] * len(blocks.pools), *needs, strict=True)]

    def num_blocks() -> dict[int, int]:
        """By sequence, of all groups."""
        tables = ((seq.seq_id, seq.table) for seq in queues.sequences.values())
        return {seq_id: sum(len(one.ids) for one in table.groups) for seq_id, table in tables if table is not None}

    def watched(builder: BatchBuilder) -> None:
        plan = {(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in builder.chunks}
        marks = builder.preempted, set(builder.held), builder.swap_out[:], dict(memory.counters), list(queues.running)
        is_short = builder.preempted or bool(builder.held) or bool(queues.reserving) or memory.refused is not None
        held, num_evicted, had_room = num_blocks(), blocks.num_evicted, blocks.has_room(next_needs())
        add(builder)
        chunks = builder.chunks
        assert {(chunk.seq_id, chunk.start, chunk.num_tokens - len(chunk.drafts)) for chunk in chunks} == plan
        assert marks == (builder.preempted, builder.held, builder.swap_out, memory.counters, list(queues.running))
        grown = {seq_id for seq_id, count in num_blocks().items() if count != held[seq_id]}
        assert grown <= {chunk.seq_id for chunk in chunks if chunk.drafts}
        assert not grown or not is_short, "drafts take blocks for which a sequence waits"
        assert blocks.has_room(next_needs()) or not had_room, "drafts take what running sequences need next"
        assert blocks.num_evicted - num_evicted <= len(grown) or len(blocks.pools) > 1

    drafting.add = watched  # type: ignore[method-assign]
