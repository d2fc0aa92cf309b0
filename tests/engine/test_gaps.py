"""What a pipeline learns of steps after those with drafts: the gap before them, and their own seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from pd_cluster.engine.pipeline import Pipeline
from pd_cluster.engine.step_timing import StepForecast
from pd_cluster.scheduling.batch import Batch, SequenceChunk
from pd_cluster.scheduling.step_model import StepModel, StepWork
from tests.engine.test_pipeline import FakeDevice, FakePending, room, step

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import StepResult

LAUNCH_S, STEP_S, HOST_S = 0.0003, 0.005, 0.0004


class TimedPending(FakePending):
    def __init__(self, device: TimedDevice, number: int) -> None:
        super().__init__(device.log, number)
        self._device = device

    def result(self) -> StepResult:
        self._device.now_s += STEP_S
        return super().result()


class TimedDevice(FakeDevice):
    """Each launch and each step takes its time."""

    now_s = 0.0

    def launch(self, batch: Batch, deadline_s: float) -> FakePending:
        self.now_s += LAUNCH_S
        return TimedPending(self, batch.step)


class Turns:
    """A pipeline that retires each step before the next is planned. `noted`: what the models learn."""

    def __init__(self, depth: int) -> None:
        device = self.device = TimedDevice()
        model, streams = StepModel(), room()
        self.noted: list[tuple[StepWork, float]] = []
        self.gaps: list[float] = []
        model.note = lambda work, seconds: self.noted.append((work, seconds))  # type: ignore[method-assign]
        streams.note = lambda *told: self.gaps.append(told[-1])  # type: ignore[method-assign]
        self.steps = Pipeline(
            cast("Any", device), cast("Any", device), depth, lambda: device.now_s,
            StepForecast(is_compiled_lazily=False), model, streams, allow_silence=lambda _: None,
        )  # fmt: skip

    def turn(self, batch: Batch, host_s: float = HOST_S) -> None:
        def plan() -> Batch:
            self.device.now_s += host_s
            return batch

        assert self.steps.launch(plan)
        self.steps.retire()
        self.steps.learn()


def drafted(number: int) -> Batch:
    return Batch(number, chunks=(SequenceChunk(1, number, 3, num_samples=1, drafts=(5, 6)),))


def prompt(number: int) -> Batch:
    return Batch(number, chunks=(SequenceChunk(2, 0, 40),))


def test_a_gap_is_from_the_end_to_the_next_launch() -> None:
    turns = Turns(2)
    for number in range(100):
        turns.turn(drafted(number), HOST_S if number else 5 * HOST_S)
    assert turns.steps.gap_s == pytest.approx(HOST_S, rel=0.05)
    assert turns.gaps == pytest.approx([0.0] + 99 * [HOST_S])


def test_time_with_nothing_to_compute_is_no_gap() -> None:
    turns = Turns(2)
    for number in range(0, 200, 2):
        turns.turn(step(number))
        turns.turn(drafted(number + 1))
        turns.steps.rest()
        turns.device.now_s += 2.0
    assert turns.steps.gap_s < 3 * HOST_S


@pytest.mark.parametrize(("depth", "learned"), [(1, "-dd--p"), (2, "-dd-p")])
def test_which_steps_teach_what_they_take(depth: int, learned: str) -> None:
    """At depth 2 decodes that were launched after drafts seem longer by their launch: they teach nothing."""
    turns = Turns(depth)
    for number, batch in enumerate((step, drafted, drafted, step, step)):
        turns.turn(batch(number))
    turns.turn(prompt(5))
    assert "".join("d" if work.num_drafts else "p" if work.num_tokens else "-" for work, _ in turns.noted) == learned


def test_prompts_after_drafts_teach_what_prompts_take() -> None:
    """Else a node that drafts in each answer would never learn the price of a prompt."""
    turns = Turns(2)
    for number in range(0, 20, 2):
        turns.turn(drafted(number))
        turns.turn(prompt(number + 1))
    assert sum(work.num_tokens > 0 for work, _ in turns.noted) == 10
