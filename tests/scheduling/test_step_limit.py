"""What prompts may take of steps that decode: a limit for their sum, a minimum, and never a decode's token."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, STEP_MULTIPLE, cost_of
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

LIMIT = 128
LONG = 140


def busy_world(
    num_decodes: int, limit: int = LIMIT, num_blocks: int = 256, depth: int = 1, max_num_batched_tokens: int = 512,
    keys_per_token: int = 0,
) -> World:  # fmt: skip
    """`num_decodes` sequences that decode, and slots and budget to spare."""
    world = World(
        num_blocks=num_blocks,
        max_num_seqs=num_decodes + 8,
        max_num_batched_tokens=max_num_batched_tokens,
        most_tokens=limit,
        keys_per_token=keys_per_token,
        max_waiting=256,
        prefix_caching=False,
        depth=depth,
    )
    for index in range(num_decodes):
        world.submit(message(f"d{index}", prompt(3, index), max_tokens=60))
    while world.scheduler.num_running < num_decodes:
        world.start_step()
    return world


def bound(num_decodes: int, limit: int) -> int:
    """Of a step's tokens: the captured size up to the limit, or the next one if prompts would starve."""
    lowered, least = limit - limit % STEP_MULTIPLE, num_decodes + LEAST_PROMPT_TOKENS
    return lowered if lowered >= least else -(-least // STEP_MULTIPLE) * STEP_MULTIPLE


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@example(num_decodes=60, lengths=[LONG] * 3, limit=192, depth=1, keys_per_token=0)
@given(
    num_decodes=st.integers(0, 140),
    lengths=st.lists(st.integers(2, LONG), min_size=1, max_size=6),
    limit=st.sampled_from([0, 1, 64, 100, LIMIT, 192]),
    depth=st.sampled_from([1, 2]),
    keys_per_token=st.sampled_from([0, 1, 40]),
)
def test_the_limit_holds_and_every_prompt_gets_on(
    num_decodes: int, lengths: list[int], limit: int, depth: int, keys_per_token: int
) -> None:
    world = busy_world(num_decodes, limit, depth=depth, keys_per_token=keys_per_token)
    world.settle()
    for index, length in enumerate(lengths):
        world.submit(message(f"p{index}", prompt(length, 7), max_tokens=2))
    while world.scheduler.num_waiting or not all(client.outputs[0] for client in world.clients.values()):
        batch = world.start_step()
        num_ones = sum(chunk.num_tokens == 1 and chunk.start > 0 and chunk.num_samples > 0 for chunk in batch.chunks)
        if limit and num_ones < batch.num_tokens and num_ones:
            most = bound(num_ones, limit)
            assert batch.num_tokens <= most
            prompts = [chunk for chunk in batch.chunks if chunk.num_tokens > 1]
            cost = sum(cost_of(chunk.num_tokens, chunk.start, keys_per_token) for chunk in prompts)
            num_tokens = sum(chunk.num_tokens for chunk in prompts)
            assert num_tokens <= STEP_MULTIPLE or num_ones + cost <= max(most, limit + 1)
        in_prompts = [chunk for chunk in batch.chunks if not chunk.num_samples]
        assert len(in_prompts) <= 1, "one prompt is cut, those before it came to their end"
        assert not in_prompts or in_prompts[0].num_tokens <= LONG
    world.run_until_idle()
    world.check_empty()


@pytest.mark.long
@pytest.mark.parametrize(("num_decodes", "total"), [(4, 128), (32, 128), (65, 128), (96, 128), (97, 191), (100, 191)])
def test_steps_beside_decodes_have_sizes_that_are_captured(num_decodes: int, total: int) -> None:
    """Where the least of prompts is all, what their last token costs is rounded up."""
    world = busy_world(num_decodes)
    world.submit(message("long", prompt(LONG, 7), max_tokens=2))
    assert world.start_step().num_tokens == total
    world.run_until_idle()
    world.check_empty()


def test_a_prompt_takes_smaller_steps_the_further_it_is() -> None:
    world = busy_world(4, limit=192, keys_per_token=60)
    world.submit(message("long", prompt(LONG, 7), max_tokens=2))
    chunks = [world.start_step().chunks[-1] for _ in range(2)]
    assert [chunk.num_tokens for chunk in chunks] == [101, 39]
    world.run_until_idle()
    world.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("limit", [0, LIMIT])
def test_a_price_changes_no_step_that_is_not_limited(limit: int) -> None:
    """Twice the same, too: what is planned depends on nothing else."""

    def steps(keys_per_token: int) -> list[list[tuple[int, int]]]:
        world = busy_world(3 if not limit else 0, limit, keys_per_token=keys_per_token)
        world.submit(message("long", prompt(LONG, 7), max_tokens=2))
        world.submit(message("long too", prompt(LONG, 8), max_tokens=2))
        first = world.start_step()
        world.run_until_idle()
        world.check_empty()
        return [[(chunk.start, chunk.num_tokens) for chunk in first.chunks]]

    assert steps(0) == steps(1) == steps(1)


def test_without_decodes_a_step_is_full() -> None:
    world = busy_world(0)
    world.submit(message("long", prompt(LONG), max_tokens=2))
    assert world.start_step().num_tokens == LONG
    world.submit(message("long too", prompt(LONG, 7), max_tokens=2))
    assert world.start_step().num_tokens == LIMIT
    world.run_until_idle()


def test_a_sequence_that_will_decode_soon_counts_as_a_decode() -> None:
    """A parked request is handed over any moment: it must not find a long step under way."""
    world = busy_world(0)
    parked = world.submit(message("from afar", prompt(20), work=Work.TAKE_OVER))
    world.submit(message("long", prompt(LONG, 7), max_tokens=2))
    assert world.start_step().num_tokens == LIMIT
    load = world.reserve(parked)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(parked)
    world.run_until_idle()
    world.check_empty()


def test_a_parked_prompt_that_another_node_decodes_shortens_no_step() -> None:
    """A pool or a disk is searched for it. Prompts of a prefill node were read 23% slower meanwhile."""
    world = busy_world(0)
    parked = world.request(message("searched", prompt(20), work=Work.PREFILL))
    world.scheduler.park(parked)
    world.submit(message("long", prompt(LONG, 7), max_tokens=2))
    assert world.start_step().num_tokens == LONG


@pytest.mark.long
@pytest.mark.parametrize("limit", [0, LIMIT])
def test_a_handed_over_sequence_decodes_in_the_next_step_beside_any_number_of_prompts(limit: int) -> None:
    world = busy_world(2, limit, max_num_batched_tokens=160)
    for index in range(5):  # of higher precedence, some running and some waiting
        world.submit(message(f"long{index}", prompt(LONG, index), max_tokens=2))
    parked = world.submit(message("from afar", prompt(20), work=Work.TAKE_OVER, max_tokens=3))
    load = world.reserve(parked)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(parked)
    batch = world.start_step()
    assert parked.sequences[0].seq_id in {chunk.seq_id for chunk in batch.chunks if chunk.num_tokens == 1}
    assert any(chunk.num_tokens > 1 for chunk in batch.chunks)
    world.run_until_idle()
    world.check_empty()


def test_a_prompt_of_one_token_needs_no_share_of_the_step() -> None:
    """It costs what a decode costs. Steps are numbered in their order."""
    world = busy_world(1, limit=66)
    world.submit(message("long", prompt(LONG, 3), max_tokens=2))
    before = world.start_step()
    short = world.submit(message("short", prompt(1, 4), max_tokens=2))
    batch = world.start_step()
    assert batch.step == before.step + 1
    assert short.sequences[0].seq_id in {chunk.seq_id for chunk in batch.chunks}
    world.run_until_idle()
    world.check_empty()


def test_a_local_prompt_and_a_load_share_scarce_memory_by_precedence() -> None:
    """The local prompt holds what the load needs; a second one of lower precedence than the load does not pass it."""
    world = busy_world(1, num_blocks=16)
    size = BLOCK_SIZE
    world.submit(message("local", prompt(7 * size, 3), max_tokens=2))
    world.start_step()
    parked = world.submit(message("from afar", prompt(9 * size, 5), work=Work.TAKE_OVER, max_tokens=2))
    assert world.reserve(parked) is None
    late = world.submit(message("local too", prompt(6 * size, 6), max_tokens=2))
    for _ in range(5):
        load = world.reserve(parked)
        if load is not None:
            break
        world.start_step()
        assert late.sequences[0].table is None
    assert load is not None, "the local prompt has ended, and what it held was free"
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(parked)
    world.run_until_idle()
    world.check_empty()


def test_loads_do_not_starve_a_local_prompt_that_waits_for_memory_and_then_for_tokens() -> None:
    """While it is short of memory, none of lower precedence gets any, also in steps that have no token for it."""
    world = busy_world(1, limit=66, num_blocks=16)
    size = BLOCK_SIZE
    world.submit(message("local", prompt(6 * size, 3), max_tokens=40))
    world.start_step()
    short = world.submit(message("short of memory", prompt(9 * size, 4), max_tokens=2, priority=2))
    world.start_step()
    world.submit(message("urgent", prompt(70, 5), max_tokens=2))
    small = world.submit(message("small", prompt(size, 6), work=Work.TAKE_OVER, max_tokens=2, priority=3))
    assert world.start_step().num_tokens == 64
    assert world.blocks.num_available >= 3
    assert world.reserve(small) is None
    world.take(world.scheduler.abort(small))
    world.run_until_idle()
    assert short.finished
    world.check_empty()
