"""How the KV groups of a cache share its memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout

MOST_WASTE = 1 / 20  # of a slab, for each group
STATE_UNIT = 256  # bytes: what a kernel loads of a state is aligned to as much at most
MOST_SLAB_BLOCKS = 256  # of the largest group in a slab


@dataclass(frozen=True, slots=True)
class KvSlabs:
    """Memory in slabs of equal size. A slab belongs to one group at a time, and holds `per_slab` of its blocks.

    Block i of a group begins `i * stride` bytes after the start of the memory, so slab s holds its blocks
    [s * per_slab, (s + 1) * per_slab). One group alone has slabs of one block.
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
        slab_bytes, per_slab = _divide(layout)
        return cls(int(num_bytes // slab_bytes), slab_bytes, per_slab)

    @classmethod
    def of_blocks(cls, layout: BlockLayout, num_blocks: int) -> KvSlabs:
        """Memory for at least `num_blocks` blocks of every group at once."""
        slab_bytes, per_slab = _divide(layout)
        return cls(sum(-(-num_blocks // count) for count in per_slab), slab_bytes, per_slab)


def _divide(layout: BlockLayout) -> tuple[int, tuple[int, ...]]:
    """The smallest slab of which no group wastes more than MOST_WASTE, or else the one that wastes least.

    A block's stride is a whole number of its heads: kernels count a group's memory in heads. But for states: those of
    a head have megabytes, and odd factors.
    """
    sizes = [group.rank_bytes(layout.tp_size) for group in layout.groups]
    heads = [
        STATE_UNIT if group.kind is KVKind.STATE else size // len(group.heads_of(0, layout.tp_size))
        for size, group in zip(sizes, layout.groups, strict=True)
    ]
    unit = lcm(*heads)
    best: tuple[float, int, tuple[int, ...]] = (2.0, 0, ())
    for slab in range(-(-max(sizes) // unit) * unit, MOST_SLAB_BLOCKS * max(sizes) + unit, unit):
        per_slab = tuple(
            next(count for count in range(slab // size, 0, -1) if slab // head % count == 0)
            for size, head in zip(sizes, heads, strict=True)
        )
        waste = max(1 - count * size / slab for count, size in zip(per_slab, sizes, strict=True))
        if waste < best[0]:
            best = (waste, slab, per_slab)
        if waste <= MOST_WASTE:
            break
    return best[1], best[2]
