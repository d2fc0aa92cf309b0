"""Which node changes its role, if any, and why. Pure: snapshots in, a decision and what to remember out.

Nodes of one router that serve the same models are a group, which is balanced by itself; in it only nodes of one shape
take each other's place. A change must gain more than it costs:

    gain    predicted attainment after less before, with steps that are a little longer and shorter, too: there at
            least a part of it
    cost    requests of HORIZON_S that lose by it: prompts whose cached prefixes are no longer where the router sends
            them, and streams of the old role, which end beside what the node does then

and be the best one in CONFIRMED rounds. After a change, whoever made it, nothing is done until the load has shown what
it did; after an operator's longer. All of that is read from what nodes tell, so a balance that restarts goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pd_cluster.balancing.estimate import LoadEstimate, StepFigures
from pd_cluster.balancing.snapshot import BALANCE, ROLES
from pd_cluster.planning.role_counts import RoleCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pd_cluster.balancing.snapshot import BalancedNode, BalanceSnapshot, EndedRequest
    from pd_cluster.planning.forecast import Forecast

STALE_S = 5.0  # a snapshot that is older decides nothing
FEWEST = 20  # requests that have ended of late, below which nothing is predicted
SETTLE_S = 45.0  # after a change: requests of before it have ended, and the load is that of after it
OPERATOR_S = 600.0  # after an operator's order
HORIZON_S = 300.0  # that a change is to pay for itself in
LEAST_GAIN = 0.03  # share of the requests
SURE = 4.0  # with other steps a fourth of the gain must be left: far from capacity, and above it, roles gain little
CONFIRMED = 3  # rounds in a row
NOT_YET = "not enough is known"


class BalanceTargets(NamedTuple):
    """Seconds."""

    ttft_s: float
    tpot_s: float


class GroupLoad(NamedTuple):
    """What a prediction is made of."""

    per_s: float
    seen: Sequence[EndedRequest]
    queued_tokens: int
    targets: BalanceTargets


class RoleChange(NamedTuple):
    """`node` becomes `role`, if its role, and those of all nodes, have changed as often as was seen."""

    node: str
    role: str
    seen_changes: int
    seen_total: int


@dataclass(frozen=True, slots=True)
class BalanceDecision:
    """For one group. `change`: None: nothing is done, for this reason. `models` name the group."""

    models: str
    reason: str
    change: RoleChange | None = None
    kind: str = "hold"  # in metrics: hold, or change


@dataclass(frozen=True, slots=True)
class Favourite:
    """The best change of the last rounds, and in how many it was that."""

    move: tuple[str, str]
    rounds: int


Memory: TypeAlias = dict[str, Favourite]  # by group
Forecaster: TypeAlias = "Callable[[GroupLoad, RoleCounts], Forecast]"


def decide(
    snapshot: BalanceSnapshot,
    memory: Mapping[str, Favourite],
    targets: BalanceTargets,
    forecast: Forecaster | None = None,
) -> tuple[list[BalanceDecision], Memory]:
    """A decision for each group, at most one of them a change. `forecast`: in place of the estimate by the feeds."""
    if snapshot.age_s > STALE_S:
        return [BalanceDecision("", f"what the routers told is {snapshot.age_s:.0f} s old")], {}
    if 2 * snapshot.num_answering <= snapshot.num_routers:
        told = f"{snapshot.num_answering} of {snapshot.num_routers} routers answer: no majority"
        return [BalanceDecision("", told)], {}
    decisions, kept = list[BalanceDecision](), Memory()
    for models, nodes in _groups(snapshot.nodes):
        decision, favourite = _Group(snapshot, models, nodes, targets, forecast).decide(memory.get(models))
        if decision.change is not None and any(other.change for other in decisions):
            decision = replace(decision, change=None, kind="hold", reason="another group's change comes first")
        decisions.append(decision)
        if favourite is not None:
            kept[models] = favourite
    return decisions or [BalanceDecision("", "there are no nodes")], kept


def _groups(nodes: Sequence[BalancedNode]) -> Iterator[tuple[str, list[BalancedNode]]]:
    """Nodes that serve the same models."""

    def name(node: BalancedNode) -> str:
        return ",".join(sorted(node.models))

    return ((models, list(some)) for models, some in groupby(sorted(nodes, key=name), name))


class _Group:
    def __init__(
        self, snapshot: BalanceSnapshot, models: str, nodes: list[BalancedNode], targets: BalanceTargets,
        forecast: Forecaster | None,
    ) -> None:  # fmt: skip
        self._snapshot, self._models, self._nodes = snapshot, models, nodes
        self._targets, self._forecast = targets, forecast
        names = [name for name in snapshot.arrived_per_s if name in models.split(",")]
        if len({node.models for node in snapshot.nodes}) == 1:
            names += [name for name in snapshot.arrived_per_s if not name]  # of requests that name no model
        self._per_s = sum(snapshot.arrived_per_s[name] for name in names)
        self._seen = [one for name in names for one in snapshot.seen.get(name, ())]

    def decide(self, before: Favourite | None) -> tuple[BalanceDecision, Favourite | None]:
        if why := self._why_not():
            return self._hold(why), None
        predict = self._predictor()
        if predict is None:
            return self._hold(f"{NOT_YET}: no node has told both what a prompt's token and what a step takes"), None
        now = predict(self._counts(self._nodes))
        best = max(self._moves(predict, now), default=None, key=lambda move: move[0])
        at = f"{self._counts(self._nodes).name}: {now.attainment:.2f} of the requests would meet their targets"
        if best is None:
            return self._hold(f"{at}; no node can change: it is the last of its role, or unlike others"), None
        net, node, role, told = best
        if net < LEAST_GAIN:
            return self._hold(f"{at}; {told}: less than {LEAST_GAIN:.2f} is gained"), None
        move = (node.role, role)
        rounds = 1 + (before.rounds if before is not None and before.move == move else 0)
        if rounds < CONFIRMED:
            return self._hold(f"{at}; {told}: seen in {rounds} of {CONFIRMED} rounds"), Favourite(move, rounds)
        change = RoleChange(node.name, role, node.changes, self._snapshot.total_changes)
        return BalanceDecision(self._models, f"{at}; {told}", change, "change"), None

    def _hold(self, reason: str) -> BalanceDecision:
        return BalanceDecision(self._models, reason)

    def _why_not(self) -> str:
        """What forbids any change, in order. "": nothing."""
        nodes = self._nodes
        live = [node for node in nodes if node.is_usable]
        if 2 * len(live) <= len(nodes):
            return f"{len(live)} of {len(nodes)} nodes are healthy and tell their load: no majority"
        if silent := [node.name for node in nodes if node.is_healthy and not node.is_live]:
            return f"nothing is told by {', '.join(silent[:3])}"
        ordered = [node for node in nodes if node.sender is not None]
        for node in sorted(ordered, key=lambda node: node.order_age_s):
            is_own = node.sender == BALANCE
            left_s = (SETTLE_S if is_own else OPERATOR_S) - node.order_age_s
            if left_s > 0:
                who = "the balance" if is_own else node.sender or "an operator"
                ago = f"{who} made {node.name} a {node.role} node {node.order_age_s:.0f} s ago"
                return f"{ago}: nothing is done for {SETTLE_S if is_own else OPERATOR_S:.0f} s"
        if len(self._seen) < FEWEST or not self._per_s:
            return f"{NOT_YET}: {len(self._seen)} requests have ended of late, {FEWEST} are needed"
        return ""

    def _predictor(self) -> Callable[[RoleCounts], Forecast] | None:
        queued = sum(node.queued_tokens for node in self._nodes)
        if (forecast := self._forecast) is not None:
            load = GroupLoad(self._per_s, self._seen, queued, self._targets)
            return lambda roles: forecast(load, roles)
        figures = StepFigures.of(self._nodes)
        if figures is None:
            return None
        return LoadEstimate(figures, self._per_s, self._seen, queued, *self._targets).attained

    def _counts(self, nodes: Sequence[BalancedNode]) -> RoleCounts:
        """Of those that serve."""
        return RoleCounts(*(sum(node.role == role and node.is_healthy for node in nodes) for role in ROLES))

    def _moves(
        self, predict: Callable[[RoleCounts], Forecast], now: Forecast
    ) -> Iterator[tuple[float, BalancedNode, str, str]]:
        """What each change would gain after its cost, the node, its new role, and both in words."""
        counts = self._counts(self._nodes)
        present = [role for role, number in zip(ROLES, counts, strict=True) if number]
        for old in present:
            if counts[ROLES.index(old)] < 2:
                continue  # the last one
            for new in present:
                like = [one for one in self._nodes if one.role == old and one.is_usable and self._has_like(one, new)]
                if new == old or not like:
                    continue
                node = min(like, key=lambda one: (one.num_streams, one.queued_tokens, one.cached_tokens, one.name))
                after = predict(_moved(counts, old, new))
                sides = (after.low - now.low, after.high - now.high)
                gain = min(after.attainment - now.attainment, *(SURE * side for side in sides))
                cost = self._cost(node)
                told = f"{node.name} as a {new} node gains {gain:.2f} and costs {cost:.3f}"
                yield gain - cost, node, new, told

    def _has_like(self, node: BalancedNode, role: str) -> bool:
        """Whether nodes of `role` are like this one: what others do says nothing of an unequal one."""
        return all(other.shape == node.shape for other in self._nodes if other.role == role)

    def _cost(self, node: BalancedNode) -> float:
        """The share of the requests of HORIZON_S that are later by the change."""
        prompt = sum(one.prompt_tokens for one in self._seen) / len(self._seen)
        hits = sum(one.cached_tokens for one in self._seen) / max(1.0, prompt * len(self._seen))
        moved = hits * node.cached_tokens / max(1.0, prompt)  # prompts whose prefixes are there
        return (moved + node.num_streams) / max(1.0, self._per_s * HORIZON_S)


def _moved(counts: RoleCounts, old: str, new: str) -> RoleCounts:
    numbers = dict(zip(ROLES, counts, strict=True))
    numbers[old] -= 1
    numbers[new] += 1
    return RoleCounts(**numbers)
