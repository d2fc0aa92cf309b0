"""Which rank reads which bytes of a block from which rank, when two engines split their heads differently. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout


class SliceRead(msgspec.Struct, frozen=True):
    """One copy, made for every block that is read: `num_bytes` of a remote rank's block into a local rank's block."""

    remote_rank: int
    local_rank: int
    group: int  # index into `BlockLayout.groups`
    remote_offset: int  # bytes from the start of the remote rank's block
    local_offset: int  # bytes from the start of the local rank's block
    num_bytes: int


def plan_slices(theirs: BlockLayout, ours: BlockLayout) -> tuple[SliceRead, ...]:
    """The reads that fill one block of every rank of ours. Ordered by our rank, then by group, then by offset.

    Every byte of our ranks' blocks is covered once, by a rank of theirs that holds it. Where several ranks hold the
    same heads, our ranks spread over them. With one rank on both sides there is one slice a group, the whole block.

    Groups that one side lacks are not read. Raises LayoutMismatch when groups differ that are not optional, or the
    heads cannot be split over either side's ranks.
    """
    num_groups = ours.num_common(theirs)
    return tuple(
        part
        for rank in range(ours.tp_size)
        for index in range(num_groups)
        for part in _plan_group(index, rank, theirs, ours)
    )


def plan_peer(num_remote: int, num_groups: int | None, ours: BlockLayout) -> tuple[SliceRead, ...]:
    """`plan_slices` for a peer of `num_remote` ranks that has our first `num_groups` groups. None: all."""
    return plan_slices(msgspec.structs.replace(ours, tp_size=num_remote, groups=ours.groups[:num_groups]), ours)


def slices_between(
    remote_rank: int, num_remote: int, ours: BlockLayout, rank: int, num_groups: int | None = None
) -> tuple[SliceRead, ...]:
    """What our `rank` reads from rank `remote_rank` of a peer, at most one slice a group. See `plan_peer`."""
    plan = plan_peer(num_remote, num_groups, ours)
    return tuple(part for part in plan if (part.remote_rank, part.local_rank) == (remote_rank, rank))


def _plan_group(index: int, rank: int, theirs: BlockLayout, ours: BlockLayout) -> list[SliceRead]:
    group = ours.groups[index]
    head_bytes = group.block_bytes // group.shape[0]
    held = [group.heads_of(remote, theirs.tp_size) for remote in range(theirs.tp_size)]
    wanted = group.heads_of(rank, ours.tp_size)
    parts, head = [], wanted.start
    while head < wanted.stop:
        holders = [remote for remote, heads in enumerate(held) if head in heads]
        source = holders[rank % len(holders)]
        stop = min(wanted.stop, held[source].stop)
        remote_offset, local_offset = (head - held[source].start) * head_bytes, (head - wanted.start) * head_bytes
        parts.append(SliceRead(source, rank, index, remote_offset, local_offset, (stop - head) * head_bytes))
        head = stop
    return parts
