"""Groups of KV layers that share memory, for tests of the block manager and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from pd_cluster.scheduling.block_manager import BlockManager
from pd_connectors.protocol.layout import KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs


def group(kind: KVKind, block_size: int, window: int = 0) -> KVGroup:
    return KVGroup(kind, (0,), (1, 1, 2, block_size, 4), "float32", block_size, window)


@dataclass(frozen=True)
class GroupSet:
    """Kinds with the blocks that each has in a slab, and the blocks of `block_size` that a window spans."""

    kinds: tuple[tuple[KVKind, float], ...] = ((KVKind.FULL, 0),)
    per_slab: tuple[int, ...] = (1,)
    multiples: tuple[int, ...] = ()  # of block_size; (): all 1

    def groups(self, block_size: int) -> tuple[KVGroup, ...]:
        multiples = self.multiples or (1,) * len(self.kinds)
        return tuple(
            group(kind, block_size * multiple, int(window * block_size))
            for (kind, window), multiple in zip(self.kinds, multiples, strict=True)
        )

    def slabs(self, num_blocks: int) -> KvSlabs:
        """Room for about `num_blocks` blocks of each group at once."""
        if len(self.kinds) == 1:
            return KvSlabs(1, 0, (num_blocks,))
        return KvSlabs(sum(-(-num_blocks // count) for count in self.per_slab), 0, self.per_slab)

    @property
    def has_state(self) -> bool:
        return any(kind is KVKind.STATE for kind, _ in self.kinds)

    @property
    def has_mortal(self) -> bool:
        """Whether there is a group of which blocks die."""
        return any(kind in (KVKind.WINDOW, KVKind.STATE) for kind, _ in self.kinds)


FULL, WINDOW, LATENT, STATE = KVKind.FULL, KVKind.WINDOW, KVKind.LATENT, KVKind.STATE
ONE_FULL = GroupSet()
FULL_WINDOW = GroupSet(((FULL, 0), (WINDOW, 1.5)), (2, 3))
FULL_WINDOW_STATE = GroupSet(((FULL, 0), (WINDOW, 2), (STATE, 0)), (3, 2, 1))
LATENT_STATE = GroupSet(((LATENT, 0), (STATE, 0)), (4, 1))
TWO_WINDOWS = GroupSet(((FULL, 0), (WINDOW, 1), (WINDOW, 2.3)), (1, 5, 3))
UNEVEN = GroupSet(((WINDOW, 1.25), (FULL, 0)), (26, 5))
UNEVEN_SIZES = GroupSet(((FULL, 0), (WINDOW, 2), (STATE, 0)), (2, 5, 1), (1, 1, 2))
FULL_STATE = GroupSet(((FULL, 0), (STATE, 0)), (4, 1))
FULL_FAR_STATE = GroupSet(((FULL, 0), (STATE, 0)), (8, 1), (1, 4))  # as 16 and 64 tokens
FULL_PAIR_STATE = GroupSet(((FULL, 0), (STATE, 0)), (5, 2), (1, 2))
FULL_HALF_STATE = GroupSet(((FULL, 0), (STATE, 0)), (2, 1))
ONLY_WINDOW = GroupSet(((WINDOW, 2),))
SETS = {
    "full": ONE_FULL, "full+window": FULL_WINDOW, "full+window+state": FULL_WINDOW_STATE, "latent+state": LATENT_STATE,
    "full+2 windows": TWO_WINDOWS, "uneven": UNEVEN, "uneven sizes": UNEVEN_SIZES, "window": ONLY_WINDOW,
    "full+state": FULL_STATE, "full+far state": FULL_FAR_STATE, "full+pair of states": FULL_PAIR_STATE,
    "full+half state": FULL_HALF_STATE,
}  # fmt: skip


def full_manager(
    num_blocks: int, block_size: int, *, num_host_blocks: int = 0, prefix_caching: bool = True
) -> BlockManager:
    """A block manager of one FULL group."""
    groups, slabs = ONE_FULL.groups(block_size), ONE_FULL.slabs(num_blocks)
    return BlockManager(groups, slabs, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching)
