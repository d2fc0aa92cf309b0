"""Several tokens of one step, and answers that go on after output tokens from another engine."""

from __future__ import annotations

import msgspec
import pytest

from pd_cluster.errors import InvalidRequest, Overloaded
from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.scheduling.batch import StepResult
from pd_cluster.scheduling.sequence import sequence_seed
from pd_connectors.protocol.messages import SampledToken
from tests.scheduling.kv_groups import FULL_FAR_STATE, FULL_HALF_STATE, ONE_FULL, GroupSet
from tests.scheduling.simulation import BLOCK_SIZE, EOS, begun, message, prompt
from tests.scheduling.world import World


@pytest.mark.long_cases
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("num_known", [1, 5, BLOCK_SIZE + 1])
def test_an_answer_goes_on_after_its_known_tokens(n: int, num_known: int) -> None:
    """The client's check is that known tokens and new ones together are the whole answer."""
    world = World(num_blocks=64)
    request = world.submit(begun(message("a", prompt(3 * BLOCK_SIZE), max_tokens=40, n=n), num_known))
    assert world.scheduler.num_waiting == n
    world.run_until_idle()
    whole = 3 * BLOCK_SIZE + num_known // BLOCK_SIZE * BLOCK_SIZE
    # of n sequences one computes the prompt, which the others find cached; all compute their own tokens but the last
    shared = (n - 1) * 3 * BLOCK_SIZE
    assert world.worker.num_tokens_computed == n * (3 * BLOCK_SIZE + 39) - shared
    assert world.scheduler.counters["prefix_cache_queried_tokens_total"] == 3 * BLOCK_SIZE
    again = world.submit(begun(message("b", prompt(3 * BLOCK_SIZE), max_tokens=40, n=n), num_known))
    world.start_step()
    assert again.sequences[0].num_computed_tokens > whole - BLOCK_SIZE, "known tokens are cached as prompts are"
    world.run_until_idle()
    assert request.finished
    world.check_empty()


@pytest.mark.long_cases
@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 37])
@pytest.mark.parametrize("num_known", [1, 5, BLOCK_SIZE, 2 * BLOCK_SIZE + 3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kv", [ONE_FULL, FULL_FAR_STATE])
def test_the_kv_of_known_tokens_may_come_from_another_node(
    length: int, num_known: int, depth: int, kv: GroupSet
) -> None:
    """Only the last known token is computed, on the state before it: its logits give the next one."""
    world = World(depth=depth, kv=kv)
    asked = begun(message("a", prompt(length), work=Work.TAKE_OVER, max_tokens=num_known + 4), num_known)
    request = world.submit(asked)
    load = world.reserve(request)
    assert load is not None
    assert load.num_tokens == length + num_known - 1
    world.finish_load(load)
    world.give_first_tokens(request)  # a P that sends some is not heard
    [chunk] = world.start_step().chunks
    assert (chunk.start, chunk.num_tokens) == (length + num_known - 1, 1)
    world.run_until_idle()
    assert world.worker.num_tokens_computed == 4
    assert request.num_external_tokens == length + num_known - 1
    world.check_empty()


@pytest.mark.parametrize("num_cached", [BLOCK_SIZE, 3 * BLOCK_SIZE])
def test_a_cached_prefix_may_reach_into_the_known_tokens(num_cached: int) -> None:
    """It is not loaded. The usage counts tokens of the prompt only."""
    world = World(num_blocks=64)
    asked = begun(message("a", prompt(BLOCK_SIZE + 8), work=Work.TAKE_OVER, max_tokens=50), 40)
    whole = [*asked.prompt_token_ids, *asked.known[0]]
    world.submit(message("before", whole[:num_cached] + prompt(5, 2), max_tokens=1))
    world.run_until_idle()
    request = world.submit(asked)
    load = world.reserve(request)
    assert load is not None
    assert load.runs[0].first_block == num_cached // BLOCK_SIZE
    world.finish_load(load)
    world.run_until_idle()
    assert request.num_cached_tokens == min(num_cached, BLOCK_SIZE + 8)
    assert request.num_external_tokens == len(whole) - 1 - num_cached
    world.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize("grammar", ["", "g"])
def test_a_state_that_was_loaded_may_be_lost_before_its_first_step(num_host_blocks: int, grammar: str) -> None:
    """Swapped the stream keeps what was loaded, else its prompt and known tokens are computed here."""
    world = World(kv=FULL_HALF_STATE, num_blocks=4, num_host_blocks=num_host_blocks, max_num_seqs=1)
    runner = world.submit(message("a", prompt(30, 1), max_tokens=90))
    world.start_step()
    asked = message(
        "d", prompt(20), work=Work.TAKE_OVER, max_tokens=40, grammar=grammar, ignore_eos=not grammar, priority=1
    )
    request = world.submit(begun(asked, 9))
    load = world.reserve(request)
    assert load is not None
    assert load.num_tokens == 28
    world.start_step()
    world.finish_load(load)
    while not runner.finished:
        world.start_step()
        world.check()
    assert world.scheduler.counters[f"preemptions_{'swap' if num_host_blocks else 'recompute'}_total"] == 1
    num_computed = world.worker.num_tokens_computed
    world.run_until_idle()
    num_drawn = len(request.sequences[0].token_ids) - 29
    assert world.worker.num_tokens_computed - num_computed == num_drawn + (0 if num_host_blocks else 28)
    world.check_empty()


def test_known_tokens_without_kv_from_elsewhere_are_computed_here() -> None:
    world = World()
    request = world.submit(begun(message("a", prompt(40), work=Work.TAKE_OVER, max_tokens=12), 6))
    load = world.reserve(request)
    assert load is not None
    world.fail_load(load)
    world.scheduler.fall_back_to_local(request)
    world.run_until_idle()
    assert world.worker.num_tokens_computed == 40 + 11
    world.drain(load)
    world.check_empty()


def test_sequences_may_know_different_numbers_of_tokens() -> None:
    world = World()
    asked = begun(message("a", prompt(20), max_tokens=12, n=2), 5)
    world.submit(msgspec.structs.replace(asked, known=(asked.known[0], ())))
    world.run_until_idle()
    world.check_empty()


def test_an_answer_that_knows_its_tokens_may_be_preempted() -> None:
    world = World(num_blocks=6, prefix_caching=False)
    for index in range(3):
        world.submit(begun(message(f"r{index}", prompt(20, index), max_tokens=30), 7))
    world.run_until_idle()
    assert world.scheduler.counters["preemptions_recompute_total"] > 0
    world.check_empty()


@pytest.mark.parametrize(
    ("known", "work", "what"),
    [
        (((1,),), Work.GENERATE, "known has tokens of 1 sequences; n is 2"),
        (((1,), (1, 2, 3, 4)), Work.GENERATE, "4 known tokens leave nothing to generate: max_tokens is 4"),
        (((1, 2), (1, EOS)), Work.GENERATE, "the known tokens of sequence 1 have ended it"),
        (((1,), (2,)), Work.PREFILL, "known tokens are not for prefill requests"),
        (((1,), (2,)), Work.TAKE_OVER, "is taken over for one sequence with known tokens"),
    ],
)
def test_known_tokens_that_no_answer_can_follow_are_refused(
    known: tuple[tuple[int, ...], ...], work: Work, what: str
) -> None:
    world = World()
    with pytest.raises(InvalidRequest, match=what) as caught:
        world.submit(message("a", prompt(20), max_tokens=4, n=2, work=work, known=known, ignore_eos=False))
    assert caught.value.param == "known"
    world.check_empty()


def test_known_tokens_with_a_grammar_have_ended_before_min_tokens() -> None:
    """The grammar may allow nothing but the end, so `min_tokens` does not keep a sequence from it."""
    world = World()
    asked = message("a", prompt(20), max_tokens=9, known=((1, EOS),), ignore_eos=False, min_tokens=5)
    sampling = msgspec.structs.replace(asked.sampling, grammar="start: X")
    with pytest.raises(InvalidRequest, match="have ended it"):
        world.submit(msgspec.structs.replace(asked, sampling=sampling))
    world.check_empty()


def test_steps_may_sample_several_tokens_of_a_sequence() -> None:
    world = World(longest_run=4, num_blocks=64)
    requests = [world.submit(message(f"r{index}", prompt(20, index), max_tokens=60)) for index in range(3)]
    for _ in range(45):
        world.start_step()
        for seq in (request.sequences[0] for request in requests if not request.finished):
            assert seq.num_computed_tokens == len(seq.token_ids) - 1, "all but the last are computed"
            assert seq.table is not None
            assert len(seq.table.groups[0].path) == seq.num_computed_tokens // BLOCK_SIZE, (
                "whole blocks are cached at once"
            )
    assert all(request.finished for request in requests)
    world.check_empty()


def test_what_a_step_samples_after_the_end_is_dropped() -> None:
    """The worker runs on as far as its blocks reach; a sequence ends within a run, by its limit or by EOS."""
    world = World(longest_run=50, num_blocks=64)
    for index in range(12):
        world.submit(message(f"r{index}", prompt(17, index), max_tokens=3 + index, ignore_eos=False))
    world.run_until_idle()
    reasons = {client.reasons[0] for client in world.clients.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    world.check_empty()


def test_no_step_may_be_planned_after_one_that_samples_several_tokens() -> None:
    """It would start at a wrong position: a planner that lets steps sample more must not plan ahead of them."""
    world = World()
    request = world.submit(message("a", prompt(20), max_tokens=40))
    first, _ = world.scheduler.schedule(), world.scheduler.schedule()
    run = (SampledToken(1), SampledToken(2))
    with pytest.raises(AssertionError, match="planned after one that sampled several tokens"):
        world.scheduler.update(first, StepResult(first.step, {request.sequences[0].seq_id: run}))


@pytest.mark.parametrize("known", [(), ((1,), ())])
def test_the_seeds_of_sequences_follow_from_their_numbers_in_the_whole_answer(
    known: tuple[tuple[int, ...], ...],
) -> None:
    """Those of which nothing is known are drawn by the first of them, until they part."""
    world = World()
    asked = msgspec.structs.replace(message("a", prompt(20), max_tokens=9, n=2, known=known), sequence_numbers=(1, 3))
    seeds = [sequence_seed(7, 1), sequence_seed(7, 3)]
    request = world.submit(msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, seed=7)))
    assert [seq.seed for seq in request.sequences] == seeds
    starts = world.scheduler.schedule().starts
    drawn = [seed for start in starts for seed in start.num_sample_seeds or (start.seed,)]
    assert drawn == seeds[: len(drawn)]
    assert len(drawn) == 2 or known


def test_a_full_queue_takes_streams_that_were_cut() -> None:
    world = World(max_waiting=2)
    for index in range(2):
        world.submit(message(f"r{index}", prompt(20, index), max_tokens=5))
    with pytest.raises(Overloaded):
        world.submit(message("new", prompt(20, 3), max_tokens=5))
    for index in range(2):
        world.submit(begun(message(f"cut{index}", prompt(20, 4 + index), max_tokens=5), 2))
    with pytest.raises(Overloaded):
        world.submit(begun(message("cut", prompt(20, 6), max_tokens=5), 2))
    world.run_until_idle()
    world.check_empty()
