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
SURE_SHARE = 0.95  # of the predicted time of a step; the rest is for what makes one shorter than the last
LATE_SHARE = 0.8  # what is left of a prediction that was too long
ALIKE = 0.2  # decode steps whose numbers of sequences differ by less take about as long
MEMORY = 0.95  # a slow planning is remembered for some tens of steps
TRUST = 0.34  # won with each step with prompts that outlasted its prediction; all of it is 1


@dataclass(slots=True)
class Pace:
    """Of one pipeline. Times are in seconds, of any one clock.

    One long step predicts nothing (this process may have been stopped): decode steps are believed when two in a row
    took as long, steps with prompts by and by.
    """

    _host_s: float = 0.0  # planning and launching a step of decodes
    _prompt_host_s: float = 0.0  # the same with prompts: that is not one replay
    _decode_s: float = 0.0  # predicted duration of the next pure decode step; 0: none
    _last_decode_s: float = 0.0  # duration of the last one
    _num_decodes: int = 0  # sequences in it
    _token_s: float = 0.0  # per token, of the fastest step with prompts so far
    _num_tokens: int = 0  # in it: how long many more take cannot be told from so few, for a step has a fixed cost too
    _trust: float = 0.0  # in the two above

    def note_launch(self, batch: Batch, host_s: float) -> None:
        """Planning and launching a step took so long."""
        if _is_decode(batch):
            self._host_s = max(host_s, self._host_s * MEMORY)
        else:
            self._prompt_host_s = max(host_s, self._prompt_host_s * MEMORY)

    def note_step(self, batch: Batch, duration_s: float, *, was_over: bool) -> None:
        """A step took `duration_s` on the device, at most. `was_over`: it had ended before we came to wait for it."""
        if not batch.chunks:
            return
        if not _is_decode(batch):
            self._note_prompts(batch.num_tokens, duration_s, was_over)
            return
        if not was_over:
            self._decode_s = min(duration_s, self._last_decode_s) if self._is_alike(len(batch.chunks)) else 0.0
            self._last_decode_s = duration_s
        elif self._decode_s:
            self._decode_s = self._last_decode_s = min(self._decode_s, duration_s) * LATE_SHARE
        self._num_decodes = len(batch.chunks)

    def _note_prompts(self, num_tokens: int, duration_s: float, was_over: bool) -> None:
        self._trust = self._trust * LATE_SHARE if was_over else min(1.0, self._trust + TRUST)
        token_s = duration_s / num_tokens
        if token_s < self._token_s or not (self._token_s or was_over):
            self._token_s, self._num_tokens = token_s, num_tokens

    def _is_alike(self, num_decodes: int) -> bool:
        return abs(num_decodes - self._num_decodes) <= ALIKE * self._num_decodes

    def rest_s(self, batch: Batch, running_s: float) -> float:
        """How long a step that has run for `running_s` will surely go on; 0: it may end any moment."""
        if not _is_decode(batch):
            sure_s = self._trust * self._token_s * min(batch.num_tokens, self._num_tokens)
        else:
            sure_s = self._decode_s if self._is_alike(len(batch.chunks)) else 0.0
        rest_s = SURE_SHARE * sure_s - running_s - SLACK_S
        return rest_s if rest_s > SLACK_S else 0.0

    def spare_s(self, batch: Batch, running_s: float, *, prompts_wait: bool = False) -> float:
        """How long planning may wait when `batch` is all the device has, and has run for `running_s`. 0: not at all.

        `prompts_wait`: the next step will have some, and takes longer to launch.
        Steps with prompts are not waited for: to have two prompts in one step makes neither faster.
        """
        if not _is_decode(batch):
            return 0.0
        host_s = max(self._host_s, self._prompt_host_s) if prompts_wait else self._host_s
        spare_s = self.rest_s(batch, running_s) - host_s * LEAD_FACTOR
        return spare_s if spare_s > SLACK_S else 0.0


def _is_decode(batch: Batch) -> bool:
    """Whether it is nothing but decodes, whose durations resemble each other."""
    return batch.num_tokens == len(batch.chunks)
