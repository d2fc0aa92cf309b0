"""Loads whose best numbers of nodes change, or do not: requests at Poisson times, by phases."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pd_cluster.bench.workload import Arrival

PROMPTS, ANSWERS = (6000, 60), (500, 500)  # tokens in and out of a request of either kind
EVENLY = (2000, 200)


@dataclass(frozen=True, slots=True)
class Phase:
    """`load`: of `span_s` seconds, requests a second for each node of the cluster."""

    span_s: float
    per_s: float
    lengths: tuple[int, int]


@dataclass(frozen=True, slots=True)
class PhasedLoad:
    """`spread`: lengths are drawn uniformly from 1 - spread to 1 + spread of the phase's."""

    name: str
    phases: tuple[Phase, ...]
    spread: float = 0.5

    def arrivals(self, num_nodes: int, seed: int) -> list[Arrival]:
        rng, begin_s, arrivals = random.Random(seed), 0.0, list[Arrival]()
        for phase in self.phases:
            at_s = begin_s + rng.expovariate(phase.per_s * num_nodes)
            while at_s < begin_s + phase.span_s:
                tokens = (max(2, round(mean * rng.uniform(1 - self.spread, 1 + self.spread))) for mean in phase.lengths)
                arrivals.append(Arrival(at_s, *tokens))
                at_s += rng.expovariate(phase.per_s * num_nodes)
            begin_s += phase.span_s
        return arrivals

    def phase_at(self, at_s: float) -> int:
        for number, phase in enumerate(self.phases):
            at_s -= phase.span_s
            if at_s < 0:
                return number
        return len(self.phases) - 1


def loads(slowness: float) -> dict[str, PhasedLoad]:
    """`slowness`: how much longer steps take than those of 8B on an H200; rates are as much lower."""
    prompts, answers, evenly = 2.0 / slowness, 4.5 / slowness, 4.5 / slowness
    turn = tuple(
        Phase(600.0, *(((prompts, PROMPTS) if number % 2 == 0 else (answers, ANSWERS)))) for number in range(4)
    )
    calm = Phase(600.0, evenly * 0.8, EVENLY)
    burst = (calm, Phase(120.0, evenly * 2.4, EVENLY), Phase(600.0, evenly * 0.8, EVENLY))
    steps = [number / 11 for number in range(12)]  # of 5 minutes
    drift = tuple(
        Phase(300.0, prompts + (answers - prompts) * share, tuple(
            round(a + (b - a) * share) for a, b in zip(PROMPTS, ANSWERS, strict=True)
        )) for share in steps
    )  # fmt: skip
    return {
        one.name: one
        for one in (
            PhasedLoad("turns", turn), PhasedLoad("burst", burst), PhasedLoad("constant", (Phase(1800.0, evenly, EVENLY),)),
            PhasedLoad("drift", drift),
        )
    }  # fmt: skip
