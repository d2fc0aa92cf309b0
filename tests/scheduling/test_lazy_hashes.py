"""Blocks are hashed as late as possible before a step, and before its result in time that is left."""

from __future__ import annotations

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling import hash_ahead
from pd_cluster.scheduling.hash_ahead import HashAhead
from tests.scheduling.kv_groups import ONLY_WINDOW
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

BLOCKS = 9


@pytest.mark.parametrize(("num_cached", "num_hashed"), [(0, 1), (1, 3), (2, 3), (3, 7), (8, BLOCKS)])
def test_a_prompt_is_hashed_as_far_as_it_may_be_cached(num_cached: int, num_hashed: int) -> None:
    """The hash after the cached run has to be known, too. With each miss as many more are made as there are."""
    world = World(depth=2, num_blocks=64, max_num_batched_tokens=1024, hashes=False)
    if num_cached:
        world.submit(message("first", prompt(num_cached * BLOCK_SIZE + 1), max_tokens=1))
        world.run_until_idle()
    request = world.submit(message("second", prompt(BLOCKS * BLOCK_SIZE + 1), max_tokens=1))
    lead = request.sequences[0]
    world.start_step()
    assert lead.num_computed_tokens == num_cached * BLOCK_SIZE
    assert len(lead.block_hashes) == num_hashed
    world.scheduler.hash_ahead()
    assert len(lead.block_hashes) == BLOCKS
    world.run_until_idle()
    world.check_empty()


def test_a_prompt_is_hashed_while_its_kv_is_on_the_way() -> None:
    world = World(num_blocks=64)
    request = world.submit(message("a", prompt(BLOCKS * BLOCK_SIZE), max_tokens=2, work=Work.TAKE_OVER))
    [lead] = request.sequences
    assert len(lead.block_hashes) == 1
    world.scheduler.hash_ahead()
    assert len(lead.block_hashes) == BLOCKS
    world.give_first_tokens(request)
    world.scheduler.fall_back_to_local(request)
    world.run_until_idle()
    world.check_empty()


def test_lazy_hashes_are_those_of_all_blocks() -> None:
    world = World()
    one, other = (
        world.submit(message(name, prompt(BLOCKS * BLOCK_SIZE), max_tokens=1)).sequences[0] for name in ("a", "b")
    )
    assert list(one.iter_hashes(BLOCKS, BLOCK_SIZE)) == other.hash_blocks(BLOCKS, BLOCK_SIZE)
    assert list(one.iter_hashes(5, BLOCK_SIZE)) == other.hash_blocks(5, BLOCK_SIZE)
    world.run_until_idle()


def test_hashing_ends_in_time_and_keeps_nothing_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_ahead, "PIECE", 2 * BLOCK_SIZE)
    world, now_s = World(num_blocks=64), 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    ahead = HashAhead(BLOCK_SIZE, clock)
    one, ended, other = (
        world.submit(message(name, prompt(BLOCKS * BLOCK_SIZE, family), max_tokens=1)).sequences[0]
        for family, name in enumerate("abc")
    )
    for seq in (one, ended, other):
        ahead.expect(seq, 8 * BLOCK_SIZE + 3)
    assert ahead.run(3.0)  # two looks at the clock are before it
    assert [len(seq.block_hashes) for seq in (one, ended, other)] == [5, 1, 1]
    world.take(world.scheduler.abort(ended.request))
    one.hash_blocks(BLOCKS, BLOCK_SIZE)  # there was no time, and its step has retired
    ahead.expect(one, BLOCKS * BLOCK_SIZE)
    assert [seq for seq, _ in ahead._expected] == [other, one]
    assert not ahead.run()
    assert [len(seq.block_hashes) for seq in (one, ended, other)] == [9, 1, 8]
    assert not ahead._expected
    world.run_until_idle()


def test_nothing_is_hashed_for_a_cache_that_is_empty() -> None:
    """Without a tree the first block that is not cached does not end the search."""
    world = World(kv=ONLY_WINDOW, num_blocks=64)
    seq = world.submit(message("a", prompt(BLOCKS * BLOCK_SIZE), max_tokens=1)).sequences[0]
    seq.block_hashes.clear()
    assert world.scheduler._memory._take_blocks(seq) == []
    assert not seq.block_hashes
