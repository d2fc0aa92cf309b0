"""How late a step may be planned: simulated against a device with steps of any duration."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.engine.step_timing import LOOK_S, WARM_UP_S, StepForecast, StepTiming
from pd_cluster.scheduling.batch import Batch, SequenceChunk

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_S = 0.001


def decodes(count: int) -> Batch:
    return Batch(0, chunks=tuple(SequenceChunk(i, 10, 1, num_samples=1) for i in range(count)))


def prompts(num_tokens: int) -> Batch:
    return Batch(0, chunks=(SequenceChunk(0, 0, num_tokens),))


@dataclass
class Device:
    """Runs one step after the other; the host plans as `StepTiming` says. Times in seconds."""

    pace: StepTiming = field(default_factory=StepTiming)
    now_s: float = 0.0
    idle_s: float = 0.0  # of the device, in all
    joined_s: list[float] = field(default_factory=list)  # from a step's planning to its start

    def run(self, steps: list[tuple[Batch, float]], predicted: float = 0.0) -> None:
        """Each (batch, its duration). A step is planned while the one before it runs, and no sooner.

        `predicted`: what the step model says in place of each duration, as a factor; 0: nothing.
        """
        start_s = self.now_s
        for index, (batch, duration_s) in enumerate(steps):
            end_s, predicted_s = start_s + duration_s, predicted * duration_s
            self.now_s = max(self.now_s, start_s)
            spare_s = self.pace.spare_s(batch, self.now_s - start_s, predicted_s)
            assert spare_s >= 0
            self.now_s = self.waited(batch, spare_s, end_s) + HOST_S
            self.pace.note_launch(batch, HOST_S)
            if index + 1 < len(steps):
                self.joined_s.append(max(0.0, end_s - self.now_s + HOST_S))
            launched_s, was_over = self.now_s, self.now_s >= end_s
            rest_s = self.pace.rest_s(batch, self.now_s - start_s, predicted_s)
            self.now_s = max(self.waited(batch, rest_s, end_s), end_s)
            was_over = was_over or self.now_s > end_s
            self.pace.note_step(batch, self.now_s - start_s, was_over=was_over, predicted_s=predicted_s)
            next_start_s = max(end_s, launched_s)
            self.idle_s += next_start_s - end_s
            start_s = next_start_s

    def waited(self, batch: Batch, seconds: float, end_s: float) -> float:
        """The time after a wait, which looks now and then whether a step with prompts is over, as the pipeline does."""
        if batch.chunks[-1].is_decode:
            return self.now_s + seconds
        return min(self.now_s + seconds, max(self.now_s, end_s + LOOK_S))


def test_even_steps_are_planned_late_and_the_device_never_idles() -> None:
    device = Device()
    device.run([(decodes(32), 0.007)] * 100)
    assert device.idle_s == 0
    assert max(device.joined_s[5:]) < 0.0045  # instead of 7 ms


def test_a_prediction_that_was_too_long_is_given_up() -> None:
    device = Device()
    device.run([(decodes(32), 0.012)] * 10 + [(decodes(32), 0.006)] * 50)
    assert device.idle_s < 0.012  # a few steps' worth, and not one in each
    before_s = device.idle_s
    device.run([(decodes(32), 0.006)] * 50)
    assert device.idle_s == before_s


def test_where_long_and_short_steps_take_turns_the_device_hardly_idles() -> None:
    """Two long ones in a row are no reason to wait as long for the third: it idled for 7 to 10% of such a time."""
    draw = random.Random(1)
    for times in ([0.006] * 3 + [0.012] * 3) * 100, [draw.choice([0.006, 0.012]) for _ in range(600)]:
        device = Device()
        device.run([(decodes(32), duration_s) for duration_s in times])
        assert device.idle_s < 0.005 * sum(times)
        assert sum(device.joined_s) < 0.65 * sum(times), "and yet it is planned late"


@pytest.mark.parametrize("num_late", [1, 20, 2000])
def test_a_stalled_host_is_soon_forgotten(num_late: int) -> None:
    """It comes late to steps that took no less than the others."""
    device = Device()
    device.run([(decodes(32), 0.007)] * 10)
    for _ in range(num_late):
        device.pace.note_step(decodes(32), 0.007, was_over=True)
    device.joined_s.clear()
    device.run([(decodes(32), 0.007)] * 30)
    assert device.idle_s == 0
    assert max(device.joined_s[8 if num_late == 1 else 20 :]) < 0.0026


def mixed(count: int, num_tokens: int) -> Batch:
    """Decodes, and a chunk."""
    return Batch(0, chunks=(*decodes(count).chunks, SequenceChunk(count, 0, num_tokens)))


def test_a_step_with_prompts_is_waited_for_as_long_as_its_decodes_take() -> None:
    """A sequence that is handed over while a decode node reads a prompt waits no longer than otherwise."""
    device = Device()
    device.run([(decodes(32), 0.007)] * 10 + [(mixed(32, 150), 0.009)] * 20)
    assert device.idle_s == 0
    pace = device.pace
    spare_s = pace.spare_s(mixed(32, 150), 0.0)
    assert 0.003 < spare_s == pace.spare_s(decodes(32), 0.0, prompts_wait=True)
    assert pace.spare_s(mixed(8, 150), 0.0) == 0, "other decodes"
    assert pace.rest_s(mixed(32, 150), 0.0) > 0.005
    pace.note_launch(mixed(32, 2000), 5 * HOST_S)
    assert pace.spare_s(mixed(32, 150), 0.0) == 0, "a launch that takes too long"


def test_a_step_with_prompts_that_was_over_shortens_what_decodes_are_said_to_take() -> None:
    device = Device()
    device.run([(decodes(32), 0.02)] * 5 + [(mixed(32, 150), 0.008)] * 20)
    before_s = device.idle_s
    assert before_s < 0.03
    device.run([(mixed(32, 150), 0.008)] * 20)
    assert device.idle_s == before_s


def test_steps_with_prompts_are_planned_late_as_far_as_the_model_is_right() -> None:
    """A stream that comes while a step of 38 ms runs is in the next one. Planned after 7 ms, that would not have it."""
    steps = [(decodes(8), 0.007)] * 10 + [(mixed(8, 512), 0.038)] * 60
    late, early = Device(), Device()
    late.run(steps, predicted=1.0)
    early.run(steps)
    assert late.idle_s == early.idle_s == 0
    assert max(late.joined_s[50:]) < 0.006 < 0.025 < min(early.joined_s[50:])


@pytest.mark.parametrize("predicted", [0.5, 0.9, 1.1, 2.0, 10.0])
def test_a_wrong_model_is_followed_as_far_as_it_held(predicted: float) -> None:
    draw = random.Random(1)
    steps = [(mixed(8, 512), 0.038 * draw.uniform(0.97, 1.03)) for _ in range(200)]
    device = Device()
    device.run([(decodes(8), 0.007)] * 10)
    device.run(steps, predicted=predicted)
    assert device.idle_s < 0.002 * sum(duration_s for _, duration_s in steps)
    if predicted >= 0.9:
        assert sum(device.joined_s[20:]) < 0.25 * sum(duration_s for _, duration_s in steps), "and yet planned late"


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("short_s", [0.008, 0.019, 0.03])
def test_where_the_model_errs_now_and_then_the_device_hardly_idles(share: float, short_s: float) -> None:
    """It says 38 ms of each step, and some of them are shorter. What decodes take is known all the same."""
    draw, device = random.Random(1), Device()
    device.run([(decodes(8), 0.007)] * 10)
    before_s = device.idle_s
    steps = [(mixed(8, 512), short_s if draw.random() < share else 0.038) for _ in range(400)]
    for batch, duration_s in steps:
        device.run([(batch, duration_s)], predicted=0.038 / duration_s)
    assert device.idle_s - before_s < max(0.01, share / 10) * sum(duration_s for _, duration_s in steps)
    assert device.pace.decode_s == pytest.approx(0.007)


def test_prompts_alone_are_never_waited_for() -> None:
    pace = StepTiming()
    for _ in range(40):
        pace.note_step(prompts(1000), 0.02, was_over=False, predicted_s=0.02)
    assert pace.spare_s(prompts(1000), 0.0, 0.02) == 0
    assert pace.spare_s(mixed(8, 1000), 0.0, 0.02) > 0.015, "beside streams they are"
    assert 0.015 < pace.rest_s(prompts(1000), 0.0, 0.02) < 0.02
    assert pace.rest_s(prompts(1000), 0.0195, 0.02) == 0
    assert pace.rest_s(Batch(1), 0.0) == 0


def test_slow_launches_of_prompts_do_not_hasten_the_planning_of_decodes() -> None:
    """On a decode node that reads some prompts, a sequence that is handed over is still in the next step of decodes."""
    pace = StepTiming()
    for _ in range(3):
        pace.note_launch(decodes(32), HOST_S)
        pace.note_step(decodes(32), 0.01, was_over=False)
    spare_s = pace.spare_s(decodes(32), 0.0)
    pace.note_launch(prompts(150), 4 * HOST_S)
    assert pace.spare_s(decodes(32), 0.0) == spare_s
    assert 0 < pace.spare_s(decodes(32), 0.0, prompts_wait=True) < spare_s - 3 * HOST_S


def test_a_prediction_of_prompts_that_was_too_long_is_given_up() -> None:
    pace, rests = StepTiming(), []
    for _ in range(40):
        pace.note_step(prompts(8), 2.0, was_over=False, predicted_s=2.0)  # on a slow device
    for _ in range(40):
        rests.append(pace.rest_s(prompts(8), 0.0, 2.0))
        pace.note_step(prompts(8), max(0.01, rests[-1]), was_over=rests[-1] > 0.01, predicted_s=2.0)
    assert rests[0] > 1
    assert sum(rests) < 10, "a few steps' worth, and not one in each"
    assert rests[-1] < 0.01


def test_no_step_with_prompts_is_waited_for_before_a_prediction_held() -> None:
    pace = StepTiming()
    assert pace.rest_s(prompts(1000), 0.0, 0.02) == 0
    pace.note_step(prompts(1000), 0.02, was_over=False)
    assert pace.rest_s(prompts(1000), 0.0, 0.02) == 0, "the model had said nothing"
    for _ in range(3):
        pace.note_step(prompts(1000), 0.02, was_over=False, predicted_s=0.02)
    assert 0 < pace.rest_s(prompts(1000), 0.0, 0.02) < 0.01


def test_one_stall_is_no_rule() -> None:
    """The process was stopped for ten seconds during a step: the next ones must not be waited for as long."""
    pace = StepTiming()
    for _ in range(5):
        pace.note_step(decodes(32), 0.01, was_over=False)
    pace.note_step(decodes(32), 10.0, was_over=False)
    assert 0 < pace.rest_s(decodes(32), 0.0) < 0.01
    pace.note_step(decodes(32), 0.01, was_over=False)
    assert 0 < pace.rest_s(decodes(32), 0.0) < 0.01
    pace.note_step(decodes(8), 10.0, was_over=False)  # the first of its kind
    assert pace.rest_s(decodes(8), 0.0) == 0


def test_a_rank_has_longer_than_the_step_loop() -> None:
    forecast = StepForecast(is_compiled_lazily=True)
    kind = forecast.kind_of(decodes(32))
    assert forecast.deadline_s(kind) == WARM_UP_S  # its kernels may be compiled first
    for duration_s, deadline_s in ((0.01, 5.0), (0.7, 5.0), (0.7, 7.0)):  # the shorter of the last two counts
        forecast.note_step(kind, duration_s)
        assert forecast.deadline_s(kind) == pytest.approx(deadline_s)
        assert forecast.deadline_s(kind) > forecast.allowed_s(kind)


def test_another_number_of_sequences_is_not_like_the_last() -> None:
    pace = StepTiming()
    for _ in range(2):
        pace.note_step(decodes(32), 0.01, was_over=False)
    assert pace.spare_s(decodes(33), 0.0) > 0
    assert pace.spare_s(decodes(8), 0.0) == 0
    assert pace.rest_s(decodes(64), 0.0) == 0


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(1, 64).map(decodes), st.integers(65, 4000).map(prompts)), st.floats(1e-4, 0.1)),
        min_size=1,
        max_size=60,
    )
)
def test_whatever_steps_take_the_wait_is_bounded(steps: list[tuple[Batch, float]]) -> None:
    """No step is waited for longer than the longest like it has ever taken."""
    device, pace = Device(), StepTiming()
    device.run(steps)
    longest_s = max(duration_s for _, duration_s in steps)
    for batch, duration_s in steps:
        pace.note_step(batch, duration_s, was_over=False)
        for other, _ in steps:
            assert 0 <= pace.spare_s(other, 0.0) <= pace.rest_s(other, 0.0) <= longest_s


def drafted(count: int, num_drafts: int) -> Batch:
    return Batch(0, chunks=tuple(SequenceChunk(i, 10, 1 + num_drafts, num_samples=1, drafts=(7,) * num_drafts)
                                 for i in range(count)))  # fmt: skip


def test_a_step_with_drafts_is_like_one_with_as_many_rows_of_decodes() -> None:
    pace = StepTiming()
    for _ in range(10):
        pace.note_step(drafted(8, 3), 0.01, was_over=False)
    assert pace.decode_s == 0.01, "it has no prompts"
    assert pace.rest_s(drafted(8, 3), 0.0) > 0.005
    assert pace.rest_s(decodes(32), 0.0) > 0.005
    assert pace.rest_s(drafted(32, 0), 0.0) > 0.005
    assert pace.rest_s(decodes(8), 0.0) == 0.0, "as many sequences, and fewer rows"
    assert pace.rest_s(drafted(32, 3), 0.0) == 0.0


def test_prompts_after_drafts_are_prompts() -> None:
    pace = StepTiming()
    for _ in range(10):
        pace.note_step(drafted(8, 3), 0.01, was_over=False)
    beside = Batch(0, chunks=(*drafted(8, 3).chunks, *prompts(500).chunks))
    for _ in range(40):
        pace.note_step(beside, 0.05, was_over=False, predicted_s=0.05)
    assert pace.decode_s == 0.01
    assert 0.005 < pace.rest_s(beside, 0.0, 0.05) < 0.05
    pace.note_launch(beside, 1.0)
    assert pace.spare_s(drafted(8, 3), 0.0) > 0, "a slow launch of prompts says nothing of decodes"


class Counted(tuple[SequenceChunk, ...]):
    """Chunks that count how often one of them is looked at."""

    num_looks = 0

    def __iter__(self) -> Iterator[SequenceChunk]:
        for chunk in super().__iter__():
            self.num_looks += 1
            yield chunk

    def __reversed__(self) -> Iterator[SequenceChunk]:
        for chunk in reversed(tuple(super().__iter__())):
            self.num_looks += 1
            yield chunk


@pytest.mark.parametrize(
    ("step", "num_passes"),
    [(decodes(256), 1), (drafted(256, 3), 1), (mixed(256, 500), 2)],
    ids=["plain", "drafts", "mixed"],
)
def test_a_prediction_costs_a_pass_over_the_chunks(step: Batch, num_passes: int) -> None:
    """It is made several times a step, on the thread that answers. Prompts need a second pass."""
    pace, counted = StepTiming(), Counted(step.chunks)
    batch = Batch(0, chunks=counted)
    looks = []
    for ask in (
        lambda: pace.note_launch(batch, HOST_S),
        lambda: pace.spare_s(batch, 0.0),
        lambda: pace.note_step(batch, 0.01, was_over=False),
        lambda: pace.rest_s(batch, 0.0),
    ):
        counted.num_looks = 0
        ask()
        looks.append(counted.num_looks)
    assert looks[0] == 0
    assert max(looks) <= num_passes * len(step.chunks) + 2
