"""How long steps take: when to plan the next one, and when the engine counts as frozen. Pure: fed steps and times.

**StepTiming** plans as late as the device allows. A step that is planned as soon as the device has begun the one before
it leaves out all requests that arrive meanwhile: a request that was handed over then waits one and a half steps on
average before its first decode. Planned just before the device runs dry, it waits half a step. So the end of the
running step is predicted from the last step like it. When a prediction was too long (the device was idle when the host
looked), the next ones are shortened, because an idle device costs more. A step of decodes and prompts takes at least
as long as its decodes alone do, and as the step model says, as far as that held of late. Planned once its decodes' time
was over, the next step left out what came in the last three quarters of one of 38 ms: of the streams that were handed
over to a decode node with such steps a tenth waited 58 to 74 ms and more for a token (8B, two H200s, two seeds).

**StepForecast** bounds a step from above. A step's *work* is its tokens, each counted once more for every
`keys_per_token` tokens before its chunk. Steps of equal work, by the integer part of its binary logarithm, are of one
kind. The next step of a kind is predicted from the shorter of its last two durations: one long step proves nothing,
because this process may have been stopped meanwhile. The factor of 4 covers differences within a kind (at most 2 times
the work) and a busy host. The first step of a kind is warm-up where kernels are compiled or graphs captured on first
use, and cannot be predicted. Elsewhere it is predicted from the nearest kind that has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch

RANK_S = 5.0  # for a step's end on every rank, at least
RANK_FACTOR = 10.0  # of the predicted step; a host that is busy with other processes delays one rank more than all
# Silence that every engine is allowed: two heartbeats and a quarter. Streams that a stopped engine had begun stood
# still for 5.4 s with three heartbeats, 5.0 with two and a half (2 cores, 16 streams at once)
FROZEN_S = 2.25
STEP_FACTOR = 4.0  # of the predicted step
WARM_UP_S = 60.0  # a first step with the compilation of its kernels is shorter

SLACK_S = 0.0005  # by which a wait may exceed its timeout
LEAD_FACTOR = 1.5  # planning begins this many times the host's time for a step before the running step ends
SURE_SHARE = 0.95  # of the predicted time of a step; a step may be shorter than the last one by the rest
LATE_SHARE = 0.8  # a prediction that was too long is multiplied by this
GROWTH = 1.05  # most growth of a prediction in one step, so that it follows the shorter of alternating steps
FLOOR = 0.5  # a prediction is at least this share of the shorter of the last two steps
ALIKE = 0.2  # decode steps take about equally long if their numbers of sequences differ by a smaller share
MEMORY = 0.95  # a slow planning is remembered for some tens of steps
GAP_SHARE = 0.1  # of a gap in the mean of gaps
TRUST = 0.1  # gained by predictions of steps with prompts with each step that outlasted its own; at most 1 in all
# While a step with prompts is waited for, it is looked at so often whether it is over: a look takes some 10 us, and
# without it the device would idle for 15 ms where a step of 38 ms takes half of what the model says
LOOK_S = 0.001


@dataclass(slots=True)
class StepTiming:
    """Predicts how long the steps of one pipeline take at least. Times are in seconds, of any one clock.

    One long step predicts nothing, because this process may have been stopped. A decode step is predicted from the
    shorter of the last two; of what the step model predicts for a step with prompts the share counts that held lately.
    """

    _host_s: float = 0.0  # planning and launching a step of decodes
    _prompt_host_s: float = 0.0  # planning and launching a step with prompts, which may not be one graph
    _plan_s: float = 0.0  # planning alone, of the last step of decodes
    _gap_s: float = 0.0  # a mean; 0: none was noted
    _decode_s: float = 0.0  # predicted duration of the next pure decode step; 0: none
    _last_decode_s: float = 0.0  # duration of the last one
    _num_decodes: int = 0  # rows of logits in it: one a sequence, and one a draft
    _held: float = 0.0  # of its prediction: how long a step with prompts is sure to take; 0 to 1
    _last_share: float = 1.0  # of its prediction: how long the last one took

    @property
    def decode_s(self) -> float:
        """Seconds of the last pure decode step; 0: not known."""
        return self._last_decode_s

    @property
    def gap_s(self) -> float:
        """Seconds from the end of a step with drafts to the launch of the next one; at first those of any planning.

        The launch is in the seconds of the next step. The longest of launches in place of them, 2 ms and more in the
        first steps of a node, let it draft nothing, so that no gap was ever noted.
        """
        return self._gap_s or self._plan_s

    def note_gap(self, gap_s: float) -> None:
        """Note such a gap. A long one says little: there may have been nothing to compute."""
        self._gap_s = self.gap_s + GAP_SHARE * (min(gap_s, 2 * self.gap_s) - self.gap_s)

    def note_launch(self, batch: Batch, host_s: float, plan_s: float = 0.0) -> None:
        """Note that planning and launching a step took `host_s`, of which planning `plan_s`."""
        if _is_of_decodes(batch):
            self._plan_s = plan_s
            self._host_s = max(host_s, self._host_s * MEMORY)
        else:
            self._prompt_host_s = max(host_s, self._prompt_host_s * MEMORY)

    def note_step(self, batch: Batch, duration_s: float, *, was_over: bool, predicted_s: float = 0.0) -> None:
        """Note a step of at most `duration_s` on the device. `was_over`: it ended before the host waited for it.

        `predicted_s`: by the step model; 0: not known, as of all others here.
        """
        if not batch.chunks:
            return
        num_decodes = _num_decodes(batch)
        is_decode_late = was_over and self._decode_s and self._is_alike(num_decodes)
        if not _is_of_decodes(batch):
            if is_decode_late and self._decode_s >= self._held * predicted_s:  # else its decodes were not waited for
                self._decode_s = min(self._decode_s, duration_s) * LATE_SHARE
            if predicted_s:
                self._note_prompts(duration_s / predicted_s, was_over)
            return
        if is_decode_late:
            self._decode_s = self._last_decode_s = min(self._decode_s, duration_s) * LATE_SHARE
        if not was_over:
            sure_s = min(duration_s, self._last_decode_s) if self._is_alike(num_decodes) else 0.0
            self._decode_s = min(sure_s, max(self._decode_s * GROWTH, sure_s * FLOOR)) if self._decode_s else sure_s
            self._last_decode_s = duration_s
        self._num_decodes = num_decodes

    def _note_prompts(self, share: float, was_over: bool) -> None:
        if was_over:
            self._held = min(self._held, share) * LATE_SHARE
        else:
            self._held = min(1.0, self._held + TRUST, share, self._last_share)
        self._last_share = share

    def _is_alike(self, num_decodes: int) -> bool:
        return abs(num_decodes - self._num_decodes) <= ALIKE * self._num_decodes

    def rest_s(self, batch: Batch, running_s: float, predicted_s: float = 0.0) -> float:
        """Seconds for which a step that has run for `running_s` will not end; 0: it may end at any moment."""
        return _until(self._sure_s(batch, _num_decodes(batch), predicted_s), running_s)

    def spare_s(self, batch: Batch, running_s: float, predicted_s: float = 0.0, *, prompts_wait: bool = False) -> float:
        """Seconds for which planning the next step may wait without leaving the device idle. 0: plan now.

        `batch` is the only step on the device and has run for `running_s`. `prompts_wait`: the next step will have
        prompts, so its launch takes longer. Planning never waits where the running step has prompts alone: no stream
        could join the next one sooner, and two prompts take as long in one step as in two.
        """
        num_decodes = _num_decodes(batch)
        if not num_decodes:
            return 0.0
        with_prompts = prompts_wait or not _is_of_decodes(batch)
        host_s = max(self._host_s, self._prompt_host_s) if with_prompts else self._host_s
        spare_s = _until(self._sure_s(batch, num_decodes, predicted_s), running_s) - host_s * LEAD_FACTOR
        return spare_s if spare_s > SLACK_S else 0.0

    def _sure_s(self, batch: Batch, num_decodes: int, predicted_s: float) -> float:
        """The least seconds of a step with `num_decodes` rows of decodes; 0: unknown."""
        sure_s = self._decode_s if num_decodes and self._is_alike(num_decodes) else 0.0
        return sure_s if _is_of_decodes(batch) else max(sure_s, self._held * predicted_s)


class StepForecast:
    """Bounds the duration of steps. `is_compiled_lazily`: the first step of a kind compiles or captures."""

    def __init__(self, *, keys_per_token: int = 0, is_compiled_lazily: bool) -> None:
        self._keys_per_token = keys_per_token
        self._is_compiled_lazily = is_compiled_lazily
        self._durations: dict[int, tuple[float, float]] = {}  # kind -> of its last two steps

    def kind_of(self, batch: Batch) -> int:
        """The kind of a step: steps of one kind take about as long."""
        work = batch.num_tokens
        if self._keys_per_token:
            work += sum(chunk.start * chunk.num_tokens for chunk in batch.chunks) // self._keys_per_token
        return work.bit_length()

    def allowed_s(self, kind: int) -> float:
        """Seconds after which the engine is frozen if a step of this kind has not ended."""
        predicted_s = self._predicted_s(kind)
        return WARM_UP_S if predicted_s is None else max(FROZEN_S, STEP_FACTOR * predicted_s)

    def deadline_s(self, kind: int) -> float:
        """Seconds after which a rank is lost if a step of this kind has not ended on it."""
        predicted_s = self._predicted_s(kind)
        return WARM_UP_S if predicted_s is None else max(RANK_S, RANK_FACTOR * predicted_s)

    def note_step(self, kind: int, duration_s: float) -> None:
        """Note the duration of a step of this kind, which has ended."""
        _, last_s = self._durations.get(kind, (duration_s, duration_s))
        self._durations[kind] = (last_s, duration_s)

    def _predicted_s(self, kind: int) -> float | None:
        """None: a step of this kind is warm-up."""
        if (last := self._durations.get(kind)) is not None:
            return min(last)
        if self._is_compiled_lazily or not self._durations:
            return None
        nearest = min(self._durations, key=lambda known: (abs(known - kind), -known))
        growth = 2.0 ** max(0, kind - nearest)  # a smaller step takes no longer than a larger one
        return min(min(self._durations[nearest]) * growth, WARM_UP_S / STEP_FACTOR)


def _until(sure_s: float, running_s: float) -> float:
    rest_s = SURE_SHARE * sure_s - running_s - SLACK_S
    return rest_s if rest_s > SLACK_S else 0.0


def _is_of_decodes(batch: Batch) -> bool:
    """Whether a step has no prompts, or is as short as if it had none. Prompts are last in it."""
    return not batch.chunks or batch.chunks[-1].is_decode


def _num_decodes(batch: Batch) -> int:
    """The tokens of a step's decodes: one each, and its drafts. A draft takes as long as a decode, but for its keys."""
    prompts = takewhile(lambda chunk: not chunk.is_decode, reversed(batch.chunks))  # they are last, and few
    return batch.num_tokens - sum(chunk.num_tokens for chunk in prompts)
