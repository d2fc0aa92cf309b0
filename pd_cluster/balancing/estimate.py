"""What share of the requests would meet their targets with so many nodes of each role, by what the feeds tell. Pure.

A coarse model that answers in a tenth of a millisecond and needs no table of steps. It takes the router's choice for
what it comes close to: prompts are read where they are read first, also in the time that the streams of decode nodes
leave, and streams that decode nodes cannot hold stay on prefill nodes that can.

    waits     those of one queue for all that read (Sakasegawa), with an exponential tail; decode nodes read more slowly
    streams   Poisson in number; late while there are more than fit the target on all nodes together
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, sqrt
from statistics import NormalDist, fmean, median, pvariance
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_cluster.balancing.snapshot import BalancedNode, GroupLoad
    from pd_cluster.planning.role_counts import RoleCounts

DECODE_S = 10e-6  # of a step, for a stream, where a step reads all weights (8B, H200)
WEIGHTS = 20  # prompt tokens that a step without any takes as long as, where it does
# Of its price in a step of its own: a prompt's token in a step that reads the weights for streams, 14 us of 22 (8B)
BESIDE = 0.85
HORIZON_S = 60.0  # in which what waits now is to be read
STEPS = 0.05  # by which steps may be shorter or longer than told
# Of the streams that fit beside a prefill node's prompts, as these come in bursts. With 1 no change seemed to gain
# where 3P1D met 0.74 and 1P3D 0.89 of long answers (simulated)
KEPT = 0.8
WORKING = 0.8  # use of prefill nodes from which on others had better read, too
FULLEST = 0.98  # use of a server with a wait that is still that of a queue at rest
MOST_READS = 40  # prompts, of all lengths, for which waits are summed
NORMAL = NormalDist()


class Forecast(NamedTuple):
    """A share of the requests within their targets, and the least and most with other steps."""

    attainment: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Steps of equal nodes, by the feeds: seconds of one without tokens, and of what is in it."""

    step_s: float
    token_s: float
    key_s: float
    stream_s: float
    context_s: float
    num_slots: int
    kv_tokens: int

    @classmethod
    def of(cls, nodes: Iterable[BalancedNode]) -> StepFigures | None:
        """The medians of the nodes that tell them; None: no node has read a prompt and decoded yet."""
        told = [node for node in nodes if node.is_usable]
        token_s = _median(node.token_s for node in told)
        context_s = _median(node.context_s for node in told)
        full_s = _median(node.step_s for node in told if node.num_streams)
        decoding = [node for node in told if node.step_s and node.num_streams]
        if not token_s or not decoding:
            return None
        stream_s = DECODE_S if full_s > WEIGHTS * token_s else token_s
        bare_s = median(node.step_s - node.num_streams * stream_s - node.context * context_s for node in decoding)
        return cls(
            max(bare_s, token_s), token_s, _median(node.key_s for node in told), stream_s, context_s,
            min(node.num_slots for node in told), min(node.kv_tokens for node in told),
        )  # fmt: skip

    def times(self, factor: float) -> StepFigures:
        scaled = {name: factor * getattr(self, name) for name in ("step_s", "token_s", "key_s", "stream_s")}
        return replace(self, context_s=factor * self.context_s, **scaled)


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """Predicts for one load."""

    figures: StepFigures
    load: GroupLoad

    def attained(self, roles: RoleCounts) -> Forecast:
        """Takes 0.1 ms."""
        told, longer, shorter = (
            _LoadSums(self.figures.times(factor), self.load).attained(roles) for factor in (1, 1 + STEPS, 1 - STEPS)
        )
        return Forecast(told, min(told, longer), max(told, shorter))


class _LoadSums:
    """The sums of one load."""

    def __init__(self, figures: StepFigures, load: GroupLoad) -> None:
        self._figures, (per_s, seen, queued_tokens, (self._ttft_s, self._tpot_s)) = figures, load
        computed = [one.prompt_tokens - one.cached_tokens for one in seen]
        reads_s = sorted(
            figures.token_s * new + figures.key_s * new * (one.cached_tokens + new / 2)
            for new, one in zip(computed, seen, strict=True)
        )
        self._reads_s = reads_s[:: 1 + len(reads_s) // MOST_READS]
        self._read_s = max(fmean(reads_s), 1e-9)
        self._spread = (1 + pvariance(reads_s) / self._read_s**2) / 2  # of Poisson arrivals
        self._busy = per_s * self._read_s + queued_tokens * figures.token_s / HORIZON_S  # readers
        answers = fmean(one.answer_tokens for one in seen)
        context = fmean(one.prompt_tokens + one.answer_tokens / 2 for one in seen)
        self._streams = per_s * answers * self._tpot_s  # that there are where each takes as long as it may
        self._stream_s = figures.stream_s + figures.context_s * context
        room = figures.kv_tokens / context if figures.kv_tokens else figures.num_slots
        self._most = min(figures.num_slots, room)

    def attained(self, roles: RoleCounts) -> float:
        tpot_s, streams = self._tpot_s, self._streams
        readers, others = roles.prefill, roles.decode + roles.mixed
        room = others * self._most_streams(tpot_s)
        left = self._left(min(streams, room) / others) if others else 0.0
        spilled = max(0.0, 1 - WORKING * readers / self._busy) if others else 0.0
        use = min(1.0, (1 - spilled) * self._busy / readers) if readers else 1.0
        room += KEPT * readers * self._most_streams((1 - use) * tpot_s)
        fit = NORMAL.cdf((room - streams) / sqrt(max(streams, 1.0)))
        in_time = (1 - spilled) * self._in_time(readers, others, left, 1.0)
        return fit * (in_time + (spilled * self._in_time(readers, others, left, left) if spilled else 0.0))

    def _most_streams(self, step_s: float) -> float:
        """Of one node with steps of so long at most."""
        return max(0.0, min(self._most, (step_s - self._figures.step_s) / self._stream_s))

    def _left(self, num_streams: float) -> float:
        """Of a node's time, what its streams leave to prompts."""
        if num_streams <= 0:
            return 1.0
        left = max(0.0, 1 - (self._figures.step_s + num_streams * self._stream_s) / self._tpot_s)
        return min(1.0, left / BESIDE) if self._figures.stream_s < self._figures.token_s else left

    def _in_time(self, readers: int, others: int, left: float, pace: float) -> float:
        """Of the prompts that a node reads in `pace` of its time, those with a first token in time.

        They wait for `readers` nodes, and for `others` that have `left` of their time.
        """
        capacity = readers + others * left
        if not capacity or not pace:
            return 0.0
        use, share = self._busy / capacity, 1.0
        if use > FULLEST:  # the queue grows as long as this lasts
            share = min(1.0, self._ttft_s / max(use - 1, 1 - FULLEST) / HORIZON_S)
            use = FULLEST
        mean_s = self._spread * self._read_s / capacity
        power = use ** (sqrt(2 * (readers + others + 1)) - 1)
        # A queue at rest, or what it grows to within the horizon, as far as chance makes it
        wait_s = min(mean_s / (1 - use), sqrt(mean_s * HORIZON_S))
        margins = (self._ttft_s - read_s / pace for read_s in self._reads_s)
        return share * fmean(1 - power * exp(-margin / wait_s) if margin > 0 else 0.0 for margin in margins)


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if value]
    return median(known) if known else 0.0
