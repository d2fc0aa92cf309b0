"""What the runs of one trace and cluster say, beside what is asked of the router."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.routing_simulation.world import Outcome

COST, LEAST_LOADED, ROUND_ROBIN, BOUND = "cost", "least-loaded", "round-robin", "bound"
HEADER = (
    "| trace | nodes | routers | policy | mean | p50 | p99 | cached | direct | real / predicted p50 / p90 |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """Means over the seeds, in seconds and shares."""

    policy: str
    num_routers: int
    mean_s: float
    p50_s: float
    p99_s: float
    hit_share: float
    direct_share: float
    ratios: dict[str, tuple[int, float, float]]  # of seconds and predicted ones, by route: how many, p50, p90

    @classmethod
    def of(cls, policy: str, num_routers: int, outcomes: Sequence[Outcome]) -> PolicyRow:
        pooled: dict[str, list[float]] = {}
        for name, ratios in chain.from_iterable(one.ratios.items() for one in outcomes):
            pooled.setdefault(name, []).extend(ratios)
        return cls(
            policy, num_routers, mean(one.mean_s for one in outcomes), mean(one.percentile_s(0.5) for one in outcomes),
            mean(one.percentile_s(0.99) for one in outcomes), mean(one.hit_share for one in outcomes),
            mean(one.direct_share for one in outcomes),
            {name: (len(some), _percentile(some, 0.5), _percentile(some, 0.9)) for name, some in pooled.items()},
        )  # fmt: skip

    def text(self, trace: str, nodes: str) -> str:
        return (
            f"| {trace} | {nodes} | {self.num_routers} | {self.policy} | {self.mean_s:.3f} | {self.p50_s:.3f} | "
            f"{self.p99_s:.2f} | {self.hit_share:.1%} | {self.direct_share:.1%} | {self._ratios_text} |"
        )

    @property
    def _ratios_text(self) -> str:
        return ", ".join(f"{name} {p50:.2f} / {p90:.2f}" for name, (_, p50, p90) in sorted(self.ratios.items()))


def _percentile(values: Sequence[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 3)


def comparisons(rows: Mapping[tuple[str, int], PolicyRow]) -> dict[str, float]:
    """Ratios of the cost's times to those of the baselines, and of several routers to one. By (policy, routers)."""
    found = dict[str, float]()
    if (cost := rows.get((COST, 1))) is not None:
        if (old := rows.get((LEAST_LOADED, 1))) is not None:
            found |= {"mean / least-loaded": cost.mean_s / old.mean_s, "p99 / least-loaded": cost.p99_s / old.p99_s}
        if (bound := rows.get((BOUND, 1))) is not None:
            found["mean / bound"] = cost.mean_s / bound.mean_s
    for (policy, num_routers), row in rows.items():
        if num_routers > 1 and (policy, 1) in rows:
            found[f"{policy}: {num_routers} routers / one"] = row.mean_s / rows[policy, 1].mean_s
    return {name: round(ratio, 3) for name, ratio in found.items()}
