"""How many streams more a node holds within their target of time per token. Pure: fed steps and times.

A decode node's streams take their steps, and prompts only what those leave (`step_budget.py`), so it holds as many as
one step computes within the target. On a prefill node prompts come first: its streams take what prompts leave of the
time. `share` is what prompts took lately, so a step may take 1 - share of the target. Routers give a prefill node
streams only while it has room for them.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.step_budget import AIM

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.step_model import StepModel, StepWork

FADE_S = 5.0  # the weight of a prompt's time falls to 1/e in this time: two answers of 256 tokens
USUAL_CONTEXT = 1024  # tokens before a decode, until the node has had one


class StreamRoom:
    """`prompts_first`: whether prompts take their time before streams do."""

    def __init__(self, tpot_s: float, max_num_seqs: int, model: StepModel, clock: Callable[[], float]) -> None:
        self.tpot_s = tpot_s  # inf: no target
        self.prompts_first = False
        self._max_num_seqs = max_num_seqs
        self._model = model
        self._clock = clock
        self._prompts_s = 0.0  # that prompts took, weighted by age
        self._noted_s = clock()
        self._context = float(USUAL_CONTEXT)  # of one decode

    @property
    def is_known(self) -> bool:
        """Whether there is a target, and steps are predicted from this node's own."""
        return self.tpot_s < inf and self._model.is_fitted

    @property
    def share(self) -> float:
        """Of the time lately, what prompts took."""
        return min(1.0, self._prompts_s * exp((self._noted_s - self._clock()) / FADE_S) / FADE_S)

    def note(self, work: StepWork, seconds: float) -> None:
        """Note a step that has ended."""
        if work.num_decodes:
            self._context = work.context / work.num_decodes
        if work.num_tokens:
            streams_s = self._model.decode_s(work.num_decodes, work.context) if work.num_decodes else 0.0
            now_s = self._clock()
            self._prompts_s *= exp((self._noted_s - now_s) / FADE_S)
            self._prompts_s += max(0.0, seconds - streams_s)
            self._noted_s = now_s

    def beside(self, num_streams: int) -> int:
        """The streams more beside so many."""
        if not self.is_known:
            return 0
        allowed_s = AIM * self.tpot_s * (1.0 - self.share if self.prompts_first else 1.0)
        most = range(1, self._max_num_seqs + 1)
        held = bisect_right(most, allowed_s, key=lambda num: self._model.decode_s(num, round(num * self._context)))
        return max(0, held - num_streams)
