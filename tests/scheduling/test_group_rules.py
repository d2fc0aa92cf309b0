"""The rules of KV groups that share memory, one by one: what is taken, let go, loaded, and preempted."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.batch_builder import BatchBuilder
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.block_table import StateSlots
from pd_cluster.scheduling.planner import Planner
from pd_cluster.scheduling.sequence import KvArrival
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.kv_groups import FULL, FULL_WINDOW, SETS, WINDOW, GroupSet
from tests.scheduling.simulation import BLOCK_SIZE, history, message, prompt
from tests.scheduling.test_scheduler_machine import random_walk
from tests.scheduling.test_shared_kv_memory import SIZE, compute, hashes_of, manager
from tests.scheduling.world import World

if TYPE_CHECKING:
    import random

    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.sequence import Sequence
    from pd_cluster.scheduling.slab_pool import SlabPool

SEVERAL = [name for name, kv in SETS.items() if len(kv.kinds) > 1]
POOLED = [name for name in SEVERAL if not SETS[name].has_state]  # a pool has no states
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def fill(blocks: BlockManager, rng: random.Random) -> list[BlockTable]:
    """Some prompts, computed in part, cached, closed or held."""
    tables = []
    for _ in range(12):
        table, length = blocks.open_table(), rng.randint(1, 6 * SIZE)
        if blocks.can_grow(table, 0, length):
            blocks.grow(table, 0, length)
            if rng.random() < 0.8:
                blocks.publish(table, hashes_of(rng.randrange(4), length))
            blocks.let_go(table, length)
        if rng.random() < 0.6:
            blocks.close(table)
        else:
            tables.append(table)
    return tables


@pytest.mark.long
@QUICK
@given(st.sampled_from(SEVERAL), st.integers(2, 9), st.randoms(use_true_random=False))
def test_there_is_room_exactly_when_taking_succeeds(name: str, num_slabs: int, rng: random.Random) -> None:
    """In whatever order the groups take their blocks."""
    blocks = manager(SETS[name], num_slabs)
    fill(blocks, rng)
    needs = [rng.randint(0, 2 * pool.per_slab) for pool in blocks._memory.slab_pools]
    has_room = blocks.has_room(needs)
    pools = [pool for pool in blocks.pools for _ in range(needs[pool.index])]
    rng.shuffle(pools)
    with nullcontext() if has_room else pytest.raises(AssertionError, match="no room"):
        blocks._memory.free_for(needs)
        for pool in pools:
            assert pool.refs[pool.take()] == 1
        blocks._memory.check()


@pytest.mark.long
@QUICK
@given(st.sampled_from(SEVERAL), st.integers(2, 9), st.randoms(use_true_random=False))
def test_no_block_is_evicted_in_a_slab_that_stays_another_groups(name: str, num_slabs: int, rng: random.Random) -> None:
    blocks = manager(SETS[name], num_slabs)
    fill(blocks, rng)
    taker = rng.choice(blocks._memory.slab_pools)
    needs = [int(pool is taker) for pool in blocks.pools]
    if not blocks.has_room(needs):
        return
    kept = [
        (pool, block_id)
        for pool in blocks._memory.slab_pools
        if pool is not taker
        for block_id in pool.cache.evictable
        if pool.used[block_id // pool.per_slab]
    ]
    blocks._memory.free_for(needs)
    taker.take()
    assert all(block_id in pool.cache for pool, block_id in kept)


@pytest.mark.long
@QUICK
@given(st.sampled_from(SEVERAL), st.integers(2, 9), st.randoms(use_true_random=False))
def test_room_without_some_tables_is_the_room_when_they_are_closed(
    name: str, num_slabs: int, rng: random.Random
) -> None:
    blocks = manager(SETS[name], num_slabs)
    tables = fill(blocks, rng)
    tables += [blocks.fork(table) for table in tables if rng.random() < 0.3]
    closed = [table for table in tables if rng.random() < 0.5]
    asked = [[rng.randint(0, 8) for _ in blocks.pools] for _ in range(20)]
    told = [blocks.has_room_without(needs, closed) for needs in asked]
    for table in closed:
        blocks.close(table)
    assert told == [blocks.has_room(needs) for needs in asked]


@pytest.mark.long
@QUICK
@given(st.sampled_from(SEVERAL), st.integers(3, 7), st.sampled_from(["prompt", "load", "prefix"]), st.randoms())
def test_the_cache_of_an_idle_engine_is_in_no_request_s_way(
    name: str, num_blocks: int, kind: str, rng: random.Random
) -> None:
    """Cached blocks may lie so that a hit leaves no slab for another group: then the hit is given up."""
    world = World(kv=SETS[name], num_blocks=num_blocks, max_num_batched_tokens=200)
    for number in range(5):
        length = rng.randint(1, min(140, world.blocks.num_tokens - 9))
        world.submit(message(f"{number}", prompt(length, rng.randrange(2)), max_tokens=rng.randint(1, 9)))
        world.start_step()
    world.run_until_idle()
    last = prompt(min(150, world.blocks.num_tokens - 1), rng.randrange(2))
    if kind == "prompt" or (kind == "prefix" and name not in POOLED):
        world.submit(message("last", last, max_tokens=2))
        world.run_until_idle()
        world.check_empty()
        return
    request = world.submit(message("last", last, work=Work.TAKE_OVER, max_tokens=1))
    unit = max(pool.ratio for pool in world.blocks.pools) * BLOCK_SIZE
    world.scheduler.missing(request)
    request.load_id = "load"
    end = (len(last) - 1) // unit * unit
    load = world.scheduler.reserve(request, end) if kind == "prefix" else world.reserve(request)
    assert load is not None
    world.start_step()
    if kind == "prefix":
        world.scheduler.admit_prefix(request, 0)
    else:
        world.finish_load(load)
    world.check()
    world.stop(request)
    world.run_until_idle()
    world.check_empty()


def fill_slabs(pool: SlabPool) -> list[int]:
    """Take the free blocks of the group's slabs, so that its next block lies in another one."""
    return [pool.take() for _ in range(sum(map(len, pool.free_in.values())))]


@pytest.mark.parametrize("kind", ["prompt", "load"])
def test_a_hit_that_leaves_no_slab_for_another_group_is_given_up(kind: str) -> None:
    """Each cached block of FULL lies in a slab of its own, where the WINDOW can have none."""
    window, per_slab, num_cached = (1, (8, 2), 2) if kind == "prompt" else (2, (8, 1), 5)
    world = World(kv=GroupSet(((FULL, 0), (WINDOW, window)), per_slab), num_blocks=6, max_num_batched_tokens=200)
    blocks, tokens = world.blocks, prompt(6 * BLOCK_SIZE)
    full, last = blocks._memory.slab_pools
    table, junk = blocks.open_table(), []
    hashes = extend_hashes(root_hash(), tokens, BLOCK_SIZE)[:num_cached]
    for pool, held in zip(blocks._memory.slab_pools, table.groups, strict=True):
        for _ in hashes if pool is full or kind == "prompt" else ():
            held.ids.append(pool.take())
            junk += fill_slabs(pool) if pool is full else []
        pool.publish(held, hashes[: len(held.ids)], [])
    for index, held in enumerate(table.groups):
        for block, block_id in enumerate(held.ids):
            for slot in range(BLOCK_SIZE):
                world.worker._write((index, block_id, slot), history(tokens)[block * BLOCK_SIZE + slot])
    for block_id in junk:
        full.drop(block_id)
    blocks.close(table)
    blocks.check()
    if kind == "prompt":
        assert blocks.num_cached(hashes) == num_cached * BLOCK_SIZE
        world.submit(message("r", tokens, max_tokens=1))
        world.run_until_idle()
    else:
        request = world.submit(message("r", tokens, work=Work.TAKE_OVER, max_tokens=1))
        load = world.reserve(request)
        assert load is not None
        assert [run.first_block for run in load.runs] == [0, last.group.handed_over(len(tokens)).start]
        assert request.sequences[0].num_cached_tokens == 0
        world.start_step()
        world.finish_load(load)
        world.give_first_tokens(request)
        world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("length", range(1, 5 * SIZE))
def test_what_a_load_brought_comes_back_from_the_host_at_its_places(length: int) -> None:
    """A handoff brings a block before the first one that the sequence needs when it is swapped in."""
    kv = GroupSet(((FULL, 0), (WINDOW, 1)), (2, 3))
    blocks = BlockManager(kv.groups(SIZE), kv.slabs(12), num_host_blocks=8)
    table = blocks.open_table()
    blocks.match_runs(table, (), length, is_handoff=True)
    blocks.grow(table, length, length)
    _, host = blocks.swap_out(table, length)
    again = blocks.open_table()
    blocks.match_runs(again, (), length)
    needs = blocks.needs(again, length, length + 1)
    copies = blocks.swap_in(again, host, needs)
    for index, source, target in copies:
        held = again.groups[index]
        assert host[index].first_block + host[index].block_ids.index(source) == held.first + held.ids.index(target)
    assert [one.end for one in again.groups] == [pool.blocks_for(length) for pool in blocks.pools]
    assert [one.first for one in again.groups] == [pool.group.first_block(length) for pool in blocks.pools]
    blocks.check()


def test_copies_into_a_slab_that_changed_hands_in_the_same_step_come_later() -> None:
    """The second copy lies over what the first one reads: a worker must not run them in another order."""
    blocks = manager(GroupSet(((FULL, 0), (WINDOW, 9)), (1, 1)), 6)
    table = blocks.open_table()
    blocks.grow(table, 0, SIZE - 1)
    fork, third = blocks.fork(table), blocks.fork(table)
    builder = BatchBuilder(step=0, budget=1)
    builder.copy_on_write += blocks.grow(fork, SIZE - 1, SIZE).copies
    blocks.close(fork)
    builder.copy_on_write += blocks.grow(third, SIZE - 1, SIZE).copies
    assert len(builder.copy_on_write) == 4
    targets = [slab for _, _, slab in builder.copy_on_write]
    assert set(targets[:2]) & set(targets[2:]), "the slabs of the preempted one were taken"
    assert builder.batch((), (), []).copies.copy_on_write == tuple(builder.copy_on_write)
    blocks.check()


@pytest.mark.parametrize("name", SETS)
def test_a_copy_of_what_is_cached_and_unused_takes_its_place_but_in_a_lone_tree(name: str) -> None:
    blocks = manager(SETS[name] if name in SEVERAL else GroupSet(SETS[name].kinds, (40,)), 40)
    long = compute(blocks, 0, 6 * SIZE)
    blocks.close(long)
    again = compute(blocks, 0, 4 * SIZE)
    blocks.check()
    is_alone = len(blocks.pools) == 1 and blocks.pools[0].is_tree  # there the first copy stays
    for pool, held in zip(blocks.pools, again.groups, strict=True):
        if isinstance(held, StateSlots):
            assert pool.stats().in_use == 1, "no second checkpoint is held"
            continue
        assert (held.path == held.ids) is not is_alone, "its own blocks are the cached ones"
        assert pool.stats().in_use == len(held.ids) * (1 + is_alone), "no second copy is held"
    blocks.close(again)
    unit = max(pool.block_size for pool in blocks.pools)
    assert blocks.num_cached(hashes_of(0, 6 * SIZE)) == 6 * SIZE // unit * unit, "what hung below it still does"
    blocks.check()


@pytest.mark.long
@QUICK
@given(st.integers(1, 4 * BLOCK_SIZE), st.integers(1, 6), st.integers(0, BLOCK_SIZE - 1))
def test_a_pin_begins_early_enough_when_its_limit_falls(window: int, num_whole: int, rest: int) -> None:
    """The redraw is known after the first pin: then the prompt's last token is computed here."""
    kv = GroupSet(((FULL, 0), (WINDOW, window / BLOCK_SIZE)), (2, 3))
    world = World(kv=kv, max_num_batched_tokens=200)
    tokens = prompt(num_whole * BLOCK_SIZE + rest)
    world.submit(message("a", tokens, max_tokens=2))
    world.run_until_idle()
    request = world.submit(message("r", tokens, work=Work.TAKE_OVER))
    for redraws in (False, True):
        request.redraws = redraws
        boundary = world.scheduler.pin(request)
        assert request.table is not None
        for pool, held in zip(world.blocks.pools, request.table.groups, strict=True):
            assert held.first <= pool.group.first_block(boundary)
            assert held.end == boundary // pool.block_size
        assert boundary <= request.num_kept_tokens
    world.stop(request)
    world.check_empty()


def test_a_pool_is_told_by_group_what_is_here() -> None:
    """Windows alone were evicted, so there is no hit: the FULL blocks are not asked for, and pinned meanwhile."""
    world = World(kv=FULL_WINDOW, num_blocks=24, max_num_batched_tokens=200)
    tokens = prompt(6 * BLOCK_SIZE + 1)
    world.submit(message("a", tokens, max_tokens=1))
    world.run_until_idle()
    full, window = world.blocks.pools
    window.forget_unused()
    request = world.submit(message("r", tokens, work=Work.TAKE_OVER))
    assert world.scheduler.pin(request) == 0
    hashes, first_blocks = world.scheduler.missing(request)
    assert (len(hashes), first_blocks) == (6, (6, 0))
    full.forget_unused()
    request.load_id = "load"
    load = world.scheduler.reserve(request, len(hashes) * BLOCK_SIZE)
    assert load is not None
    assert [run.span for run in load.runs] == [range(6, 6), range(window.group.first_block(6 * BLOCK_SIZE), 6)]
    world.start_step()
    world.scheduler.admit_prefix(request, load.num_tokens)
    assert world.scheduler.pin(request) == load.num_tokens
    world.check()


@pytest.mark.long
@QUICK
@given(st.sampled_from(POOLED), st.integers(0, 2), st.integers(1, 2), st.booleans(), st.booleans())
def test_a_prefix_is_loaded_after_what_each_group_has(
    name: str, num_own: int, num_more: int, is_loaded: bool, falls: bool
) -> None:
    world = World(kv=SETS[name], num_blocks=24, max_num_batched_tokens=200)
    unit = max(pool.ratio for pool in world.blocks.pools)
    tokens = prompt((num_own + num_more) * unit * BLOCK_SIZE + 1)
    if num_own:
        world.submit(message("a", tokens[: num_own * unit * BLOCK_SIZE + 1], max_tokens=1))
        world.run_until_idle()
    request = world.submit(message("r", tokens, work=Work.TAKE_OVER))
    hashes, first_blocks = world.scheduler.missing(request)
    assert first_blocks == tuple(num_own * unit // pool.ratio for pool in world.blocks.pools)
    if falls:
        while world.scheduler._memory.drop_pin():
            pass
        world.blocks.forget_unused()
    end = len(hashes) * BLOCK_SIZE
    request.load_id = "load"
    load = world.scheduler.reserve(request, end)
    assert load is not None
    is_given_up = falls and num_own > 0 and world.kv.has_mortal
    assert load.num_tokens == (0 if is_given_up else end)
    for pool, run in zip(world.blocks.pools, load.runs, strict=True):
        assert pool.group.first_block(load.num_tokens) <= run.first_block
        assert run.span.stop == load.num_tokens // pool.block_size
    world.start_step()
    world.scheduler.admit_prefix(request, load.num_tokens if is_loaded else 0)
    hits = extend_hashes(root_hash(), tokens, BLOCK_SIZE)
    now = 0 if falls else num_own * unit * BLOCK_SIZE
    assert world.blocks.num_cached(hits) == (load.num_tokens if is_loaded else now)
    assert request.kv is KvArrival.ABSENT
    world.check()
    world.stop(request)
    world.check_empty()


def test_what_shares_all_of_its_blocks_with_a_lease_is_not_preempted() -> None:
    """A lease holds a block in every slab. A decode needs a block; those of the only victim are the lease's."""
    world = World(kv=GroupSet(((FULL, 0), (WINDOW, 1)), (8, 8)), num_blocks=8, max_num_batched_tokens=200)
    world.submit(message("p", prompt(2 * BLOCK_SIZE), work=Work.PREFILL))
    world.run_until_idle()
    long = world.submit(message("a", prompt(5 * BLOCK_SIZE - 1, 2), max_tokens=30))
    world.start_step()
    taken = world.submit(message("b", prompt(2 * BLOCK_SIZE), work=Work.TAKE_OVER, max_tokens=4))
    load = world.reserve(taken)
    assert load is not None
    assert not any(run.block_ids for run in load.runs)
    world.finish_load(load)
    for _ in range(5):
        world.start_step()  # the decode takes the last block
    world.give_first_tokens(taken)
    for _ in range(25):
        world.start_step()
        world.check()
    assert taken.finished
    assert sum(world.scheduler.counters[name] for name in PREEMPTIONS) == 1, "the decode gave way, nothing else"
    assert not long.finished
    world.end_lease("lease-p")
    world.run_until_idle()
    assert long.finished
    world.check_empty()


PREEMPTIONS = ("preemptions_recompute_total", "preemptions_swap_total")


@pytest.mark.long
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_preemption_for_a_sequence_makes_room_for_it(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_writable = Planner._make_writable
    num_helped = 0

    def checked(self: Planner, seq: Sequence, builder: BatchBuilder) -> bool:
        nonlocal num_helped
        counters = self._memory.counters
        before = sum(counters[one] for one in PREEMPTIONS)
        is_writable = make_writable(self, seq, builder)
        if sum(counters[one] for one in PREEMPTIONS) > before:
            num_helped += is_writable
            assert is_writable or builder.held or seq.table is None, "a preemption that made no room"
        return is_writable

    monkeypatch.setattr(Planner, "_make_writable", checked)
    random_walk(100 + seed, num_steps=80, kv=name)


@pytest.mark.long
@QUICK
@given(st.integers(1, 5 * BLOCK_SIZE), st.integers(1, 8 * BLOCK_SIZE), st.integers(4, 80))
def test_a_lease_keeps_what_it_hands_over_until_it_ends(window: int, length: int, budget: int) -> None:
    kv = GroupSet(((FULL, 0), (WINDOW, window / BLOCK_SIZE)), (2, 3))
    world = World(kv=kv, max_num_batched_tokens=budget)
    world.submit(message("p", prompt(length), work=Work.PREFILL))
    world.run_until_idle()
    table = world.blocks.leases["lease-p"]
    for pool, held in zip(world.blocks.pools, table.groups, strict=True):
        assert held.first == pool.group.handed_over(length).start
        assert held.end == pool.blocks_for(length)
    world.end_lease("lease-p")
    world.check_empty()


def test_routers_are_told_blocks_of_all_groups() -> None:
    """10 slabs of 6 units; `block_size` tokens take 3 in FULL and 2 in WINDOW."""
    world = World(kv=FULL_WINDOW, num_blocks=12)
    assert (world.scheduler.load.free_blocks, world.scheduler.load.num_blocks) == (12, 12)
    world.submit(message("a", prompt(2 * BLOCK_SIZE), max_tokens=9))
    world.start_step()
    assert world.scheduler.load.free_blocks == 10


def test_routers_are_not_told_blocks_that_one_group_alone_can_have() -> None:
    """Each has one loose block, and one slab is left, which only one of them can take."""
    blocks = manager(FULL_WINDOW, 4)
    assert blocks.num_free_tokens == blocks.num_tokens == 4 * SIZE
    table = blocks.open_table()
    blocks.grow(table, 0, 3 * SIZE)
    blocks.let_go(table, 3 * SIZE)
    assert blocks.num_available == 6 + 3 + 2, "units, of which a block of both takes 5"
    assert blocks.num_free_tokens == SIZE


def test_the_optional_groups_that_no_model_has_are_refused() -> None:
    groups = FULL_WINDOW.groups(SIZE)
    groups = (groups[0], msgspec.structs.replace(groups[1], optional=True))
    with pytest.raises(AssertionError, match="optional"):
        BlockManager(groups, FULL_WINDOW.slabs(8))
