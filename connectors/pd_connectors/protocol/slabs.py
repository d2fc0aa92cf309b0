"""How the KV groups of a cache share its memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout

MOST_WASTE = 1 / 20  # of a slab, for each group
MOST_BLOCKS = 64  # of the largest group in a slab
ALIGNMENT = 256  # bytes of a block's stride


@dataclass(frozen=True, slots=True)
class KvSlabs:
    """Memory in slabs of equal size. A slab belongs to one group at a time, and holds `per_slab` of its blocks.

    Block i of a group begins `i * stride` bytes behind the start of the memory, so slab s holds its blocks
    [s * per_slab, (s + 1) * per_slab). One group has one slab, which is all of the memory.
    """

    num_slabs: int
    slab_bytes: int  # on one rank
    per_slab: tuple[int, ...]  # by group

    @property
    def num_bytes(self) -> int:
        return self.num_slabs * self.slab_bytes

    def num_blocks(self, group: int) -> int:
        """Block ids of a group. As many fit if it owns every slab."""
        return self.num_slabs * self.per_slab[group]

    def stride(self, group: int) -> int:
        """Bytes from one block of a group to the next, on one rank."""
        return self.slab_bytes // self.per_slab[group]

    @classmethod
    def in_bytes(cls, layout: BlockLayout, num_bytes: float) -> KvSlabs:
        """As many slabs as fit into `num_bytes` of one rank."""
        sizes = [group.rank_bytes(layout.tp_size) for group in layout.groups]
        if len(sizes) == 1:
            num_blocks = int(num_bytes // sizes[0])
            return cls(1, num_blocks * sizes[0], (num_blocks,))
        slab_bytes, per_slab = _divide(sizes)
        return cls(int(num_bytes // slab_bytes), slab_bytes, per_slab)

    @classmethod
    def of_blocks(cls, layout: BlockLayout, num_blocks: int) -> KvSlabs:
        """Memory for at least `num_blocks` blocks of every group at once."""
        if len(layout.groups) == 1:
            return cls.in_bytes(layout, num_blocks * layout.rank_bytes)
        slab_bytes, per_slab = _divide([group.rank_bytes(layout.tp_size) for group in layout.groups])
        return cls(sum(-(-num_blocks // count) for count in per_slab), slab_bytes, per_slab)


def _divide(sizes: list[int]) -> tuple[int, tuple[int, ...]]:
    """The smallest slab, a multiple of the largest block, of which no group wastes more than MOST_WASTE."""
    largest = max(sizes)

    def waste(count: int) -> float:
        slab = count * largest
        return max(1 - slab // size * size / slab for size in sizes)

    counts = range(1, MOST_BLOCKS + 1)
    count = next((one for one in counts if waste(one) <= MOST_WASTE), None) or min(counts, key=waste)
    per_slab = tuple(count * largest // size for size in sizes)
    step = ALIGNMENT * lcm(*per_slab)
    return -(-count * largest // step) * step, per_slab
