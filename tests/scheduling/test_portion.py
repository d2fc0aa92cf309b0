"""On a CPU no step has more than a portion of one group, and all of the group gets on."""

from __future__ import annotations

import random

import pytest

from pd_cluster.scheduling import portion
from pd_cluster.scheduling.portion import MOST_PROMPT_TOKENS, MOST_ROWS
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

NUM_SAMPLES = 40


def wide_world() -> World:
    return World(
        num_blocks=800, max_num_seqs=64, max_num_batched_tokens=512, max_waiting=1000, rests=True, forgets=True
    )


@pytest.mark.long
def test_many_samples_of_one_request_are_stepped_in_rotation() -> None:
    world = wide_world()
    world.submit(message("hog", prompt(10), n=NUM_SAMPLES, max_tokens=30))
    world.start_step()
    num_steps = -(-NUM_SAMPLES // MOST_ROWS)
    for _ in range(8):
        batches = [world.start_step() for _ in range(num_steps)]
        assert all(len(batch.chunks) <= MOST_ROWS for batch in batches)
        assert len({chunk.seq_id for batch in batches for chunk in batch.chunks}) == NUM_SAMPLES, "one was passed over"
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("size", [5, 50, 120])
def test_the_prompts_of_one_request_are_cut(size: int) -> None:
    world = wide_world()
    for index in range(30):
        world.submit(message(f"hog-{index}", prompt(size, index), max_tokens=5, group="hog"))
    alone = world.submit(message("alone", prompt(120, 77), max_tokens=3))
    sizes = []
    while world.scheduler.has_work:
        batch = world.start_step()
        lead = alone.sequences[0].seq_id if alone.sequences else None
        sizes.append(sum(chunk.num_tokens for chunk in batch.chunks if chunk.seq_id != lead))
        if len(sizes) == 1:
            assert len(world.client(alone).outputs[0]) == 1, "a prompt alone is not cut"
    assert 0 < max(sizes) <= MOST_PROMPT_TOKENS + MOST_ROWS
    world.check_empty()


def test_without_rests_a_step_has_all_rows() -> None:
    """A GPU's steps are as long with many rows."""
    world = World(num_blocks=800, max_num_seqs=64, max_num_batched_tokens=512, forgets=True)
    world.submit(message("hog", prompt(10), n=NUM_SAMPLES, max_tokens=5))
    world.start_step()
    assert len(world.start_step().chunks) == NUM_SAMPLES
    world.run_until_idle()


@pytest.mark.long
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_whatever_is_short_every_sequence_of_a_group_gets_to_its_end(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random groups with tiny portions, short of slots, memory, or both. `World` compares every answer."""
    rng = random.Random(seed)
    monkeypatch.setattr(portion, "MOST_ROWS", rng.randint(1, 3))
    monkeypatch.setattr(portion, "MOST_PROMPT_TOKENS", rng.randint(1, 12))
    world = World(
        num_blocks=rng.choice((24, 40, 300)), num_host_blocks=rng.choice((0, 8)), max_num_seqs=rng.randint(4, 12),
        depth=rng.randint(1, 2), max_waiting=1000, rests=True, forgets=True,
    )  # fmt: skip
    for index in range(40):
        group, n = f"g{rng.randrange(4)}", rng.choice((1, 1, 2, 4))
        world.submit(message(f"r{index}", prompt(rng.randint(1, 40), index), max_tokens=20, n=n, group=group))
        for _ in range(rng.randint(0, 3)):
            world.start_step()
    world.run_until_idle(limit=20_000)
    world.check_empty()
