"""In which order steps, loads and publishes begin, with the device in the test's hand."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, cast

import pytest

from pd_cluster.engine.pipeline import Pipeline
from pd_cluster.engine.step_timing import LOOK_S, StepForecast
from pd_cluster.scheduling.batch import Batch, BlockCopies, SequenceChunk, StepResult
from pd_cluster.scheduling.step_model import StepModel, StepWork
from pd_cluster.scheduling.stream_room import StreamRoom
from pd_connectors.base import LoadSpec, PublishSpec
from tests.connectors.layouts import runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import WorkerHalf


class FakePending:
    """A step that is over as soon as it is waited for."""

    is_over = False

    def __init__(self, log: list[str], step: int) -> None:
        self._log, self._step = log, step

    def result(self) -> StepResult:
        self._log.append(f"step {self._step} over")
        return StepResult(self._step, {})


class FakeDevice:
    """Executor and connector: what the pipeline asks of both, in one list."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_drawn = 0

    def launch(self, batch: Batch, deadline_s: float) -> FakePending:
        self.log.append(f"step {batch.step} begins")
        return FakePending(self.log, batch.step)

    def draw_late(self) -> float:
        self.num_drawn += 1
        return 0.0

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        self.log += [f"{load.load_id} begins" for load in loads]

    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        self.log += [f"{publish.lease_id}: {publish.num_tokens} tokens" for publish in publishes]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def room() -> StreamRoom:
    return StreamRoom(inf, 1, StepModel(), lambda: 0.0)


def pipeline(device: FakeDevice, depth: int) -> Pipeline:
    forecast = StepForecast(is_compiled_lazily=False)
    return Pipeline(
        cast("Executor", device),
        cast("WorkerHalf", device),
        depth,
        lambda: 0.0,
        forecast,
        StepModel(),
        room(),
        allow_silence=lambda _: None,
    )


def step(
    number: int,
    *,
    loads: tuple[str, ...] = (),
    computes: bool = True,
    begun: tuple[str, ...] = (),
    publishes: tuple[str, ...] = (),
) -> Batch:
    return Batch(
        number,
        chunks=(SequenceChunk(1, number, 1, num_samples=1),) if computes else (),
        loads=tuple(LoadSpec(load_id, runs(0, (3,)), 16) for load_id in loads),
        begun=tuple(PublishSpec(lease_id, (), 0, 0) for lease_id in begun),
        publishes=tuple(PublishSpec(lease_id, runs(0, (3,)), 16, 0) for lease_id in publishes),
    )


def test_a_load_begins_when_every_step_before_its_own_is_over(device: FakeDevice) -> None:
    """Its blocks may be those of a sequence that the running step still writes, or copies to the host."""
    steps = pipeline(device, 2)
    steps.launch(lambda: step(1))
    steps.launch(lambda: step(2, loads=("load a",)))
    assert device.log == ["step 1 begins", "step 2 begins"]
    steps.retire()
    assert device.log[2:] == ["step 1 over", "load a begins"]
    steps.launch(lambda: step(3, loads=("load b", "load c")))
    steps.retire()
    assert device.log[4:] == ["step 3 begins", "step 2 over", "load b begins", "load c begins"]
    steps.retire()
    assert device.log[-1] == "step 3 over", "once"


def test_a_load_waits_for_the_youngest_of_several_steps(device: FakeDevice) -> None:
    steps = pipeline(device, 3)
    steps.launch(lambda: step(1))
    steps.launch(lambda: step(2))
    steps.launch(lambda: step(3, loads=("load a",)))
    steps.retire()
    assert "load a begins" not in device.log
    steps.retire()
    assert device.log[-1] == "load a begins"


def test_a_step_of_loads_alone_waits_too_and_none_is_launched(device: FakeDevice) -> None:
    steps = pipeline(device, 2)
    steps.launch(lambda: step(1))
    assert not steps.launch(lambda: step(2, loads=("load a",), computes=False))
    assert device.log == ["step 1 begins"]
    assert len(steps) == 1
    steps.retire()
    assert device.log[1:] == ["step 1 over", "load a begins"]


@pytest.mark.parametrize("depth", [1, 2])
def test_with_nothing_under_way_a_load_begins_at_once(device: FakeDevice, depth: int) -> None:
    steps = pipeline(device, depth)
    assert not steps.launch(lambda: step(1, loads=("load a",), computes=False))
    assert device.log == ["load a begins"]
    assert steps.launch(lambda: step(2, loads=("load b",)))
    assert device.log == ["load a begins", "load b begins", "step 2 begins"]


def test_late_rows_are_drawn_before_the_next_step_is_planned(device: FakeDevice) -> None:
    """The plan needs to know which of them are absent."""
    steps, drawn = pipeline(device, 2), list[int]()

    def plan() -> Batch:
        drawn.append(device.num_drawn)
        return step(len(drawn))

    for _ in range(2):
        steps.launch(plan)
    assert drawn == [1, 2]


def test_copies_and_departures_are_steps(device: FakeDevice) -> None:
    steps = pipeline(device, 2)
    assert steps.launch(lambda: Batch(1, copies=BlockCopies(swap_out=((0, 3, 0),))))
    assert steps.launch(lambda: Batch(2, departures=(1,), loads=(LoadSpec("load a", runs(0, (3,)), 16),)))
    assert device.log == ["step 1 begins", "step 2 begins"]


def test_a_begun_prompt_is_told_before_its_step_and_its_blocks_by_the_caller(
    device: FakeDevice,
) -> None:
    steps = pipeline(device, 2)
    steps.launch(lambda: step(1, publishes=("lease a",)))
    steps.launch(lambda: step(2, begun=("lease b",), publishes=("lease b",)))
    assert device.log == ["step 1 begins", "lease b: 0 tokens", "step 2 begins"]
    assert steps.is_full
    batch, result = steps.retire()
    assert (batch.step, result.step) == (1, 1)
    assert [publish.lease_id for publish in batch.publishes] == ["lease a"]
    assert device.log[3:] == ["step 1 over"]
    assert not steps.is_full
    steps.retire()
    assert device.log[4:] == ["step 2 over"]


def test_the_model_learns_from_steps_that_the_host_waited_for(device: FakeDevice) -> None:
    """A step that was over before the host looked may have been shorter than it seemed."""
    now_s, model, streams = 100.0, StepModel(), room()
    forecast = StepForecast(is_compiled_lazily=False)
    steps = Pipeline(
        cast("Executor", device), cast("WorkerHalf", device), 2, lambda: now_s, forecast, model, streams,
        allow_silence=lambda _: None,
    )  # fmt: skip
    assert steps.busy_s == 0.0
    noted: list[tuple[StepWork, float]] = []
    all_noted: list[tuple[StepWork, float]] = []
    with_drafts: list[int] = []

    def note(work: StepWork, seconds: float, num_accepted: int = 0, gap_s: float = 0.0) -> None:
        all_noted.append((work, seconds))
        with_drafts.append(num_accepted)

    streams.note = note  # type: ignore[method-assign]
    model.note = lambda work, seconds: noted.append((work, seconds))  # type: ignore[method-assign]
    work = StepWork(1, 7)
    step_s = model.seconds(work)
    assert steps.launch(lambda: step(7))
    assert steps.busy_s == pytest.approx(step_s)
    now_s += step_s / 4
    assert steps.launch(lambda: step(7))
    assert steps.busy_s == pytest.approx(step_s * 7 / 4)
    now_s += step_s
    steps.retire()
    assert not noted  # only when its tokens are sent
    steps.learn()
    [(noted_work, seconds)] = noted
    assert noted_work == work
    assert seconds == pytest.approx(step_s * 5 / 4)
    now_s += 10 * step_s
    assert steps.busy_s == 0.0
    FakePending.is_over = True
    try:
        steps.retire()
    finally:
        FakePending.is_over = False
    steps.learn()
    assert len(noted) == 1
    assert [seconds for _, seconds in all_noted] == pytest.approx([step_s * 5 / 4, step_s * 10]), "all of the time"


def test_a_step_after_one_that_was_seen_late_teaches_nothing(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began before the host saw the end of the one before it, so that it seems to take no time at all."""
    now_s, noted = [100.0], list[float]()
    steps = pipeline(device, 2)
    steps._clock = lambda: now_s[0]
    steps._model.note = lambda work, seconds: noted.append(seconds)  # type: ignore[method-assign]
    step_s = steps._model.seconds(StepWork(1, 7))
    steps.launch(lambda: step(7))
    steps.launch(lambda: step(7))
    now_s[0] += 10 * step_s
    monkeypatch.setattr(FakePending, "is_over", True)
    steps.retire()
    steps.retire()
    steps.learn()
    assert not noted
    steps.launch(lambda: step(7))  # nothing ran before it
    now_s[0] += step_s / 2
    steps.retire()
    steps.learn()
    assert noted == pytest.approx([step_s / 2])


@pytest.mark.parametrize("may_outlast", [False, True])
def test_a_step_that_may_end_after_its_copies_teaches_nothing(device: FakeDevice, *, may_outlast: bool) -> None:
    steps, noted = pipeline(device, 1), list[StepWork]()
    steps._model.note = lambda work, seconds: noted.append(work)  # type: ignore[method-assign]
    copies = BlockCopies(save=((0, 1, 2),), may_outlast=may_outlast)
    assert steps.launch(lambda: replace(step(0), copies=copies))
    steps.retire()
    steps.learn()
    assert len(noted) == (not may_outlast)


def test_at_depth_1_every_step_is_timed(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's step is over when its launch returns. Nothing ran beside it, so its time is exact."""
    monkeypatch.setattr(FakePending, "is_over", True)
    steps = pipeline(device, 1)
    noted: list[StepWork] = []
    steps._model.note = lambda work, seconds: noted.append(work)  # type: ignore[method-assign]
    for number in range(3):
        assert steps.launch(lambda: step(number))  # noqa: B023 - it is called at once
        steps.retire()
    steps.learn()
    assert noted == [StepWork(1, number) for number in range(3)]


def test_a_step_with_drafts_is_retired_before_the_next_is_planned(device: FakeDevice) -> None:
    drafts = Batch(2, chunks=(SequenceChunk(1, 2, 3, num_samples=1, drafts=(5, 6)),))
    steps = pipeline(device, 3)
    steps.launch(lambda: step(1))
    assert not steps.is_full
    steps.launch(lambda: drafts)
    assert steps.is_full
    steps.retire()
    assert (len(steps), steps.is_full, steps.spare_s(prompts_wait=False)) == (1, True, 0.0)
    steps.retire()
    assert not steps.is_full


def test_a_step_with_drafts_costs_the_time_of_the_host_where_steps_overlap(device: FakeDevice) -> None:
    for depth in (1, 2):
        steps = pipeline(device, depth)
        assert steps.gap_s == 0.0
        steps._timing.note_launch(Batch(0, chunks=(SequenceChunk(1, 4, 1, num_samples=1),)), 0.0009, 0.0007)
        assert steps.gap_s == (0.0 if depth == 1 else 0.0007)


def test_the_device_waits_for_the_host_where_most_steps_are_over_at_its_look(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts = Batch(2, chunks=(SequenceChunk(1, 2, 3, num_samples=1, drafts=(5, 6)),))

    def run(depth: int, *, is_over: bool, batch: Batch) -> bool:
        monkeypatch.setattr(FakePending, "is_over", is_over)
        steps[depth].launch(lambda: batch)
        steps[depth].retire()
        return steps[depth].is_late

    steps = {depth: pipeline(device, depth) for depth in (1, 2)}
    assert [run(2, is_over=True, batch=step(1)) for _ in range(20)] == [False] * 6 + [True] * 14, "one says little"
    assert all(run(2, is_over=False, batch=drafts) for _ in range(20)), "the host always waits for those"
    assert not [run(2, is_over=False, batch=step(1)) for _ in range(20)][-1]
    assert not any(run(1, is_over=True, batch=step(1)) for _ in range(20)), "a step without another beside it"


def test_a_wait_for_a_step_with_prompts_looks_whether_it_is_over(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prediction may be too long by half of a step. What decodes take is known better, and waited for at once."""
    streams = tuple(SequenceChunk(number, 10, 1, num_samples=1) for number in range(8))
    steps = pipeline(device, 2)
    monkeypatch.setattr(steps._timing, "_held", 1.0)
    monkeypatch.setattr(steps._timing, "_decode_s", 0.02)
    monkeypatch.setattr(steps._timing, "_num_decodes", 8)
    monkeypatch.setattr(steps._model, "seconds", lambda work: 60.0)
    steps.launch(lambda: Batch(1, chunks=(*streams, SequenceChunk(9, 0, 500))))
    assert steps.spare_s(prompts_wait=True) == steps.rest_s == LOOK_S
    monkeypatch.setattr(FakePending, "is_over", True)
    assert steps.spare_s(prompts_wait=True) == steps.rest_s == 0
    monkeypatch.setattr(FakePending, "is_over", False)
    steps.retire()
    monkeypatch.setattr(steps._timing, "_decode_s", 60.0)
    steps.launch(lambda: Batch(2, chunks=streams))
    assert min(steps.spare_s(prompts_wait=False), steps.rest_s) > 10 * LOOK_S
