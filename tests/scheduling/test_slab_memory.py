"""Which cached block a group gives up for a new one, where slabs are short, and how it is found."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_cluster.scheduling.slab_pool import SlabPool
from tests.scheduling.kv_groups import FULL, SETS, WINDOW, GroupSet
from tests.scheduling.test_group_rules import QUICK, SEVERAL, fill
from tests.scheduling.test_shared_kv_memory import SIZE, compute, manager

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from pd_cluster.scheduling.block_manager import BlockManager


@pytest.mark.long
@QUICK
@given(st.sampled_from(SEVERAL), st.integers(2, 9), st.randoms(use_true_random=False))
def test_what_was_in_use_least_recently_is_evicted_first(name: str, num_slabs: int, rng: random.Random) -> None:
    """In growths that want all there is, in whatever order groups take. Of idle slabs the youngest block counts."""
    blocks = manager(SETS[name], num_slabs)
    memory, evict_subtree = blocks._memory, SlabPool.evict_subtree

    def checked(pool: SlabPool, block_id: int) -> None:
        is_in_oldest_slab = block_id // pool.per_slab == next(iter(memory.idle), None)
        assert is_in_oldest_slab or block_id == next(iter(pool.cache.evictable))
        assert is_in_oldest_slab or pool.let_go_at[block_id] <= min((at for at, _ in memory.idle.values()), default=inf)
        evict_subtree(pool, block_id)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabPool, "evict_subtree", checked)
        for _ in range(4):
            tables = fill(blocks, rng)
            needs = [0 for _ in blocks.pools]
            for _ in range(40):
                more = needs[:]
                more[rng.randrange(len(more))] += 1
                needs = more if blocks.has_room(more) else needs
            memory.free_for(needs)
            memory.check()
            pools = [pool for pool in blocks.pools for _ in range(needs[pool.index])]
            rng.shuffle(pools)
            taken = [(pool, pool.take()) for pool in pools]
            memory.check()
            rng.shuffle(taken)
            for pool, block_id in taken:
                pool.drop(block_id)
            for table in tables:
                blocks.close(table)
    blocks.check()


def crowded() -> BlockManager:
    """Old cached blocks in idle slabs, and younger ones in slabs of which a block is in use."""
    blocks = manager(GroupSet(((FULL, 0), (WINDOW, 9)), (4, 4)), 120)
    tables = [compute(blocks, 2 * family, 5 * SIZE) for family in range(30)]
    for table in tables:
        blocks.close(table)
    for family in range(30, 40):
        keeper = blocks.open_table()
        blocks.grow(keeper, 0, SIZE)
        blocks.close(compute(blocks, 2 * family, 3 * SIZE))
    return blocks


def test_a_growth_looks_at_no_cached_block_but_those_that_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group wants the idle slabs, which are full of older blocks."""
    num_looks = 0

    def evictable(cache: PrefixCache) -> Iterator[int]:
        nonlocal num_looks
        for block_id in cache._evictable:
            num_looks += 1
            yield block_id

    blocks = crowded()
    full, window = blocks._memory.slab_pools
    num_old, num_slack = full.cache.num_evictable - full.num_loose, blocks._memory.num_slack
    needs = [full.num_loose, window.num_loose + 4 * num_slack]
    assert blocks.has_room(needs)
    assert (num_old, needs[0]) == (150, 30)
    num_evicted = blocks.num_evicted
    monkeypatch.setattr(PrefixCache, "evictable", property(evictable))
    blocks._memory.free_for(needs)
    assert num_looks <= 2 * (blocks.num_evicted - num_evicted)
    for _ in range(needs[0]):
        full.take()
    assert not full.num_loose
    blocks._memory.check()


def test_what_was_let_go_first_goes_though_its_slab_is_busy() -> None:
    """The group has younger blocks, and the other group an idle slab that was in use later."""
    blocks = manager(GroupSet(((FULL, 0), (WINDOW, 1)), (2, 2)), 5)
    full, window = blocks._memory.slab_pools
    table = compute(blocks, 0, 2 * SIZE)
    blocks.truncate(table, 1)
    [old] = full.cache.evictable
    other = compute(blocks, 2, SIZE)
    blocks.close(other)
    blocks._memory.free_for([sum(map(len, full.free_in.values())) + 2 * len(blocks._memory.unowned) + 1, 0])
    assert old not in full.cache
    assert window.cache.num_evictable
    blocks._memory.check()


@pytest.mark.parametrize("name", SETS)
def test_all_of_the_memory_can_be_taken(name: str) -> None:
    """Whichever group wants it, and also where a group is alone."""
    blocks = manager(SETS[name], 6)
    for pool in blocks.pools:
        needs = [len(pool.refs) if other is pool else 0 for other in blocks.pools]
        assert needs[pool.index] == blocks._slabs.num_blocks(pool.index)
        assert blocks.has_room(needs)
        blocks._memory.free_for(needs)
        taken = [pool.take() for _ in range(needs[pool.index])]
        assert sorted(taken) == list(range(len(pool.refs)))
        for block_id in taken:
            pool.drop(block_id)
