"""Which cached block a group gives up for a new one, where slabs are short, and how it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_cluster.scheduling.slab_memory import SlabPool
from tests.scheduling.kv_groups import FULL, SETS, WINDOW, GroupSet
from tests.scheduling.test_group_rules import QUICK, SEVERAL, fill
from tests.scheduling.test_shared_kv_memory import SIZE, compute, hashes_of, manager

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from pd_cluster.scheduling.block_manager import BlockManager


@QUICK
@given(st.sampled_from(SEVERAL), st.integers(2, 9), st.randoms(use_true_random=False))
def test_the_block_of_a_busy_slab_that_was_let_go_first_is_evicted_first(
    name: str, num_slabs: int, rng: random.Random
) -> None:
    """In growths that want all there is, in whatever order of groups. Between them blocks are found and let go."""
    blocks = manager(SETS[name], num_slabs)
    oldest_loose = SlabPool._oldest_loose

    def checked(pool: SlabPool) -> int:
        oldest = next(one for one in pool.cache.evictable if pool.used[one // pool.per_slab])
        assert oldest_loose(pool) == oldest
        return oldest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlabPool, "_oldest_loose", checked)
        for _ in range(4):
            tables = fill(blocks, rng)
            needs = [0 for _ in blocks.pools]
            for _ in range(40):
                more = needs[:]
                more[rng.randrange(len(more))] += 1
                needs = more if blocks.has_room(more) else needs
            blocks._memory.wanted = needs[:]
            pools = [pool for pool in blocks.pools for _ in range(needs[pool.index])]
            rng.shuffle(pools)
            taken = [(pool, pool.take()) for pool in pools]
            blocks._memory.check()
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


def test_a_growth_looks_once_at_the_cached_blocks_of_idle_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group wants the idle slabs."""
    num_looks = 0

    def evictable(cache: PrefixCache) -> Iterator[int]:
        nonlocal num_looks
        for block_id in cache._evictable:
            num_looks += 1
            yield block_id

    blocks = crowded()
    full, window = blocks._memory.slab_pools
    num_old = full.cache.num_evictable - full.num_loose
    needs = [full.num_loose, window.num_loose + 4 * blocks._memory.num_slack]
    assert blocks.has_room(needs)
    assert (num_old, needs[0]) == (150, 30)
    monkeypatch.setattr(PrefixCache, "evictable", property(evictable))
    blocks._memory.wanted = needs[:]
    for _ in range(needs[0]):
        full.take()
    assert num_looks == num_old + needs[0]
    assert not full.num_loose


def test_what_a_growth_has_found_may_be_evicted_or_be_in_use_when_its_turn_comes() -> None:
    blocks = crowded()
    full, window = blocks._memory.slab_pools
    _, second, *_ = [one for one in full.cache.evictable if full.used[one // full.per_slab]]
    needs = [full.num_loose, window.num_loose + 4 * blocks._memory.num_slack]
    blocks._memory.wanted = needs[:]
    full.take()
    full._evict_all(second)
    assert full.take() == second, "it is free"
    full.take()
    table, hashes = blocks.open_table(), hashes_of(2 * 31, 3 * SIZE)
    assert blocks.match(table, hashes) == len(hashes)
    blocks._memory.wanted = [full.num_loose, needs[1]]
    for _ in range(full.num_loose):
        full.take()
    assert blocks.num_cached(hashes) == 3 * SIZE
    blocks._memory.check()
