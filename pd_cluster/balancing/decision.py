"""Which node changes its role, if any, and why. Pure: snapshots in, a decision and what to remember out.

Nodes of one router that serve the same models are a group, which is balanced by itself; in it only nodes of one shape
take each other's place. A change must gain more than it costs:

    gain    predicted attainment after less before, the mean of steps as told, a little longer, and shorter
    cost    requests of HORIZON_S that lose by it: prompts with cached prefixes that are no longer where they are sent,
            and streams of a node that is to read prompts, which end beside these

What it gains beyond that and NOTHING is added up, round by round, as the load of a minute is noisy: ENOUGH of it, in
CONFIRMED rounds in a row, decides. After a change nothing is done until the load has shown what it did; after an
operator's longer. No node leaves a role that a change has given before that has paid. All of that is read from what
nodes tell, so a balance that restarts goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, permutations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pd_cluster.balancing.estimate import Forecast, LoadEstimate, StepFigures
from pd_cluster.balancing.snapshot import BALANCE, ROLES, GroupLoad
from pd_cluster.planning.role_counts import RoleCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pd_cluster.balancing.snapshot import BalancedNode, BalanceSnapshot, BalanceTargets

STALE_S = 5.0  # a snapshot that is older decides nothing
FEWEST = 20  # requests that have ended of late, below which nothing is predicted
SETTLE_S = 45.0  # after a change: requests of before it have ended, and the load is that of after it
OPERATOR_S = 600.0  # after an operator's order
HORIZON_S = 300.0  # that a change is to pay for itself in
KEPT_S = HORIZON_S  # in which no node leaves a role that a change has given
# Shares of the requests. A gain of 0.05 acts in the third round, one of 0.02 after half a minute
NOTHING, ENOUGH = 0.01, 0.06
CONFIRMED = 3
NOT_YET = "not enough is known"


class RoleChange(NamedTuple):
    """`node` becomes `role`, if its role has changed as often, and the router knows of the same nodes, as was seen."""

    node: str
    role: str
    seen_changes: int
    seen_state: int


@dataclass(frozen=True, slots=True)
class BalanceDecision:
    """For one group. `change`: None: nothing is done, for this reason. `models` name the group."""

    models: str
    reason: str
    change: RoleChange | None = None


class GatheredGain(NamedTuple):
    """In how many rounds in a row a change had gained, and how much in sum."""

    rounds: int = 0
    total: float = 0.0


Moves: TypeAlias = dict[tuple[str, str], GatheredGain]  # by old and new role
Memory: TypeAlias = dict[str, Moves]  # by group
Forecaster: TypeAlias = "Callable[[GroupLoad, RoleCounts], Forecast]"


def decide(
    snapshot: BalanceSnapshot,
    memory: Mapping[str, Moves],
    targets: BalanceTargets,
    forecast: Forecaster | None = None,
) -> tuple[list[BalanceDecision], Memory]:
    """A decision for each group, at most one of them a change. `forecast`: in place of the estimate by the feeds."""
    if snapshot.age_s > STALE_S:
        return [BalanceDecision("", f"what the routers told is {snapshot.age_s:.0f} s old")], {}
    if 2 * snapshot.num_answering <= snapshot.num_routers:
        told = f"{snapshot.num_answering} of {snapshot.num_routers} routers answer: no majority"
        return [BalanceDecision("", told)], {}
    if not snapshot.are_agreed:
        return [BalanceDecision("", "the routers tell different nodes, or roles or health of them")], {}
    decisions, kept = list[BalanceDecision](), Memory()
    for models, nodes in _groups(snapshot.nodes):
        decision, kept[models] = _Group(snapshot, models, nodes, targets, forecast).decide(memory.get(models, {}))
        if decision.change is not None and any(other.change for other in decisions):
            decision = replace(decision, change=None, reason="another group's change comes first")
        decisions.append(decision)
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
        served = frozenset[str]().union(*(node.names for node in nodes))
        names = [name for name in snapshot.arrived_per_s if name in served]
        if len({node.models for node in snapshot.nodes}) == 1:
            names += [name for name in snapshot.arrived_per_s if not name]  # of requests that name no model
        self._per_s = sum(snapshot.arrived_per_s[name] for name in names)
        self._seen = [one for name in names for one in snapshot.seen.get(name, ())]

    def decide(self, before: Moves) -> tuple[BalanceDecision, Moves]:
        if why := self._why_not():
            return self._hold(why), {}
        predict = self._predictor()
        if predict is None:
            return self._hold(f"{NOT_YET}: no node has told both what a prompt's token and what a step takes"), {}
        now, found, after = predict(self._counts()), list(self._moves(predict)), Moves()
        at = f"{self._counts().name}: {now.attainment:.2f} of the requests would meet their targets"
        if not found:
            return self._hold(f"{at}; no node can change: it is the last or newest of its role, or unlike others"), {}
        for net, node, role, _ in found:
            old = before.get((node.role, role), GatheredGain())
            total = max(0.0, old.total + net - NOTHING)
            after[node.role, role] = GatheredGain(old.rounds + 1, total) if total else GatheredGain()
        net, node, role, told = max(found, key=lambda move: after[move[1].role, move[2]].total)
        best = after[node.role, role]
        if best.rounds >= CONFIRMED and best.total >= ENOUGH:
            change = RoleChange(node.name, role, node.changes, self._snapshot.role_state)
            return BalanceDecision(self._models, f"{at}; {told}", change), {}
        much = f"seen in {best.rounds} rounds, of {CONFIRMED}, with {best.total:.2f} of {ENOUGH:.2f} in sum"
        return self._hold(f"{at}; {told}: {much if best.rounds else 'too little'}"), after

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
        if earlier := [node.name for node in nodes if not node.tells_orders]:
            return f"of an earlier release, which obeys what is of another state: {', '.join(earlier[:3])}"
        ordered = [node for node in nodes if node.sender is not None]
        for node in sorted(ordered, key=lambda node: node.order_age_s):
            is_own = node.sender == BALANCE
            left_s = (SETTLE_S if is_own else OPERATOR_S) - node.order_age_s
            if left_s > 0:
                sender = "the balance" if is_own else node.sender or "an operator"
                ago = f"{sender} made {node.name} a {node.role} node {node.order_age_s:.0f} s ago"
                return f"{ago}: nothing is done for {SETTLE_S if is_own else OPERATOR_S:.0f} s"
        if len(self._seen) < FEWEST or not self._per_s:
            return f"{NOT_YET}: {len(self._seen)} requests have ended of late, {FEWEST} are needed"
        return ""

    def _predictor(self) -> Callable[[RoleCounts], Forecast] | None:
        queued = sum(node.queued_tokens for node in self._nodes if node.is_usable)
        load = GroupLoad(self._per_s, self._seen, queued, self._targets)
        if (forecast := self._forecast) is not None:
            return lambda roles: forecast(load, roles)
        figures = StepFigures.of(self._nodes)
        return None if figures is None else LoadEstimate(figures, load).attained

    def _counts(self) -> RoleCounts:
        """Of the nodes that serve."""
        return RoleCounts(*(sum(node.role == role and node.is_healthy for node in self._nodes) for role in ROLES))

    def _moves(self, predict: Callable[[RoleCounts], Forecast]) -> Iterator[tuple[float, BalancedNode, str, str]]:
        """What each change would gain after its cost, the node, its new role, and both in words."""
        counts = self._counts()
        now = _mean(predict(counts))
        own = [one for one in self._nodes if one.sender == BALANCE and one.order_age_s < KEPT_S]
        given = {one.role for one in own}  # they are to pay first
        present = [role for role, number in zip(ROLES, counts, strict=True) if number]
        for old, new in permutations(present, 2):
            like = [one for one in self._nodes if one.role == old and one.is_usable and self._has_like(one, new)]
            if counts[ROLES.index(old)] < 2 or not like or old in given:  # the last one stays
                continue
            node = min(like, key=lambda one: (one.num_streams, one.queued_tokens, one.cached_tokens, one.name))
            gain, cost = _mean(predict(_moved(counts, old, new))) - now, self._cost(node, new)
            yield gain - cost, node, new, f"{node.name} as a {new} node gains {gain:.2f} and costs {cost:.3f}"

    def _has_like(self, node: BalancedNode, role: str) -> bool:
        """Whether nodes of `role` are like this one: what others do says nothing of an unequal one.

        Of a dead one nothing is known.
        """
        return all(other.is_like(node) for other in self._nodes if other.role == role and other.is_usable)

    def _cost(self, node: BalancedNode, role: str) -> float:
        """The share of the requests of HORIZON_S that are later by the change. Streams of a node that still decodes are
        none of them."""
        prompt = sum(one.prompt_tokens for one in self._seen) / len(self._seen)
        hits = sum(one.cached_tokens for one in self._seen) / max(1.0, prompt * len(self._seen))
        moved = hits * node.cached_tokens / max(1.0, prompt)  # prompts with prefixes there
        streams = node.num_streams if role == "prefill" else 0
        return (moved + streams) / max(1.0, self._per_s * HORIZON_S)


def _mean(share: Forecast) -> float:
    return (share.low + share.attainment + share.high) / 3


def _moved(counts: RoleCounts, old: str, new: str) -> RoleCounts:
    numbers = dict(zip(ROLES, counts, strict=True))
    numbers[old] -= 1
    numbers[new] += 1
    return RoleCounts(**numbers)
