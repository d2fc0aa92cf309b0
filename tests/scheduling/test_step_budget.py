"""What prompts may take of steps beside streams with targets."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, STEP_MULTIPLE, PrefillBudget
from pd_cluster.scheduling.sequence import SequenceStatus
from pd_cluster.scheduling.step_budget import DEBT, PATIENCE, StepBudget
from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.scheduling.streamed_step import RECOVERY, SPREAD
from pd_cluster.scheduling.targets import AIM, Targets
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

NOW_S = 100.0
CONTEXT = 1000
TARGETS = Targets(ttft_s=0.2, tpot_s=0.010, itl_s=0.030)
MODEL = StepModel()


def stream(ahead_s: float, num_tokens: int = 20) -> Any:
    """A running sequence with its `num_tokens`-th token pending in the planned step, so far ahead of its target."""
    since_s = NOW_S + ahead_s - AIM * TARGETS.tpot_s * (num_tokens - 2)
    return SimpleNamespace(
        request=SimpleNamespace(marks=SimpleNamespace(stream_s=since_s, arrived_s=0.0)), num_remaining_tokens=1,
        priority=0, num_output_tokens=num_tokens - 1, num_pending=1, num_given_tokens=0, token_ids=range(CONTEXT),
        status=SequenceStatus.RUNNING,
    )  # fmt: skip


def waiting(num_tokens: int, age_s: float, priority: int = 0, scheduled_s: float | None = None) -> Any:
    marks = SimpleNamespace(stream_s=None, arrived_s=NOW_S - age_s, scheduled_s=scheduled_s)
    return SimpleNamespace(request=SimpleNamespace(marks=marks), num_remaining_tokens=num_tokens, priority=priority)


def share(
    ahead_s: list[float],
    prompts: tuple[Any, ...] = (),
    targets: Targets = TARGETS,
    busy_s: float = 0.0,
    num_free_slots: int = 1,
) -> PrefillBudget:
    queues = SimpleNamespace(
        running=[stream(one) for one in ahead_s], loaded=[], waiting=list(prompts), num_free_slots=num_free_slots
    )
    budget = StepBudget(targets, MODEL, lambda: NOW_S - busy_s, lambda: busy_s)
    return budget.beside(len(ahead_s), 0, 4096, cast("Any", queues))


def step_s(num_decodes: int, num_tokens: int) -> float:
    return MODEL.seconds(StepWork(num_decodes, num_decodes * CONTEXT, num_tokens))


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(
    ahead_s=st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=150),
    age_s=st.floats(0, 1),
    length=st.integers(2, 10_000),
    tpot_s=st.floats(0.004, 0.05),
)
def test_a_step_takes_no_more_than_the_stream_with_the_least_slack_may_wait(
    ahead_s: list[float], age_s: float, length: int, tpot_s: float
) -> None:
    targets = Targets(0.2, tpot_s, 3 * tpot_s)
    budget = share(ahead_s, (waiting(length, age_s),), targets)
    num_decodes = len(ahead_s)
    most = budget.take(0, 100_000)
    assert most >= LEAST_PROMPT_TOKENS, "a prompt would starve"
    least_s = min(ahead_s) + AIM * (tpot_s - TARGETS.tpot_s) * 18  # `stream` is ahead of TARGETS
    allowed_s = AIM * tpot_s + max(0.0, least_s + DEBT * AIM * tpot_s)
    if age_s > PATIENCE * targets.ttft_s:
        allowed_s = AIM * targets.itl_s  # it has waited long enough for streams
    assert most <= STEP_MULTIPLE + LEAST_PROMPT_TOKENS or step_s(num_decodes, most) <= allowed_s + 1e-9
    assert most <= STEP_MULTIPLE + LEAST_PROMPT_TOKENS or step_s(num_decodes, most) <= AIM * targets.itl_s + 1e-9


def taken(*ahead_s: float, prompts: tuple[Any, ...] = (), targets: Targets = TARGETS, busy_s: float = 0.0) -> int:
    return share(list(ahead_s), prompts, targets, busy_s).take(0, 100_000)


def test_slack_is_spread_unless_a_prompt_would_be_late() -> None:
    at_limit, ahead = taken(0.0), taken(0.05)
    assert step_s(1, at_limit) <= AIM * 0.010
    assert step_s(1, at_limit + 2 * STEP_MULTIPLE) > AIM * 0.010
    assert step_s(1, ahead) <= AIM * 0.010 + 0.05 / SPREAD
    assert at_limit < ahead
    assert taken(0.05, prompts=(waiting(300, 0.0),)) == ahead, "it will be in time"
    urgent = taken(0.05, prompts=(waiting(300, 0.19),))
    assert ahead < urgent
    assert step_s(1, urgent) <= AIM * 0.030 < step_s(1, urgent + 3 * STEP_MULTIPLE)
    late = (waiting(300, 0.19),)
    assert taken(0.0, prompts=late) > at_limit, "streams may be late by some tokens for a late prompt"
    owed_s = DEBT * AIM * 0.010 + 1e-6
    assert taken(-owed_s, prompts=late) == taken(-owed_s), "and by no more"
    assert taken(0.05, prompts=(waiting(300, 0.19),), targets=replace(TARGETS, ttft_s=float("inf"))) == ahead


def spread_evenly(ahead_s: list[float], prompts: tuple[Any, ...], targets: Targets) -> PrefillBudget:
    """What prompts get where small shares are no dearer than large ones."""
    num_decodes = len(ahead_s)
    alone_s, tpot_s = MODEL.decode_s(num_decodes, num_decodes * CONTEXT), AIM * targets.tpot_s
    least_s = min(ahead_s) + AIM * (targets.tpot_s - TARGETS.tpot_s) * 18

    def tokens(slack_s: float) -> tuple[int, float]:
        allowed_s = min(AIM * targets.itl_s, max(tpot_s + slack_s, RECOVERY * tpot_s))
        return MODEL.tokens_within(num_decodes, allowed_s - alone_s), allowed_s

    most, allowed_s = tokens(least_s / SPREAD)
    left_s = [0.95 * targets.ttft_s - (NOW_S - one.request.marks.arrived_s) for one in prompts]
    num_before = [sum(one.num_remaining_tokens for one in prompts[: end + 1]) for end in range(len(prompts))]
    is_late = any(num > most / allowed_s * left for num, left in zip(num_before, left_s, strict=True))
    owed_s = max(DEBT * tpot_s, (1 - AIM) * targets.tpot_s * 18)
    if least_s + owed_s > 0 and is_late:
        most = max(most, tokens(least_s + owed_s)[0])
    keys_per_token = max(1, round(MODEL.token_s_at(num_decodes + most) / MODEL.key_s))
    return PrefillBudget.beside(num_decodes, 4096, most, keys_per_token)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(
    ahead_s=st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=150),
    prompts=st.lists(st.tuples(st.integers(2, 6000), st.floats(0, 0.4)), max_size=4),
    tpot_s=st.floats(0.004, 0.05),
)
def test_a_dense_model_saves_no_slack(ahead_s: list[float], prompts: list[tuple[int, float]], tpot_s: float) -> None:
    queued, targets = tuple(waiting(*one) for one in prompts), Targets(0.2, tpot_s, 3 * tpot_s)
    assert share(ahead_s, queued, targets) == spread_evenly(ahead_s, queued, targets)


def mixture_s(work: StepWork) -> float:
    """The first 120 tokens of a prompt beside 8 decodes cost 42 us each, the others 10."""
    tokens_s = 10e-6 * work.num_tokens + 32e-6 * min(work.num_tokens, 120)
    return 4e-3 + 0.1e-3 * work.num_decodes + tokens_s


@cache
def mixture() -> StepModel:
    """Solved once, and not where tests are collected: 0.1 s."""
    return StepModel(
        [(work, mixture_s(work)) for num in (1, 8, 32) for work in [StepWork(num)]]
        + [(work, mixture_s(work)) for size in (64, 128, 256, 512, 1024) for work in [StepWork(8, 0, size - 8)]]
    )


class Node:
    """A node of 8 streams with a clock: `steps` are the tokens of prompts of each."""

    def __init__(self, targets: Targets, *prompts: Any) -> None:
        self.now_s, self.steps = NOW_S, list[int]()
        ahead_s = AIM * (targets.tpot_s - TARGETS.tpot_s) * 18  # `stream` is ahead of TARGETS
        self.streams = [stream(-ahead_s) for _ in range(8)]
        self.prompts = list(prompts)
        queues = SimpleNamespace(running=self.streams, loaded=[], waiting=self.prompts, num_free_slots=1)
        self.queues = cast("Any", queues)
        self.budget = StepBudget(targets, mixture(), lambda: self.now_s, lambda: 0.0)

    def step(self) -> None:
        share, num_tokens = self.budget.beside(8, 0, 2048, self.queues), 0
        while self.prompts and share.admits(0):
            first = self.prompts[0]
            taken = share.take(0, first.num_remaining_tokens)
            first.num_remaining_tokens -= taken
            num_tokens += taken
            if not first.num_remaining_tokens:
                self.prompts.pop(0)
        for one in self.streams:
            one.num_output_tokens += 1
        self.steps.append(num_tokens)
        self.now_s += mixture_s(StepWork(8, 0, num_tokens))

    @property
    def tpot_s(self) -> float:
        return (self.now_s - NOW_S) / len(self.steps)


def test_where_small_shares_are_dear_a_prompt_has_few_long_steps() -> None:
    """With its share of each step the prompt of 4,000 tokens would take 66 steps."""
    node = Node(replace(TARGETS, ttft_s=float("inf"), tpot_s=0.0075), waiting(4000, 0.0))
    while node.prompts:
        node.step()
    long = [num for num in node.steps if num]
    assert len(long) <= 4
    assert min(long[:-1]) > 1000
    assert len(node.steps) < 35
    assert node.tpot_s <= 0.0075


def test_a_late_prompt_does_not_wait_for_slack() -> None:
    for age_s, num_steps in ((0.0, 5), (0.18, 1)):
        node = Node(replace(TARGETS, tpot_s=0.0075), waiting(600, age_s))
        while node.prompts:
            node.step()
        assert (len(node.steps) == 1) == (num_steps == 1), node.steps
        assert len(node.steps) <= num_steps


@pytest.mark.parametrize("tpot_s", [0.003, 0.005])
def test_the_wait_for_slack_has_an_end(tpot_s: float) -> None:
    """Decodes alone miss the target, so no slack is ever there. The least of each step is given at once."""
    node = Node(Targets(tpot_s=tpot_s, itl_s=0.020), waiting(5000, 1.0))
    while node.prompts:
        node.step()
    most = max(node.steps)
    assert most > 10 * LEAST_PROMPT_TOKENS
    assert len(node.steps) <= 1.1 * 5000 / LEAST_PROMPT_TOKENS, "captured sizes are less than it might take"
    assert mixture_s(StepWork(8, 0, most)) <= 0.020


def patient_and_tired() -> tuple[Any, Any]:
    """Prompts that have waited a little less and a little more than PATIENCE targets."""
    patient, tired = (waiting(9000, PATIENCE * TARGETS.ttft_s + late_s) for late_s in (-0.001, 0.001))
    return patient, tired


def test_a_prompt_that_has_waited_for_several_targets_waits_no_longer() -> None:
    """Streams that are late already become slower, but no gap is longer than its target."""
    least, most = (taken(-5.0, prompts=(one,)) for one in patient_and_tired())
    assert step_s(1, least) <= AIM * TARGETS.tpot_s
    assert step_s(1, most) <= AIM * TARGETS.itl_s < step_s(1, most + 3 * STEP_MULTIPLE)


def test_nor_does_it_wait_for_slack_to_be_saved() -> None:
    patient, tired = patient_and_tired()
    for one in (patient, tired):
        node = Node(replace(TARGETS, tpot_s=0.005), waiting(100, 0.0), one)
        node.step()
        num_tokens = node.steps[0]
        assert (num_tokens > 1000) == (one is tired), "whatever its place among the next ones"
        assert mixture_s(StepWork(8, 0, num_tokens)) <= AIM * TARGETS.itl_s


def test_waits_for_something_else_are_none_for_streams() -> None:
    """For a slot, for better priorities; and a sequence without a prompt's token to compute waits for none."""
    age_s = 2 * PATIENCE * TARGETS.ttft_s
    least, most = taken(-5.0), taken(-5.0, prompts=(waiting(9000, age_s),))
    assert most > 2 * least
    for one in (
        waiting(9000, age_s, scheduled_s=NOW_S - 0.1),
        waiting(9000, age_s, priority=2),
        waiting(1, age_s),
    ):
        assert taken(-5.0, prompts=(one,)) == least
    assert taken(-5.0, prompts=(waiting(9000, age_s, scheduled_s=NOW_S - age_s),)) == most
    assert share([-5.0], (waiting(9000, age_s),), num_free_slots=0).take(0, 100_000) == least


def test_a_share_that_is_left_over_says_that_prompts_wait_for_something_else() -> None:
    """For memory, say. An overload begins when no share has sufficed for PATIENCE targets since."""
    now_s, late = NOW_S, stream(-5.0)
    queues = SimpleNamespace(running=[late], loaded=[], waiting=[waiting(10**6, 10.0)], num_free_slots=1)
    budget = StepBudget(TARGETS, MODEL, lambda: now_s, lambda: 0.0)
    budget.beside(1, 0, 4096, cast("Any", queues))  # none of it is taken
    while now_s < NOW_S + PATIENCE * TARGETS.ttft_s:
        num_tokens = budget.beside(1, 0, 4096, cast("Any", queues)).take(0, 100_000)
        assert step_s(1, num_tokens) <= AIM * TARGETS.tpot_s
        now_s += 0.01
    assert budget.beside(1, 0, 4096, cast("Any", queues)).take(0, 100_000) > 2 * num_tokens


def test_slack_is_saved_for_no_more_tokens_than_wait() -> None:
    short, long = (Node(replace(TARGETS, tpot_s=0.0075), waiting(num, 0.0)) for num in (200, 2000))
    for node in (short, long):
        while not node.steps or not node.steps[-1]:
            node.step()
    assert short.steps[-1] == 200
    assert 1 < len(short.steps) < len(long.steps)


def test_a_step_without_decodes_does_not_wait() -> None:
    """Sequences that are loaded may find no room: without a prompt's token the step would be empty."""
    node = Node(replace(TARGETS, tpot_s=0.0075), waiting(2000, 0.0))
    assert not node.budget.beside(8, 0, 2048, node.queues).admits(0)
    node.queues.running, node.queues.loaded = [], node.streams
    assert node.budget.beside(8, 8, 2048, node.queues).admits(0)


def test_the_lasting_share_is_that_of_slack_saved_and_changes_nothing() -> None:
    node = Node(replace(TARGETS, ttft_s=float("inf"), tpot_s=0.0075), waiting(100_000, 0.0))
    told = [node.budget.lasting(8, 2048, node.queues) for _ in range(100)]
    assert len(set(told)) == 1, "it is asked for many times a step"
    assert not node.budget.beside(8, 0, 2048, node.queues).admits(0)
    for _ in range(300):
        node.step()
    assert told[0] == pytest.approx(sum(node.steps) / len(node.steps), rel=0.5)


def test_the_stream_with_the_least_slack_decides() -> None:
    assert taken(0.05, 0.0, 0.05) == taken(0.0, 0.0, 0.0) < taken(0.05, 0.05, 0.05)


def test_a_late_stream_catches_up_while_prompts_go_on() -> None:
    late, very_late = taken(-0.02), taken(-5.0)
    assert taken(0.0) > late >= very_late >= STEP_MULTIPLE
    assert RECOVERY * AIM * 0.010 * 0.9 < step_s(1, very_late) <= RECOVERY * AIM * 0.010


def test_prompts_get_the_least_where_decodes_alone_miss_the_target() -> None:
    budget = share([0.0] * 200)
    assert step_s(200, 0) > TARGETS.tpot_s
    assert LEAST_PROMPT_TOKENS <= budget.take(0, 100_000) < STEP_MULTIPLE + LEAST_PROMPT_TOKENS


def test_steps_under_way_count() -> None:
    """The planned step begins later than now, and slack is what is left then."""
    assert taken(0.05, busy_s=0.005) == taken(0.05)  # `stream` is ahead by then


def test_tokens_far_into_their_prompt_are_fewer() -> None:
    near, far = share([0.0]).take(0, 100_000), share([0.0]).take(8000, 100_000)
    assert STEP_MULTIPLE <= far < near


def test_a_target_of_gaps_alone_bounds_each_step() -> None:
    targets = Targets(itl_s=0.020)
    for ahead_s in (-1.0, 0.0, 1.0):
        num_tokens = taken(ahead_s, targets=targets)
        assert step_s(1, num_tokens) <= AIM * 0.020 < step_s(1, num_tokens + 3 * STEP_MULTIPLE)


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_and_streams_all_end(depth: int) -> None:
    """A world's step takes a second. With a target of 0.1 s each is late, with one of 5 s none."""
    for tpot_s in (0.1, 5.0):
        world = World(num_blocks=400, max_num_seqs=20, max_num_batched_tokens=256, depth=depth, tpot_s=tpot_s)
        for index in range(30):
            world.submit(message(f"r{index}", prompt(20 + 4 * index, index), max_tokens=10))
            world.start_step()
        world.run_until_idle()
        world.check_empty()


def test_without_a_target_prompts_have_the_whole_step() -> None:
    assert share([0.0] * 7, targets=Targets(ttft_s=0.2)) == PrefillBudget.whole(4096 - 7)
    budget = StepBudget(Targets(), MODEL, lambda: NOW_S, lambda: 0.0)
    assert budget.lasting(7, 4096, cast("Any", SimpleNamespace())) == 0


def test_the_share_is_told_without_a_prompt_that_asks_for_it() -> None:
    """A router asks before it sends a prompt. The share of the last prompt's step may be old."""
    world = World(max_num_batched_tokens=256, tpot_s=5.0)
    assert world.scheduler.step_tokens == 0, "no decode limits a prompt"
    world.submit(message("a", prompt(20), max_tokens=8))
    shares = []
    while not world.scheduler.idle:
        world.start_step()
        world.settle()
        shares.append(world.scheduler.step_tokens)
    assert 0 < shares[1] < 256
    assert shares[1] <= shares[5], "the stream has gained slack"
    assert shares[-1] == 0
