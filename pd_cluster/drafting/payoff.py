"""Rests a drafter that costs more than it gains, where the device waits for the host after every step.

What the host does for drafts is free while the device computes. A step of a small model ends before the host has
planned the next one, so there each step is longer by it. SmolLM2 (135M, one H200, steps of 0.7 to 1.2 ms) with drafts
by lookup had 0.76 of the tokens a second without at 8 streams of JSON, with 90 drafts in all: offers and their prices,
0.3 ms a step. Drafts that are right often gained 1.7 times as much all the same, so what decides is measured.
"""

from __future__ import annotations

PROBE = 12  # steps, at least, before a rest: chances of new streams need some
MEMORY = 0.97  # of what was gained and spent, at each step
# Steps without drafts, twice as many each time that a probe gains nothing. PROBE of MOST_REST steps that are 1.25 times
# as long cost 0.6%; streams that begin to repeat themselves wait half a second at most
FIRST_REST, MOST_REST = 32, 512


class Payoff:
    """Sums the seconds that drafts have saved, and those that finding them has taken from steps. Pure."""

    def __init__(self) -> None:
        self._saved_s = 0.0  # less those that were spent
        self._num_steps = 0  # of this probe
        self._rest, self._num_left = FIRST_REST, 0

    def rests(self) -> bool:
        """Whether the next step has no drafts. Called once for each step."""
        if not self._num_left:
            return False
        self._num_left -= 1
        return True

    def spend(self, seconds: float) -> None:
        """Note a step for which the device waited so much longer."""
        self._saved_s = MEMORY * self._saved_s - seconds
        self._num_steps += 1
        if self._num_steps < PROBE:
            return
        if self._saved_s >= 0:
            self._rest = FIRST_REST
            return
        self._num_left, self._rest = self._rest, min(2 * self._rest, MOST_REST)
        self._num_steps, self._saved_s = 0, 0.0

    def forget(self) -> None:
        """Note that the device does not wait for the host: other rules weigh what drafts take of its time."""
        self._num_steps, self._saved_s = 0, 0.0

    def save(self, seconds: float) -> None:
        """Note what accepted drafts have saved. Below 0: their step was longer than that."""
        self._saved_s += seconds
