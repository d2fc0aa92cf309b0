"""Host blocks and hits over both tiers, case by case. Random walks are in `test_host_tier_walks`."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

import pytest

from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.host_copies import LEAST_AHEAD, STEPS_AHEAD
from pd_connectors.protocol.feed import HOST
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.kv_groups import FULL, FULL_WINDOW, ONE_FULL, STATE, GroupSet
from tests.scheduling.test_shared_kv_memory import SIZE, hashes_of
from tests.scheduling.world import is_hit

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_table import BlockTable


class SideCopies(NamedTuple):
    """Of a step."""

    save: list[tuple[int, int, int]]
    load: list[tuple[int, int, int]]


def manager(num_blocks: int, num_host: int, kv: GroupSet = ONE_FULL) -> BlockManager:
    return BlockManager(kv.groups(SIZE), kv.slabs(num_blocks), num_host_blocks=num_host, host_cache=True)


def computed(blocks: BlockManager, family: int, length: int) -> BlockTable:
    table = blocks.open_table()
    blocks.grow(table, 0, length)
    blocks.publish(table, hashes_of(family, length))
    blocks.let_go(table, length)
    return table


def step(blocks: BlockManager, written: dict[BlockTable, int] | None = None, *, retires: bool = True) -> SideCopies:
    """The side copies of a step of which all else is planned."""
    saves, loads = blocks.copies.plan(written or {}, step_s=inf, has_streams=False)
    if retires:
        blocks.copies.note_saved(saves)
    blocks.check()
    return SideCopies(saves, loads)


def fill(blocks: BlockManager, family: int, length: int) -> None:
    """Compute a prompt and let it go, and save what is about to be evicted."""
    blocks.close(computed(blocks, family, length))
    step(blocks)


def test_what_is_about_to_be_evicted_is_saved_and_found_again() -> None:
    """Twelve blocks hold one prompt of eight; the second one takes the place of most of the first."""
    blocks = manager(12, 40)
    fill(blocks, 0, 8 * SIZE)
    fill(blocks, 2, 8 * SIZE)
    fill(blocks, 4, 8 * SIZE)
    hashes = hashes_of(0, 8 * SIZE)
    assert not is_hit(blocks, hashes, 1)
    assert blocks.num_cached(hashes) == 8 * SIZE
    assert blocks.host.num_unsaved == 0
    table = blocks.open_table()
    assert blocks.match(table, hashes) == 0
    assert blocks.match_host(table, hashes, 0, 9 * SIZE) == 8
    assert table in blocks.copies.pending
    assert len(table.groups[0].ids) == 8
    loads = step(blocks).load
    assert [device for _, _, device in loads] == table.groups[0].ids
    assert table not in blocks.copies.pending
    blocks.grow(table, 8 * SIZE, 9 * SIZE)
    blocks.publish(table, hashes)
    assert is_hit(blocks, hashes, 8)
    blocks.close(table)
    blocks.check()
    assert blocks.idle


def test_nothing_is_saved_while_there_is_room() -> None:
    blocks = manager(40, 40)
    fill(blocks, 0, 8 * SIZE)
    assert not blocks.host.num_saved


def test_the_device_goes_first_and_the_host_goes_on() -> None:
    blocks = manager(12, 40)
    fill(blocks, 0, 8 * SIZE)
    blocks.close(computed(blocks, 2, 7 * SIZE))  # the tail of the first prompt goes
    hashes = hashes_of(0, 8 * SIZE)
    table = blocks.open_table()
    start = blocks.match(table, hashes)
    assert 0 < start < 8
    assert blocks.match_host(table, hashes, start, 9 * SIZE) == 8
    assert len(table.groups[0].path) == start
    copies = step(blocks)
    assert not copies.load, "what its blocks held is saved first"
    assert set(table.groups[0].ids[start:]) <= {device for _, device, _ in copies.save}
    assert len(step(blocks).load) == 8 - start
    blocks.close(table)


def test_an_eviction_without_a_copy_is_counted_and_a_reset_is_none() -> None:
    blocks = manager(4, 40)
    blocks.close(computed(blocks, 0, 4 * SIZE))
    blocks.close(computed(blocks, 2, 3 * SIZE))
    assert blocks.host.num_unsaved == 3
    step(blocks)
    blocks.forget_unused()
    assert blocks.num_cached(hashes_of(2, 3 * SIZE)) == 0
    assert blocks.host.num_unsaved == 3
    blocks.check()


def test_what_does_not_pay_is_computed() -> None:
    blocks = manager(12, 40)
    for family in (0, 2, 4):
        fill(blocks, family, 8 * SIZE)
    table, hashes, asked = blocks.open_table(), hashes_of(0, 8 * SIZE), []
    before = blocks.stats()

    def loads_sooner(boundary: int, num_bytes: int) -> bool:
        asked.append((boundary, num_bytes))
        return False

    assert blocks.match_host(table, hashes, 0, 9 * SIZE, loads_sooner) == 0
    assert asked == [(8, 8 * blocks.pools[0].group.block_bytes)]
    assert blocks.stats() == before
    blocks.close(table)


def test_swap_takes_cached_blocks_but_none_that_is_loaded() -> None:
    blocks = manager(12, 8)
    for family in (0, 2, 4):
        fill(blocks, family, 8 * SIZE)
    held = blocks.open_table()
    hashes = hashes_of(4, 8 * SIZE)
    first = blocks.match(held, hashes)
    assert first == 8
    num_cached = blocks.host.num_cached
    assert num_cached > 4
    assert blocks.can_swap_out(held, 8 * SIZE)
    copies, runs = blocks.swap_out(held, 8 * SIZE)
    assert len({host for _, _, host in copies}) == 8
    assert blocks.host.num_cached == 0
    blocks.check()
    blocks.free_host(runs)
    blocks.check()
    assert blocks.idle


def test_a_queued_load_outlives_a_reset_and_swaps() -> None:
    blocks = manager(12, 8)
    for family in (0, 2, 4):
        fill(blocks, family, 8 * SIZE)
    own = blocks.host.groups[0]
    hashes = next(hashes_of(family, 8 * SIZE) for family in (0, 2) if hashes_of(family, 8 * SIZE)[0] in own.cached)
    table = blocks.open_table()
    start = blocks.match(table, hashes)
    end = blocks.match_host(table, hashes, start, 9 * SIZE)
    assert end > start
    sources = {host for *_, host, _ in blocks.copies.pending[table]}
    blocks.forget_unused()
    blocks.check()
    assert blocks.num_cached(hashes) == start * SIZE, "a reset forgets what only a queued load holds"
    assert not sources & set(blocks.host.take(0, own.num_takeable)), "the source of a load was taken"
    own.give_back(list(own.taken))
    assert {host for _, host, _ in step(blocks).load} == sources
    blocks.close(table)
    blocks.check()
    assert blocks.idle


def test_a_table_that_is_closed_is_not_loaded() -> None:
    blocks = manager(12, 40)
    for family in (0, 2, 4):
        fill(blocks, family, 8 * SIZE)
    table, hashes = blocks.open_table(), hashes_of(0, 8 * SIZE)
    blocks.match_host(table, hashes, 0, 9 * SIZE)
    assert not blocks.can_swap_out(table, 8 * SIZE), "it has not its content yet"
    blocks.close(table)
    assert not step(blocks).load
    assert blocks.idle


def test_a_save_keeps_its_target_until_its_step_has_retired() -> None:
    blocks = manager(8, 4)
    blocks.close(computed(blocks, 0, 8 * SIZE))
    builder = step(blocks, retires=False)
    assert len(builder.save) == 2, "half of the tier, so that it does not copy the same blocks for ever"
    assert blocks.host.groups[0].num_takeable == 2
    blocks.copies.note_saved(builder.save)
    assert blocks.host.groups[0].num_takeable == 4
    assert not step(blocks).save


def test_the_copies_of_a_step_are_bounded() -> None:
    blocks = manager(20, 40)
    blocks.copies.most_loads, blocks.copies.most_saves = 3, 2
    for family in (0, 2, 4, 6):
        blocks.close(computed(blocks, family, 5 * SIZE))
    saves = [len(step(blocks).save) for _ in range(8)]
    assert max(saves) == 2
    assert sum(saves) >= LEAST_AHEAD


def test_host_memory_grows_while_it_is_used() -> None:
    blocks = manager(12, 0)
    fill(blocks, 0, 12 * SIZE)
    assert not blocks.host.num_saved
    for num in (2, 2, 6, 30):
        blocks.host.grow(num)
        step(blocks)
    assert blocks.host.num_saved >= LEAST_AHEAD
    with pytest.raises(AssertionError):
        blocks.host.grow(29)


def test_a_window_needs_its_last_blocks_of_either_tier() -> None:
    """Window of six tokens: two blocks before a boundary, one evicted to the host and one still on the device."""
    blocks = manager(30, 60, FULL_WINDOW)
    blocks.close(computed(blocks, 0, 20))
    hashes = hashes_of(0, 20)
    window, own = blocks.pools[1], blocks.host.groups[1]
    for index in (3, 4):
        block_id = window.cache.find(hashes[index])
        assert block_id is not None
    [host] = blocks.host.take(1, 1)
    blocks.host.add(1, hashes[3], host)
    window.evict_subtree(window.cache.find(hashes[3]))  # type: ignore[attr-defined]
    table = blocks.open_table()
    start = blocks.match(table, hashes)
    assert start < 5
    assert blocks.match_host(table, hashes, start, 21) == 5
    assert len(step(blocks).load) == 1
    held = table.groups[1]
    assert held.first == 3
    assert held.ids[1] == window.cache.find(hashes[4])
    assert own.cached[hashes[3]] == host
    blocks.grow(table, 20, 21)
    blocks.publish(table, hashes)
    assert held.path == held.ids[:2]
    assert is_hit(blocks, hashes, 5)
    blocks.close(table)
    blocks.check()


def test_names_stay_until_the_last_tier_lets_go() -> None:
    blocks = manager(8, 40)
    blocks.news.switch(is_on=True)
    hashes = hashes_of(0, 4 * SIZE)
    table = computed(blocks, 0, 4 * SIZE)
    blocks.name([(4 * SIZE, 77)], 0, hashes)
    blocks.close(table)
    step(blocks)
    (), (named,), _ = blocks.news.take()
    fill(blocks, 2, 8 * SIZE)
    assert blocks.news.take() == ((), (), ((named.block, HOST),))
    blocks.forget_unused()
    assert blocks.news.take()[0] == (named.block,)


def test_a_tier_for_swaps_alone_caches_nothing() -> None:
    blocks = BlockManager(ONE_FULL.groups(SIZE), ONE_FULL.slabs(8), num_host_blocks=8)
    for family in (0, 2):
        blocks.close(computed(blocks, family, 8 * SIZE))
    assert not blocks.host.num_cached
    assert not blocks.host.counters


def test_no_tenant_finds_what_another_one_left() -> None:
    blocks = BlockManager(ONE_FULL.groups(16), ONE_FULL.slabs(12), num_host_blocks=40, host_cache=True)
    tokens = list(range(128))
    for salt in ("one", "other", "third"):
        hashes = extend_hashes(root_hash(salt), tokens, 16)
        assert blocks.num_cached(hashes) == 0
        table = blocks.open_table()
        blocks.grow(table, 0, len(tokens))
        blocks.publish(table, hashes)
        blocks.close(table)
        step(blocks)
    assert blocks.num_cached(extend_hashes(root_hash("one"), tokens, 16)) == len(tokens)
    assert blocks.num_cached(extend_hashes(root_hash(""), tokens, 16)) == 0


def test_tables_that_are_loaded_take_turns() -> None:
    """Two blocks a step: the second table is not held up by the first one's eight."""
    blocks = manager(24, 80)
    for family in (0, 2, 4, 6, 8, 10):
        fill(blocks, family, 8 * SIZE)
    blocks.copies.most_loads = 2
    tables = []
    for family, num in ((0, 8), (2, 2)):
        tables.append(blocks.open_table())
        assert blocks.match_host(tables[-1], hashes_of(family, num * SIZE), 0, 9 * SIZE) == num
    assert [len(step(blocks).load) for _ in range(2)] == [2, 2]
    assert tables[1] not in blocks.copies.pending
    assert [len(step(blocks).load) for _ in range(4)] == [2, 2, 2, 0]
    for table in tables:
        blocks.close(table)
    assert blocks.idle


def admitted(blocks: BlockManager, num_blocks: int) -> BlockTable:
    """The table of a prompt that has its blocks, and has computed nothing."""
    table = blocks.open_table()
    with blocks.host.bequeath(table):
        blocks.grow(table, 0, num_blocks * SIZE)
    blocks.check()
    return table


def test_what_a_long_prompt_evicts_is_saved_before_the_step_that_writes_its_block() -> None:
    """A step computes two blocks; what two further steps may reach is saved, and nothing that a step has reached."""
    blocks = manager(12, 40)
    hashes = hashes_of(0, 12 * SIZE)
    blocks.close(computed(blocks, 0, 12 * SIZE))
    blocks.copies.step_tokens = 2 * SIZE
    table = admitted(blocks, 12)
    held, saved = table.groups[0].ids, []
    for end in range(0, 14, 2):
        saves = [device for _, device, _ in step(blocks, {table: end * SIZE}).save]
        assert not set(saves) & set(held[:end]), "a block is saved after a step that writes it was planned"
        saved += saves
        assert saved == held[: min(end + STEPS_AHEAD * 2, 12)]
        assert blocks.num_cached(hashes) == (12 if len(saved) == 12 else 0) * SIZE, "a tail without its head is none"
    assert not blocks.host.num_unsaved
    assert not blocks.host.victims
    blocks.close(table)
    assert blocks.idle


def test_what_a_step_writes_before_it_is_saved_is_lost_and_counted() -> None:
    blocks = manager(12, 40)
    blocks.close(computed(blocks, 0, 12 * SIZE))
    blocks.copies.step_tokens, blocks.copies.most_saves = 12 * SIZE, 2
    table = admitted(blocks, 12)
    assert blocks.copies.holds_up(table, 0), "a step can save what its first blocks held"
    assert [device for _, device, _ in step(blocks, {table: 5 * SIZE}).save] == table.groups[0].ids[5:7]
    assert blocks.host.num_unsaved == 5
    assert not step(blocks).save, "a sequence that does not run may have steps planned"
    blocks.close(table)
    assert blocks.host.num_unsaved == 10
    assert not step(blocks).save
    assert blocks.idle


def test_a_reset_forgets_what_is_not_saved_yet() -> None:
    blocks = manager(12, 40)
    blocks.close(computed(blocks, 0, 12 * SIZE))
    table = admitted(blocks, 12)
    blocks.forget_unused()
    assert not step(blocks, {table: 0}).save
    assert not blocks.num_cached(hashes_of(0, 12 * SIZE))
    blocks.close(table)


def test_what_was_computed_again_is_not_saved_twice() -> None:
    blocks = manager(20, 40)
    blocks.close(computed(blocks, 0, 8 * SIZE))
    blocks.close(computed(blocks, 2, 8 * SIZE))
    blocks.copies.step_tokens = 8 * SIZE
    table = admitted(blocks, 10)  # it evicts six of the first prompt
    assert len(blocks.host.victims[table]) == 6
    again = computed(blocks, 0, 8 * SIZE)
    saves = {device for _, device, _ in step(blocks, {table: 0}).save}
    assert not saves & set(table.groups[0].ids)
    blocks.close(again)
    blocks.close(table)
    assert blocks.idle


def test_loads_do_not_wait_for_saves_into_a_host_memory_that_they_hold() -> None:
    """Eight host blocks, of which the loads hold all: what their blocks held is lost."""
    blocks = manager(8, 16)
    fill(blocks, 0, 8 * SIZE)
    blocks.close(computed(blocks, 2, 8 * SIZE))
    own, hashes = blocks.host.groups[0], hashes_of(0, 8 * SIZE)
    taken = blocks.host.take(0, len(own.free))
    table = blocks.open_table()
    assert blocks.match_host(table, hashes, 0, 8 * SIZE) == 8
    assert own.num_takeable == 0
    assert step(blocks) == ([], [])
    assert len(step(blocks).load) == 8
    assert blocks.host.num_unsaved == 8
    own.give_back(taken)
    blocks.close(table)
    assert blocks.idle


def with_states(blocks: BlockManager, family: int, length: int, num_prompt: int) -> BlockTable:
    """A prompt in one step and its answer in another, both computed."""
    table = blocks.open_table()
    assert blocks.states is not None
    for start, end in ((0, num_prompt), (num_prompt, length)):
        if start < end:
            blocks.grow(table, start, end)
            blocks.states.plan(table, start, end, num_prompt, draws=True)
            blocks.publish(table, hashes_of(family, end))
            blocks.let_go(table, end)
    return table


def test_states_are_saved_when_eviction_reaches_them_and_an_answers_newest_when_it_has_ended() -> None:
    blocks = manager(24, 60, GroupSet(((FULL, 0), (STATE, 0)), (6, 1)))
    answering = with_states(blocks, 0, 3 * SIZE, 2 * SIZE + 1)
    newest = hashes_of(0, 3 * SIZE)[-1]
    for family in range(1, 40):
        blocks.close(with_states(blocks, family, SIZE, SIZE))
        if blocks.pools[1].num_spare < 2:
            break
    states, saved = blocks.pools[1], blocks.host.groups[1].cached
    assert [block_hash for _, block_hash in states.cache.oldest(2)] == [hashes_of(0, 2 * SIZE)[-1], newest]
    assert states.cache.num_evictable > 15
    for _ in range(2):
        step(blocks)
        assert LEAST_AHEAD < len(saved) < 15, "as many as a step may take, and a quarter"
        assert newest not in saved
    blocks.close(answering)
    step(blocks)
    assert newest in saved, "the next turn goes on from it"
    blocks.check()
