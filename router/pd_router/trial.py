"""When an idle prefill node gets a prompt although its pace says that another node answers sooner. Pure.

A node that gets no prompts measures none: a pace that is too long, because the machine was busy or the prompts were
others, would stay for good. So each prompt that another node gets instead saves up a share of its own time, and the
idle node is tried when that pays for what the trial is expected to lose. If it takes as long as its pace says, saving
begins anew. If it is faster, its pace counts as that much shorter while it is idle, until it tells a better one.
"""

from __future__ import annotations

SAVED = 1 / 20  # of each prompt's time: what trials add to the mean time to the first token, up to MOST
MOST = 48  # prompts until a trial whatever it costs: two routers try within 96 requests


class IdleTrial:
    """Of one node, at one router."""

    __slots__ = ("_factor", "_num_waited", "_saved_s")

    def __init__(self) -> None:
        self._factor = 1.0
        self._num_waited = 0
        self._saved_s = 0.0

    def note(self, took_s: float, told_s: float) -> None:
        """Note a prompt that found the node idle. `told_s`: what it takes by the node's pace; 0: it tells none."""
        if told_s:
            self._factor = min(1.0, took_s / told_s)

    def likely_s(self, told_s: float) -> float:
        """What a prompt takes at the idle node, by its pace and by the last such prompt."""
        return told_s * self._factor

    def is_due(self, late_s: float, usual_s: float) -> bool:
        """Whether the node gets a prompt by which the client probably loses `late_s` of the `usual_s` elsewhere."""
        if late_s <= 0.0:
            return True
        self._num_waited += 1
        self._saved_s += SAVED * usual_s
        if self._saved_s < late_s and self._num_waited < MOST:
            return False
        self._num_waited, self._saved_s = 0, 0.0
        return True
