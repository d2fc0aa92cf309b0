"""When an idle prefill node gets a prompt although its pace says that another node answers sooner. Pure.

A node that gets no prompts measures none: a pace that is too long, because the machine was busy or the prompts were
others, would stay for good. So each prompt that another node gets instead saves up a share of its own time, and the
idle node is tried when that pays for what the trial is expected to lose. If it takes as long as its pace says, saving
begins anew. If it is faster, its pace counts as that much shorter while it is idle, until it tells a better one.
"""

from __future__ import annotations

# Of each prompt's time. Beside nodes 1.5, 2, 3 and 8 times as slow the mean time to the first token was 3.1, 2.3, 2.7
# and 5.2% longer than without trials (simulated, prompts of 400 and 1,500 tokens), with 1/20 it was 6.5, 6.3 and 5.4%.
SAVED = 1 / 50
SHORT_S = 0.02  # reported for a prompt that is no evidence: the way to the node and back may take as long
FEWEST = 8  # of one of many workers
MOST = 40  # prompts, after which one of usual length is a trial whatever it costs; after twice as many any is


class IdleTrial:
    """Of one node, at one router."""

    __slots__ = ("_factor", "_saved_s", "num_waited")

    def __init__(self) -> None:
        self._factor = 1.0
        self.num_waited = 0
        self._saved_s = 0.0

    def begin(self) -> None:
        """Begin saving anew: the node has a prompt."""
        self.num_waited, self._saved_s = 0, 0.0

    def note(self, took_s: float, reported_s: float) -> None:
        """Note a prompt that found the node idle. `reported_s`: what it takes by the node's pace; 0: it tells none."""
        if reported_s > SHORT_S:
            self._factor = min(1.0, took_s / reported_s)

    def likely_s(self, reported_s: float) -> float:
        """What a prompt takes at the idle node, by its pace and by the last such prompt."""
        return reported_s * self._factor

    def is_due(self, likely_s: float, usual_s: float, doubt_s: float = 0.0, most: int = MOST) -> bool:
        """Whether the node gets a prompt that takes `usual_s` elsewhere, and probably `likely_s` there.

        So it is without a trial if that is no longer, up to `doubt_s`. `most`: in place of MOST. It stays due until the
        node has a prompt: a request may be refused after its choice, or wait, and be chosen for again.
        """
        if likely_s <= usual_s + doubt_s:
            return True
        self.num_waited += 1
        self._saved_s += SAVED * usual_s
        is_long = self.num_waited * SAVED * usual_s > 1.01 * self._saved_s
        return self._saved_s >= likely_s - usual_s or self.num_waited >= (2 * most if is_long else most)
