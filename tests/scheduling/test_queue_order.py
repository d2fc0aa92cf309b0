"""The order of prompts that wait: shortest first, and none starves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling import batch_builder
from pd_cluster.scheduling.passed_prompts import MOST_PASSES, PassedPrompts
from pd_cluster.scheduling.queue_order import AGEING
from pd_cluster.scheduling.step_model import StepModel, StepWork
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from pd_cluster.scheduling.sequence import Request

TOKEN_S = 0.1  # of a prompt here; a step of the world takes a second


MODEL = StepModel([(StepWork(num_tokens=num), TOKEN_S * num) for num in (100, 200, 400, 2048)])


def world(**settings: Any) -> World:
    return World(model=MODEL, shortest_first=True, **{"max_num_seqs": 1, "num_blocks": 64, **settings})


def begun(world: World) -> list[str]:
    """Names of the requests in the order in which their prompts began. Runs the world until it is idle."""
    requests = {seq_id: seq.request.request_id for seq_id, seq in world.scheduler._queues.sequences.items()}
    names: list[str] = []
    while world.scheduler.has_work:
        names += [requests[start.seq_id] for start in world.start_step().starts]
    return names


def test_the_shortest_is_first_and_priority_before_that() -> None:
    one = world()
    for name, length, priority in (("long", 150, 0), ("short", 10, 0), ("middle", 60, 0), ("last", 5, 1)):
        one.submit(message(name, prompt(length), max_tokens=1, priority=priority))
    assert begun(one) == ["short", "middle", "long", "last"]
    one.check_empty()


def test_first_in_first_out_is_the_order_of_arrival() -> None:
    one = World(max_num_seqs=1, num_blocks=64)
    for name, length in (("long", 150), ("short", 10), ("middle", 60)):
        one.submit(message(name, prompt(length), max_tokens=1))
    assert begun(one) == ["long", "short", "middle"]


def test_cached_tokens_are_no_work() -> None:
    one = world(num_blocks=128)
    one.submit(message("before", prompt(140, 3), max_tokens=1))
    assert begun(one) == ["before"]
    one.submit(message("new", prompt(60, 4), max_tokens=1))
    one.submit(message("cached", [*prompt(140, 3), 5], max_tokens=1))
    assert begun(one) == ["cached", "new"]


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 158)), min_size=2, max_size=12))
def test_a_prompt_is_passed_only_by_shorter_ones_and_only_for_as_long_as_it_takes(
    arrivals: list[tuple[float, int]],
) -> None:
    """`arrivals`: (seconds, tokens), in any order."""
    one = world(num_blocks=300)
    requests = []
    for index, (at_s, length) in enumerate(sorted(arrivals)):
        one.now_s = at_s
        requests.append((at_s, one.submit(message(f"r{index}", prompt(length, index), max_tokens=1))))
    precedences = {request.request_id: request.precedence for _, request in requests}
    names = begun(one)
    assert names == sorted(names, key=precedences.__getitem__)
    for index, (at_s, request) in enumerate(requests):
        seconds = MODEL.prefill_s(len(request.prompt_token_ids))
        for later_s, later in requests[index + 1 :]:
            if names.index(later.request_id) < names.index(request.request_id):
                assert len(later.prompt_token_ids) < len(request.prompt_token_ids)
                assert later_s - at_s <= seconds / AGEING + 1e-5


@pytest.mark.parametrize("group", ["", "crowd"])
def test_a_long_prompt_is_not_passed_for_ever(group: str) -> None:
    """A short one arrives in each step, of one HTTP request or of many."""
    one = world(num_blocks=300, max_waiting=500)
    one.submit(message("busy", prompt(10), max_tokens=2))
    one.start_step()
    long = one.submit(message("long", prompt(150, 7), max_tokens=1))
    steps = 0
    while long.sequences[0].table is None and not long.finished:
        one.submit(message(f"short{steps}", prompt(3, steps), max_tokens=1, group=group))
        one.start_step()
        steps += 1
        assert steps < 3 * MODEL.prefill_s(150) / AGEING
    one.run_until_idle()
    one.check_empty()


def test_what_is_handed_over_waits_for_nothing_to_be_computed() -> None:
    one = world()
    parked = one.submit(message("from afar", prompt(150), work=Work.TAKE_OVER, max_tokens=2))
    local = one.submit(message("local", prompt(20), max_tokens=2))
    assert parked.turn == parked.since <= local.since < local.turn


def test_the_cost_of_a_place_is_one_look_at_the_cache() -> None:
    """Of a prompt that is not cached, one block is hashed. The prompt's admission needs that hash anyway."""
    one = world()
    request = one.submit(message("r", prompt(150), max_tokens=1))
    hashes = request.sequences[0].block_hashes[:]
    assert len(hashes) == 1
    begun(one)
    assert request.sequences[0].block_hashes[: len(hashes)] == hashes


@pytest.mark.parametrize("depth", [1, 2])
def test_a_better_priority_passes_a_prompt_that_runs(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And shares its steps with little of it."""
    monkeypatch.setattr(batch_builder, "FILL", 24)
    one = World(max_num_seqs=3, num_blocks=64, max_num_batched_tokens=40, depth=depth)
    slow = one.submit(message("slow", prompt(150), max_tokens=1, priority=1))
    names = {slow.sequences[0].seq_id: "slow"}

    def sizes() -> dict[str, int]:
        """Tokens of each request's chunk in the next step."""
        return {names[chunk.seq_id]: chunk.num_tokens for chunk in one.start_step().chunks}

    assert sizes() == {"slow": 40}
    quick = one.submit(message("quick", prompt(34, 1), max_tokens=1))
    names[quick.sequences[0].seq_id] = "quick"
    assert sizes() == {"quick": 34}
    short = one.submit(message("short", prompt(10, 2), max_tokens=1, priority=-1))
    names[short.sequences[0].seq_id] = "short"
    assert sizes() == {"short": 10, "slow": 14}
    assert sizes() == {"slow": 40}, "alone it has the whole step"
    one.run_until_idle()
    assert all(request.finished for request in (slow, quick, short))
    one.check_empty()


def steps_of_passed(
    world: World, passed: list[Request], name: str = "better", priority: int = 0
) -> tuple[list[str], int, int]:
    """A better prompt arrives before each step, and fills it, until these are finished.

    -> (names in the order in which they finished, steps, steps that began with one of these)
    """
    names = {seq.seq_id for request in passed for seq in request.sequences}
    done: list[str] = []
    num_steps = num_turns = 0
    while len(done) < len(passed):
        world.submit(message(f"{name}{num_steps}", prompt(39, num_steps + 5), max_tokens=1, priority=priority))
        chunks = world.start_step().chunks
        num_steps += 1
        num_turns += bool(chunks) and chunks[0].seq_id in names
        done += [one.request_id for one in passed if one.finished and one.request_id not in done]
        assert num_steps < 1000, f"starved: {[one.request_id for one in passed if not one.finished]}"
    return done, num_steps, num_turns


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_runs_is_not_passed_for_ever(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV is half read elsewhere. Better ones get 15 of 16 steps."""
    monkeypatch.setattr(batch_builder, "FILL", 0)
    one = World(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=40, depth=depth, max_waiting=500)
    slow = one.submit(message("slow", prompt(150), work=Work.PREFILL, max_tokens=1, priority=1))
    one.start_step()
    _, num_steps, num_turns = steps_of_passed(one, [slow])
    assert num_turns == 3, "each of a whole step"
    assert num_steps <= (MOST_PASSES + 1) * num_turns + depth
    one.run_until_idle()
    one.end_lease("lease-slow")
    one.check_empty()


def test_a_step_without_prompts_does_not_take_a_turn_away() -> None:
    """It has no room beside its decodes, or preempts: the prompt was passed before it, and will be after it."""
    world = World()
    passed = world.submit(message("a", prompt(100), priority=1)).sequences
    passes = PassedPrompts()
    for _ in range(MOST_PASSES):
        assert passes.of_turn(passed, best_waiting=0) is None
        passes.note(passed, 0, is_turn=False)
        passes.note([], math.inf, is_turn=False)
    assert passes.of_turn(passed, best_waiting=0) is passed[0]
    passes.note(passed, 1, is_turn=True)
    assert passes.of_turn(passed, best_waiting=0) is None


def test_of_passed_prompts_the_first_to_arrive_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its priority: all of them hold memory, and equal parts of the turns would make all of them late."""
    monkeypatch.setattr(batch_builder, "FILL", 0)
    one = World(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=40, max_waiting=500)
    passed = []
    for index, priority in enumerate((3, 2, 1)):
        passed.append(one.submit(message(f"p{priority}", prompt(110, index), max_tokens=1, priority=priority)))
        one.start_step()
    done, num_steps, num_turns = steps_of_passed(one, passed)
    assert done == ["p3", "p2", "p1"]
    assert num_turns == 6, "the last step of each has room for a better one, too"
    num_passed = 2  # before: the steps in which p2 and p1 began
    assert num_passed + num_steps == (MOST_PASSES + 1) * num_turns, "three that are passed get no more turns than one"
    one.run_until_idle()
    one.check_empty()


@pytest.mark.long
def test_a_prompt_that_waits_is_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds nothing."""
    monkeypatch.setattr(batch_builder, "FILL", 0)
    one = World(max_num_seqs=4, num_blocks=64, max_num_batched_tokens=40, max_waiting=500)
    one.submit(message("better", prompt(39, 1), max_tokens=1))
    waits = one.submit(message("waits", prompt(150), max_tokens=1, priority=1))
    with pytest.raises(AssertionError, match="starved"):
        steps_of_passed(one, [waits], "again")
