"""What prompts may take of steps beside streams with targets."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.config import NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.errors import StartupError
from pd_cluster.scheduling.prefill_budget import LEAST_PROMPT_TOKENS, STEP_MULTIPLE, PrefillBudget
from pd_cluster.scheduling.sequence import SequenceStatus
from pd_cluster.scheduling.step_budget import AIM, DEBT, RECOVERY, SPREAD, FixedBudget, SlackBudget, Targets
from pd_cluster.scheduling.step_model import StepModel, StepWork
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
        num_output_tokens=num_tokens - 1, num_pending=1, num_given_tokens=0, token_ids=range(CONTEXT),
        status=SequenceStatus.RUNNING,
    )  # fmt: skip


def waiting(num_tokens: int, age_s: float) -> Any:
    marks = SimpleNamespace(stream_s=None, arrived_s=NOW_S - age_s)
    return SimpleNamespace(request=SimpleNamespace(marks=marks), num_remaining_tokens=num_tokens)


def share(
    ahead_s: list[float], prompts: tuple[Any, ...] = (), targets: Targets = TARGETS, busy_s: float = 0.0
) -> PrefillBudget:
    queues = SimpleNamespace(running=[stream(one) for one in ahead_s], loaded=[], waiting=list(prompts))
    budget = SlackBudget(targets, MODEL, lambda: NOW_S - busy_s, lambda: busy_s)
    return budget.beside(len(ahead_s), 0, 4096, cast("Any", queues))


def step_s(num_decodes: int, num_tokens: int) -> float:
    return MODEL.seconds(StepWork(num_decodes, num_decodes * CONTEXT, num_tokens))


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


def test_tokens_far_behind_in_their_prompt_are_fewer() -> None:
    near, far = share([0.0]).take(0, 100_000), share([0.0]).take(8000, 100_000)
    assert STEP_MULTIPLE <= far < near


def test_a_target_of_gaps_alone_bounds_each_step() -> None:
    targets = Targets(itl_s=0.020)
    for ahead_s in (-1.0, 0.0, 1.0):
        num_tokens = taken(ahead_s, targets=targets)
        assert step_s(1, num_tokens) <= AIM * 0.020 < step_s(1, num_tokens + 3 * STEP_MULTIPLE)


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


def test_targets_replace_the_limit_and_no_other_setting() -> None:
    decode = ServerConfig(role="decode")
    plain = NodeConfig(server=decode)
    assert plain.tokens_beside_decodes_on("cuda:0") == 192
    assert not plain.scheduler.has_targets
    with_target = NodeConfig(server=decode, scheduler=SchedulerConfig(slo_tpot_ms=10, slo_ttft_ms=200))
    assert with_target.tokens_beside_decodes_on("cuda:0") == 0
    assert Targets.of(with_target.scheduler) == Targets(0.2, 0.01, 0.03)
    assert Targets.of(SchedulerConfig(slo_tpot_ms=10, slo_itl_ms=15)) == Targets(float("inf"), 0.01, 0.015)
    assert not SchedulerConfig(slo_ttft_ms=200).has_targets, "of streams"
    with pytest.raises(StartupError, match="slo_tpot_ms"):
        SchedulerConfig(slo_tpot_ms=-1)
    both = NodeConfig(server=decode, scheduler=SchedulerConfig(slo_itl_ms=20, max_tokens_beside_decodes=192))
    assert both.tokens_beside_decodes_on("cuda:0") == 0


def test_a_fixed_limit_is_the_share_of_before() -> None:
    queues = cast("Any", SimpleNamespace())
    for num_decodes in (0, 1, 47, 49, 200):
        for limit in (0, 128, 192):
            expected = PrefillBudget.beside(num_decodes, 2048, limit, 5990)
            assert FixedBudget(limit, 5990).beside(num_decodes, 0, 2048, queues) == expected


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
