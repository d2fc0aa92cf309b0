"""How long a step may last before the engine counts as frozen. Pure: fed steps and their durations.

A step's *work* is its tokens, each counted once more for every `keys_per_token` tokens before its chunk. Steps of equal
work, by the integer part of its binary logarithm, are of one kind. The next step of a kind is predicted from the
shorter of its last two durations: one long step proves nothing, because this process may have been stopped meanwhile.
The factor of 4 covers differences within a kind (at most 2 times the work) and a busy host.

The first step of a kind is warm-up where kernels are compiled or graphs captured on first use, and cannot be predicted.
Elsewhere it is predicted from the nearest kind that has run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import Batch

FROZEN_S = 3.0  # silence that every engine is allowed: three heartbeats
STEP_FACTOR = 4.0  # of the predicted step
WARM_UP_S = 60.0  # a first step with the compilation of its kernels is shorter


class StepForecast:
    """Predicts one pipeline's steps. `is_compiled_lazily`: the first step of a kind compiles or captures something."""

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

    def note_step(self, kind: int, duration_s: float) -> None:
        """A step of this kind has ended."""
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
