"""The life of a request, case by case. What may happen in any order is in test_scheduler_machine."""

from __future__ import annotations

import pytest

from pd_cluster.errors import InvalidRequest, Overloaded
from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.scheduling.sequence import SequenceStatus, sequence_seed
from tests.scheduling.simulation import BLOCK_SIZE, EOS, message, prompt
from tests.scheduling.world import World


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_runs_to_its_end(length: int, depth: int) -> None:
    world = World(depth=depth)
    request = world.submit(message("a", prompt(length), max_tokens=20))
    world.run_until_idle()
    assert len(world.client(request).outputs[0]) == 20
    assert world.worker.num_tokens_computed == length + 19
    world.check_empty()


def test_long_prompts_are_cut_and_decodes_go_first() -> None:
    world = World(max_num_batched_tokens=32)
    world.submit(message("short", prompt(5), max_tokens=10))
    world.start_step()
    world.submit(message("long", prompt(100, 1), max_tokens=2))
    for expected in (31, 31, 31, 7):
        batch = world.start_step()
        assert [chunk.num_tokens for chunk in batch.chunks] == [1, expected]
        assert batch.chunks[1].num_samples == (expected == 7)
    world.run_until_idle()
    world.check_empty()


def test_an_equal_prefix_is_computed_once() -> None:
    world = World()
    world.submit(message("a", prompt(50), max_tokens=1))
    world.run_until_idle()
    again = world.submit(message("b", prompt(50), max_tokens=1))
    world.run_until_idle()
    assert again.num_cached_tokens == 48
    assert world.worker.num_tokens_computed == 50 + 2
    world.check_empty()


def test_of_a_prompt_of_whole_blocks_one_block_is_computed_for_its_logits() -> None:
    world = World()
    for name in ("a", "b"):
        request = world.submit(message(name, prompt(2 * BLOCK_SIZE), max_tokens=2))
        world.run_until_idle()
    assert request.num_cached_tokens == BLOCK_SIZE
    world.check_empty()


def test_generated_blocks_are_cached_too() -> None:
    world = World()
    first = world.submit(message("a", prompt(10), max_tokens=40))
    world.run_until_idle()
    follow_up = prompt(10) + world.client(first).outputs[0] + [3, 4]
    second = world.submit(message("b", follow_up, max_tokens=2))
    world.run_until_idle()
    assert second.num_cached_tokens == 48
    world.check_empty()


def test_tenants_with_different_salts_share_nothing() -> None:
    world = World()
    for name, salt in (("a", "x"), ("b", "y"), ("c", "")):
        request = world.submit(message(name, prompt(50), max_tokens=1, salt=salt))
        world.run_until_idle()
        assert request.num_cached_tokens == 0
    world.check_empty()


def test_nothing_is_cached_before_the_step_that_computes_it_has_retired() -> None:
    world = World(depth=2, max_num_batched_tokens=16)
    world.submit(message("a", prompt(33), max_tokens=3))
    world.start_step()
    world.start_step()  # the first has retired, this one runs
    late = world.submit(message("b", prompt(40), max_tokens=3))
    world.start_step()
    assert late.num_cached_tokens == 16
    world.run_until_idle()
    world.check_empty()


def test_samples_share_the_prompt_and_copy_only_the_partial_block() -> None:
    world = World()
    world.submit(message("a", prompt(40), max_tokens=3, n=3))
    world.start_step()
    batch = world.start_step()
    assert len(batch.chunks) == 3
    assert len(batch.copies.copy_on_write) == 2  # the last holder writes in place
    assert world.blocks.stats().in_use == 2 + 3
    world.run_until_idle()
    world.check_empty()


def test_a_step_samples_no_more_first_tokens_than_sequences_may_run() -> None:
    world = World(max_num_seqs=4)
    world.submit(message("a", prompt(8), max_tokens=5, n=3))
    world.submit(message("b", prompt(8, 1), max_tokens=5, n=2))
    world.start_step()
    assert world.scheduler.num_running == 3
    assert world.scheduler.num_waiting == 1
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_one_of_several_samples_can_be_stopped_at_any_moment(index: int, steps: int) -> None:
    world = World(max_num_batched_tokens=16)
    request = world.submit(message("a", prompt(20), max_tokens=6, n=3))
    for _ in range(steps):
        world.start_step()
    update = world.scheduler.abort(request, index, FinishReason.ABORT)
    assert update is not None
    assert not update.finished
    world.take(update)
    assert world.scheduler.abort(request, index) is None
    world.run_until_idle()
    lengths = [len(output) for output in world.client(request).outputs]
    assert [length == 6 for length in lengths] == [other != index for other in range(3)]
    world.check_empty()


def test_an_eos_first_token_ends_a_request() -> None:
    world = World()
    seed = next(seed for seed in range(200) if _first_token(seed) == EOS)
    request = world.submit(message("a", prompt(20), seed=seed, ignore_eos=False, max_tokens=9))
    world.run_until_idle()
    assert world.client(request).outputs == [[EOS]]
    assert world.client(request).reasons == [FinishReason.STOP]
    world.check_empty()


def _first_token(seed: int) -> int:
    world = World()
    request = world.submit(message("probe", prompt(20), seed=seed, max_tokens=1))
    return world.first_tokens(request)[0].token_id


def test_a_stop_token_counts_only_from_min_tokens_on() -> None:
    world = World()
    request = world.request(message("a", prompt(4), max_tokens=9, min_tokens=3, stop_token_ids=(7,)))
    world.scheduler.add(request)
    seq = request.sequences[0]
    for token in (7, 7):
        seq.append(token)
        assert seq.finish_reason is None
    seq.append(7)
    assert (seq.finish_reason, seq.stop_token_id) == (FinishReason.STOP, 7)


# what can never be served


@pytest.mark.parametrize(
    ("length", "max_tokens", "n", "param"),
    [
        (0, 1, 1, "prompt"),
        (160, 1, 1, "prompt"),
        (100, 61, 1, "max_tokens"),
        (10, 1, 5, "n"),
        (100, 30, 1, "max_tokens"),
    ],
)
def test_what_can_never_be_served_is_refused(length: int, max_tokens: int, n: int, param: str) -> None:
    world = World(num_blocks=8)
    with pytest.raises(InvalidRequest) as caught:
        world.submit(message("a", prompt(length), max_tokens=max_tokens, n=n))
    assert caught.value.param == param


def test_a_prefill_leg_needs_room_for_its_prompt_only() -> None:
    world = World(num_blocks=8)
    world.submit(message("a", prompt(128), max_tokens=100, n=4, work=Work.PREFILL))
    world.run_until_idle()
    world.end_lease("lease-a")
    world.check_empty()


def test_first_tokens_of_prefill_legs_count_as_sequences() -> None:
    """Each is a row of logits: what a step may sample is bounded by max_num_seqs, whatever n the legs have."""
    world = World(num_blocks=64)
    limit = world.max_num_seqs
    with pytest.raises(InvalidRequest):
        world.submit(message("wide", prompt(8), n=limit + 1, work=Work.PREFILL))
    for index in range(4):
        world.submit(message(str(index), prompt(8, index), n=limit - 1, work=Work.PREFILL))
    num_sampled = []
    while world.scheduler.has_work:
        num_sampled.append(sum(chunk.num_samples for chunk in world.start_step().chunks))
    assert sum(num_sampled) == 4 * (limit - 1)
    assert max(num_sampled) <= limit
    for index in range(4):
        world.end_lease(f"lease-{index}")
    world.check_empty()


def test_a_full_queue_refuses() -> None:
    world = World(max_waiting=2)
    world.submit(message("a", prompt(4)))
    world.submit(message("b", prompt(4), work=Work.TAKE_OVER))
    with pytest.raises(Overloaded):
        world.submit(message("c", prompt(4)))
    with pytest.raises(Overloaded):
        world.submit(message("d", prompt(4), work=Work.TAKE_OVER))
    assert world.scheduler.num_waiting == 1
    assert world.scheduler.num_waiting_for_remote_kv == 1


# memory


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_the_last_in_precedence_is_preempted_and_comes_back(num_host_blocks: int, depth: int) -> None:
    """At depth 2 it is always touched by a running step when it is wanted: it is left out of one step first."""
    world = World(num_blocks=6, num_host_blocks=num_host_blocks, depth=depth)
    requests = [world.submit(message(name, prompt(30, index), max_tokens=40)) for index, name in enumerate("ab")]
    statuses = set()
    while not requests[0].finished:
        world.start_step()
        assert requests[0].sequences[0].status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED)
        statuses.add(requests[1].sequences[0].status)
    assert (SequenceStatus.SWAPPED if num_host_blocks else SequenceStatus.PREEMPTED) in statuses
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_worst_priority_is_preempted(depth: int) -> None:
    world = World(num_blocks=6, depth=depth)
    late = world.submit(message("a", prompt(30), max_tokens=40, priority=1))
    world.start_step()
    urgent = world.submit(message("b", prompt(30, 1), max_tokens=40, priority=0))
    while not urgent.finished:
        world.start_step()
        assert urgent.sequences[0].status in (SequenceStatus.RUNNING, SequenceStatus.FINISHED)
    assert not late.finished
    assert world.scheduler.counters["preemptions_recompute_total"] >= 1
    world.run_until_idle()
    world.check_empty()


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """What it freed may still be the source of a copy of this step."""
    world = World(num_blocks=8, num_host_blocks=8)
    world.submit(message("a", prompt(30), max_tokens=40))
    world.submit(message("victim", prompt(70, 1), max_tokens=40, priority=1))
    world.start_step()
    world.start_step()
    waiting = world.submit(message("b", prompt(20, 2), max_tokens=4))
    batch = world.start_step()
    while not batch.copies.swap_out:
        assert waiting.sequences[0].status is SequenceStatus.WAITING
        batch = world.start_step()
    assert batch.starts == ()
    assert waiting.sequences[0].seq_id in [start.seq_id for start in world.start_step().starts]
    world.run_until_idle()
    world.check_empty()


def test_a_lone_sequence_that_cannot_grow_yields_until_the_lease_ends() -> None:
    world = World(num_blocks=6)
    world.submit(message("p", prompt(64), work=Work.PREFILL))
    world.run_until_idle()
    request = world.submit(message("a", prompt(30, 1), max_tokens=20))
    for _ in range(12):
        world.start_step()
    assert request.sequences[0].status is SequenceStatus.PREEMPTED
    batch = world.scheduler.schedule()
    assert not batch.moves_worker
    assert not batch.loads
    world.end_lease("lease-p")
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("ends", ["abort", "one of two"])
def test_what_a_running_step_touches_is_given_back_when_it_has_retired(ends: str) -> None:
    """Another sequence, or a load from another node, would write blocks that the step still reads and writes."""
    world = World(depth=2, num_blocks=8, prefix_caching=False)
    request = world.submit(message("a", prompt(40), max_tokens=20, n=1 if ends == "abort" else 2))
    for _ in range(3):
        world.start_step()  # one is under way
    running = request.sequences[-1]
    assert running.num_in_flight == 1
    in_use = world.blocks.stats().in_use
    world.take(world.scheduler.abort(request, None if ends == "abort" else 1))
    assert running.finish_reason is FinishReason.ABORT
    assert world.blocks.stats().in_use == in_use, "given back under a step that runs"
    assert not world.scheduler.idle
    world.settle()
    assert world.blocks.stats().in_use < in_use
    world.run_until_idle()
    world.check_empty()


def test_a_swapped_sequence_can_be_aborted() -> None:
    world = World(num_blocks=6, num_host_blocks=6)
    world.submit(message("a", prompt(30), max_tokens=40))
    victim = world.submit(message("b", prompt(30, 1), max_tokens=40))
    while victim.sequences[0].status is not SequenceStatus.SWAPPED:
        world.start_step()
    world.take(world.scheduler.abort(victim))
    assert len(world.blocks.host.groups[0].free) == 6
    world.run_until_idle()
    world.check_empty()


@pytest.mark.long
def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    world = World(num_blocks=8, max_num_seqs=8)
    for index in range(3):
        world.submit(message(f"s{index}", prompt(20, index), max_tokens=12))
    world.start_step()
    large = world.submit(message("large", prompt(120), max_tokens=2))
    for index in range(3, 30):
        world.submit(message(f"s{index}", prompt(20, index), max_tokens=12))
        world.start_step()
    assert large.finished
    world.run_until_idle()
    world.check_empty()


# odds and ends


def test_sequence_seeds_differ_and_are_the_same_everywhere() -> None:
    seeds = {sequence_seed(seed, index) for seed in (-1, 0, 1, 2**70) for index in range(50)}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sequence_seed(42, 0) == 1866737719573629743


def test_the_timeline_of_a_local_request_sums_to_its_first_token() -> None:
    world = World(max_num_seqs=1)
    world.submit(message("a", prompt(10), max_tokens=4))
    request = world.submit(message("b", prompt(30, 1), max_tokens=4))
    world.run_until_idle()
    timeline = request.marks.timeline()
    assert (timeline.queue_s, timeline.prefill_s, timeline.transfer_s) == (4.0, 1.0, 0.0)


def test_the_timeline_of_a_loaded_request_names_each_wait() -> None:
    world = World()
    request = world.submit(message("d", prompt(40), work=Work.TAKE_OVER, max_tokens=4))
    world.now_s = 2.0
    load = world.reserve(request)
    assert load is not None
    world.give_first_tokens(request)
    world.now_s = 5.0
    world.finish_load(load)
    world.now_s = 6.0
    world.run_until_idle()
    timeline = request.marks.timeline()
    waits = (timeline.queue_s, timeline.transfer_s, timeline.admit_s, timeline.first_decode_s, timeline.prefill_s)
    assert waits == (2.0, 3.0, 1.0, 1.0, 0.0)
