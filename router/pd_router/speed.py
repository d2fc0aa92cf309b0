"""How fast a node reads prompts, learned from those that it has read."""

from __future__ import annotations

import math

FORGET_S = 10.0  # after as long a sample weighs 1/e, whether or not others have come
DOUBT_S = 0.5  # of reading: a guess is worth as much as samples of so long, and no sample is made longer than this
ODD = 4.0  # no sample counts for slower than the speed so far by more; nor for faster, but for that
FORGOTTEN_S = 1e-6  # samples that weigh less are none


class ReadingSpeed:
    """Prompt bytes per second of reading: of the time in which the node had any to read.

    A prompt is read from its beginning, or from the end of the one before it, until its own end: exact for a node that
    reads one after the other, right in sum for one that reads several at once. Times are of any one clock.
    Bytes count alike wherever they stand, though the end of a long prompt is read slower: prompts of more than 6,000
    tokens take a decode node 1.3 times as long as expected (simulated; counting them as longer gained nothing).
    """

    __slots__ = ("_last_s", "_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = 0.0  # as much has been read, older bytes counting less,
        self._seconds = 0.0  # in so long, faded alike
        self._last_s = -math.inf  # end of the last one

    def note(self, num_bytes: int, begun_s: float, now_s: float) -> None:
        """A prompt that was given to the node at `begun_s` has been read just now."""
        start_s = max(begun_s, self._last_s)
        took_s = now_s - start_s
        if self._seconds * self._fade(start_s) > FORGOTTEN_S:
            usual_s = num_bytes * self._seconds / self._num_bytes
            least_s = min(usual_s / ODD, DOUBT_S)  # a speed so far that is absurd is not stretched for ever
            took_s = min(max(took_s, least_s), usual_s * ODD)
        fade = self._fade(now_s)
        self._num_bytes = self._num_bytes * fade + num_bytes
        self._seconds = self._seconds * fade + took_s
        self._last_s = now_s

    def at(self, now_s: float, guess: float | None = None) -> float | None:
        """Bytes per second; a `guess` replaces what is not known, or was forgotten. None: neither."""
        fade = self._fade(now_s)
        seconds, num_bytes = self._seconds * fade, self._num_bytes * fade
        if guess is not None:
            return (num_bytes + guess * DOUBT_S) / (seconds + DOUBT_S)
        return num_bytes / seconds if seconds > FORGOTTEN_S else None

    def _fade(self, now_s: float) -> float:
        return math.exp((self._last_s - now_s) / FORGET_S)
