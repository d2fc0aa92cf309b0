"""Beam searches: the policy beside its definition, and requests in a scheduler under every pressure."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import Work
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams
from pd_cluster.scheduling.beam import BeamSearch
from pd_connectors.protocol.messages import SampledToken, TopLogprob
from tests.scheduling.beam_reference import best_answers
from tests.scheduling.kv_groups import SETS
from tests.scheduling.simulation import EOS, candidates, history, logprobs, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STOPPING: tuple[bool | str, ...] = (False, True, "never")
PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)


def searched(
    sampling: SamplingParams, stop_ids: frozenset[int], row: Callable[[Sequence[int]], SampledToken]
) -> list[list[int]]:
    """The answers of the policy; `row`: the candidates after an output."""
    assert sampling.beams is not None
    search = BeamSearch(sampling.beams, sampling.max_tokens, stop_ids)
    outputs: list[list[int]] = [[]]
    while steps := search.advance([row(output) for output in outputs]):
        assert len(steps) == sampling.beams.width
        outputs = [[*outputs[step.parent], step.token_id] for step in steps]
    return [[token.token_id for token in one.beam.tokens] for one in search.finished[: sampling.n]]


@pytest.mark.long_cases
@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("length_penalty", PENALTIES)
def test_the_policy_is_its_definition(early_stopping: bool | str, length_penalty: float) -> None:
    rng = random.Random(f"{early_stopping}/{length_penalty}")
    for _ in range(20):
        width, stop_ids = rng.randint(1, 8), frozenset(rng.sample(range(23), rng.randint(0, 4)))
        beams = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        sampling = SamplingParams(max_tokens=rng.randint(1, 12), n=rng.randint(1, width), beams=beams)
        root = rng.getrandbits(32)

        def last(output: Sequence[int], root: int = root) -> int:
            return [root, *history(output, root)][-1]

        def row(output: Sequence[int], num_top: int = width + len(stop_ids)) -> SampledToken:
            best = candidates(last(output))
            return SampledToken(best.token_id, best.logprob, best.top[:num_top])

        expected = best_answers(sampling, stop_ids, lambda output: logprobs(last(output)))
        assert searched(sampling, stop_ids, row) == [tokens for tokens, _ in expected]


def test_answers_have_the_logprobs_that_were_asked_for() -> None:
    top = tuple(TopLogprob(token, -float(token + 1)) for token in range(4))
    search = BeamSearch(BeamParams(width=2), 1, frozenset(), num_logprobs=1)
    assert search.advance([SampledToken(0, -1.0, top)]) == []
    assert [one.beam.tokens for one in search.finished] == [
        (SampledToken(0, -1.0, top[:1]),),
        (SampledToken(1, -2.0, top[:1]),),
    ]


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_host_blocks", [0, 8])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_searches_end_with_the_best_answers_whatever_memory_and_slots_they_get(
    depth: int, num_host_blocks: int, prefix_caching: bool
) -> None:
    """Few blocks and few slots, beside other requests; some clients leave."""
    rng = random.Random(f"{depth}/{num_host_blocks}/{prefix_caching}")
    for _ in range(6):
        num_blocks = rng.choice([7, 9, 12, 40])
        world = World(
            kv=SETS[rng.choice(list(SETS))], num_blocks=num_blocks, num_host_blocks=num_host_blocks,
            prefix_caching=prefix_caching, depth=depth, max_num_seqs=rng.choice([4, 5, 8]),
        )  # fmt: skip
        requests = []
        for index in range(rng.randint(1, 5)):
            beams = None
            if index < 2 or rng.random() < 0.3:
                early_stopping = rng.choice(STOPPING)
                beams = BeamParams(
                    width=rng.randint(1, 4), early_stopping=early_stopping, length_penalty=rng.choice(PENALTIES)
                )
            n = rng.randint(1, 3 if beams is None else beams.width)
            asked = message(
                f"r{index}", prompt(rng.randint(1, 60), rng.randint(0, 1)), n=n, beams=beams, seed=index,
                max_tokens=rng.randint(1, 36), ignore_eos=rng.random() < 0.3,
            )  # fmt: skip
            requests.append(world.submit(asked))
            for _ in range(rng.randint(0, 5)):
                if world.scheduler.has_work:
                    world.start_step()
                    world.check()
        leaver = rng.choice(requests)
        if rng.random() < 0.3 and not leaver.finished:
            world.scheduler.abort(leaver)
            world.clients[leaver.request_id].terminal = True
        world.run_until_idle()
        world.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("kv", SETS)
def test_a_search_alone_ends_in_little_memory(kv: str) -> None:
    """A beam that lacks a block may free no slab if it yields: it shares its blocks with those that wait for it."""
    rng = random.Random(kv)
    for seed in range(4):
        width = rng.randint(2, 5)
        world = World(kv=SETS[kv], num_blocks=rng.randint(5, 9), num_host_blocks=rng.choice([0, 4]), max_num_seqs=width)
        beams, length = BeamParams(width=width), min(rng.randint(1, 40), world.blocks.num_tokens - 30)
        world.submit(message("r", prompt(length), n=width, beams=beams, max_tokens=30, seed=seed))
        world.run_until_idle(400)
        world.check_empty()


@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_search_goes_on_after_the_candidates_of_another_node(early_stopping: bool | str, tokens_first: bool) -> None:
    world = World()
    beams = BeamParams(width=4, early_stopping=early_stopping)
    asked = message("r", prompt(40), work=Work.TAKE_OVER, n=3, beams=beams, max_tokens=9, ignore_eos=False)
    request = world.submit(asked)
    load = world.reserve(request)
    assert load is not None
    if tokens_first:
        world.give_first_tokens(request)
        world.finish_load(load)
    else:
        world.finish_load(load)
        world.give_first_tokens(request)
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("knows_candidates", [True, False])
@pytest.mark.parametrize("ending", ["fails", "redrawn", "leaves"])
def test_a_load_that_does_not_give_the_first_tokens(ending: str, knows_candidates: bool) -> None:
    world = World(num_blocks=12)
    beams = BeamParams(width=4)
    asked = message("r", prompt(40), work=Work.TAKE_OVER, n=4, beams=beams, max_tokens=20, ignore_eos=False)
    request = world.submit(asked)
    load = world.reserve(request, redraws=ending == "redrawn")
    assert load is not None
    if knows_candidates:
        world.give_first_tokens(request)
    if ending == "redrawn":
        world.finish_load(load)
    elif ending == "fails":
        world.fail_load(load)
        world.drain(load)
        world.scheduler.fall_back_to_local(request)
    else:
        world.take(world.scheduler.abort(request))
        world.drain(load)
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_search_ends_with_any_of_its_beams(num_steps: int) -> None:
    """A round waits for a candidate of each beam: one that had left would hold it for ever.

    The client is told of the ends of those that it asked for.
    """
    world = World()
    request = world.submit(message("r", prompt(20), n=2, beams=BeamParams(width=3), max_tokens=30))
    for _ in range(num_steps):
        world.start_step()
    world.stop(request, 0)
    assert request.finished
    world.run_until_idle()
    world.check_empty()


def test_one_token_ends_a_search_while_its_load_is_under_way() -> None:
    world = World()
    asked = message("r", prompt(40), work=Work.TAKE_OVER, n=2, beams=BeamParams(width=2), max_tokens=1)
    request = world.submit(asked)
    load = world.reserve(request)
    assert load is not None
    world.give_first_tokens(request)
    assert request.finished
    world.drain(load)
    world.run_until_idle()
    world.check_empty()


def test_a_prefill_samples_one_token_with_the_candidates() -> None:
    world = World()
    request = world.submit(message("r", prompt(40), work=Work.PREFILL, n=1, beams=BeamParams(width=4)))
    assert len(request.sequences) == 1
    world.run_until_idle()
    assert request.finished
    world.end_lease("lease-r")
    world.check()


def test_no_step_is_planned_before_its_token_is_chosen() -> None:
    world = World(depth=2)
    request = world.submit(message("r", prompt(20), n=4, beams=BeamParams(width=4), max_tokens=6))
    for _ in range(12):
        world.start_step()
        assert all(seq.num_in_flight <= 1 for seq in request.sequences)
        if request.finished:
            break
    world.run_until_idle()
    world.check_empty()
    assert EOS not in world.clients["r"].outputs[0][:-1]


def test_a_read_of_several_beams_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="n must be 1"):
        World().submit(message("r", prompt(20), work=Work.READ, beams=BeamParams(width=3)))
