"""Which heads of a block lie in one object of the pool. Pure.

An object holds a fixed number of heads of one group: an eighth of all, or one. Its size does not depend on how many
ranks an engine has, so that engines of different degrees read each other's objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout, KVGroup

MAX_PARTS = 8  # of a group that is split evenly: larger objects for models with many heads


@dataclass(frozen=True, slots=True)
class HeadPart:
    """What one object holds of one rank's block."""

    group: int  # index into `BlockLayout.groups`
    number: int  # within the group, over all ranks
    heads: slice  # of the rank's block
    num_bytes: int
    is_stored: bool  # by this rank: of several that hold it, the first one stores it


def head_parts(layout: BlockLayout, rank: int) -> list[list[HeadPart]]:
    """By group, the objects of one block on one rank, by head. Together they are the rank's whole block.

    Raises ConnectorUnavailable when a rank would hold a fraction of an object.
    """
    parts = []
    for index, group in enumerate(layout.groups):
        size, held = heads_per_object(group), group.heads_of(rank, layout.tp_size)
        if len(held) % size:
            raise ConnectorUnavailable(f"a pool's objects hold {size} KV heads, and one of {layout.tp_size} ranks "
                                       f"{len(held)}: use another --tp, or no pool")  # fmt: skip
        is_first = rank == 0 or group.heads_of(rank - 1, layout.tp_size) != held
        num_bytes = group.block_bytes // group.shape[0] * size
        parts.append(
            [
                HeadPart(index, (held.start + start) // size, slice(start, start + size), num_bytes, is_first)
                for start in range(0, len(held), size)
            ]
        )
    return parts


def heads_per_object(group: KVGroup) -> int:
    """A divisor of the group's heads. All of them where no rank may hold less."""
    heads = group.shape[0]
    if not group.sharded:
        return heads
    return max(size for size in range(1, max(1, heads // MAX_PARTS) + 1) if heads % size == 0)
