"""Decides the next actions from the goal and the state. Pure: no Ray, no clock, no socket.

How a unit leaves:

    ready, one too many    leave     the routers drain it: it gets no new requests
    drained, or grace_s    stop      SIGTERM; the process finishes its requests and leases
    ended, lost            discard   actor and placement group are removed; a missing unit is then created

A unit is *lost* as soon as Ray reports its actor or its Ray node as dead, or after LOST_S of silence. `weigh` ignores
the silence of a node that a router finds healthy, and of all units when most are silent at the same time: then the
controller has probably lost its own connection. Those units stay in place and in the routers' tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pd_cluster.launch.on_ray.spec import ROLES, ROUTER
from pd_cluster.launch.on_ray.unit import STOP_MARGIN_S, UnitPhase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

SILENT_S = 5.0  # after so long without its actor's report a node gets no requests; Ray notices after 13 s or more
LOST_S = 15.0  # after this it is replaced
REPLACE_WAITING_S = 90.0  # a unit without a place is requested again, because the Ray nodes may have changed
DISCARD_MARGIN_S = 30.0  # a stopping unit that still runs so long after its deadline is discarded
MIN_STOP_S = 5.0
MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class UnitView:
    """A unit as the controller sees it. `silent_s`: since its actor's last report, or since its creation."""

    name: str
    role: str
    phase: UnitPhase
    phase_s: float = 0.0
    silent_s: float = 0.0
    url: str = ""
    ray_node: str = ""  # where it runs, or should run
    was_found: bool = False  # an earlier controller made it: it may run although this one has no report

    @property
    def number(self) -> int:
        return int(self.name.rpartition("-")[2])

    @property
    def may_run(self) -> bool:
        """Whether its process may be running, so that its silence means something."""
        living = (UnitPhase.STARTING, UnitPhase.READY, UnitPhase.LEAVING, UnitPhase.STOPPING)
        return self.phase in living or (self.phase is UnitPhase.WAITING and self.was_found)

    @property
    def is_wanted(self) -> bool:
        """Whether it counts towards its role's number."""
        return self.phase in (UnitPhase.WAITING, UnitPhase.STARTING, UnitPhase.READY)


@dataclass(frozen=True, slots=True)
class RoutedNode:
    """A node in a router's `GET /nodes`. `outstanding`: unfinished work that this router sent it. `has_moved`: by role
    orders, so its role is its own."""

    url: str
    role: str
    state: str
    healthy: bool
    posted: bool
    outstanding: int
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """Wanted number of units by role. `closing`: none, and the routers end first."""

    counts: Mapping[str, int]
    grace_s: float
    closing: bool = False


@dataclass(slots=True)
class Decision:
    """The next actions. `stop`: unit -> seconds for its requests; `create`: the role of each new unit."""

    discard: list[str] = field(default_factory=list)
    leave: list[str] = field(default_factory=list)
    stop: dict[str, float] = field(default_factory=dict)
    create: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """An order to a router. `node`: the URL for "add", else host:port."""

    action: Literal["add", "remove", "drain"]
    node: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living Ray node. `total`: its resources, including those in use."""

    node_id: str
    address: str
    total: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """Preferred and forbidden Ray nodes for a unit. Ray decides, because other programs use the cluster too."""

    target: str | None
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WeighedUnits:
    """`units` for `decide` and `unit_orders`. `num_answering` of `num_known` witnesses answered lately.

    `spared`: units that would lose their requests or be replaced, if their silence were not ignored.
    """

    units: tuple[UnitView, ...]
    num_answering: int
    num_known: int
    spared: tuple[str, ...] = ()

    @property
    def is_doubted(self) -> bool:
        """Whether the controller has probably lost its own connection."""
        return 2 * self.num_answering < self.num_known


def weigh(units: Sequence[UnitView], here: str, doubt_s: float, healthy: Collection[str] = ()) -> WeighedUnits:
    """Ignore silence shorter than `doubt_s` of `healthy` nodes, and of all unless half of the witnesses answer.

    Witnesses are the units that may run on other Ray nodes than the controller's, `here`: units beside the controller
    answer even when its network is down. Without such units, all that may run are witnesses. So one of two witnesses
    may be silent. When a machine with most of the witnesses dies, only Ray's report counts.

    `doubt_s`: a unit that gets no questions for so long has ended (`UnitPlan.orphan_s`), whatever the cause.
    `healthy`: URLs of the nodes with a /health that is good, by a router's own look.
    """
    running = [unit for unit in units if unit.may_run]
    witnesses = [unit for unit in running if unit.ray_node != here] or running
    hearing = WeighedUnits(tuple(units), sum(unit.silent_s < SILENT_S for unit in witnesses), len(witnesses))
    spared = {
        unit.name for unit in running
        if SILENT_S <= unit.silent_s < doubt_s and (hearing.is_doubted or unit.url in healthy)
    }  # fmt: skip
    weighed = tuple(replace(unit, silent_s=0.0) if unit.name in spared else unit for unit in units)
    return replace(hearing, units=weighed, spared=tuple(sorted(spared)))


def decide(
    goal: Goal, units: Sequence[UnitView], tables: Sequence[Sequence[RoutedNode]], held_back: Collection[str] = ()
) -> Decision:
    """The next actions. `tables`: the nodes of each router that answers. `held_back`: roles that must not grow yet."""
    decision = Decision()
    all_reported = len(tables) >= sum(unit.role == ROUTER and unit.phase is UnitPhase.READY for unit in units)
    for unit in units:
        if _is_over(unit, goal):
            decision.discard.append(unit.name)
        elif unit.phase is UnitPhase.LEAVING and (
            unit.phase_s >= goal.grace_s or (all_reported and is_drained(unit.url, tables))
        ):
            decision.stop[unit.name] = max(MIN_STOP_S, goal.grace_s - unit.phase_s)
    over = set(decision.discard)
    routers_left = any(unit.role == ROUTER and unit.name not in over for unit in units)
    for role in ROLES:
        alive = [unit for unit in units if unit.role == role and unit.is_wanted and unit.name not in over]
        wanted = 0 if goal.closing else goal.counts.get(role, 0)
        if goal.closing and role != ROUTER and routers_left:
            continue  # a router that ends finishes its requests and needs nodes for that
        for unit in victims(alive, len(alive) - wanted):
            _dismiss(unit, goal, decision)
        if role not in held_back:
            decision.create += [role] * (wanted - len(alive))
    return decision


def _is_over(unit: UnitView, goal: Goal) -> bool:
    if unit.phase is UnitPhase.WAITING:
        return unit.silent_s >= REPLACE_WAITING_S
    hangs_s = goal.grace_s + STOP_MARGIN_S + DISCARD_MARGIN_S
    return (
        unit.phase in (UnitPhase.ENDED, UnitPhase.LOST)
        or unit.silent_s >= LOST_S
        or (unit.phase is UnitPhase.STOPPING and unit.phase_s >= hangs_s)
    )


def _dismiss(unit: UnitView, goal: Goal, decision: Decision) -> None:
    if unit.phase is UnitPhase.WAITING:
        decision.discard.append(unit.name)  # it has no process yet, or no request has reached its process
    elif unit.phase is UnitPhase.STARTING:
        decision.stop[unit.name] = MIN_STOP_S
    elif unit.role == ROUTER:
        decision.stop[unit.name] = goal.grace_s  # a router drains itself without an order
    else:
        decision.leave.append(unit.name)


def victims(alive: Sequence[UnitView], number: int) -> list[UnitView]:
    """Units to give up: first those that do not serve, then from the fullest Ray node, then the youngest."""
    left = list(alive)
    chosen: list[UnitView] = []
    while len(chosen) < number:
        here = [unit.ray_node for unit in left]
        unit = min(left, key=lambda u: (_rank(u), -here.count(u.ray_node), -u.number))
        left.remove(unit)
        chosen.append(unit)
    return chosen


def _rank(unit: UnitView) -> int:
    if unit.phase is UnitPhase.WAITING:
        return 0
    return 1 if unit.phase is UnitPhase.STARTING or unit.silent_s >= SILENT_S else 2


def is_drained(url: str, tables: Sequence[Sequence[RoutedNode]]) -> bool:
    """Whether no router will send requests to `url`, and none has unfinished work there."""
    reported = (node for table in tables for node in table if node.url == url)
    return all(node.state != "active" and node.outstanding == 0 for node in reported)


def routed(units: Iterable[UnitView]) -> list[UnitView]:
    """Nodes for the routers' tables: those that may have requests and have an actor that answered lately."""
    phases = (UnitPhase.READY, UnitPhase.LEAVING, UnitPhase.STOPPING)
    return [
        unit for unit in units
        if unit.role != ROUTER and unit.phase in phases and unit.url and unit.silent_s < SILENT_S
    ]  # fmt: skip


def unit_orders(units: Iterable[UnitView], table: Iterable[RoutedNode]) -> list[UnitOrder]:
    """Orders after which a router knows exactly `units`. Removals come first, because a URL may be reused."""
    wanted = {unit.url: unit for unit in routed(units)}
    known = {node.url: node for node in table if node.posted and node.state != "leaving"}
    result = [UnitOrder("remove", _netloc(url)) for url in known if url not in wanted]
    for url, unit in wanted.items():
        node = known.get(url)
        if node is None or (node.role != unit.role and not node.has_moved):
            result.append(UnitOrder("add", url, unit.role))
        if unit.phase is not UnitPhase.READY and (node is None or node.state == "active"):
            result.append(UnitOrder("drain", _netloc(url)))
    return result


def is_whole(goal: Goal, units: Sequence[UnitView], tables: Sequence[Sequence[RoutedNode]]) -> bool:
    """Whether all wanted units are ready and usable by every router. A router may also have nodes from elsewhere."""
    if len(tables) < goal.counts[ROUTER]:
        return False
    ready = [unit for unit in units if unit.phase is UnitPhase.READY and unit.silent_s < SILENT_S]
    if len(ready) < len(units) or any(sum(u.role == role for u in ready) != goal.counts[role] for role in ROLES):
        return False
    urls = {unit.url for unit in ready if unit.role != ROUTER}
    return all({node.url for node in table if node.posted and node.healthy} == urls for table in tables)


def choose(
    placement: str,
    role: str,
    bundle: Mapping[str, float],
    units: Iterable[UnitView],
    bundles: Mapping[str, Mapping[str, float]],
    ray_nodes: Sequence[RayNode],
    suspects: Collection[str] = (),
    *,
    one_per_address: bool = False,
) -> Placement:
    """Choose a Ray node for a new unit of `role`.

    "spread" prefers the node with the fewest units of this role, then with the fewest units; "pack" the node with the
    most units that has room. `bundles`: resources that a unit reserves, by role. `suspects`: Ray nodes that seem dead
    before Ray reports it; they are avoided if another has room. `one_per_address`: all units of this role listen on
    one port.
    """
    placed = list(units)
    addresses = {node.node_id: node.address for node in ray_nodes}
    taken = {addresses.get(unit.ray_node) for unit in placed if unit.role == role} if one_per_address else set()
    never = tuple(n.node_id for n in ray_nodes if n.address in taken)
    avoid = (*never, *(n.node_id for n in ray_nodes if n.node_id in suspects and n.node_id not in never))
    best: tuple[tuple[int, ...], str] | None = None
    for node in ray_nodes:
        here = [unit for unit in placed if unit.ray_node == node.node_id]
        if node.node_id in avoid or not _has_room(node, bundle, [bundles[unit.role] for unit in here]):
            continue
        same = sum(unit.role == role for unit in here)
        rank = ((same, len(here)) if placement == "spread" else (-len(here), same)), node.node_id
        best = rank if best is None else min(best, rank)
    return Placement(best[1], avoid) if best else Placement(None, never)


def _has_room(node: RayNode, bundle: Mapping[str, float], used: Sequence[Mapping[str, float]]) -> bool:
    return all(
        node.total.get(name, 0.0) - sum(other.get(name, 0.0) for other in used) >= amount - 1e-6
        for name, amount in bundle.items()
    )


def backoff_s(failures: int) -> float:
    """Seconds until a role's next unit, after `failures` units in a row that never became ready."""
    return min(MAX_BACKOFF_S, 2.0**failures) if failures else 0.0


def _netloc(url: str) -> str:
    return urlsplit(url).netloc
