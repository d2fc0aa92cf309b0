"""Block tables of sequences of one KV group, and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.scheduling.batch import NewBlocks
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Iterable


def table(block_ids: Iterable[int], first: int = 0) -> tuple[NewBlocks, ...]:
    """Blocks from the block `first` on."""
    return (NewBlocks(0, first, tuple(block_ids)),)


def slabs_of(num_blocks: int) -> KvSlabs:
    """Blocks of a byte."""
    return KvSlabs(1, num_blocks, (num_blocks,))
