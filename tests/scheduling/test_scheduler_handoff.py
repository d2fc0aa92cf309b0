"""Leases given out and KV taken over, case by case."""

from __future__ import annotations

import pytest

from pd_cluster.protocol.messages import FinishReason, Work
from pd_connectors.protocol.messages import SampledToken
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

# leases


def test_a_prefill_announces_whole_blocks_and_then_the_prompt() -> None:
    world = World(max_num_batched_tokens=24)
    request = world.submit(message("p", prompt(60), work=Work.PREFILL, max_tokens=1, n=2))
    announced = [[publish.num_tokens for publish in world.start_step().publishes] for _ in range(3)]
    assert announced == [[16], [48], [60]]
    assert request.finished
    assert [len(output) for output in world.client(request).outputs] == [1, 1]
    assert world.blocks.stats().leased == 4
    world.end_lease("lease-p")
    assert world.blocks.stats().leased == 0
    world.run_until_idle()
    world.check_empty()


def test_a_prefix_hit_is_announced_with_the_first_chunk() -> None:
    world = World(max_num_batched_tokens=16)
    world.submit(message("a", prompt(64), max_tokens=1))
    world.run_until_idle()
    world.submit(message("p", prompt(80), work=Work.PREFILL))
    assert [publish.num_tokens for publish in world.start_step().publishes] == [80]
    world.run_until_idle()
    world.end_lease("lease-p")
    world.check_empty()


def test_a_preempted_prefill_is_retracted_before_its_blocks_go() -> None:
    world = World(num_blocks=9, max_num_batched_tokens=5, num_host_blocks=9)
    runner = world.submit(message("a", prompt(46), max_tokens=40))
    while not runner.is_parted:
        world.start_step()
    prefill = world.submit(message("p", prompt(78, 1), work=Work.PREFILL, priority=1))
    announced: list[tuple[int, int]] = []
    begun = []
    while not prefill.finished:
        batch = world.start_step()
        begun += [(publish.generation, publish.num_tokens, len(announced)) for publish in batch.begun]
        announced += [(publish.generation, publish.num_tokens) for publish in batch.publishes]
    num_void = sum(generation == 0 for generation, _ in announced)
    assert begun == [(0, 0, 0), (1, 0, num_void)], "told anew, before anything of the second attempt is readable"
    assert (1, 64) in announced  # after the preemption it starts over, with what the cache still has
    assert [seq.request for seq in world.preempted] == [prefill]
    assert world.published["lease-p"].generation == 1
    assert world.scheduler.counters["preemptions_swap_total"] == 0
    world.end_lease("lease-p")
    world.run_until_idle()
    world.check_empty()


def test_a_lease_that_ends_during_prefill_aborts_it() -> None:
    world = World(max_num_batched_tokens=16)
    request = world.submit(message("p", prompt(60), work=Work.PREFILL))
    world.start_step()
    world.end_lease("lease-p")
    assert request.finished
    assert world.client(request).reasons == [FinishReason.ABORT]
    world.run_until_idle()
    world.check_empty()


def test_ending_an_unknown_lease_or_load_is_harmless() -> None:
    world = World()
    assert world.scheduler.end_lease("unknown") is None
    world.scheduler.drain("unknown")
    world.check_empty()


# taking KV over


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 70])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_loaded_prompt_is_never_computed_here(length: int, n: int, tokens_first: bool) -> None:
    world = World()
    request = world.submit(message("d", prompt(length), work=Work.TAKE_OVER, max_tokens=5, n=n))
    load = world.reserve(request)
    assert load is not None
    if tokens_first:
        world.give_first_tokens(request)
        assert all(len(output) == 1 for output in world.client(request).outputs)
    world.start_step()
    world.finish_load(load)
    if not tokens_first:
        world.start_step()
        assert world.scheduler.num_running == 0
        world.give_first_tokens(request)
    world.run_until_idle()
    assert world.worker.num_tokens_computed == n * 4
    assert request.num_external_tokens == length
    world.check_empty()


def test_first_tokens_count_once_however_late_they_come_again() -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER, max_tokens=3))
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(request)
    assert world.scheduler.set_first_tokens(request, (SampledToken(1),)) is None
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize(("length", "num_cached"), [(64, 64), (70, 64), (40, 32)])
def test_what_the_cache_has_is_not_loaded(length: int, num_cached: int) -> None:
    world = World()
    world.submit(message("a", prompt(80), max_tokens=1))
    world.run_until_idle()
    request = world.submit(message("d", prompt(length), work=Work.TAKE_OVER, max_tokens=3))
    load = world.reserve(request)
    assert load is not None
    assert load.runs[0].first_block == num_cached // BLOCK_SIZE
    assert len(load.runs[0].block_ids) == (length > num_cached)
    world.give_first_tokens(request)
    world.start_step()
    world.finish_load(load)
    world.run_until_idle()
    assert (request.num_cached_tokens, request.num_external_tokens) == (num_cached, length - num_cached)
    world.check_empty()


# first tokens that are drawn again


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 70])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_redraw_computes_the_last_prompt_token_and_no_other(length: int, n: int, depth: int) -> None:
    world = World(depth=depth)
    request = world.submit(message("d", prompt(length), work=Work.TAKE_OVER, max_tokens=5, n=n))
    load = world.reserve(request, redraws=True)
    assert load is not None
    assert load.num_tokens == length
    world.give_first_tokens(request)
    world.start_step()
    assert world.client(request).outputs == [[]] * n, "nothing is shown before the KV is here"
    world.finish_load(load)
    [chunk] = world.start_step().chunks
    assert (chunk.start, chunk.num_tokens, chunk.num_samples) == (length - 1, 1, n)
    world.settle()
    assert all(len(output) == 1 for output in world.client(request).outputs)
    world.run_until_idle()
    assert world.worker.num_tokens_computed == 1 + n * 4
    assert (request.num_cached_tokens, request.num_external_tokens) == (0, length - 1)
    assert world.blocks.stats().cached >= length // BLOCK_SIZE
    world.check_empty()


@pytest.mark.parametrize("length", [32, 48, 64, 70])
@pytest.mark.parametrize("pinned_before", [True, False])
def test_a_redraw_writes_into_no_cached_block(length: int, pinned_before: bool) -> None:
    """The cache may hold all of the prompt: the block of the last token is read from P nevertheless."""
    world = World()
    world.submit(message("a", prompt(80), max_tokens=1))
    world.run_until_idle()
    request = world.submit(message("d", prompt(length), work=Work.TAKE_OVER, max_tokens=3, n=2))
    if pinned_before:
        assert world.scheduler.pin(request) == length // BLOCK_SIZE * BLOCK_SIZE
    load = world.reserve(request, redraws=True)
    assert load is not None
    assert load.runs[0].first_block == (length - 1) // BLOCK_SIZE
    assert len(load.runs[0].block_ids) == 1
    world.start_step()
    world.finish_load(load)
    world.run_until_idle()
    assert request.num_external_tokens == length - 1 - load.runs[0].first_block * BLOCK_SIZE
    world.check_empty()


def test_a_redraw_ends_a_request_of_one_token() -> None:
    world = World()
    request = world.submit(message("d", prompt(33), work=Work.TAKE_OVER, max_tokens=1, n=2))
    load = world.reserve(request, redraws=True)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.run_until_idle()
    assert world.client(request).reasons == [FinishReason.LENGTH] * 2
    world.check_empty()


@pytest.mark.parametrize("num_host_blocks", [0, 8])
@pytest.mark.parametrize("length", [33, 48])
def test_a_redraw_that_loses_its_blocks_draws_the_same(length: int, num_host_blocks: int) -> None:
    """Preempted before its step: swapped it keeps what was loaded, else the whole prompt is computed here."""
    world = World(num_blocks=6, num_host_blocks=num_host_blocks, max_num_seqs=1)
    runner = world.submit(message("a", prompt(30, 1), max_tokens=40))
    world.start_step()
    request = world.submit(message("d", prompt(length), work=Work.TAKE_OVER, max_tokens=3, priority=1))
    load = world.reserve(request, redraws=True)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    while not runner.finished:
        world.start_step()
        world.check()
    assert sum(world.scheduler.counters[f"preemptions_{how}_total"] for how in ("swap", "recompute")) == 1
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("first_redraws", [True, False])
def test_another_load_decides_anew_about_a_redraw(first_redraws: bool) -> None:
    world = World()
    request = world.submit(message("d", prompt(48), work=Work.TAKE_OVER, max_tokens=5))
    first = world.reserve(request, redraws=first_redraws)
    assert first is not None
    world.start_step()
    world.fail_load(first)
    second = world.reserve(request, redraws=not first_redraws)
    assert second is not None
    world.start_step()
    world.give_first_tokens(request)
    assert len(world.client(request).outputs[0]) == first_redraws
    world.drain(first)
    world.finish_load(second)
    world.run_until_idle()
    world.check_empty()


def test_known_first_tokens_are_never_drawn_again() -> None:
    world = World()
    request = world.submit(message("d", prompt(48), work=Work.TAKE_OVER, max_tokens=5))
    first = world.reserve(request)
    assert first is not None
    world.start_step()
    world.give_first_tokens(request)
    world.fail_load(first)
    second = world.reserve(request, redraws=True)
    assert second is not None
    world.start_step()
    world.drain(first)
    world.finish_load(second)
    world.run_until_idle()
    assert world.worker.num_tokens_computed == 4
    world.check_empty()


@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_redraw_falls_back_to_a_whole_prefill(n: int) -> None:
    world = World()
    request = world.submit(message("d", prompt(48), work=Work.TAKE_OVER, max_tokens=5, n=n))
    load = world.reserve(request, redraws=True)
    assert load is not None
    world.start_step()
    world.fail_load(load)
    world.scheduler.fall_back_to_local(request)
    world.run_until_idle()
    world.drain(load)
    assert world.worker.num_tokens_computed == 48 + n * 4
    world.check_empty()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_failed_load_falls_back_without_sampling_twice(known: bool, n: int) -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER, max_tokens=5, n=n))
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    if known:
        world.give_first_tokens(request)
    world.fail_load(load)
    assert world.blocks.stats().quarantined == 3
    world.scheduler.fall_back_to_local(request)
    world.run_until_idle()
    assert request.finished
    assert world.blocks.stats().in_use == 3
    world.drain(load)
    world.check_empty()


def test_a_failed_load_can_be_tried_again_elsewhere() -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER, max_tokens=5))
    first = world.reserve(request)
    assert first is not None
    world.start_step()
    world.give_first_tokens(request)
    world.fail_load(first)
    second = world.reserve(request)
    assert second is not None
    assert not set(second.runs[0].block_ids) & set(first.runs[0].block_ids)
    world.start_step()
    world.drain(first)
    assert world.scheduler.set_first_tokens(request, (SampledToken(1),)) is None  # the second P's are not news
    world.finish_load(second)
    world.run_until_idle()
    world.check_empty()


def test_a_load_that_never_started_leaves_the_batch() -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER))
    load = world.reserve(request)
    assert load is not None
    world.take(world.scheduler.abort(request))
    assert world.scheduler.schedule().loads == ()
    assert world.blocks.stats().quarantined == 3
    world.drain(load)
    world.check_empty()


def test_first_tokens_that_end_the_request_end_it_while_the_load_writes() -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER, max_tokens=1, n=2))
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    world.give_first_tokens(request)
    assert world.client(request).reasons == [FinishReason.LENGTH] * 2
    assert world.blocks.stats().quarantined == 3
    world.finish_load(load)  # it was too late to cancel
    world.check_empty()


def test_aborting_a_load_quarantines_until_it_has_drained() -> None:
    world = World(num_blocks=4)
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER))
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    world.take(world.scheduler.abort(request))
    other = world.submit(message("a", prompt(30, 1), max_tokens=2))
    world.start_step()
    assert not other.sequences[0].in_worker
    world.drain(load)
    world.run_until_idle()
    world.check_empty()


def test_loads_do_not_overtake_one_that_waits_for_memory() -> None:
    world = World(num_blocks=10)
    runner = world.submit(message("a", prompt(60), max_tokens=20))
    world.start_step()
    large = world.submit(message("large", prompt(120, 1), work=Work.TAKE_OVER, max_tokens=2))
    small = world.submit(message("small", prompt(10, 2), work=Work.TAKE_OVER, max_tokens=2))
    local = world.submit(message("local", prompt(10, 3), max_tokens=2))
    assert world.reserve(large) is None
    assert world.reserve(small) is None
    world.start_step()
    assert not local.sequences[0].in_worker
    while not runner.finished:
        world.start_step()
    load = world.reserve(large)
    assert load is not None
    world.scheduler.fall_back_to_local(small)
    world.start_step()
    world.give_first_tokens(large)
    world.finish_load(load)
    world.run_until_idle()
    world.check_empty()


def test_a_pin_gives_way_to_a_running_sequence_and_is_found_again() -> None:
    world = World(num_blocks=8)
    world.submit(message("a", prompt(64), max_tokens=1))
    world.run_until_idle()
    parked = world.submit(message("d", prompt(66), work=Work.TAKE_OVER, max_tokens=2))
    assert parked.table is not None
    assert len(parked.table.groups[0].ids) == 4
    world.submit(message("b", prompt(40, 1), max_tokens=40))
    world.run_until_idle()
    assert world.scheduler.counters["preemptions_recompute_total"] == 0
    load = world.reserve(parked)
    assert load is not None
    assert load.runs[0].first_block < 4
    world.give_first_tokens(parked)
    world.start_step()
    world.finish_load(load)
    world.run_until_idle()
    world.check_empty()


def test_loaded_prompts_wait_for_slots_holding_their_blocks() -> None:
    world = World(max_num_seqs=1)
    runner = world.submit(message("a", prompt(10), max_tokens=8))
    world.start_step()
    request = world.submit(message("d", prompt(40, 1), work=Work.TAKE_OVER, max_tokens=3, n=1))
    load = world.reserve(request)
    assert load is not None
    world.give_first_tokens(request)
    world.start_step()
    world.finish_load(load)
    assert world.scheduler.num_waiting == 1
    while not runner.finished:
        world.start_step()
    world.run_until_idle()
    assert world.worker.num_tokens_computed == 10 + 7 + 2
    world.check_empty()
