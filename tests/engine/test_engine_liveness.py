"""When an engine counts as frozen: by silence, against what it allowed itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.engine.liveness import RANKED_STALL_S, STALL_S, EngineLiveness, EngineState
from pd_cluster.engine.step_timing import FROZEN_S, STEP_FACTOR, WARM_UP_S, StepForecast
from pd_cluster.scheduling.batch import Batch, SequenceChunk

if TYPE_CHECKING:
    from collections.abc import Sequence


def batch(num_tokens: int, start: int = 0) -> Batch:
    return Batch(0, chunks=(SequenceChunk(0, start, num_tokens),))


def forecast(*steps: tuple[int, float], compiled_lazily: bool = False, keys_per_token: int = 0) -> StepForecast:
    """After steps of so many tokens that took so many seconds."""
    made = StepForecast(keys_per_token=keys_per_token, is_compiled_lazily=compiled_lazily)
    for num_tokens, duration_s in steps:
        made.note_step(made.kind_of(batch(num_tokens)), duration_s)
    return made


def allowed_s(made: StepForecast, num_tokens: int, start: int = 0) -> float:
    return made.allowed_s(made.kind_of(batch(num_tokens, start)))


def test_short_steps_are_allowed_three_seconds() -> None:
    assert allowed_s(forecast((100, 0.1), (100, 0.7)), 100) == FROZEN_S


def test_long_steps_are_allowed_four_times_their_prediction() -> None:
    assert allowed_s(forecast((100, 2.0), (100, 2.0)), 100) == STEP_FACTOR * 2.0


def test_one_long_step_predicts_nothing() -> None:
    """The process may have been stopped within it."""
    assert allowed_s(forecast((100, 0.1), (100, 30.0)), 100) == FROZEN_S


@pytest.mark.parametrize("compiled_lazily", [True, False])
def test_the_first_step_of_all_is_warm_up(compiled_lazily: bool) -> None:
    assert allowed_s(forecast(compiled_lazily=compiled_lazily), 1) == WARM_UP_S


def test_the_first_step_of_a_kind_is_warm_up_where_it_may_compile() -> None:
    assert allowed_s(forecast((1, 0.01), compiled_lazily=True), 500) == WARM_UP_S
    assert allowed_s(forecast((1, 0.01), (500, 9.0), (500, 0.1), compiled_lazily=True), 500) == FROZEN_S


def test_elsewhere_it_is_predicted_from_the_nearest_kind() -> None:
    made = forecast((256, 0.5))
    assert allowed_s(made, 1024) == STEP_FACTOR * 0.5 * 4
    assert allowed_s(made, 1) == FROZEN_S
    assert allowed_s(made, 1 << 20) == WARM_UP_S


def test_keys_make_a_step_longer() -> None:
    made = forecast((64, 1.0), keys_per_token=1000)
    assert allowed_s(made, 64, start=7000) == STEP_FACTOR * 1.0 * 8


@given(steps=st.lists(st.tuples(st.integers(1, 4096), st.floats(0.0, 100.0))), num_tokens=st.integers(0, 4096))
def test_every_step_is_allowed_something(steps: Sequence[tuple[int, float]], num_tokens: int) -> None:
    longest_s = max([duration_s for _, duration_s in steps], default=0.0)
    assert FROZEN_S <= allowed_s(forecast(*steps), num_tokens) <= max(WARM_UP_S, STEP_FACTOR * longest_s)


def test_states() -> None:
    engine = EngineLiveness(0.0)
    assert engine.state(FROZEN_S - 0.01) is EngineState.ALIVE
    assert engine.state(FROZEN_S) is EngineState.FROZEN
    engine.received(10.0)
    assert engine.state(10.0 + FROZEN_S - 0.01) is EngineState.ALIVE
    assert engine.state(10.0 + FROZEN_S + STALL_S) is EngineState.DEAD


def test_an_engine_of_several_ranks_is_dead_soon_if_its_process_does_not_run() -> None:
    """While its thread gives signs of life it is frozen as early as others, and dead as late."""
    mute, lives = (EngineLiveness(0.0, mute_s=RANKED_STALL_S) for _ in range(2))
    last_s = FROZEN_S + RANKED_STALL_S - 0.1
    for now in (FROZEN_S, last_s):
        lives.runs(now)
        assert (mute.state(now), lives.state(now)) == (EngineState.FROZEN, EngineState.FROZEN)
    over_s = FROZEN_S + RANKED_STALL_S
    assert (mute.state(over_s), lives.state(over_s)) == (EngineState.DEAD, EngineState.FROZEN)
    assert lives.state(last_s + FROZEN_S - 0.1) is EngineState.FROZEN
    assert lives.state(last_s + FROZEN_S) is EngineState.DEAD
    lives.runs(60.0)
    assert lives.state(60.0 + FROZEN_S - 0.1) is EngineState.FROZEN
    assert lives.state(FROZEN_S + STALL_S) is EngineState.DEAD
    lives.received(60.0 + FROZEN_S - 0.1)
    assert lives.state(60.0 + FROZEN_S) is EngineState.ALIVE


def test_a_step_that_may_take_long_may_hold_the_thread_of_the_signs_too() -> None:
    engine = EngineLiveness(0.0, mute_s=RANKED_STALL_S)
    engine.allow(20.0)
    assert engine.state(19.9) is EngineState.ALIVE
    assert engine.state(20.4) is EngineState.FROZEN
    assert engine.state(20.5) is EngineState.DEAD


def test_an_announced_step_may_take_what_it_was_allowed() -> None:
    """What is said while it runs does not take that back; the next announcement does."""
    engine = EngineLiveness(0.0)
    engine.allow(20.0)
    engine.received(1.0)
    assert engine.state(20.9) is EngineState.ALIVE
    assert engine.state(21.0) is EngineState.FROZEN
    engine.allow(0.0)
    engine.received(21.0)
    assert engine.state(21.0 + FROZEN_S) is EngineState.FROZEN
