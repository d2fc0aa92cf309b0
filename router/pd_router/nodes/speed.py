"""How fast a node prefills, learned from the prompts that it has prefilled."""

from __future__ import annotations

import math

FORGET_S = 10.0  # the weight of a sample falls to 1/e in this time
DOUBT_S = 0.5  # a guess weighs as much as samples of so many seconds; no sample is lengthened beyond it
ODD = 4.0  # a sample is limited to a quarter and to four times of the speed so far, except as DOUBT_S says
FORGOTTEN_S = 1e-6  # a smaller weight counts as no sample


class ReadingSpeed:
    """Prompt bytes per second, over the time in which the node had prompts to prefill.

    A prompt's time runs from its arrival, or from the end of the prompt before it, until its own end. This is exact for
    a node that prefills one prompt after the other, and right in sum for one that prefills several at once.
    All bytes count alike, though the end of a long prompt takes longer: prompts of more than 6,000 tokens take a decode
    node 1.3 times as long as expected (simulated; weighting them gained nothing). Times are of any one clock.
    """

    __slots__ = ("_last_s", "_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = 0.0  # prefilled bytes, weighted by age
        self._seconds = 0.0  # the seconds that they took, weighted alike
        self._last_s = -math.inf  # end of the last prompt

    def note(self, num_bytes: int, begun_s: float, now_s: float) -> None:
        """Note that a prompt that the node got at `begun_s` was prefilled at `now_s`."""
        start_s = max(begun_s, self._last_s)
        took_s = now_s - start_s
        if self._seconds * self._fade(start_s) > FORGOTTEN_S:
            usual_s = num_bytes * self._seconds / self._num_bytes
            least_s = min(usual_s / ODD, DOUBT_S)  # so that an absurd speed so far is corrected
            took_s = min(max(took_s, least_s), usual_s * ODD)
        fade = self._fade(now_s)
        self._num_bytes = self._num_bytes * fade + num_bytes
        self._seconds = self._seconds * fade + took_s
        self._last_s = now_s

    def at(self, now_s: float, guess: float | None = None) -> float | None:
        """Bytes per second; `guess` stands in for missing or faded samples. None: no samples and no guess."""
        fade = self._fade(now_s)
        seconds, num_bytes = self._seconds * fade, self._num_bytes * fade
        if guess is not None:
            return (num_bytes + guess * DOUBT_S) / (seconds + DOUBT_S)
        return num_bytes / seconds if seconds > FORGOTTEN_S else None

    def _fade(self, now_s: float) -> float:
        return math.exp((self._last_s - now_s) / FORGET_S)
