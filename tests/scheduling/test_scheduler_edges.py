"""Which sequences are in the next step where memory, slots or queues are short."""

from __future__ import annotations

import pytest

from pd_cluster.errors import Overloaded
from pd_cluster.protocol.messages import Work
from tests.scheduling.simulation import BLOCK_SIZE, MAX_MODEL_LEN, message, prompt
from tests.scheduling.world import World


def test_while_a_victim_is_awaited_the_other_sequences_decode() -> None:
    """One step still touches the victim's block, so it cannot be taken now: the claimant and the victim sit it out."""
    world = World(depth=2, num_blocks=4, prefix_caching=False)
    first, other, worst = (
        world.submit(message(name, prompt(length, family), max_tokens=20))
        # the second grows into the last free block before the first needs one
        for family, (name, length) in enumerate((("first", 10), ("other", BLOCK_SIZE - 2), ("worst", 2)))
    )
    ids = {request: request.sequences[0].seq_id for request in (first, other, worst)}
    while True:
        batch = world.start_step()
        planned = {chunk.seq_id for chunk in batch.chunks}
        if ids[first] not in planned:
            break
        assert planned == set(ids.values())
    assert planned == {ids[other]}, "the one that needs a block, and the one that has to give it"
    assert worst.sequences[0].table is not None
    planned = {chunk.seq_id for chunk in world.start_step().chunks}
    assert planned == {ids[first], ids[other]}
    assert worst.sequences[0].table is None
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("n", [2, 3])
def test_several_sequences_that_fall_back_compute_their_prompt_once(n: int) -> None:
    """Their first tokens are known, so each enters for itself: one computes, the others find it cached."""
    world = World(max_num_batched_tokens=48, num_blocks=64)
    request = world.submit(message("a", prompt(4 * BLOCK_SIZE + 1), max_tokens=2, n=n, work=Work.TAKE_OVER))
    world.give_first_tokens(request)
    world.scheduler.fall_back_to_local(request)
    world.run_until_idle()
    live = sum(len(output) > 1 for output in world.client(request).outputs)
    # each computes what follows the whole blocks: the prompt's last token and its own first one
    assert world.worker.num_tokens_computed == 4 * BLOCK_SIZE + 2 * live
    world.check_empty()


def test_a_prompt_and_its_answer_may_fill_the_model_to_the_last_token() -> None:
    world = World()
    request = world.submit(message("a", prompt(MAX_MODEL_LEN - 10), max_tokens=10))
    world.run_until_idle()
    assert len(world.client(request).outputs[0]) == 10
    with pytest.raises(Exception, match="exceed the model's"):
        world.submit(message("b", prompt(MAX_MODEL_LEN - 10), max_tokens=11))
    with pytest.raises(Exception, match=f"at most {MAX_MODEL_LEN - 1} fit"):
        world.submit(message("c", prompt(MAX_MODEL_LEN), max_tokens=1))
    world.submit(message("d", prompt(MAX_MODEL_LEN - 1), max_tokens=1))
    world.run_until_idle()
    world.check_empty()


def test_a_sibling_takes_the_last_slot_as_soon_as_it_parts() -> None:
    world = World(max_num_seqs=2)
    world.submit(message("a", prompt(20), max_tokens=4, n=2))
    world.start_step()
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 0)
    world.run_until_idle()
    world.check_empty()


def test_an_admission_leaves_a_block_to_those_that_run() -> None:
    world = World(num_blocks=4, prefix_caching=False)
    world.submit(message("runs", prompt(2), max_tokens=3))
    world.start_step()
    world.submit(message("late", prompt(3 * BLOCK_SIZE - 1, 1), max_tokens=2))
    world.start_step()
    assert world.scheduler.num_waiting == 1
    world.run_until_idle()
    world.check_empty()


def test_a_group_yields_no_more_blocks_than_a_prompt_lacks() -> None:
    """Two of three, and one to spare, are missing: one sequence of two blocks yields, though three owe."""
    world = World(num_blocks=10, max_num_seqs=8, prefix_caching=False)
    for index in range(4):
        world.submit(message(f"hog-{index}", prompt(20, index), max_tokens=8, group="hog"))
    world.start_step()
    small = world.submit(message("small", prompt(40), max_tokens=8))
    while small.sequences[0].table is None:
        world.start_step()
    assert world.scheduler.counters["preemptions_recompute_total"] == 1
    world.run_until_idle()
    world.check_empty()


def test_requests_without_a_slot_count_as_waiting() -> None:
    """In the queue, with its KV already here, or parked until its KV comes."""
    world = World(max_waiting=3, max_num_seqs=1)
    world.submit(message("runs", prompt(4), max_tokens=40))
    world.start_step()
    loaded = world.submit(message("loaded", prompt(20, 1), max_tokens=4, work=Work.TAKE_OVER))
    world.give_first_tokens(loaded)
    load = world.reserve(loaded)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    assert (world.scheduler.num_waiting, world.scheduler.num_waiting_for_remote_kv) == (1, 0)
    world.submit(message("parked", prompt(20, 2), max_tokens=4, work=Work.TAKE_OVER))
    waits = world.submit(message("waits", prompt(20, 3), max_tokens=4))
    assert (world.scheduler.num_waiting, world.scheduler.num_waiting_for_remote_kv) == (2, 1)
    with pytest.raises(Overloaded, match="3 prompts are waiting"):
        world.submit(message("one too many", prompt(4, 4), max_tokens=4))
    world.take(world.scheduler.abort(waits))
    world.submit(message("in its place", prompt(4, 4), max_tokens=4))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_pool_is_asked_for_nothing_that_is_here_or_cannot_be_kept(prefix_caching: bool) -> None:
    world = World(prefix_caching=prefix_caching)
    world.submit(message("a", prompt(3 * BLOCK_SIZE + 1), max_tokens=1))
    world.run_until_idle()
    again = world.submit(message("again", prompt(3 * BLOCK_SIZE + 1), max_tokens=4, work=Work.TAKE_OVER))
    assert world.scheduler.missing(again) == ([], ())
    longer = world.submit(message("longer", prompt(5 * BLOCK_SIZE + 1), max_tokens=4, work=Work.TAKE_OVER))
    hashes, first_blocks = world.scheduler.missing(longer)
    assert (len(hashes), first_blocks) == ((5, (3,)) if prefix_caching else (0, ()))


def test_a_load_that_was_not_asked_for_admits_nothing() -> None:
    """Word of one that was dropped, or of none."""
    world = World()
    request = world.submit(message("a", prompt(40), max_tokens=4, work=Work.TAKE_OVER))
    world.scheduler.admit_loaded(request)
    assert (world.scheduler.num_waiting, world.scheduler.num_waiting_for_remote_kv) == (0, 1)
    load = world.reserve(request)
    assert load is not None
    assert world.scheduler.reserve(request) is None, "it has its blocks"
    world.fail_load(load)
    world.scheduler.admit_loaded(request)
    assert (world.scheduler.num_waiting, world.scheduler.num_waiting_for_remote_kv) == (0, 1)
    assert not request.is_parted
    world.drain(load)
    world.scheduler.fall_back_to_local(request)
    assert request.num_cached_tokens == 0, "nothing was found yet"
    world.run_until_idle()
    world.check_empty()


def test_first_tokens_that_are_told_twice_hold_nothing_up() -> None:
    world = World()
    request = world.submit(message("a", prompt(40), max_tokens=4, work=Work.TAKE_OVER))
    world.give_first_tokens(request)
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    assert world.scheduler.set_first_tokens(request, world.first_tokens(request)) is None, "no news"
    world.finish_load(load)
    assert (world.scheduler.num_waiting, world.scheduler.num_waiting_for_remote_kv) == (1, 0)
    world.run_until_idle()
    world.check_empty()
