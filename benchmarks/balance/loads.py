"""Loads for which the best numbers of nodes change, or do not: requests at Poisson times, by phases."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

from pd_cluster.bench.workload import Arrival

PROMPTS, ANSWERS = (1500, 15), (75, 200)  # tokens in and out of a request of either kind
EVENLY = (500, 50)


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """`load`: of `span_s` seconds, requests a second for each node of the cluster."""

    span_s: float
    per_s: float
    lengths: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PhasedLoad:
    """`spread`: lengths are drawn uniformly from 1 - spread to 1 + spread of the phase's."""

    name: str
    phases: tuple[LoadSpan, ...]
    spread: float = 0.5

    def arrivals(self, num_nodes: int, seed: int) -> list[Arrival]:
        rng, begin_s, arrivals = random.Random(seed), 0.0, list[Arrival]()

        def drawn(mean: int) -> int:
            return max(2, round(mean * rng.uniform(1 - self.spread, 1 + self.spread)))

        for phase in self.phases:
            at_s = begin_s + rng.expovariate(phase.per_s * num_nodes)
            while at_s < begin_s + phase.span_s:
                prompt, answer = phase.lengths
                arrivals.append(Arrival(at_s, drawn(prompt), drawn(answer)))
                at_s += rng.expovariate(phase.per_s * num_nodes)
            begin_s += phase.span_s
        return arrivals

    @property
    def begins_s(self) -> list[float]:
        """Of the phases."""
        return [0.0, *accumulate(phase.span_s for phase in self.phases)][:-1]

    def phase_at(self, at_s: float) -> int:
        for number, phase in enumerate(self.phases):
            at_s -= phase.span_s
            if at_s < 0:
                return number
        return len(self.phases) - 1


def loads(slowness: float, rate_scale: float = 1.0) -> dict[str, PhasedLoad]:
    """`slowness`: how much longer steps take than those of 8B on an H200; rates are as much lower."""
    prompts, answers, evenly = (rate_scale * per_s / slowness for per_s in (21.0, 76.0, 42.0))
    turns = ((prompts, PROMPTS), (answers, ANSWERS)) * 2
    calm, sudden = LoadSpan(600.0, evenly / 2, EVENLY), LoadSpan(120.0, 1.5 * evenly, EVENLY)
    made = (
        PhasedLoad("prompts", (LoadSpan(600.0, *turns[0]),)),
        PhasedLoad("answers", (LoadSpan(600.0, *turns[1]),)),
        PhasedLoad("turns", tuple(LoadSpan(600.0, *turn) for turn in turns)),
        PhasedLoad("burst", (calm, sudden, calm)),
        PhasedLoad("constant", (LoadSpan(1800.0, evenly, EVENLY),)),
        PhasedLoad("drift", tuple(_between(turns[0], turns[1], step / 11) for step in range(12))),
    )
    return {one.name: one for one in made}


def _between(begin: tuple[float, tuple[int, int]], end: tuple[float, tuple[int, int]], share: float) -> LoadSpan:
    """Five minutes of so much of the way from one load to another."""
    (rate, (prompt, answer)), (last_rate, (last_prompt, last_answer)) = begin, end
    lengths = round(prompt + (last_prompt - prompt) * share), round(answer + (last_answer - answer) * share)
    return LoadSpan(300.0, rate + (last_rate - rate) * share, lengths)
