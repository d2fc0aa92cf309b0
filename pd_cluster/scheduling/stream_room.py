"""How many streams more a node holds within their target of time per token. Pure: fed steps and times.

A decode node's streams take their steps, and prompts only what those leave (`step_budget.py`), so it holds as many as
one step computes within the target. On a prefill node prompts come first: its streams take what prompts leave of the
time. `share` is what prompts took lately, so a step may take 1 - share of the target. Its prompts also need slots and
memory, which streams keep for seconds. Routers give a prefill node streams only while it has room for them.

With drafts a stream gets more than a token a step, and a step takes longer. What counts is the tokens that it gets in
the time of a step of decodes alone: `pace`, 1 without drafts. A stream to come may find nothing to draft, so the pace
is that of the streams that are there, and 1 for those to come.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil, exp, inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.step_model import StepModel, StepWork
    from pd_connectors.protocol.feed import NodeLoad

# Of the target. Prompts prolong a step up to AIM of it (`targets.py`), but a stream's time per token is a mean of
# steps, where errors of both signs cancel (simulated, a mixture, 1P1D at 20/s: share within 200/10 .79, .87 with 0.98)
HELD = 0.98
LATE = 1.5  # targets within which a prefill node takes streams that would miss it everywhere (`NodeLoad.late_room`)
FADE_S = 5.0  # the weight of what is past falls to 1/e in this time: two answers of 256 tokens
# Of a prefill node's slots, for prompts. Without it they wait for the end of a stream: TTFT p90 538 ms, 60 with it
# (simulated: 64 slots, 1000 in, 1100 out, 16/s)
SPARE_SLOTS = 1 / 8
# Of the bound of gaps, what the streams of a prefill node that was told no target may take: the rest is for its prompts
KEPT_STEP = 1 / 4
# Of its KV memory, from which on it takes no more streams: those that it has grow, and leases last. With memory for 19
# such prompts the median was 2.4 s without, 33 ms with it; none is 25
SPARE_MEMORY = 1 / 2
USUAL_CONTEXT = 1024  # tokens before a decode, while the node has had none lately
# Tokens of streams, of 1 each, that count beside those of the last seconds: a few lucky steps of one stream are no pace
UNDRAFTED = 64


class StreamRoom:
    """`prompts_first`: whether prompts take their time before streams do."""

    def __init__(self, tpot_s: float, max_num_seqs: int, model: StepModel, clock: Callable[[], float]) -> None:
        self.tpot_s = tpot_s  # inf: no target
        self.prompts_first = False
        self.gap_s = inf  # bound of the steps that prompts make beside streams
        self._max_num_seqs = max_num_seqs
        self._model = model
        self._clock = clock
        self._prompts_s = 0.0  # that prompts took, weighted by age
        self._noted_s = clock()
        self._context = float(USUAL_CONTEXT)  # of one decode in the last step with any
        self._decoded_s = self._noted_s
        # Tokens of streams, and those that decodes alone had drawn in the same time; both weighted by age
        self._num_out = self._num_alone = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there is a target, and steps are predicted from this node's own."""
        return self.tpot_s < inf and self._model.is_fitted

    @property
    def share(self) -> float:
        """Of the time lately, what prompts took."""
        return min(1.0, self._prompts_s * exp((self._noted_s - self._clock()) / FADE_S) / FADE_S)

    @property
    def context(self) -> float:
        """Expected of one decode: as in the last step with decodes, which says less and less of the next stream."""
        return USUAL_CONTEXT + (self._context - USUAL_CONTEXT) * exp((self._decoded_s - self._clock()) / FADE_S)

    @property
    def pace(self) -> float:
        """Tokens that a stream got lately in the time of a step of decodes alone. At least 1."""
        weight = exp((self._decoded_s - self._clock()) / FADE_S)
        return max(1.0, (weight * self._num_out + UNDRAFTED) / (weight * self._num_alone + UNDRAFTED))

    def filled_in(self, load: NodeLoad, num_streams: int, num_promised: int = 0) -> NodeLoad:
        """`load` with the target, and the rooms beside so many streams, which may have `num_promised` tokens.

        A prefill node without a target tells what it may keep, a node of another role nothing. Without streams the last
        step says nothing of one to come.
        """
        if not num_streams and self._model.is_fitted:
            load = replace(load, step_s=self._model.decode_s(0, 0))
        if not self.is_known:
            return self._keeping(load, num_streams, num_promised) if self.prompts_first else load
        free = load.free_blocks / load.num_blocks
        within, late = (self.beside(num_streams, free, targets) for targets in (1.0, LATE))
        return replace(load, tpot_s=self.tpot_s, stream_room=within, late_room=late)

    def _keeping(self, load: NodeLoad, num_streams: int, num_promised: int) -> NodeLoad:
        """Prompts keep the most of each step, some slots, and half of the memory however long the answers become."""
        if not self._model.is_fitted or self.gap_s == inf or self.tpot_s < inf:
            return load
        step_s = self._model.decode_s(num_streams, load.num_context)
        has_slots = load.num_running + load.num_waiting < (1 - SPARE_SLOTS) * load.num_slots
        has_time = step_s <= KEPT_STEP * self.gap_s
        is_free = load.free_blocks >= SPARE_MEMORY * load.num_blocks
        most = int((1 - SPARE_MEMORY) * load.num_blocks) * load.block_size if has_slots and has_time and is_free else 0
        return replace(load, step_s=step_s, kept_tokens=max(0, most - num_promised))

    def note(self, work: StepWork, seconds: float, num_accepted: int = 0, gap_s: float = 0.0) -> None:
        """Note a step that has ended. `num_accepted`: of its drafts. `gap_s`: in which it could not begin."""
        now_s = self._clock()
        if work.num_decodes:
            self._note_tokens(work, num_accepted, gap_s, exp((self._decoded_s - now_s) / FADE_S))
            self._context, self._decoded_s = work.context / work.num_decodes, now_s
        if work.num_tokens:
            streams_s = self._model.seconds(work.streams) if work.num_decodes else 0.0
            self._prompts_s *= exp((self._noted_s - now_s) / FADE_S)
            self._prompts_s += max(0.0, seconds - streams_s)
            self._noted_s = now_s

    def _note_tokens(self, work: StepWork, num_accepted: int, gap_s: float, weight: float) -> None:
        num_alone = float(work.num_decodes)
        if work.num_drafts or gap_s:
            alone_s = self._model.decode_s(work.num_decodes, work.context)
            num_alone *= (gap_s + self._model.seconds(work.streams)) / alone_s
        self._num_out = weight * self._num_out + work.num_decodes + num_accepted
        self._num_alone = weight * self._num_alone + num_alone

    def beside(self, num_streams: int, free: float = 1.0, targets: float = 1.0) -> int:
        """The streams more beside so many, within so many targets. `free`: the share of the KV memory that is."""
        if not self.is_known or (self.prompts_first and free < SPARE_MEMORY):
            return 0
        allowed_s, slots, context = HELD * targets * self.tpot_s, self._max_num_seqs, self.context
        further = (self.pace - 1.0) * num_streams  # tokens beyond one each, in a step's time
        if self.prompts_first:
            allowed_s *= 1.0 - self.share
            slots -= ceil(SPARE_SLOTS * slots)

        def token_s(num: int) -> float:
            """Of each of so many streams, on average."""
            return self._model.decode_s(num, round(num * context)) / (1.0 + further / max(num, num_streams))

        held = bisect_right(range(1, slots + 1), allowed_s, key=token_s)
        return max(0, held - num_streams)
