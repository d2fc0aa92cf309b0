"""How several KV groups share memory: which group owns which slab.

    a slab is   when                                       counted as
    unowned     no group has it                            slack
    idle        an owner, and no referenced block          slack; it can change hands
    busy        an owner, and at least a referenced block  its unreferenced blocks are its owner's only

A group takes blocks from its busy slabs first, so that slabs become idle. When it has no free block it takes an unowned
slab. Before a growth, what was in use least recently is evicted until there are free blocks and unowned slabs for all
groups that it grows: cached blocks of these groups, and idle slabs, where a slab was in use until its last reference
went. So all groups have one order of age. Room counts what can be evicted as well as what is free, so no eviction takes
it from another group.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import chain, count, islice
from math import lcm
from operator import itemgetter, mul
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import KvStats
from pd_cluster.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.scheduling.block_table import BlockTable
    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs


class SlabMemory:
    """The pools of all groups. A group that is alone has all of the memory, and no slabs.

    `num_units`: a slab has as many as the least common multiple of the blocks that groups have in one.
    """

    def __init__(self, groups: Sequence[KVGroup], ratios: Sequence[int], slabs: KvSlabs) -> None:
        self._units = lcm(*slabs.per_slab)
        self.num_units = slabs.num_slabs * self._units
        self._weights = tuple(self._units // count for count in slabs.per_slab)  # units of a block, by group
        self._num_slabs = slabs.num_slabs if len(groups) > 1 else 0
        self.unowned = list(range(self._num_slabs - 1, -1, -1))
        self.idle: dict[int, tuple[int, SlabPool]] = {}  # slab -> when its last reference went, owner; in this order
        self.clock = count()
        self.slab_pools = tuple(
            SlabPool(self, index, group, ratio, slabs.num_slabs, slabs.per_slab[index])
            for index, (group, ratio) in enumerate(zip(groups, ratios, strict=True))
            if len(groups) > 1
        )
        alone = BlockPool(0, groups[0], 1, 1, slabs.num_blocks(0))
        self.pools: tuple[BlockPool, ...] = self.slab_pools or (alone,)

    @property
    def num_slack(self) -> int:
        """Slabs without any referenced block."""
        return len(self.unowned) + len(self.idle)

    @property
    def num_available(self) -> int:
        """Units without a reference."""
        num_units = len(self.unowned) * self._units
        for pool in self.pools:
            num_units += (pool.num_free + pool.cache.num_evictable) * self._weights[pool.index]
        return num_units

    def units_of(self, num_blocks: Sequence[int]) -> int:
        """Units of so many blocks by group."""
        return sum(map(mul, num_blocks, self._weights))

    def stats(self, num_quarantined: Sequence[int]) -> KvStats:
        """`num_quarantined`: blocks, by group."""
        groups = tuple(pool.stats(count) for pool, count in zip(self.pools, num_quarantined, strict=True))
        free = len(self.unowned) * self._units + self.units_of([one.free for one in groups])
        cached = self.units_of([one.cached for one in groups])
        return KvStats(
            num_blocks=self.num_units,
            free=free,
            cached=cached,
            in_use=self.num_units - free - cached,
            leased=self.units_of([one.leased for one in groups]),
            quarantined=self.units_of([one.quarantined for one in groups]),
            groups=groups,
        )

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether each group can take so many blocks at once."""
        if not self.slab_pools:
            return needs[0] <= len(self.pools[0].free) + self.pools[0].cache.num_evictable
        return self._has_slabs(needs, [pool.num_loose for pool in self.slab_pools], self.num_slack)

    def has_free(self, needs: Sequence[int]) -> bool:
        """Whether each group can take so many blocks at once, and none is evicted for them."""
        if not self.slab_pools:
            return needs[0] <= len(self.pools[0].free)
        return self._has_slabs(needs, [pool.num_takeable for pool in self.slab_pools], len(self.unowned))

    def has_room_without(self, needs: Sequence[int], tables: Iterable[BlockTable]) -> bool:
        """The same if these tables were closed. Of slabs as few tables are looked at as that takes."""
        if not self.slab_pools:
            refs, pool = Counter(chain.from_iterable(table.groups[0].references for table in tables)), self.pools[0]
            return self.has_room([needs[0] - sum(pool.refs[block_id] == num for block_id, num in refs.items())])
        num_loose, num_slack = [pool.num_loose for pool in self.slab_pools], self.num_slack
        closed: list[Counter[int]] = [Counter() for _ in self.slab_pools]  # block -> references of these tables
        freed: Counter[int] = Counter()  # slab -> blocks
        for table in tables:
            for pool, held, counts in zip(self.slab_pools, table.groups, closed, strict=True):
                for block_id in held.references:
                    counts[block_id] += 1
                    if counts[block_id] == pool.refs[block_id]:
                        slab = block_id // pool.per_slab
                        freed[slab] += 1
                        becomes_idle = freed[slab] == pool.used[slab]
                        num_slack += becomes_idle
                        num_loose[pool.index] += 1 - pool.per_slab * becomes_idle
            if self._has_slabs(needs, num_loose, num_slack):
                return True
        return self.has_room(needs)

    def _has_slabs(self, needs: Sequence[int], nums: list[int], num_slabs: int) -> bool:
        """Whether so many slabs hold what the groups need beside so many blocks that they have."""
        pairs = zip(needs, nums, self.slab_pools, strict=True)
        return sum(max(0, -(-(need - num) // pool.per_slab)) for need, num, pool in pairs) <= num_slabs

    def free_for(self, needs: Sequence[int]) -> None:
        """Evict until each group can take so many blocks. There is room for them."""
        pools = self.slab_pools
        while pools and not self._has_slabs(needs, [pool.num_takeable for pool in pools], len(self.unowned)):
            oldest = [(since, owner, owner.ids_of(slab)) for slab, (since, owner) in islice(self.idle.items(), 1)]
            for pool in pools:
                if needs[pool.index] > pool.num_takeable:
                    blocks = islice(pool.cache.evictable, 1)
                    oldest += [(pool.let_go_at[block_id], pool, range(block_id, block_id + 1)) for block_id in blocks]
            assert oldest, "blocks are wanted for which there is no room"
            _, pool, block_ids = min(oldest, key=itemgetter(0))
            for block_id in block_ids:
                if block_id in pool.cache:
                    pool.evict_subtree(block_id)

    def check(self) -> None:
        """Raise AssertionError unless every slab is accounted for once."""
        owned = [slab for pool in self.slab_pools for slab in pool.free_in]
        assert sorted(owned + self.unowned) == list(range(self._num_slabs)), "slabs lost, or owned twice"
        for pool in self.slab_pools:
            num_loose = 0
            for slab, free in pool.free_in.items():
                used = sum(pool.refs[block_id] > 0 for block_id in pool.ids_of(slab))
                assert pool.used[slab] == used, f"slab {slab}: {pool.used[slab]} blocks counted, {used} in use"
                assert (slab in self.idle) == (not used)
                assert used or self.idle[slab][1] is pool
                assert len(free) < pool.per_slab, "an empty slab was not given back"
                assert (slab in pool.open) == bool(free)
                num_loose += pool.per_slab - used if used else 0
            assert (num_loose, pool.num_free) == (pool.num_loose, pool.num_takeable)
            are_busy = [pool.used[slab] > 0 for slab in pool.open]
            assert are_busy == sorted(are_busy, reverse=True), "an idle slab is open before a busy one"
        since = [idle_at for idle_at, _ in self.idle.values()]
        assert since == sorted(since)


class SlabPool(BlockPool):
    """The blocks of one group in the slabs that it owns. Block i is in slab i // per_slab."""

    def __init__(
        self, memory: SlabMemory, index: int, group: KVGroup, ratio: int, num_slabs: int, per_slab: int
    ) -> None:
        super().__init__(index, group, ratio, num_slabs, per_slab)
        self._memory = memory
        self.keeps_first = False
        self.free_in = {}
        self.used = [0] * num_slabs  # referenced blocks
        self.open: OrderedDict[int, None] = OrderedDict()  # slabs with a free block, busy ones first
        self.num_loose = 0  # unreferenced blocks in busy slabs
        self.num_takeable = 0  # free blocks
        self.let_go_at = [0] * len(self.refs)  # of cached ones

    @property
    def num_spare(self) -> int:
        return self.num_takeable + len(self._memory.unowned) * self.per_slab

    def take(self) -> int:
        memory, slab = self._memory, next(iter(self.open), None)
        if slab is None:
            slab = memory.unowned.pop()
            self.free_in[slab] = list(reversed(self.ids_of(slab)))
            self.open[slab] = None
            self.num_takeable += self.per_slab
            memory.idle[slab] = (0, self)
        self._use(slab)
        self.num_takeable -= 1
        block_id = self.free_in[slab].pop()
        if not self.free_in[slab]:
            del self.open[slab]
        self.refs[block_id] = 1
        return block_id

    def evict_subtree(self, block_id: int) -> None:
        """Evict an unreferenced block, and what hangs below it."""
        for evicted, block_hash in reversed(self.cache.evict_subtree(block_id)):  # tails first, as elsewhere
            self.on_evicted(block_hash, evicted)
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
            self._memory.idle[slab] = (now, self)
            if slab in self.open:
                self.open.move_to_end(slab)
        if block_id in self.cache:
            self.cache.let_go(block_id)
            self.let_go_at[block_id] = now
        else:
            self._put_free(block_id)

    def _use(self, slab: int) -> None:
        """Note the first reference to one of the slab's blocks."""
        if self.used[slab]:
            self.num_loose -= 1
        else:
            self.num_loose += self.per_slab - 1
            del self._memory.idle[slab]
            if slab in self.open:
                self.open.move_to_end(slab, last=False)
        self.used[slab] += 1

    def _put_free(self, block_id: int) -> None:
        slab = block_id // self.per_slab
        free = self.free_in[slab]
        free.append(block_id)
        self.num_takeable += 1
        self.open[slab] = None
        if self.used[slab]:
            self.open.move_to_end(slab, last=False)
        elif len(free) == self.per_slab:  # it goes back
            self.num_takeable -= self.per_slab
            del self.open[slab], self.free_in[slab], self._memory.idle[slab]
            self._memory.unowned.append(slab)
