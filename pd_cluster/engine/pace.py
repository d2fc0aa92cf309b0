"""When to plan the next step: as late as the device allows.

A step that is planned as soon as the device has begun the one before it leaves out all that arrives meanwhile: a
request that was handed over then waits one and a half steps on average before its first decode. Planned just before the
device runs dry, it waits half a step. So the end of the running step is predicted from the last step like it. When a
prediction was too long (the device was idle when we looked), the next ones are shortened: the device comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.engine.batch import Batch

SLACK_S = 0.001  # the resolution of waits
LEAD_FACTOR = 1.5  # of the host's own time for a step, which it must not exceed
SURE_SHARE = 0.95  # of the predicted time of a decode step; the rest is for what makes one shorter than the last
LATE_SHARE = 0.8  # what is left of a prediction that was too long
ALIKE = 0.2  # decode steps whose numbers of sequences differ by less take about as long
IDLE_S = 50e-6  # a wait that ends sooner found the device idle
MEMORY = 0.95  # a slow planning is remembered for some tens of steps


@dataclass(slots=True)
class Pace:
    """Of one pipeline. Times are in seconds, of any one clock."""

    _host_s: float = 0.0  # planning and launching a step
    _decode_s: float = 0.0  # predicted duration of the next pure decode step
    _num_decodes: int = 0  # sequences in the step that this was learnt from
    _token_s: float = 0.0  # per token, of the fastest step with prompts so far

    def note_launch(self, host_s: float) -> None:
        """Planning and launching a step took so long."""
        self._host_s = max(host_s, self._host_s * MEMORY)

    def note_step(self, batch: Batch, duration_s: float, waited_s: float) -> None:
        """A step took `duration_s` on the device, at most; we had to wait `waited_s` for its end."""
        if not batch.chunks:
            return
        if not _is_decode(batch):
            if waited_s > IDLE_S:
                token_s = duration_s / batch.num_tokens
                self._token_s = min(self._token_s or token_s, token_s)
            return
        if waited_s > IDLE_S:
            self._decode_s = duration_s
        elif self._decode_s:
            self._decode_s = min(self._decode_s, duration_s) * LATE_SHARE
        self._num_decodes = len(batch.chunks)

    def rest_s(self, batch: Batch, running_s: float) -> float:
        """How long a step that has run for `running_s` will surely go on; 0: it may end any moment."""
        count = len(batch.chunks)
        if not _is_decode(batch):
            sure_s = self._token_s * batch.num_tokens
        elif abs(count - self._num_decodes) <= ALIKE * self._num_decodes:
            sure_s = self._decode_s
        else:
            return 0.0
        rest_s = SURE_SHARE * sure_s - running_s - SLACK_S
        return rest_s if rest_s > SLACK_S else 0.0

    def spare_s(self, batch: Batch, running_s: float) -> float:
        """How long planning may wait when `batch` is all the device has, and has run for `running_s`. 0: not at all.

        Steps with prompts are not waited for: to have two prompts in one step makes neither faster.
        """
        if not _is_decode(batch):
            return 0.0
        spare_s = self.rest_s(batch, running_s) - self._host_s * LEAD_FACTOR
        return spare_s if spare_s > SLACK_S else 0.0


def _is_decode(batch: Batch) -> bool:
    """Whether it is nothing but decodes, whose durations resemble each other."""
    return batch.num_tokens == len(batch.chunks)
