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

from collections import Counter
from itertools import chain, count, islice
from math import lcm
from operator import itemgetter, mul
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import KvStats
from pd_cluster.scheduling.block_pool import BlockPool
from pd_cluster.scheduling.slab_pool import SlabPool
from pd_cluster.scheduling.state_pool import StatePool
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
        self.clock: Iterator[int] = count()
        self.slab_pools = tuple(
            (StatePool if group.kind is KVKind.STATE else SlabPool)(
                self, index, group, ratio, slabs.num_slabs, slabs.per_slab[index]
            )
            for index, (group, ratio) in enumerate(zip(groups, ratios, strict=True))
            if len(groups) > 1
        )
        assert self.slab_pools or groups[0].kind is not KVKind.STATE, "states without keys and values"
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
