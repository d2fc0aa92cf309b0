"""How several KV groups share memory: which group owns which slab.

    a slab is   when                                       counted as
    unowned     no group has it                            slack
    idle        an owner, and no referenced block          slack; it can change hands
    busy        an owner, and at least a referenced block  its unreferenced blocks are its owner's only

A group takes blocks from its busy slabs first, so that slabs become idle. When it has no free block it takes an unowned
slab. When there is none, it evicts what was in use least recently: of its own cached blocks, and of all idle slabs,
where a slab was in use until its last reference went. So all groups have one order of age. Before a group takes a block
from slack it looks whether enough is left for what the other groups want in the same growth (`wanted`).
"""

from __future__ import annotations

from collections import Counter
from itertools import count, islice
from math import lcm
from typing import TYPE_CHECKING

from pd_cluster.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pd_cluster.scheduling.block_table import BlockTable
    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs


class SlabMemory:
    """The pools of all groups. A group that is alone has all of the memory, and no slabs.

    `num_units`: a slab has as many as the least common multiple of the blocks that groups have in one.
    `weights`: the units of a block, by group.
    """

    def __init__(self, groups: Sequence[KVGroup], ratios: Sequence[int], slabs: KvSlabs, num_host_blocks: int) -> None:
        self._units = lcm(*slabs.per_slab)
        self.num_units = slabs.num_slabs * self._units
        self.weights = tuple(self._units // count for count in slabs.per_slab)
        self._num_slabs = slabs.num_slabs if len(groups) > 1 else 0
        self.unowned = list(range(self._num_slabs - 1, -1, -1))
        self.idle: dict[int, int] = {}  # slab -> when its last reference went; in this order
        self.owners: dict[int, SlabPool] = {}
        self.clock = count()
        self.slab_pools = tuple(
            SlabPool(self, index, group, ratio, slabs, num_host_blocks)
            for index, (group, ratio) in enumerate(zip(groups, ratios, strict=True))
            if len(groups) > 1
        )
        alone = BlockPool(0, groups[0], 1, slabs.num_blocks(0), num_host_blocks)
        self.pools: tuple[BlockPool, ...] = self.slab_pools or (alone,)
        self.wanted = [0] * len(groups)  # blocks of the growth under way that are not taken yet, by group

    @property
    def num_slack(self) -> int:
        """Slabs without any referenced block."""
        return len(self.unowned) + len(self.idle)

    @property
    def num_unowned_units(self) -> int:
        return len(self.unowned) * self._units

    def has_room(self, needs: Sequence[int], without: Sequence[BlockTable] = ()) -> bool:
        """Whether each group can take so many blocks at once, if these tables are closed."""
        if not self.slab_pools:
            pool = self.pools[0]
            num_freed = len(pool.freed(table.groups[0] for table in without)) if without else 0
            return needs[0] <= len(pool.free) + pool.cache.num_evictable + num_freed
        num_slabs, num_slack = 0, self.num_slack
        for pool in self.slab_pools:
            num_loose, freed = pool.num_loose, pool.freed(table.groups[pool.index] for table in without)
            for slab, num in Counter(block_id // pool.per_slab for block_id in freed).items():
                becomes_idle = num == pool.used[slab]
                num_slack += becomes_idle
                num_loose += num - pool.per_slab if becomes_idle else num
            num_slabs += max(0, -(-(needs[pool.index] - num_loose) // pool.per_slab))
        return num_slabs <= num_slack

    def spares_slack(self, taker: SlabPool) -> bool:
        """Whether `taker` can take a block from a slab of slack, and all that is wanted still has room."""
        num_slabs = 1
        for need, pool in zip(self.wanted, self.slab_pools, strict=True):
            loose = pool.num_loose + (pool.per_slab if pool is taker else 0)
            num_slabs += max(0, -(-(need - loose) // pool.per_slab))
        return num_slabs <= self.num_slack

    def check(self) -> None:
        """Raise AssertionError unless every slab is accounted for once."""
        owned = [slab for pool in self.slab_pools for slab in pool.free_in]
        assert sorted(owned + self.unowned) == list(range(self._num_slabs)), "slabs lost, or owned twice"
        for pool in self.slab_pools:
            num_loose = 0
            for slab, free in pool.free_in.items():
                assert self.owners[slab] is pool
                block_ids = pool._ids_of(slab)
                used = sum(pool.refs[block_id] > 0 for block_id in block_ids)
                assert pool.used[slab] == used, f"slab {slab}: {pool.used[slab]} blocks counted, {used} in use"
                assert (slab in self.idle) == (not used)
                assert len(free) < pool.per_slab, "an empty slab was not given back"
                assert (slab in pool.open) == bool(used and free)
                assert (slab in pool.idle_free) == bool(free and not used)
                num_loose += len(block_ids) - used if used else 0
            assert num_loose == pool.num_loose
        assert list(self.idle.values()) == sorted(self.idle.values())


class SlabPool(BlockPool):
    """The blocks of one group in the slabs that it owns. Block i is in slab i // per_slab."""

    def __init__(
        self, memory: SlabMemory, index: int, group: KVGroup, ratio: int, slabs: KvSlabs, num_host_blocks: int
    ) -> None:
        super().__init__(index, group, ratio, slabs.num_blocks(index), num_host_blocks)
        self._memory = memory
        self.per_slab = slabs.per_slab[index]
        self.free = []
        self.free_in: dict[int, list[int]] = {}  # owned slab -> its free blocks
        self.used = [0] * slabs.num_slabs  # referenced blocks
        self.open: dict[int, None] = {}  # busy slabs with a free block
        self.idle_free: dict[int, None] = {}  # idle ones with a free block
        self.num_loose = 0  # unreferenced blocks in busy slabs
        self._let_go_at = [0] * slabs.num_blocks(index)  # of cached ones
        self._loose: Iterator[int] = iter(())  # cached blocks of busy slabs, see `_oldest_loose`
        self._searched_for: list[int] = []  # the `wanted` of the growth for which they were searched

    @property
    def num_owned(self) -> int:
        return len(self.free_in) * self.per_slab

    @property
    def num_free(self) -> int:
        return sum(map(len, self.free_in.values()))

    def take(self) -> int:
        slab = self._slab_with_free()
        block_id = self.free_in[slab].pop()
        self._use(slab)
        if not self.free_in[slab]:
            del self.open[slab]
        self.refs[block_id] = 1
        self._memory.wanted[self.index] -= 1
        return block_id

    def _slab_with_free(self) -> int:
        memory = self._memory
        while True:
            if self.open:
                return next(iter(self.open))
            if self.num_loose and not memory.spares_slack(self):
                self._evict_all(self._oldest_loose())
            elif self.idle_free:
                return next(iter(self.idle_free))
            elif memory.unowned:
                return self._adopt(memory.unowned.pop())
            else:
                self._evict_oldest()

    def _oldest_loose(self) -> int:
        """The cached block of a busy slab that was let go longest ago.

        Older blocks of idle slabs may be in the way by the thousand, so a growth searches once for all that it wants.
        That is enough: these blocks are evicted only when they are as many as it wants, and all slack is other groups'.
        Then they are so until its end, and no slab of this group becomes busy.
        """
        wanted = self._memory.wanted
        if self._searched_for is wanted:
            for block_id in self._loose:
                if block_id in self.cache:
                    return block_id
        loose = (one for one in self.cache.evictable if self.used[one // self.per_slab])
        self._loose, self._searched_for = iter(list(islice(loose, max(1, wanted[self.index])))), wanted
        return next(self._loose)

    def _ids_of(self, slab: int) -> range:
        return range(slab * self.per_slab, (slab + 1) * self.per_slab)

    def _adopt(self, slab: int) -> int:
        self.free_in[slab] = list(reversed(self._ids_of(slab)))
        self.idle_free[slab] = None
        self._memory.idle[slab] = next(self._memory.clock)
        self._memory.owners[slab] = self
        return slab

    def _evict_oldest(self) -> None:
        """Evict the own block, or all blocks of the idle slab, that was in use least recently."""
        oldest = next(iter(self.cache.evictable), None)
        slab, idle_at = next(iter(self._memory.idle.items()), (None, 0))
        if slab is None or (oldest is not None and self._let_go_at[oldest] <= idle_at):
            assert oldest is not None, "a block was taken without room"
            self._evict_all(oldest)
        else:
            self._memory.owners[slab].give_up(slab)

    def give_up(self, slab: int) -> None:
        """Evict all blocks of an idle slab."""
        for block_id in self._ids_of(slab):
            if block_id in self.cache:
                self._evict_all(block_id)

    def _evict_all(self, block_id: int) -> None:
        """Evict an unreferenced block, and what hangs below it."""
        for evicted, block_hash in self.cache.evict_subtree(block_id):
            self.on_evicted(block_hash)
            self.num_evicted += 1
            self._put_free(evicted)

    def acquire(self, block_id: int) -> None:
        if self.refs[block_id] == 0:
            self._use(block_id // self.per_slab)
        super().acquire(block_id)

    def drop(self, block_id: int) -> None:
        if self.refs[block_id] != 1:
            super().drop(block_id)
            return
        slab, now = block_id // self.per_slab, next(self._memory.clock)
        self.refs[block_id] = 0
        self.used[slab] -= 1
        if self.used[slab]:
            self.num_loose += 1
        else:
            self.num_loose -= self.per_slab - 1
            self._memory.idle[slab] = now
            if slab in self.open:
                del self.open[slab]
                self.idle_free[slab] = None
        if block_id in self.cache:
            self.cache.let_go(block_id)
            self._let_go_at[block_id] = now
        else:
            self._put_free(block_id)

    def _use(self, slab: int) -> None:
        """Note the first reference to one of the slab's blocks."""
        if self.used[slab]:
            self.num_loose -= 1
        else:
            self.num_loose += self.per_slab - 1
            del self._memory.idle[slab]
            if slab in self.idle_free:
                del self.idle_free[slab]
                self.open[slab] = None
        self.used[slab] += 1

    def _put_free(self, block_id: int) -> None:
        slab = block_id // self.per_slab
        free = self.free_in[slab]
        free.append(block_id)
        if self.used[slab]:
            self.open[slab] = None
        elif len(free) < self.per_slab:
            self.idle_free[slab] = None
        else:  # it goes back
            self.idle_free.pop(slab, None)
            del self.free_in[slab], self._memory.idle[slab], self._memory.owners[slab]
            self._memory.unowned.append(slab)

    def _all_free(self) -> list[int]:
        return [block_id for free in self.free_in.values() for block_id in free]

    def _all_owned(self) -> Iterable[int]:
        return (block_id for slab in self.free_in for block_id in self._ids_of(slab))
