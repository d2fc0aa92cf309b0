"""What clients may wait, and the gaps of a decode node that was told no target."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.slo.device import DEVICES
from pd_cluster.config import SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.planning.device import steps_at_start
from pd_cluster.scheduling.prefill_budget import ROUND, STEP_MULTIPLE
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.scheduling.targets import (
    KEPT_GAP_S,
    MOST_KEYS,
    MOST_PROLONGED,
    PROLONGED,
    USUAL_CONTEXT,
    USUAL_DECODES,
    Targets,
    usual_gap_s,
)
from pd_connectors.protocol.feed import FAR

# Milliseconds of steps on one H200 with 32 decodes of 1,024 tokens, by all of their tokens. See benchmarks/LOG.md
DENSE_8B = {32: 5.4, 128: 6.2, 256: 8.1, 512: 13.7, 1024: 23.8}
DENSE_06B = {32: 1.82, 128: 2.23, 256: 2.44, 512: 2.91, 1024: 3.88}
MIXTURE_30B = {32: 13.5, 128: 15.7, 256: 16.7, 512: 19.0, 1024: 24.9}
SLOW_EXPERTS = {32: 13.5, 128: 20.0, 256: 20.3, 512: 21.7, 1024: 26.9}  # a kernel that was slower from 128 tokens on
CONTEXT = USUAL_DECODES * USUAL_CONTEXT
USUAL_STREAMS = cast("Any", SimpleNamespace(mean_context=USUAL_CONTEXT))


def decoding(model: StepModel, role: str = "decode", device: str = "cuda:0", config: Any = None) -> StepBudget:
    """Of a node that was told no target, or what `config` tells."""
    targets = Targets.of(config or SchedulerConfig()).on(role, device, model)
    return StepBudget(targets, model, lambda: 100.0, lambda: 0.0)


def streams(*contexts: int, mean: int = 0) -> Any:
    """Queues with running streams. `mean`: with the prompts that are no streams yet."""
    running = [
        SimpleNamespace(num_remaining_tokens=1, num_output_tokens=9, num_pending=1, token_ids=range(context))
        for context in contexts
    ]
    mean = mean or sum(contexts) // len(contexts)
    return SimpleNamespace(running=running, loaded=[], waiting=[], num_free_slots=1, mean_context=mean)


def tokens(budget: StepBudget, num_decodes: int, context: int = USUAL_CONTEXT, start: int = 0) -> int:
    """Tokens of a long prompt after `start` others beside so many decodes."""
    return budget.beside(num_decodes, 0, 2048, streams(*[context] * num_decodes)).take(start, 100_000)


def measured(table: dict[int, float]) -> StepModel:
    """Also with steps of few and many decodes, with the times of 8B in proportion."""
    shape, scale = StepModel(), table[32] / DENSE_8B[32] / 1e3
    times = [(StepWork(32, CONTEXT, size - 32), ms / 1e3) for size, ms in table.items()]
    alone = [StepWork(num, num * USUAL_CONTEXT) for num in (1, 4, 12, 64, 128)]
    return StepModel([*times, *((work, 1e3 * scale * shape.seconds(work)) for work in alone)])


@pytest.mark.parametrize(
    ("table", "least", "most"),
    [(DENSE_8B, 160, 160), (DENSE_06B, 224, 352), (MIXTURE_30B, 416, 480), (SLOW_EXPERTS, 480, 640)],
)
def test_recorded_steps(table: dict[int, float], least: int, most: int) -> None:
    model = measured(table)
    assert least <= tokens(decoding(model), 32) <= most
    alone_s = model.decode_s(USUAL_DECODES, CONTEXT)
    assert 0.999 * PROLONGED * alone_s <= usual_gap_s(model) <= MOST_PROLONGED * alone_s


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.5, 0.75, 1.5, 2.0])
def test_a_step_at_start_that_took_another_time(factor: float) -> None:
    """A node keeps its first times, and one of them may be wrong: what position costs stays within its bounds."""
    shape, keys = StepModel(), 6000
    alone = [StepWork(num, num * USUAL_CONTEXT) for num in (1, 4, 12, 32, 64, 128)]
    after = StepWork(32, CONTEXT, 96, keys_of(96, 4096))
    works = [*alone, *(StepWork(32, CONTEXT, size - 32) for size in (128, 256, 512, 1024)), after]
    for wrong in range(len(works)):
        times = [(work, (factor if at == wrong else 1) * shape.seconds(work)) for at, work in enumerate(works)]
        model = StepModel(times)
        targets = Targets().on("decode", "cuda:0", model, keys)
        share = StepBudget(targets, model, lambda: 100.0, lambda: 0.0).beside(32, 0, 2048, USUAL_STREAMS)
        assert keys <= share.keys_per_token <= MOST_KEYS * keys


def test_a_step_full_of_decodes_is_limited() -> None:
    """0 would say to routers that it is not."""
    assert [decoding(StepModel()).lasting(num, 2048, USUAL_STREAMS) for num in (2047, 2048)] == [1, 1]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(times=st.lists(st.floats(1e-3, 1.0), min_size=5, max_size=5))
def test_whatever_is_measured_the_gap_is_within_its_bounds(times: list[float]) -> None:
    model = measured(dict(zip(DENSE_8B, times, strict=True)))
    alone_s = model.decode_s(USUAL_DECODES, CONTEXT)
    assert 0.999 * PROLONGED * alone_s <= usual_gap_s(model) <= 1.001 * MOST_PROLONGED * alone_s


def test_prompts_that_cost_much_leave_the_gap_of_the_decodes() -> None:
    alone_s, model = DENSE_8B[32] / 1e3, measured({size: 5.4 + size - 32 for size in DENSE_8B})
    assert usual_gap_s(model) == pytest.approx(PROLONGED * alone_s, rel=0.02)
    assert tokens(decoding(model), 32) == 32


@pytest.mark.parametrize("context", [100, 1024])
def test_an_8b_has_as_many_tokens_as_with_192_in_all_whatever_the_context_of_its_streams(context: int) -> None:
    """Before, a step took 192 tokens, 128 beside more than 48 decodes, and at least 32 of prompts."""
    before = {1: 187, 4: 184, 16: 172, 32: 157, 48: 141, 49: 78, 64: 64, 96: 32, 97: 93, 128: 64, 192: 64, 256: 64}
    for model in (StepModel(), StepModel(steps_at_start(DEVICES["8b", 1]))):
        budget = decoding(model)
        now = {num: tokens(budget, num, context) for num in before}
        assert all(now[num] >= before[num] for num in before), now
        for num_decodes, num_tokens in now.items():
            step_s = model.seconds(StepWork(num_decodes, num_decodes * USUAL_CONTEXT, num_tokens))
            assert step_s <= usual_gap_s(model) or num_tokens < 96, "beyond it only the least of prompts"


def test_a_step_far_into_a_prompt_is_within_the_gap_too() -> None:
    model = StepModel()
    num_tokens = tokens(decoding(model), 8, start=4096)
    assert 64 < num_tokens < tokens(decoding(model), 8)
    work = StepWork(8, 8 * USUAL_CONTEXT, num_tokens, num_tokens * 4096)
    assert model.seconds(work) <= 1.1 * usual_gap_s(model)


@pytest.mark.parametrize("num_decodes", [1, 2, 5, 8])
@pytest.mark.parametrize("context", [4000, 12_000])
def test_a_prompt_behind_as_many_tokens_as_long_streams_has_nearly_its_usual_share(
    num_decodes: int, context: int
) -> None:
    """With the share of 1,024 tokens a step took 64 of a prompt behind 40,000, so that it took three times as long."""
    budget = decoding(StepModel())
    usual, now = tokens(budget, num_decodes), tokens(budget, num_decodes, context, context)
    assert 0.75 * usual <= now <= 1.1 * usual
    assert tokens(budget, num_decodes, context) == usual, "a fresh prompt's tokens are not dearer"


@pytest.mark.long_cases
@pytest.mark.parametrize("num_decodes", [1, 2, 5, 8])
@pytest.mark.parametrize("context", [FAR, 20_000, 40_000, 60_000])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_far_prompts_beside_far_streams_have_whole_rounds_within_the_bound_of_gaps(
    role: str, num_decodes: int, context: int
) -> None:
    """A step of 576 tokens takes as long as one of 768: attention's tiles go round once more."""
    model = StepModel(steps_at_start(DEVICES["8b", 1]))
    budget = decoding(model, role)
    for start in (0, context, context * 5 // 4):
        now = tokens(budget, num_decodes, context, start)
        predicted_s = model.seconds(StepWork(num_decodes, num_decodes * context, now, keys_of(now, start)))
        assert predicted_s <= KEPT_GAP_S or now <= STEP_MULTIPLE
        assert start < FAR or now + num_decodes <= ROUND
        assert now + num_decodes == ROUND or predicted_s > 0.6 * KEPT_GAP_S


@pytest.mark.parametrize(
    ("contexts", "prompt"), [([1000] * 3, 63_000), ([131_072, *[50] * 7], 0), ([60_000, *[1000] * 3], 0)]
)
@pytest.mark.parametrize("start", [0, 8192, 30_000, 50_000])
def test_streams_of_which_one_is_not_far_wait_as_short_ones_do(contexts: list[int], prompt: int, start: int) -> None:
    """Three of 1,000 tokens waited 34 ms a step for a prompt of 63,000: the mean of all was far."""
    model, num = StepModel(steps_at_start(DEVICES["8b", 1])), len(contexts)
    mean = (sum(contexts) + prompt) // (num + bool(prompt))
    now = decoding(model).beside(num, 0, 8192, streams(*contexts, mean=mean)).take(start, 50_000)
    alone_s = model.decode_s(num, sum(contexts))
    assert model.seconds(StepWork(num, sum(contexts), now, keys_of(now, start))) < alone_s + 0.0105
    assert now >= min(128, tokens(decoding(model), num, start=start))


def test_a_stream_that_enters_counts_too_and_one_without_a_token_does_not() -> None:
    budget, queues = decoding(StepModel(steps_at_start(DEVICES["8b", 1]))), streams(40_000, 40_000)
    far = budget.beside(2, 0, 2048, queues).take(0, 9000)
    queues.running.append(SimpleNamespace(num_remaining_tokens=9000, token_ids=range(9000)))
    assert budget.beside(2, 0, 2048, queues).take(0, 9000) == far
    queues.loaded.append(SimpleNamespace(token_ids=range(1000)))
    assert budget.beside(2, 0, 2048, queues).take(0, 9000) == far, "it has no slot"
    assert budget.beside(3, 1, 2048, queues).take(0, 9000) < 0.7 * far


def test_a_prompt_alone_leaves_a_request_that_will_decode_the_usual_step() -> None:
    budget, queues = decoding(StepModel()), streams(40_000)
    far = budget.beside(0, 0, 2048, queues).take(0, 9000)
    queues.running.clear()
    assert budget.beside(0, 0, 2048, queues).take(0, 9000) < 0.7 * far


@pytest.mark.parametrize("num_decodes", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("slower", [1, 2, 4])
def test_far_streams_leave_fresh_prompts_no_less_than_usual_ones_on_any_device(num_decodes: int, slower: int) -> None:
    """16 streams on a device that takes four times as long left 48 tokens for 240."""
    model = StepModel([(work, slower * one_s) for work, one_s in steps_at_start(DEVICES["8b", 1])])
    usual, far = (tokens(decoding(model), num_decodes, context) for context in (USUAL_CONTEXT, FAR))
    assert far >= usual


@pytest.mark.long
def test_what_far_streams_leave_goes_by_steps_of_late() -> None:
    """At start a step of 96 tokens said what a key costs, and in steps of 512 it is two thirds of that."""
    model = StepModel(steps_at_start(DEVICES["8b", 1]))
    budget = decoding(model)
    budget.model = StepModel(steps_at_start(DEVICES["8b", 1]))
    before, work = tokens(budget, 4, 40_000, 40_000), StepWork(4, 160_000, 320, 320 * 40_000)
    usual, took_s = tokens(budget, 4), 0.75 * budget.model.seconds(work)
    for _ in range(400):
        model.note(work, took_s)
    assert tokens(budget, 4, 40_000, 40_000) > before
    assert tokens(budget, 4) == usual


@pytest.mark.parametrize("num_decodes", [1, 2, 5, 8])
@pytest.mark.parametrize("context", [1024, 20_000, 40_000, 60_000])
def test_routers_are_told_the_tokens_that_a_prompt_gets(num_decodes: int, context: int) -> None:
    """Wherever it begins: a share of 251 that shrank as one of 1,024 does was told as half of what it is."""
    budget = decoding(StepModel(steps_at_start(DEVICES["8b", 1])))
    share = budget.lasting(num_decodes, 2048, streams(*[context] * num_decodes))
    keys = budget.step_keys(num_decodes, share)
    for start in (0, context // 2, context, context * 5 // 4):
        told = share / (1 + start / keys) if keys else share
        assert 0.65 <= tokens(budget, num_decodes, context, start) / max(64, told) <= 1.4, (start, told)


def test_the_usual_gap_is_a_decode_nodes_on_a_gpu_without_other_targets() -> None:
    model = StepModel()
    gap_s = usual_gap_s(model)
    assert gap_s == pytest.approx(0.0077, rel=0.02)
    for role, device in (("decode", "cpu"), ("prefill", "cpu"), ("mixed", "cuda:0")):
        assert decoding(model, role, device).targets == Targets()
    assert decoding(model, "prefill").targets == Targets(itl_s=KEPT_GAP_S)
    for config in (SchedulerConfig(), SchedulerConfig(slo_ttft_ms=200)):
        targets = decoding(model, config=config).targets
        assert (targets.tpot_s, targets.context) == (inf, USUAL_CONTEXT)
        assert targets.itl_s > gap_s
    for config in (SchedulerConfig(slo_tpot_ms=10), SchedulerConfig(slo_itl_ms=5)):
        for role in ("decode", "mixed"):
            assert decoding(model, role, config=config).targets == Targets.of(config)


def test_targets_in_seconds() -> None:
    assert Targets.of(SchedulerConfig(slo_tpot_ms=10, slo_ttft_ms=200)) == Targets(0.2, 0.01, 0.03)
    both = Targets.of(SchedulerConfig(slo_tpot_ms=10, slo_itl_ms=15))
    assert both == Targets(inf, 0.01, 0.015)
    assert both.on("prefill", "cuda:0", StepModel()) == Targets(itl_s=0.015), "prompts come first"
    assert SchedulerConfig(slo_itl_ms=20).has_targets
    assert not SchedulerConfig(slo_ttft_ms=200).has_targets, "of streams"
    with pytest.raises(StartupError, match="--slo-tpot-ms must be at least 0"):
        SchedulerConfig(slo_tpot_ms=-1)
