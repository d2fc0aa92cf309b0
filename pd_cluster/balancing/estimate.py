"""What share of the requests would meet their targets with so many nodes of each role, by what the feeds tell. Pure.

A coarse model that answers in a millisecond and needs no table of steps. A node with n streams at the target of time
per token has of its time what their steps leave, T0(n) / tpot being taken; prompts are read in that, on whichever side
the router has them read (`g`), and streams stay where it has them (`f`): the best of a grid of both is what the
router's own choice comes close to.

    waits     those of k servers with one queue (Sakasegawa), with an exponential tail
    streams   Poisson in number; late while there are more than fit the target
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import exp, sqrt
from statistics import NormalDist, fmean, median, pvariance
from typing import TYPE_CHECKING

from pd_cluster.planning.forecast import Forecast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.balancing.snapshot import BalancedNode, EndedRequest
    from pd_cluster.planning.role_counts import RoleCounts

DECODE_S = 10e-6  # of a step, for a stream, where a step reads all weights (8B, H200)
WEIGHTS = 20  # prompt tokens that a step without any takes as long as, where it does
HORIZON_S = 60.0  # in which what waits now is to be read
STEPS = 0.05  # by which steps may be shorter or longer than told
SHARES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # of prompts that decode nodes read, of streams that prefill nodes keep
WORKING = 0.8  # use of prefill nodes from which on others had better read, too
FULLEST = 0.98  # use of a server whose wait is still that of a queue at rest
MOST_READS = 40  # prompts, of all lengths, whose waits are summed
NORMAL = NormalDist()


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
    """Predicts for one load. `queued_tokens`: of prompts, that wait now. Targets in seconds, as clients measure."""

    figures: StepFigures
    per_s: float
    seen: Sequence[EndedRequest]
    queued_tokens: int
    ttft_s: float
    tpot_s: float

    def attained(self, roles: RoleCounts) -> Forecast:
        """Takes a millisecond."""
        told, longer, shorter = (
            _Shares(replace(self, figures=self.figures.times(factor))).best(roles)
            for factor in (1, 1 + STEPS, 1 - STEPS)
        )
        return Forecast(told, min(told, longer), max(told, shorter))


class _Shares:
    """The sums of one load, and attainment by where prompts and streams go."""

    def __init__(self, of: LoadEstimate) -> None:
        figures, seen = of.figures, of.seen
        self._of = of
        computed = [one.prompt_tokens - one.cached_tokens for one in seen]
        reads_s = sorted(
            figures.token_s * new + figures.key_s * new * (one.cached_tokens + new / 2)
            for new, one in zip(computed, seen, strict=True)
        )
        self._reads_s = reads_s[:: 1 + len(reads_s) // MOST_READS]
        self._read_s = max(fmean(reads_s), 1e-9)
        self._spread = (1 + pvariance(reads_s) / self._read_s**2) / 2  # of Poisson arrivals
        self._busy = of.per_s * self._read_s + of.queued_tokens * figures.token_s / HORIZON_S  # readers
        answers = fmean(one.answer_tokens for one in seen)
        context = fmean(one.prompt_tokens + one.answer_tokens / 2 for one in seen)
        self._streams = of.per_s * answers * of.tpot_s  # that there are where each takes as long as it may
        self._stream_s = figures.stream_s + figures.context_s * context
        room = figures.kv_tokens / context if figures.kv_tokens else figures.num_slots
        self._most = min(figures.num_slots, room)

    def best(self, roles: RoleCounts) -> float:
        readers, others = roles.prefill, roles.decode + roles.mixed
        if not (readers and others):
            return self._attained(readers, others, float(not readers), float(not others))
        room = self._most_streams(self._of.tpot_s) * others
        reads = {*SHARES, max(0.0, 1 - WORKING * readers / self._busy)}
        keeps = {*SHARES, *(max(0.0, 1 - (room + add * sqrt(room)) / self._streams) for add in (-2, 0))}
        return max(self._attained(readers, others, read, keep) for read, keep in product(reads, keeps))

    def _most_streams(self, step_s: float) -> float:
        """Of one node, whose steps take so long at most."""
        return max(0.0, min(self._most, (step_s - self._of.figures.step_s) / self._stream_s))

    def _attained(self, readers: int, others: int, read: float, keep: float) -> float:
        """`read`: of the prompts, on nodes that decode; `keep`: of the streams, on prefill nodes."""
        tpot_s, streams = self._of.tpot_s, self._streams
        on_others, on_readers = (1 - keep) * streams, keep * streams
        left = self._left(on_others / others) if others else 0.0
        first = (1 - read) * self._in_time(readers, (1 - read) * self._busy, self._left(0.0)) if readers else 0.0
        first += read * self._in_time(others, read * self._busy, left) if others else 0.0
        use = min(1.0, (1 - read) * self._busy / readers) if readers else 1.0
        rest = (1 - keep) * self._fit(on_others, others, tpot_s) if others else 0.0
        return first * (rest + (keep * self._fit(on_readers, readers, (1 - use) * tpot_s) if keep else 0.0))

    def _left(self, num_streams: float) -> float:
        """Of a node's time, what its streams leave to prompts."""
        if num_streams <= 0:
            return 1.0
        return max(0.0, 1 - (self._of.figures.step_s + num_streams * self._stream_s) / self._of.tpot_s)

    def _in_time(self, servers: int, busy: float, left: float) -> float:
        """Of the prompts that `servers` nodes read in `left` of their time, those whose first token is in time."""
        if not busy:
            return 1.0
        if not left:
            return 0.0
        use, share = busy / servers / left, 1.0
        if use > FULLEST:  # the queue grows as long as this lasts
            share = min(1.0, self._of.ttft_s / max(use - 1, 1 - FULLEST) / HORIZON_S)
            use = FULLEST
        power = use ** (sqrt(2 * (servers + 1)) - 1)
        wait_s = self._spread * self._read_s / left / (servers * (1 - use))
        margins = (self._of.ttft_s - read_s / left for read_s in self._reads_s)
        return share * fmean(1 - power * exp(-margin / wait_s) if margin > 0 else 0.0 for margin in margins)

    def _fit(self, streams: float, nodes: int, step_s: float) -> float:
        """How often so many streams, on average, have steps of `step_s` at most on `nodes` nodes."""
        if not streams:
            return 1.0
        return NORMAL.cdf((nodes * self._most_streams(step_s) - streams) / sqrt(streams))


def _median(values: Iterable[float]) -> float:
    known = [value for value in values if value]
    return median(known) if known else 0.0
