"""The block pool and the prefix tree on their own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from pd_cluster.scheduling.batch import NewBlocks
from pd_cluster.scheduling.block_table import BlockTable, Growth
from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.kv_groups import full_manager

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_manager import BlockManager

SIZE = 16


def hashes(*families: int, salt: str = "") -> list[bytes]:
    """Hashes of one block per family number."""
    return extend_hashes(root_hash(salt), [token for family in families for token in [family] * SIZE], SIZE)


def full_table(blocks: BlockManager, *families: int, publish: bool = True) -> BlockTable:
    table = blocks.open_table()
    matched = blocks.match(table, hashes(*families))
    assert blocks.can_grow(table, matched * SIZE, len(families) * SIZE)
    blocks.grow(table, matched * SIZE, len(families) * SIZE)
    if publish:
        blocks.publish(table, hashes(*families))
    return table


def test_the_least_recently_used_leaf_goes_first() -> None:
    blocks = full_manager(6, SIZE)
    for families in ((1, 2), (1, 3), (4,)):
        blocks.close(full_table(blocks, *families))
    blocks.close(full_table(blocks, 1, 2))  # used again: 1-3 is the oldest leaf now, then 4
    assert blocks.stats().cached == 4
    blocks.grow(blocks.open_table(), 0, 3 * SIZE)
    probe = blocks.open_table()
    assert blocks.match(probe, hashes(1, 3)) == 1
    blocks.close(probe)
    blocks.grow(blocks.open_table(), 0, SIZE)
    probe = blocks.open_table()
    assert blocks.match(probe, hashes(4)) == 0
    assert blocks.match(probe, hashes(1, 2)) == 2
    blocks.check()


@pytest.mark.long
def test_a_path_as_long_as_memory_is_let_go_of() -> None:
    """Were a node's last reference its child's, freeing the last one would recurse to the root, and end the process."""
    cache = PrefixCache()
    for block_id in range(200_000):
        cache.insert(block_id.to_bytes(4, "big"), block_id, block_id - 1 if block_id else None)
    assert len(cache) == 200_000
    nodes = weakref.ref(cache)
    del cache
    assert nodes() is None


def test_what_is_matched_cannot_be_evicted() -> None:
    blocks = full_manager(4, SIZE)
    blocks.close(full_table(blocks, 1, 2, 3))
    pin = blocks.open_table()
    assert blocks.match(pin, hashes(1, 2)) == 2
    table = blocks.open_table()
    assert blocks.num_available == 2
    assert not blocks.can_grow(table, 0, 3 * SIZE)
    blocks.grow(table, 0, 2 * SIZE)
    assert not set(pin.groups[0].ids) & set(table.groups[0].ids)
    blocks.check()


def test_a_block_with_content_that_is_cached_already_stays_private() -> None:
    blocks = full_manager(8, SIZE)
    first = full_table(blocks, 1, 2, publish=False)
    second = full_table(blocks, 1, 2, 3, publish=False)
    blocks.publish(first, hashes(1, 2))
    blocks.publish(second, hashes(1, 2, 3))
    assert second.groups[0].path[:2] == first.groups[0].ids
    blocks.close(first)
    blocks.check()
    assert blocks.stats().in_use == 5  # the cached twins stay as long as what hangs below them is in use
    blocks.close(second)
    blocks.check()
    assert (blocks.stats().in_use, blocks.stats().cached) == (0, 3)


def test_the_first_copy_of_a_prompt_stays_cached_though_nothing_refers_to_it() -> None:
    """A prompt of whole blocks computes its last one again, since logits of its last token are needed."""
    blocks, known = full_manager(6, 16), hashes(0, 1, 2)
    table = blocks.open_table()
    blocks.grow(table, 0, 48)
    blocks.publish(table, known)
    blocks.close(table)
    again = blocks.open_table()
    blocks.grow(again, blocks.match(again, known[:2]) * 16, 48)
    assert blocks.publish(again, known) == []
    [held] = again.groups
    assert (held.ids, held.path, blocks.pools[0].free) == ([0, 1, 3], [0, 1, 2], [5, 4])
    blocks.close(again)
    assert blocks.pools[0].free == [5, 4, 3]
    assert blocks.num_available == 6
    blocks.check()


def test_the_last_holder_of_a_forked_block_writes_in_place() -> None:
    blocks = full_manager(8, SIZE)
    table = blocks.open_table()
    blocks.grow(table, 0, 20)
    fork = blocks.fork(table)
    growth = blocks.grow(fork, 20, 21)
    assert growth.copies == ((0, table.groups[0].ids[1], fork.groups[0].ids[1]),)
    assert growth.new_blocks == (NewBlocks(0, 1, (fork.groups[0].ids[1],)),)
    assert blocks.grow(table, 20, 21).copies == ()
    assert table.groups[0].ids[0] == fork.groups[0].ids[0]
    blocks.check()


def test_after_a_fork_both_must_ask_before_they_write() -> None:
    """What was writable is shared now: a write without asking would go into the other table's block."""
    blocks = full_manager(8, SIZE)
    table = blocks.open_table()
    blocks.grow(table, 0, 20)
    assert table.capacity == 2 * SIZE
    fork = blocks.fork(table)
    assert (table.capacity, fork.capacity) == (0, 0)
    growth = blocks.grow(table, 20, 21)
    assert len(growth.copies) == 1
    assert growth.copies[0][1] == fork.groups[0].ids[1] != table.groups[0].ids[1]
    assert (table.capacity, fork.capacity) == (2 * SIZE, 0)
    blocks.check()


def test_growing_over_the_end_of_a_block_takes_the_next() -> None:
    blocks = full_manager(4, SIZE)
    table = blocks.open_table()
    assert blocks.grow(table, 0, SIZE).new_blocks == (NewBlocks(0, 0, tuple(table.groups[0].ids)),)
    assert (len(table.groups[0].ids), table.capacity) == (1, SIZE)
    growth = blocks.grow(table, SIZE, SIZE + 1)
    assert growth == Growth((NewBlocks(0, 1, (table.groups[0].ids[1],)),), ())
    assert table.capacity == 2 * SIZE
    assert blocks.can_grow(table, SIZE + 1, 4 * SIZE)
    assert not blocks.can_grow(table, SIZE + 1, 4 * SIZE + 1)
    fork = blocks.fork(table)
    assert blocks.can_grow(fork, SIZE + 1, 3 * SIZE), "one for the shared block, one more"
    assert not blocks.can_grow(fork, SIZE + 1, 4 * SIZE)
    blocks.truncate(table, 1)
    assert (len(table.groups[0].ids), table.capacity) == (1, 0)
    blocks.check()


def test_evictions_are_counted() -> None:
    blocks = full_manager(3, SIZE)
    blocks.close(full_table(blocks, 1, 2))
    blocks.grow(blocks.open_table(), 0, SIZE)
    assert blocks.num_evicted == 0
    blocks.grow(blocks.open_table(), 0, 2 * SIZE)
    assert blocks.num_evicted == 2


def test_it_is_idle_when_nothing_is_held_in_any_way() -> None:
    blocks = full_manager(4, SIZE, num_host_blocks=2)
    assert blocks.idle
    table = full_table(blocks, 1, publish=False)
    assert not blocks.idle
    blocks.quarantine("load", table)
    blocks.close(table)
    assert not blocks.idle
    blocks.drain("load")
    assert blocks.idle
    table = full_table(blocks, 1)
    _, host = blocks.swap_out(table, SIZE)
    assert not blocks.idle
    blocks.free_host(host)
    assert blocks.idle
    blocks.hold("lease", full_table(blocks, 2))
    assert not blocks.idle
    blocks.end_lease("lease")
    assert blocks.idle


@pytest.mark.parametrize("damage", ["_by_hash", "_evictable", "child", "block_id"])
def test_the_check_sees_a_tree_that_does_not_agree_with_itself(damage: str) -> None:
    blocks = full_manager(4, SIZE)
    blocks.close(full_table(blocks, 1, 2))
    cache = blocks.pools[0].cache
    blocks.check()
    first = cache.find(hashes(1)[0])
    assert first is not None
    if damage == "_by_hash":
        del cache._by_hash[hashes(1)[0]]
    elif damage == "_evictable":
        del cache._evictable[first]
    elif damage == "child":
        cache._by_block[first].child = None
    else:
        cache._by_block[first].block_id += 1
    with pytest.raises(AssertionError):
        cache.check(blocks.pools[0].refs)


def test_a_lease_holds_its_blocks_until_it_ends_and_shared_ones_count_once() -> None:
    blocks = full_manager(8, SIZE)
    for lease_id in ("a", "b"):
        blocks.hold(lease_id, full_table(blocks, 1, 2))
    assert blocks.stats().leased == 2
    assert blocks.end_lease("a")
    assert not blocks.end_lease("a")
    blocks.check()
    assert blocks.stats().leased == 2
    assert blocks.end_lease("b")
    assert blocks.stats().leased == 0
    assert blocks.idle
    blocks.check()


def test_quarantined_blocks_are_in_use_until_they_have_drained() -> None:
    blocks = full_manager(8, SIZE)
    blocks.close(full_table(blocks, 1))
    table = full_table(blocks, 1, 2, 3, publish=False)
    blocks.quarantine("load", table)
    blocks.close(table)
    blocks.check()
    stats = blocks.stats()
    assert (stats.quarantined, stats.in_use, stats.cached) == (2, 2, 1)
    blocks.drain("load")
    blocks.drain("load")
    assert blocks.idle
    blocks.check()


def test_swapping_keeps_what_the_cache_still_has() -> None:
    blocks = full_manager(4, SIZE, num_host_blocks=4)
    table = full_table(blocks, 1, 2)
    blocks.grow(table, 2 * SIZE, 2 * SIZE + 3)
    out, host = blocks.swap_out(table, 2 * SIZE + 3)
    assert len(blocks.host.groups[0].free) == 1
    blocks.check()
    again = blocks.open_table()
    assert blocks.match(again, hashes(1, 2)) == 2
    back = blocks.swap_in(again, host, [1])
    assert [host for _, host, _ in back] == [out[2][2]]
    assert len(blocks.host.groups[0].free) == 4
    blocks.check()


def test_without_prefix_caching_everything_released_is_free() -> None:
    blocks = full_manager(4, SIZE, prefix_caching=False)
    blocks.close(full_table(blocks, 1, 2))
    assert blocks.stats().free == 4
    assert blocks.match(blocks.open_table(), hashes(1, 2)) == 0


def test_the_check_sees_a_lost_block() -> None:
    blocks = full_manager(4, SIZE)
    table = full_table(blocks, 1, 2)
    table.groups[0].ids.pop()
    with pytest.raises(AssertionError):
        blocks.check()


def test_the_check_sees_a_block_that_is_held_and_free() -> None:
    blocks = full_manager(4, SIZE)
    table = full_table(blocks, 1, publish=False)
    blocks.close(table)
    table.groups[0].ids.append(0)
    with pytest.raises(AssertionError):
        blocks.close(table)


NAMES = ("open", "grow", "fork", "close", "publish", "hold", "end", "quarantine", "drain")
OPERATIONS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 9)), max_size=60)


@pytest.mark.long
@settings(max_examples=150, deadline=None, derandomize=True)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 12))
def test_blocks_are_conserved(operations: list[tuple[str, int]], num_blocks: int) -> None:
    """Tables over three families of contents, in any order of operations."""
    blocks = full_manager(num_blocks, SIZE)
    tables: list[tuple[BlockTable, list[int]]] = []  # with the content of each of its blocks
    for step, (operation, pick) in enumerate(operations):
        if operation == "open":
            families = [1, 1 + pick % 3, 1 + pick // 3]
            table = blocks.open_table()
            tables.append((table, families[: blocks.match(table, hashes(*families))]))
        elif operation in ("end", "drain"):
            for earlier in range(step):
                blocks.end_lease(f"{earlier}") if operation == "end" else blocks.drain(f"{earlier}")
        elif tables:
            table, families = tables[pick % len(tables)]
            if operation == "grow":
                start = len(table.groups[0].ids) * SIZE
                if blocks.can_grow(table, start, start + SIZE):
                    blocks.grow(table, start, start + SIZE)
                    families.append(1 + pick % 3)
            elif operation == "fork":
                tables.append((blocks.fork(table), families[:]))
            elif operation == "publish":
                blocks.publish(table, hashes(*families))
            else:
                tables.remove((table, families))
                if operation == "hold":
                    blocks.hold(f"{step}", table)
                else:
                    if operation == "quarantine":
                        blocks.quarantine(f"{step}", table)
                    blocks.close(table)
        blocks.check()
    for table, _ in tables:
        blocks.close(table)
    for step in range(len(operations)):
        blocks.end_lease(f"{step}")
        blocks.drain(f"{step}")
    blocks.check()
    assert blocks.idle
    assert blocks.num_available == num_blocks
