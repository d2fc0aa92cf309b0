"""Blocks of drafts: no other sequence wants them, and they are given back when their step has retired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.drafts import Speculation
from tests.drafters import TokenDrafter
from tests.scheduling.kv_groups import (
    FULL,
    FULL_WINDOW,
    ONE_FULL,
    ONLY_WINDOW,
    SETS,
    WINDOW,
    GroupSet,
    full_manager,
)
from tests.scheduling.simulation import BLOCK_SIZE, VOCAB_SIZE, history, message, prompt, sample
from tests.scheduling.test_scheduler_machine import random_walk
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.scheduling.sequence import Request

NAMES = ("preemptions_recompute_total", "preemptions_swap_total", "prefix_cache_evicted_blocks_total")


@dataclass
class Sure(TokenDrafter):
    """Knows the seeds, by a prompt's first token, of sequences that may have drafts: so many are right, so many not."""

    seeds: dict[int, int]
    num_right: int
    num_wrong: int = 0

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        if (seed := self.seeds.get(token_ids[0])) is None:
            return ()
        last, drafts = history(token_ids)[-1], list[int]()
        for _ in range(self.num_right):
            drafts.append(sample(last, seed))
            last = history(drafts[-1:], last)[-1]
        return (*drafts, *(VOCAB_SIZE,) * self.num_wrong)[:most]


def world_of(drafter: Sure, num_blocks: int, kv: GroupSet = ONE_FULL, *, num_cached: int = 0) -> World:
    """`num_cached`: blocks that hold what an earlier prompt has left."""
    world = World(num_blocks=num_blocks, kv=kv, drafts=True, max_num_seqs=40)
    drafting = world.scheduler._drafting
    assert drafting is not None
    if num_cached:
        world.submit(message("before", [19] * (num_cached * BLOCK_SIZE), max_tokens=1))
        world.run_until_idle()
        assert world.blocks.stats().cached == num_cached
    drafting._drafter = drafter
    drafting._costs = Speculation(drafter)
    return world


def begun(world: World, name: str, first: int, length: int, *, num_steps: int = 1, max_tokens: int = 24) -> Request:
    """A sequence after its prompt, of which the last token has been drawn."""
    request = world.submit(message(name, [first, *prompt(length - 1)], max_tokens=max_tokens, seed=first))
    for _ in range(num_steps):
        world.start_step()
    return request


def seed_of(request: Request) -> int:
    return request.sequences[0].seed


def drafter_for(*firsts: int, num_right: int, num_wrong: int = 0) -> Sure:
    """The seeds of requests are their prompts' first tokens."""
    seeds = {}
    for first in firsts:
        probe = World()
        seeds[first] = seed_of(begun(probe, "probe", first, 2, num_steps=0))
    return Sure(seeds, num_right, num_wrong)


def num_held(request: Request) -> int:
    table = request.sequences[0].table
    assert table is not None
    return len(table.groups[0].ids)


def next_drafts(world: World, request: Request) -> int:
    chunks = {chunk.seq_id: chunk for chunk in world.start_step().chunks}
    return len(chunks[request.sequences[0].seq_id].drafts)


def test_blocks_after_the_accepted_tokens_are_given_back_and_come_again() -> None:
    for num_right, num_blocks in ((0, 1), (2, 1), (3, 2), (4, 2)):  # 13 tokens, one drawn at 13: 14, 15 and 16 follow
        world = world_of(drafter_for(5, num_right=num_right, num_wrong=9 - num_right), 8)
        request = begun(world, "a", 5, 13)
        assert num_held(request) == 1
        assert next_drafts(world, request) == 9
        assert num_held(request) == num_blocks
        world.check()
    world.run_until_idle()
    world.check_empty()


def test_what_is_given_back_admits_a_prompt_at_once() -> None:
    world = world_of(drafter_for(5, num_right=0, num_wrong=9), 5)
    first = begun(world, "a", 5, 13)
    assert next_drafts(world, first) == 9
    other = world.submit(message("b", prompt(3 * BLOCK_SIZE, 1), max_tokens=1))
    batch = world.start_step()
    assert {chunk.num_tokens - len(chunk.drafts) for chunk in batch.chunks} == {1, 3 * BLOCK_SIZE}
    assert other.finished


def test_drafts_leave_what_running_sequences_need_next() -> None:
    """Another sequence is about to need a block. If only one is free, drafts get the rest of their own block."""
    for num_blocks, num_drafts in ((4, 9), (3, 2)):
        world = world_of(drafter_for(5, num_right=0, num_wrong=9), num_blocks)
        drafted, other = begun(world, "a", 5, 11), begun(world, "b", 6, 14)
        assert next_drafts(world, drafted) == 9, "the other one has a place for its next token"
        assert next_drafts(world, drafted) == num_drafts
        assert num_held(other) == 1
    world.start_step()
    assert num_held(other) == 2
    assert sum(world.scheduler.counters[name] for name in NAMES) == 0


def test_drafts_take_no_slab_that_another_group_needs_next() -> None:
    """Two idle slabs of FULL are oldest, and the slab of WINDOW is full: two blocks in use, two younger cached ones.

    The draft needs a block of each group, and so does the other sequence next: FULL has both idle slabs for that, and
    WINDOW both cached blocks. Were room made for the draft alone, WINDOW got the second idle slab.
    """
    world = world_of(drafter_for(5, num_right=0, num_wrong=9), 4, GroupSet(((FULL, 0), (WINDOW, 9)), (1, 4)))
    world.submit(message("before", [19] * (2 * BLOCK_SIZE), max_tokens=1))
    world.run_until_idle()
    drafted, other = begun(world, "a", 5, 13, num_steps=0), begun(world, "b", 6, 15)
    full, window = world.blocks._memory.slab_pools
    assert (len(world.blocks._memory.idle), full.num_loose) == (2, 0)
    assert (window.num_takeable, window.num_loose, world.blocks.num_evicted) == (0, 2, 0)
    assert next_drafts(world, drafted) == 9
    world.start_step()
    assert num_held(other) == 2
    assert world.scheduler.counters["preemptions_recompute_total"] == 0
    world.check()


def test_the_block_of_a_sequences_own_next_token_is_left_to_its_drafts() -> None:
    world = world_of(drafter_for(5, num_right=0, num_wrong=9), 3)
    drafted, _ = begun(world, "a", 5, 13), begun(world, "b", 6, 5)
    assert [next_drafts(world, drafted) for _ in range(3)] == [9] * 3
    assert drafted.sequences[0].num_scheduled_tokens == 17


@pytest.mark.parametrize(("num_cached", "num_drafts"), [(7, 18), (6, 18), (5, 30)])
def test_drafts_evict_for_the_next_block_alone_and_only_where_none_is_free(num_cached: int, num_drafts: int) -> None:
    """One of 8 blocks is the sequence's, with 2 places left. The drafts reach into two more."""
    world = world_of(drafter_for(5, num_right=0, num_wrong=30), 8, num_cached=num_cached)
    request = begun(world, "a", 5, 13, max_tokens=60)
    drafting = world.scheduler._drafting
    assert drafting is not None
    drafting._most = 30
    assert next_drafts(world, request) == num_drafts
    assert world.blocks.num_evicted == (num_cached == 7)
    assert next_drafts(world, request) == (30 if num_drafts == 30 else 17)
    assert world.blocks.num_evicted == (num_cached == 7), "what was evicted once is free"


def test_while_a_sequence_waits_for_blocks_drafts_get_none() -> None:
    world = world_of(drafter_for(5, num_right=0, num_wrong=9), 4)
    request = begun(world, "a", 5, 13)
    waiting = world.submit(message("b", prompt(3 * BLOCK_SIZE, 1), max_tokens=4))
    assert next_drafts(world, request) == 2, "the rest of its block"
    assert waiting in [seq.request for seq in world.scheduler._queues.waiting]
    world.take(world.scheduler.abort(waiting))
    assert next_drafts(world, request) == 9
    parked = world.submit(message("c", prompt(3 * BLOCK_SIZE, 1), work=Work.TAKE_OVER))
    assert world.reserve(parked) is None
    assert next_drafts(world, request) == 0, "its block is full"
    world.take(world.scheduler.abort(parked))


@pytest.mark.long
@pytest.mark.slow_cases
@pytest.mark.parametrize("kv", [ONLY_WINDOW, FULL_WINDOW])
@pytest.mark.parametrize("num_right", [0, 3, 9])
def test_no_block_dies_before_the_token_that_passes_it_is_accepted(kv: GroupSet, num_right: int) -> None:
    world = world_of(drafter_for(5, num_right=num_right, num_wrong=9 - num_right), 24, kv)
    request = begun(world, "a", 5, 13, max_tokens=90)
    seq, place = request.sequences[0], kv.kinds.index(next(one for one in kv.kinds if one[1]))
    window, num_died = world.blocks.pools[place].group, 0
    while not request.finished:
        assert seq.table is not None
        known = seq.num_computed_tokens
        world._running.append((batch := world.scheduler.schedule(), world.worker.execute(batch)))
        assert seq.table.groups[place].first <= window.first_block(known), "while its step runs"
        world.settle()
        if not request.finished:
            assert seq.table.groups[place].first == window.first_block(seq.num_computed_tokens)
            num_died = seq.table.groups[place].first
            world.check()
    assert num_died > 0
    world.run_until_idle()
    world.check_empty()


def test_drafts_end_with_a_token_that_ends_the_sequence() -> None:
    """Those after it would take rows, and count as accepted tokens that no client gets."""
    world = world_of(drafter_for(5, num_right=3, num_wrong=6), 8)
    request = begun(world, "a", 5, 13)
    request.sequences[0].stop_ids = frozenset({VOCAB_SIZE})
    assert next_drafts(world, request) == 4


def test_drafts_of_a_draw_that_sits_out_are_given_back() -> None:
    late = [False]
    world = world_of(drafter_for(5, num_right=9), 8)
    world.worker.are_late = lambda: late[0]
    request = begun(world, "a", 5, 13)
    late[0] = True
    assert next_drafts(world, request) == 9
    assert num_held(request) == 1
    world.check()
    late[0] = False
    assert next_drafts(world, request) == 9
    assert num_held(request) == 2


def test_a_table_gives_back_only_what_is_after() -> None:
    blocks = full_manager(6, 4)
    table = blocks.open_table()
    blocks.grow(table, 0, 14)
    ids = table.groups[0].ids[:]
    for num_tokens, num_left in ((16, 4), (13, 4), (12, 3), (5, 2), (5, 2)):
        blocks.trim(table, num_tokens)
        assert table.groups[0].ids == ids[:num_left]
        assert table.capacity == 4 * num_left
        blocks.check()
    blocks.close(table)
    assert blocks.idle


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("kv", ["full", *(name for name, one in SETS.items() if not one.has_state and name != "full")])
@pytest.mark.parametrize("seed", [0, 1, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 4, 5))])
def test_with_drafts_that_are_all_wrong_every_plan_is_that_without_drafts(seed: int, kv: str) -> None:
    """Which sequences enter, wait and are preempted; with leases, loads, aborts and swaps.

    Nothing is cached: an eviction that comes a few steps early might change a hit."""
    fixed = {"budget": 64, "depth": 1, "longest_run": 1, "lateness": 0.0, "prefix_caching": False, "kv": kv}
    drafted, plain = (random_walk(seed, 100, num_bent=num_bent, **fixed) for num_bent in (5, -1))
    assert drafted.worker.num_drafts > 0 == drafted.worker.num_accepted
    assert drafted.plans == plain.plans
    counters = plain.scheduler.counters
    assert {name: drafted.scheduler.counters[name] for name in counters} == counters
