"""What a prompt lacks of the largest hit that files would make: with it in host memory, that hit is there."""

from __future__ import annotations

import random

import pytest

from pd_cluster.scheduling.block_manager import BlockManager
from tests.scheduling.kv_groups import SETS
from tests.scheduling.test_shared_kv_memory import SIZE, hashes_of

NUM_BLOCKS = 12


@pytest.mark.long_cases
@pytest.mark.parametrize("kv", SETS)
def test_what_is_lacking_makes_the_hit(kv: str) -> None:
    rng, num_hits = random.Random(kv), 0
    for _ in range(60):
        groups = SETS[kv].groups(SIZE)
        blocks = BlockManager(groups, SETS[kv].slabs(40), num_host_blocks=40, host_cache=True)
        hashes = hashes_of(0, NUM_BLOCKS * SIZE)
        computed = rng.randrange(NUM_BLOCKS)
        table = blocks.open_table()
        blocks.grow(table, 0, computed * SIZE)
        if blocks.states is not None and computed:
            blocks.states.plan(table, 0, computed * SIZE, computed * SIZE, draws=False)
        blocks.publish(table, hashes[:computed])
        blocks.close(table)
        for group, share in enumerate(rng.choices([0.0, 0.5, 0.9], k=len(groups))):
            for one in (one for one in hashes if rng.random() < share):
                blocks.host.add(group, one, blocks.host.take(group, 1)[0])
        shares = rng.choices([0.5, 0.9, 1.0], k=len(groups))
        files = {(group, one) for group, share in enumerate(shares) for one in hashes if rng.random() < share}
        before = blocks.num_cached(hashes)
        boundary, lacking = blocks.lacking(hashes, lambda group, one: (group, one) in files)  # noqa: B023
        assert boundary * SIZE >= before
        assert set(lacking) <= files
        assert len(set(lacking)) == len(lacking)
        if boundary * SIZE == before:
            continue
        num_hits += 1
        for group, one in lacking:
            assert one not in blocks.host.groups[group].cached
            assert blocks.pools[group].cache.find(one) is None
            blocks.host.add(group, one, blocks.host.take(group, 1)[0])
        assert blocks.num_cached(hashes) == boundary * SIZE
        blocks.check()
    assert num_hits > 20


@pytest.mark.parametrize("kv", SETS)
def test_files_of_all_blocks_make_the_longest_hit(kv: str) -> None:
    groups = SETS[kv].groups(SIZE)
    blocks = BlockManager(groups, SETS[kv].slabs(40), num_host_blocks=40, host_cache=True)
    hashes = hashes_of(0, NUM_BLOCKS * SIZE)
    unit = max(group.block_size for group in groups) // SIZE
    boundary, lacking = blocks.lacking(hashes, lambda group, one: True)
    assert boundary == NUM_BLOCKS // unit * unit
    for index, group in enumerate(groups):  # of windows, only what the next token reads
        count = boundary * SIZE // group.block_size - group.first_block(boundary * SIZE)
        assert sum(one == index for one, _ in lacking) == count
    assert blocks.lacking(hashes, lambda group, one: False) == (0, [])
