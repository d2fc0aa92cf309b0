"""Blocks are hashed as late as possible before a step, and before its result while the device computes."""

from __future__ import annotations

import pytest

from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

BLOCKS = 9


@pytest.mark.parametrize(("num_cached", "num_hashed"), [(0, 1), (1, 3), (2, 3), (3, 7), (8, BLOCKS)])
def test_a_prompt_is_hashed_as_far_as_it_may_be_cached(num_cached: int, num_hashed: int) -> None:
    """The hash behind the cached run has to be known, too. With each miss as many more are made as there are."""
    world = World(depth=2, num_blocks=64, max_num_batched_tokens=1024)
    if num_cached:
        world.submit(message("first", prompt(num_cached * BLOCK_SIZE + 1), max_tokens=1))
        world.run_until_idle()
    request = world.submit(message("second", prompt(BLOCKS * BLOCK_SIZE + 1), max_tokens=1))
    lead = request.sequences[0]
    batch = world.start_step()
    assert lead.num_computed_tokens == num_cached * BLOCK_SIZE
    assert len(lead.block_hashes) == num_hashed
    world.scheduler.hash_ahead(batch)
    assert len(lead.block_hashes) == BLOCKS
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


def test_a_chunk_whose_last_token_is_unknown_is_hashed_up_to_it() -> None:
    """After a preemption a chunk may end behind a token that the device has not drawn yet."""
    world = World(depth=2, num_blocks=64, max_num_batched_tokens=1024)
    request = world.submit(message("a", prompt(2 * BLOCK_SIZE - 1), max_tokens=3))
    lead = request.sequences[0]
    world.start_step()
    world.scheduler._memory.hash_computed(lead, 2 * BLOCK_SIZE)
    assert len(lead.block_hashes) == 1
    world.run_until_idle()
