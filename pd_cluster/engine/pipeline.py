"""Steps that were launched and have not retired, in order.

    depth 1   launch n, wait for n                      no overlap: on a CPU the step needs the cores that plan
    depth 2   launch n + 1, then wait for n             the device never waits for the host between two steps

After a step with drafts no other is launched before it has retired: its sequences could not be in the next one,
because it is uncertain where they go on. They would be in every other step only.

When the connector learns what a step touches:

    loads of step n       `recv_before` once every step before n has retired; n itself writes none of their blocks
    publishes of step n   those of no tokens, that a prompt has begun, at once; the others are sent by the caller of
                          `retire`, with the first tokens that the step sampled
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_cluster.engine.step_timing import FROZEN_S, LOOK_S, StepForecast, StepTiming
from pd_cluster.scheduling.step_model import StepWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.scheduling.stream_room import StreamRoom
    from pd_cluster.worker.executor import Executor, Pending
    from pd_connectors.base import LoadSpec, WorkerHalf

LATE_MEMORY, MOST_IN_TIME = 0.1, 0.5  # of the last steps, some ten count


@dataclass(slots=True)
class Flight:
    """A step that was launched and has not retired."""

    batch: Batch
    pending: Pending
    launched_s: float
    kind: int  # see `StepForecast`
    allowed_s: float
    work: StepWork
    predicted_s: float
    is_uncertain: bool  # it has drafts
    gap_s: (
        float  # from the end of one with drafts to its launch, which counts in its seconds; 0: no other was before it
    )
    loads_after: list[LoadSpec] = field(default_factory=list)  # they start when this step has retired


class Pipeline:
    """Launches steps and retires them, oldest first.

    depth: how many steps may run while the host waits.  model: learns how long steps take.  room: learns what prompts
    take of the time.  allow_silence: called before a step that may take longer than the one before it, with the number
    of seconds in which the step loop may not turn.
    """

    def __init__(
        self,
        executor: Executor,
        connector: WorkerHalf,
        depth: int,
        clock: Callable[[], float],
        forecast: StepForecast,
        model: StepModel,
        room: StreamRoom,
        allow_silence: Callable[[float], None],
    ) -> None:
        assert depth >= 1
        self.depth = depth
        self._forecast = forecast
        self._model = model
        self._room = room
        self._allow_silence = allow_silence
        self.allowed_s = FROZEN_S  # silence that was announced last
        self.total_s = 0.0  # with at least one step under way
        self._executor = executor
        self._connector = connector
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self.num_retired = 0
        self._retired_s = 0.0
        self._was_over = False  # the step that retired last, before the host looked
        self._late_share = 0.0  # of steps without drafts, those that were over before the host looked
        self._was_uncertain = False  # the step that retired last
        self._timing = StepTiming()
        self._unlearned: list[tuple[Flight, StepResult, float, bool]] = []  # retired: seconds, and whether exact

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """Whether the oldest step should be retired before another is planned."""
        return len(self._flights) >= self.depth or self._is_uncertain

    @property
    def is_dry(self) -> bool:
        """Whether the device idles until the next launch, after a step with drafts. Never where it does in any case."""
        return self.depth > 1 and self._was_uncertain and not self._flights

    @property
    def _is_uncertain(self) -> bool:
        return bool(self._flights) and self._flights[-1].is_uncertain

    def spare_s(self, *, prompts_wait: bool) -> float:
        """Seconds for which planning the next step may wait for more requests, before it asks again; 0: plan now."""
        if len(self._flights) != 1 or self.depth == 1 or self._is_uncertain:
            return 0.0
        return self._until_look(self._timing.spare_s(*self._running, self._predicted_s, prompts_wait=prompts_wait))

    @property
    def rest_s(self) -> float:
        """Seconds for which the oldest step is not looked at, because it cannot end yet; 0: it may have ended."""
        return 0.0 if self.depth == 1 else self._until_look(self._timing.rest_s(*self._running, self._predicted_s))

    def _until_look(self, seconds: float) -> float:
        """A part of this wait for the oldest step, if that has prompts; 0 once it is over."""
        flight = self._flights[0]
        if not seconds or not flight.work.num_tokens:
            return seconds
        return 0.0 if flight.pending.is_over else min(seconds, LOOK_S)

    @property
    def _predicted_s(self) -> float:
        """Of the oldest step."""
        return self._flights[0].predicted_s

    @property
    def decode_s(self) -> float:
        """Seconds of the last step with decodes only; 0: not known."""
        return self._timing.decode_s

    @property
    def gap_s(self) -> float:
        """Seconds that the device idles after a step with drafts: the host plans the next one then.

        0 where it does so after every step.
        """
        return 0.0 if self.depth == 1 else self._timing.gap_s

    @property
    def is_late(self) -> bool:
        """Whether most steps were over before the host looked: what it does then makes each step longer."""
        return self._late_share > MOST_IN_TIME

    @property
    def busy_s(self) -> float:
        """Predicted seconds until every step under way has ended."""
        if not self._flights:
            return 0.0
        _, running_s = self._running
        return max(0.0, sum(flight.predicted_s for flight in self._flights) - running_s)

    @property
    def absent(self) -> frozenset[int]:
        """The sequences for which the newest step draws no token. Known when the next one is planned."""
        return self._flights[-1].pending.absent if self._flights else frozenset()

    @property
    def _running(self) -> tuple[Batch, float]:
        """The oldest step, and the seconds for which it has run on the device."""
        flight = self._flights[0]
        return flight.batch, self._clock() - max(flight.launched_s, self._retired_s)

    def launch(self, plan: Callable[[], Batch]) -> bool:
        """Plan a step and start it. Returns False if the step has no work for the worker."""
        started_s = self._clock()
        waited_s = self._executor.draw_late()
        batch = plan()
        if self._flights:
            self._flights[-1].loads_after.extend(batch.loads)
        else:
            self._connector.recv_before(batch.loads)
        if not batch.moves_worker:
            return False
        launched_s = self._clock()
        self._connector.send_after(batch.begun)  # first: a launch takes milliseconds, on a CPU the whole step
        kind = self._forecast.kind_of(batch)
        allowed_s = self._forecast.allowed_s(kind)
        self._allow(max([allowed_s, *(flight.allowed_s for flight in self._flights)]))
        pending = self._executor.launch(batch, self._forecast.deadline_s(kind))
        work = StepWork.of(batch.chunks)  # after the launch: the device has work by now
        predicted_s = self._model.seconds(work)
        gap_s = 0.0
        if self._was_uncertain and not self._flights:
            gap_s = launched_s - self._retired_s
            self._timing.note_gap(gap_s)
        self._flights.append(
            Flight(batch, pending, launched_s, kind, allowed_s, work, predicted_s, work.num_drafts > 0, gap_s)
        )
        self._timing.note_launch(batch, self._clock() - started_s - waited_s, launched_s - started_s - waited_s)
        return True

    def retire(self) -> tuple[Batch, StepResult]:
        """Wait for the oldest step, and start the loads after it. The caller announces what it computed."""
        flight = self._flights.popleft()
        # At depth 1 the host waits from the launch on, so it sees the end of each step; a CPU's is over by then.
        was_over = self.depth > 1 and flight.pending.is_over
        result = flight.pending.result()
        now_s = self._clock()
        duration_s = now_s - max(flight.launched_s, self._retired_s)
        self._timing.note_step(flight.batch, duration_s, was_over=was_over, predicted_s=flight.predicted_s)
        self._forecast.note_step(flight.kind, duration_s)
        # A step had begun before if the host did not see the end of the one before it at once: 0 s of it were
        # noted, and its longer likes never
        is_begin_seen = not self._was_over or flight.launched_s >= self._retired_s
        is_exact = is_begin_seen and (not was_over or duration_s < flight.predicted_s)
        # Prices of drafts hold their steps' launches. Decodes would seem longer by them
        is_of_decodes = not (flight.is_uncertain or flight.work.num_tokens)
        is_exact = is_exact and not (self.depth > 1 and flight.gap_s and is_of_decodes)
        is_exact = is_exact and not flight.batch.copies.may_outlast
        self._was_over, self._was_uncertain = was_over, flight.is_uncertain
        if not flight.is_uncertain:
            self._late_share += LATE_MEMORY * (was_over - self._late_share)
        self._unlearned.append((flight, result, duration_s, is_exact))
        self.total_s += duration_s
        self._retired_s = now_s
        self.num_retired += 1
        if flight.loads_after:
            self._connector.recv_before(flight.loads_after)
        return flight.batch, result

    def learn(self) -> None:
        """Correct predictions by the steps that have retired. Call it when their tokens are sent: it takes 40 us."""
        for flight, result, duration_s, is_exact in self._unlearned:
            if is_exact:
                self._model.note(flight.work, duration_s)
            num_accepted = _num_accepted(flight.batch, result) if flight.is_uncertain else 0
            self._room.note(flight.work, duration_s, num_accepted, flight.gap_s)
        self._unlearned.clear()

    def rest(self) -> None:
        """Allow only the usual silence again. Call it when no step runs."""
        assert not self._flights
        self._was_uncertain = False  # what follows is no gap: there was nothing to compute
        self._allow(FROZEN_S)

    def _allow(self, allowed_s: float) -> None:
        if allowed_s != self.allowed_s:
            self.allowed_s = allowed_s
            self._allow_silence(allowed_s)


def _num_accepted(batch: Batch, result: StepResult) -> int:
    """The drafts of a step that were accepted. A sequence that is absent has none."""
    runs = (result.samples.get(chunk.seq_id) for chunk in batch.chunks if chunk.drafts)
    return sum(len(run) - 1 for run in runs if run)
