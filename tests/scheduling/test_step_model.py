"""Predictions of the times of steps: fitted to measurements, corrected by steps, never by one alone."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.draft_prices import FIRST_FITS
from pd_cluster.scheduling.step_model import CORRECT_EVERY, ENOUGH_PROMPTS, NUM_EARLY, StepModel, StepWork, keys_of

CONTEXT = 1024
# ms of steps with 32 decodes after 1,024 tokens, by the tokens of the step ("Steps with prompts" in benchmarks/LOG.md)
TABLES = {
    "8B": ((4.3, 5.4, 9.5), {128: 6.2, 192: 7.1, 256: 8.1, 384: 11.1, 512: 13.7, 768: 19.1, 1024: 23.8}),
    "0.6B": ((1.6, 1.8, 2.6), {128: 2.2, 192: 2.4, 256: 2.4, 384: 2.7, 512: 2.9, 768: 3.5, 1024: 3.9}),
    "experts": ((3.5, 13.5, 19.1), {128: 15.7, 192: 16.3, 256: 16.7, 384: 18.7, 512: 19.0, 768: 21.9, 1024: 24.9}),
}
WORKS = st.builds(
    StepWork, st.integers(0, 256), st.integers(0, 10**6), st.integers(0, 8192), st.integers(0, 10**8)
)  # fmt: skip


def measured(name: str, scale: float = 1.0) -> list[tuple[StepWork, float]]:
    """Decodes alone, 1, 32 and 128 of them, then steps with a prompt."""
    alone, beside = TABLES[name]
    samples = [(StepWork(num, num * CONTEXT), ms) for num, ms in zip((1, 32, 128), alone, strict=True)]
    for size, ms in beside.items():
        samples.append((StepWork(32, 32 * CONTEXT, size - 32, keys_of(size - 32, 0)), ms))
    return [(work, scale * ms / 1e3) for work, ms in samples]


@pytest.mark.long
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("name", TABLES)
def test_a_fitted_model_predicts_what_was_measured(name: str, scale: float) -> None:
    samples = measured(name, scale)
    model = StepModel(samples)
    assert model.is_fitted
    for work, seconds in samples:
        assert model.seconds(work) == pytest.approx(seconds, rel=0.1 if name == "experts" else 0.06)


def mixture_s(work: StepWork) -> float:
    """The first tokens of a step choose 128 experts, 8 each, whether they are decodes or of prompts."""
    num_experts = 128 * (1 - (15 / 16) ** (work.num_decodes + work.num_tokens))
    tokens_s = 8e-6 * work.num_decodes + 25e-9 * work.context + 5e-6 * work.num_tokens + 1e-9 * work.num_keys
    return 2e-3 + 55e-6 * num_experts + tokens_s


def test_a_mixture_reads_experts_for_the_first_tokens_of_a_step() -> None:
    beside = [(32, size - 32) for size in (128, 256, 512, 1024)]
    works = [StepWork(num, num * CONTEXT) for num in (1, 4, 12, 32, 64, 128)] + [StepWork(32, 32 * 4096)]
    works += [StepWork(num, num * CONTEXT, size, keys_of(size, 0)) for num, size in beside]
    model = StepModel([(work, mixture_s(work)) for work in (*works, StepWork(32, 32 * CONTEXT, 96, keys_of(96, 4096)))])
    for num in (1, 2, 6, 8, 16, 20, 24, 40, 48, 96, 256):
        work = StepWork(num, num * CONTEXT)
        assert model.seconds(work) == pytest.approx(mixture_s(work), rel=0.03)
    for num, size in ((0, 64), (0, 2048), (4, 100), (16, 500), (64, 1000)):
        work = StepWork(num, num * CONTEXT, size, keys_of(size, 0))
        assert model.seconds(work) == pytest.approx(mixture_s(work), rel=0.05)
    for num in (0, 3, 30, 100):
        alone_s = model.decode_s(num, 0)
        for size in (1, 5, 40, 300, 5000):
            longer_s = model.seconds(StepWork(num, 0, size)) - alone_s
            assert model.prolonged_s(num, size) == pytest.approx(longer_s)
            assert model.tokens_within(num, longer_s * (1 + 1e-9)) == size


def test_the_defaults_are_those_of_8b() -> None:
    model = StepModel()
    assert not model.is_fitted
    for work, seconds in measured("8B"):
        assert model.seconds(work) == pytest.approx(seconds, rel=0.06)
    assert model.decode_s(60, 60 * 1200) == pytest.approx(7.1e-3, rel=0.06)
    assert model.prefill_s(2048) == pytest.approx(45e-3, rel=0.06)


@pytest.mark.long
def test_decodes_alone_tell_no_price_of_prompts() -> None:
    model = StepModel()
    for number in range(2 * NUM_EARLY):
        model.note(StepWork(1 + number % 4, 400), 0.03)
    assert model.is_fitted
    assert not model.knows_prompts
    for _ in range(4):
        model.note(StepWork(0, 0, 300, keys_of(300, 0)), 0.08)
    assert model.knows_prompts
    assert StepModel(measured("8B")).knows_prompts


def cpu_s(work: StepWork, factor: float = 1.0) -> float:
    """The demo model on a core: 5 ms, 1 for a decode, 0.17 for a prompt's token, which is 8 times the default."""
    prompts_s = 0.17e-3 * work.num_tokens + 80e-9 * work.num_keys
    return 5e-3 + 1e-3 * work.num_decodes + factor * prompts_s


def prompt(num_tokens: int, num_decodes: int = 0) -> StepWork:
    return StepWork(num_decodes, 400 * num_decodes, num_tokens, keys_of(num_tokens, 0))


@pytest.mark.long
@pytest.mark.parametrize("beside", [0, 3])
@pytest.mark.parametrize("num_decode_steps", [0, 20, 28, NUM_EARLY, 200])
def test_the_price_of_prompts_is_that_of_the_first_ones_whatever_came_before(
    num_decode_steps: int, beside: int
) -> None:
    """A decode node computes its first prompts after many decodes. Before, it told a seventh of their price."""
    model, rng = StepModel(), random.Random(num_decode_steps)
    for number in range(num_decode_steps):
        model.note(work := StepWork(1 + number % 3, 400), cpu_s(work) * rng.uniform(0.9, 1.1))
    for number in range(max(NUM_EARLY - num_decode_steps, ENOUGH_PROMPTS)):
        assert not model.knows_prompts
        model.note(work := prompt((400, 1500)[number % 2], beside), cpu_s(work) * rng.uniform(0.9, 1.1))
    assert model.knows_prompts
    assert model.prefill_s(2048) == pytest.approx(cpu_s(prompt(2048)), rel=0.25)


@pytest.mark.long
@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_price_that_is_no_longer_true_is_replaced_within_few_prompts(factor: float) -> None:
    """A device that is slower or faster than before. Steps beyond OUTLIER alone would take hundreds of prompts."""
    model = StepModel()
    for _ in range(100):
        for work in (StepWork(2, 800), prompt(400), prompt(1500)):
            model.note(work, cpu_s(work))
    before_s, decode_s = model.prefill_s(1000), model.decode_s(2, 800)
    for count in range(ENOUGH_PROMPTS):
        assert model.prefill_s(1000) == pytest.approx(before_s, rel=0.05), count
        model.note(work := prompt(1500 - 100 * count), cpu_s(work, factor))
    assert model.prefill_s(1000) == pytest.approx(factor * before_s, rel=0.1)
    assert model.decode_s(2, 800) == pytest.approx(decode_s, rel=0.05)


@pytest.mark.long
def test_stalls_and_small_pieces_beside_decodes_change_no_price() -> None:
    """Fewer stalls in a row than it takes; and pieces of which the time is lost in that of many decodes."""
    model = StepModel()
    for _ in range(100):
        for work in (StepWork(2, 800), prompt(400), prompt(1500)):
            model.note(work, cpu_s(work))
    before_s = model.prefill_s(1000)
    for _ in range(10 * ENOUGH_PROMPTS):
        model.note(work := prompt(2, num_decodes=30), cpu_s(work))  # ten times what the model knows of 30 decodes
    for _ in range(ENOUGH_PROMPTS - 1):
        model.note(prompt(400), 60.0)
    model.note(work := prompt(400), cpu_s(work))
    assert model.prefill_s(1000) == pytest.approx(before_s, rel=0.1)


def settled() -> StepModel:
    """After some steps of the CPU of `cpu_s`."""
    model = StepModel()
    for _ in range(30):
        for work in (StepWork(2, 800), prompt(400), prompt(1500)):
            model.note(work, cpu_s(work))
    return model


@pytest.mark.long
@pytest.mark.parametrize("num_tokens", [10, 20, 40, 60])
def test_rare_stalls_of_short_prompts_change_no_price(num_tokens: int) -> None:
    """They are mostly the weights' time, so that stalls alone were counted, 4 of them in 400 steps: 180 times too
    dear."""
    model, rng = settled(), random.Random(1)
    before_s = model.prefill_s(1000)
    for _ in range(2000):
        model.note(work := prompt(num_tokens), cpu_s(work) * rng.uniform(1 / 1.4, 1.4) + 0.06 * (rng.random() < 0.01))
        assert model.prefill_s(1000) == pytest.approx(before_s, rel=0.3)


@pytest.mark.long
@given(
    sizes=st.lists(st.tuples(st.integers(2, 2048), st.integers(0, 3), st.floats(1 / 1.4, 1.4)), max_size=20),
    burst=st.lists(st.floats(0.01, 100.0), max_size=ENOUGH_PROMPTS - 1),
)
@settings(max_examples=12, deadline=None)
def test_noise_within_the_bound_and_few_outliers_never_multiply_a_price(
    sizes: list[tuple[int, int, float]], burst: list[float]
) -> None:
    model, restarts = settled(), list[object]()
    model._restart = restarts.append  # type: ignore[method-assign, assignment]
    model._solve = lambda *_: None  # type: ignore[method-assign]  # which follows the noise
    for num_tokens, num_decodes, noise in sizes:
        work = prompt(num_tokens, num_decodes)
        model.note(work, model.seconds(work) * noise)
    for noise in burst:
        model.note(work := prompt(400), model.seconds(work) * noise)
    assert not restarts


@pytest.mark.long
@given(factor=st.floats(1 / 8, 8), seed=st.integers(0, 10**6))
@settings(max_examples=12, deadline=None)
def test_a_lasting_change_is_followed_within_100_prompts(factor: float, seed: int) -> None:
    model, rng = settled(), random.Random(seed)
    for _ in range(100):
        model.note(work := prompt(rng.choice((300, 400, 1500))), cpu_s(work, factor) * rng.uniform(1 / 1.2, 1.2))
    for num_tokens in (300, 1000, 1500):
        assert 1 / 1.5 < model.seconds(prompt(num_tokens)) / cpu_s(prompt(num_tokens), factor) < 1.5


@pytest.mark.long
def test_long_prompts_and_short_ones_do_not_change_each_others_price_for_good() -> None:
    """The price of keys is not known from short ones. It took 40 changes to and fro, each of them 3 times wrong."""
    model = StepModel()
    for _ in range(100):
        for work in (StepWork(2, 800), prompt(300), prompt(400)):
            model.note(work, cpu_s(work))
    chunks = [StepWork(0, 0, 1024, keys_of(1024, 1024 * number)) for number in range(4, 12)]
    for turn in range(4):
        for work in chunks + [prompt(400)] * 8:
            assert turn < 2 or model.seconds(work) == pytest.approx(cpu_s(work), rel=0.3)
            model.note(work, cpu_s(work))


@pytest.mark.long
def test_decodes_are_priced_when_they_took_as_long_as_predicted() -> None:
    """One step of 30 alone, 5 times as long, and no correction yet: what follows says nothing of prompts."""
    model = settled()
    before_s = model.prefill_s(1000)
    model.note(StepWork(30, 12_000), 0.2)
    for _ in range(2 * ENOUGH_PROMPTS):
        model.note(work := prompt(64, 30), 0.165 + cpu_s(work))
    assert model.prefill_s(1000) == pytest.approx(before_s, rel=0.2)


@pytest.mark.long
@given(works=st.lists(st.tuples(WORKS, st.floats(0, 100)), max_size=60), small=WORKS, more=WORKS)
@settings(max_examples=30, deadline=None)
def test_predictions_stay_above_zero_and_grow_with_the_work(
    works: list[tuple[StepWork, float]], small: StepWork, more: StepWork
) -> None:
    model = StepModel()
    for work, seconds in works:
        model.note(work, seconds)
    sums = (
        small.num_decodes + more.num_decodes, small.context + more.context, small.num_tokens, small.num_keys
    )  # fmt: skip
    assert model.seconds(small) > 0
    if not small.num_tokens:  # more decodes make prompt tokens dearer or cheaper
        assert model.seconds(small) <= model.seconds(StepWork(*sums))
    longer = StepWork(small.num_decodes, small.context, small.num_tokens + more.num_tokens, small.num_keys)
    assert model.seconds(small) <= model.seconds(longer)
    assert model.token_s > 0
    assert model.key_s > 0


@pytest.mark.long
def test_one_long_step_changes_little_and_its_like_change_the_prediction() -> None:
    model = StepModel(measured("8B"))
    work = StepWork(32, 32 * CONTEXT, 160, keys_of(160, 0))
    before = model.seconds(work)
    for _ in range(CORRECT_EVERY):
        model.note(work, before)
    model.note(work, 60.0)
    for _ in range(CORRECT_EVERY - 1):
        model.note(work, before)
    assert model.seconds(work) == pytest.approx(before, rel=0.03)
    for _ in range(1000):
        model.note(work, 1.3 * before)
    assert model.seconds(work) == pytest.approx(1.3 * before, rel=0.02)


@pytest.mark.long
def test_terms_that_no_step_has_keep_what_was_measured() -> None:
    """An hour without prompts: a decode node knows its price of a prompt's token all the same."""
    model = StepModel(measured("8B"))
    token_s, key_s = model.token_s_at(100), model.key_s
    for number in range(3000):
        model.note(StepWork(1 + number % 40, 1000 * (number % 40)), 5e-3)
    assert model.decode_s(20, 20_000) == pytest.approx(5e-3, rel=0.02)
    assert (model.token_s_at(100), model.key_s) == pytest.approx((token_s, key_s), rel=0.01)


@pytest.mark.long
def test_few_noisy_steps_of_one_decode_do_not_make_many_absurdly_dear() -> None:
    """A CPU: 20 ms, 1 ms for a decode and for a prompt's token, 10% of noise. As weak a pull as to measured steps made
    one of these predictions 7 times too long."""

    def truth(work: StepWork) -> float:
        return 20e-3 + 1e-3 * (work.num_decodes + work.num_tokens) + 0.5e-6 * work.context

    probe = StepWork(16, 16 * 500)
    for seed in range(60):
        model, rng = StepModel(), random.Random(seed)
        for number in range(NUM_EARLY):
            size = rng.randint(10, 40)
            work = StepWork(1, 100 + number) if number % 5 else StepWork(0, 0, size, keys_of(size, 0))
            model.note(work, truth(work) * rng.lognormvariate(0, 0.1))
        assert 0.3 < model.seconds(probe) / truth(probe) < 1.5


def test_a_model_without_measurements_learns_another_device() -> None:
    """A CPU: 4.5 ms for a decode and 0.25 more for each, 0.12 ms for a prompt's token. Steps vary by 5%; one stalls."""

    def truth(work: StepWork) -> float:
        return 4.3e-3 + 0.25e-3 * work.num_decodes + 0.12e-3 * work.num_tokens

    model, rng = StepModel(), random.Random(1)
    for number in range(400):
        num_decodes, num_tokens = rng.randint(0, 64), rng.choice([0, 0, rng.randint(2, 200)])
        work = StepWork(num_decodes, 100 * num_decodes, num_tokens, keys_of(num_tokens, 0))
        if num_decodes + num_tokens:
            model.note(work, truth(work) * rng.uniform(0.95, 1.05) + (number % 50 == 3) * 2.0)
        assert model.is_fitted or number < 2 * NUM_EARLY
    for work in (StepWork(8, 800), StepWork(64, 6400), StepWork(4, 400, 60, keys_of(60, 0))):
        assert model.seconds(work) == pytest.approx(truth(work), rel=0.05)


def test_the_work_of_a_step_is_that_of_its_chunks() -> None:
    chunks = (SequenceChunk(1, 10, 1), SequenceChunk(2, 30, 1), SequenceChunk(3, 5, 4), SequenceChunk(4, 0, 3))
    assert StepWork.of(chunks) == StepWork(2, 40, 7, (5 + 6 + 7 + 8) + (0 + 1 + 2))


def drafted(num: int, num_drafts: int, context: int = CONTEXT) -> StepWork:
    """Decodes with so many drafts each."""
    drafts = (0,) * num_drafts
    return StepWork.of([SequenceChunk(i, context, 1 + num_drafts, num_samples=1, drafts=drafts) for i in range(num)])


def test_the_work_of_a_step_with_drafts_is_that_of_its_decodes_and_of_the_drafts() -> None:
    work = StepWork.of([SequenceChunk(1, 10, 1), SequenceChunk(2, 30, 3, drafts=(7, 7)), SequenceChunk(3, 5, 4)])
    assert work == StepWork(2, 40, 4, 5 + 6 + 7 + 8, num_drafts=2, draft_keys=31 + 32, num_drafting=1)
    assert work.streams == replace(work, num_tokens=0, num_keys=0)


VerifySteps = dict[tuple[int, int], tuple[float, dict[int, float]]]
# By decodes and the tokens before each: ms of a step without drafts, and with so many for each. One H200: 8B from
# launch to result in captured sizes, 30B-A3B where drafts attend as chunks, captured up to 256 rows
VERIFY_8B = {
    (1, 1024): (4.24, {1: 5.31, 7: 5.31}),
    (8, 1024): (4.58, {3: 5.55}),
    (32, 1024): (5.27, {1: 6.84, 3: 7.1, 7: 8.39}),
    (64, 1024): (6.82, {3: 9.71}),
    (128, 1024): (8.94, {1: 11.83, 2: 14.8}),
    (32, 4096): (8.14, {3: 9.75}),
}
VERIFY_30B = {
    (1, 1024): (2.65, {1: 4.05, 3: 5.51, 7: 7.76}),
    (8, 1024): (7.84, {1: 11.21, 3: 14.19, 7: 15.6}),
    (32, 1024): (14.45, {1: 16.47, 3: 16.91, 7: 18.35}),
    (64, 1024): (17.1, {1: 17.96, 3: 19.84}),
    (128, 1024): (18.96, {1: 22.56}),
    (64, 4096): (21.44, {1: 22.73, 3: 25.3}),
}


def verified(table: VerifySteps) -> list[tuple[StepWork, float]]:
    samples = []
    for (num, context), (ms, times) in table.items():
        samples.append((StepWork(num, num * context), ms / 1e3))
        samples += [(drafted(num, count, context), each / 1e3) for count, each in times.items()]
    return samples


def test_the_default_prices_of_drafts_are_those_of_8b() -> None:
    model = StepModel()
    for work, seconds in verified(VERIFY_8B):
        assert model.seconds(work) == pytest.approx(seconds, rel=0.08), work


@pytest.mark.long
@pytest.mark.parametrize(("table", "rel"), [(VERIFY_8B, 0.07), (VERIFY_30B, 0.15)])
def test_measured_steps_with_drafts_are_predicted(table: VerifySteps, rel: float) -> None:
    """A mixture's first rows read experts, drafts or not: the prices of drafts alone could not say it."""
    samples = verified(table)
    model = StepModel(samples)
    for work, seconds in samples:
        assert model.seconds(work) == pytest.approx(seconds, rel=rel), work
    plain = StepModel([(work, seconds) for work, seconds in samples if not work.num_drafts])
    assert prices_of_others(model) == prices_of_others(plain), "drafts change no other price"


def prices_of_others(model: StepModel) -> list[float]:
    """All that a model says of steps without drafts."""
    works = [StepWork(num, context) for num in (0, 1, 7, 20, 100, 200) for context in (0, 10**5)]
    works += [StepWork(num, 0, size, keys) for num in (0, 9) for size in (5, 50, 200, 500, 999) for keys in (0, 10**6)]
    return [*map(model.seconds, works), model.token_s, model.key_s, float(model.knows_prompts), float(model.revision)]


@cache
def measured_8b() -> StepModel:
    """Solved once, and not where tests are collected: 0.1 s."""
    return StepModel(measured("8B"))


DRAFTED = st.builds(drafted, st.integers(1, 40), st.integers(1, 16), st.integers(0, 8192))


@pytest.mark.long
@given(steps=st.lists(st.tuples(DRAFTED, st.integers(0, 9), st.floats(1e-6, 100)), min_size=1, max_size=60))
@settings(max_examples=12, deadline=None)
def test_a_step_with_drafts_changes_no_price_but_those_of_drafts(steps: list[tuple[StepWork, int, float]]) -> None:
    """Exactly, whatever it took, whatever prompts were beside it, and whether steps were measured at start."""
    for model in (StepModel(), deepcopy(measured_8b())):
        before, is_fitted = prices_of_others(model), model.is_fitted
        for work, num_tokens, seconds in steps:
            model.note(replace(work, num_tokens=max(0, num_tokens - 6), num_keys=num_tokens), seconds)
        assert prices_of_others(model) == before
        assert model.is_fitted == is_fitted
        for work, *_ in steps:
            alone_s = model.seconds(StepWork(work.num_decodes, work.context))
            assert alone_s < model.seconds(work) < inf


@pytest.mark.long
def test_drafts_are_learned_beside_what_is_known_of_decodes() -> None:
    """Three times as dear as they were, and noise of 10%."""
    model, rng = StepModel(verified(VERIFY_8B)), random.Random(1)
    works = [drafted(num, count) for num in (1, 4, 16, 64) for count in (1, 4, 8)]
    truth = {work: 3 * model.seconds(work) - 2 * model._without_drafts_s(work) for work in works}
    for _ in range(1000):
        work = rng.choice(works)
        model.note(work, truth[work] * rng.uniform(0.9, 1.1) + (rng.random() < 0.01) * 0.1)
    for work in works:
        assert model.seconds(work) == pytest.approx(truth[work], rel=0.1), work


@pytest.mark.long
def test_where_no_drafts_were_measured_the_first_steps_tell_their_price() -> None:
    """A CPU: each row takes 0.3 ms, which is 30 times what an H200's price is when scaled by its decodes."""

    def truth(work: StepWork) -> float:
        return cpu_s(work) + 0.3e-3 * work.num_drafts

    model, rng = StepModel(), random.Random(1)
    for number in range(200):
        model.note(work := StepWork(1 + number % 4, 400 * (1 + number % 4)), cpu_s(work))
    for number in range(FIRST_FITS[-1]):
        model.note(work := drafted(1 + number % 2, 1 + number % 5, 400), truth(work) * rng.uniform(0.9, 1.1))
    for work in (drafted(1, 2, 400), drafted(2, 5, 400), drafted(2, 8, 400)):
        assert model.seconds(work) == pytest.approx(truth(work), rel=0.15), work


@pytest.mark.long
@pytest.mark.parametrize("table", [VERIFY_8B, VERIFY_30B])
def test_all_numbers_of_drafts_have_the_price_of_their_step(table: VerifySteps) -> None:
    model = StepModel(verified(table))
    for num, context, num_tokens in ((1, 100, 0), (3, 2000, 40), (64, 1024, 0), (130, 500, 300)):
        work = StepWork(num, num * context, num_tokens, 10 * num_tokens)
        price = model.draft_price(work, 16 * num)
        assert [*price.knots] == sorted({0, 16 * num, *price.knots})
        assert price.seconds[0] == pytest.approx(model.seconds(work))
        for num_drafts in {1, 2, num, 2 * num, min(128, 5 * num), 16 * num - 1, 16 * num}:
            num_drafting = min(num, num_drafts)
            with_drafts = replace(
                work, num_drafts=num_drafts, draft_keys=num_drafts * (context + 1), num_drafting=num_drafting
            )
            found = np.interp(num_drafts, price.knots, price.seconds) + price.step_s + num_drafting * price.sequence_s
            assert found == pytest.approx(model.seconds(with_drafts))
    assert len(model.draft_price(StepWork(1, 0), 1024).knots) < 10, "few places tell all of them"
