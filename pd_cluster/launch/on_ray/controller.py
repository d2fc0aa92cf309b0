"""Keeps a cluster at its goal. Each round reads the state, decides (`policy.py`) and acts.

Each round asks the units, the routers and Ray for the state. So the controller may die at any moment: the next one
finds the units by name and the goal in the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray import policy
from pd_cluster.launch.on_ray.cluster import Ledger, UnitDied, authentication_mode
from pd_cluster.launch.on_ray.policy import Goal, UnitView
from pd_cluster.launch.on_ray.routers import Routers
from pd_cluster.launch.on_ray.spec import ROLES, ROUTER, check_counts
from pd_cluster.launch.on_ray.unit import UnitPhase, UnitPlan, UnitReport
from pd_connectors.protocol.keys import derive_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.launch.on_ray.policy import Placement, RayNode
    from pd_cluster.launch.on_ray.spec import ClusterSpec
    from pd_cluster.launch.on_ray.unit import Secret

logger = logging.getLogger("pd_cluster.ray")

PERIOD_S = 0.5
ASK_AGAIN_S = 5.0  # a question without an answer for so long counts as lost and is repeated
ANSWER_S = 1.0  # how long a round waits for reports; later ones count in a later round
MAX_SILENCE_S = 2.0  # most that a round adds, so that a pause of the controller does not count as silence
CENSUS_PERIOD_S = 5.0  # between two reads of Ray's actors, which only this controller creates
DOUBT_MARGIN_S = 30.0  # after a unit's orphan_s, for the end of its process and its actor
SUSPECT_S = 30.0  # for so long no new unit goes to a Ray node with a silent unit
PROBLEMS_KEPT = 20


class World(Protocol):
    """The part of Ray that the controller uses: `cluster.RayCluster`, which documents it."""

    @property
    def here(self) -> str: ...
    def ray_nodes(self) -> list[RayNode]: ...
    def find(self) -> list[str]: ...
    def stray_groups(self) -> list[str]: ...
    def create(self, plan: UnitPlan, key: Secret, bundle: Mapping[str, float], choice: Placement) -> None: ...
    def discard(self, name: str) -> None: ...
    async def report(self, name: str) -> UnitReport: ...
    def leave(self, name: str) -> None: ...
    def stop(self, name: str, grace_s: float) -> None: ...
    def save(self, ledger: Ledger) -> None: ...
    def load(self) -> Ledger | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStatus(UnitReport):
    """A unit in `pd-cluster ray status`. `silent_s`: since the controller got a report."""

    name: str
    role: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """`whole`: all wanted units are ready, and every router uses them. `problems`: the latest, oldest first.

    `doubt`: why silent units are currently neither removed from the routers nor replaced; "": they are.
    """

    name: str
    counts: dict[str, int]
    closing: bool
    whole: bool
    units: tuple[UnitStatus, ...]
    failures: dict[str, int]  # by role: units in a row that never became ready
    problems: tuple[str, ...]
    doubt: str = ""


@dataclass(slots=True)
class _Record:
    name: str
    ray_node: str = ""  # where it should run
    was_found: bool = False  # made by an earlier controller
    silent_s: float = 0.0
    report: UnitReport | None = None
    died: str = ""
    was_ready: bool = False
    asking: asyncio.Task[UnitReport] | None = None
    asked_s: float = 0.0  # clock

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    def view(self) -> UnitView:
        report = self.report
        phase = UnitPhase.LOST if self.died else report.phase if report else UnitPhase.WAITING
        return UnitView(
            self.name, self.role, phase, report.phase_s if report else 0.0, self.silent_s,
            report.url if report else "", report.ray_node if report else self.ray_node, self.was_found,
        )  # fmt: skip

    def status(self, spec: ClusterSpec, *, is_spared: bool) -> UnitStatus:
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in spec.role(self.role).bundle.items())
        report = self.report or UnitReport(UnitPhase.WAITING, 0.0, self.ray_node, "", detail=f"for {bundle}")
        is_silent = self.report is not None and self.silent_s >= policy.SILENT_S and not is_spared
        reported = asdict(report) | ({"phase": UnitPhase.LOST} if self.died or is_silent else {})
        return UnitStatus(name=self.name, role=self.role, silent_s=self.silent_s, **reported)


@dataclass(slots=True)
class _Backoff:
    """The failures of one role: consecutive units that never became ready, and when the next one may be created."""

    failures: dict[str, int] = field(default_factory=dict)
    until_s: dict[str, float] = field(default_factory=dict)

    def failed(self, role: str, now_s: float) -> None:
        self.failures[role] = self.failures.get(role, 0) + 1
        self.until_s[role] = now_s + policy.backoff_s(self.failures[role])

    def worked(self, role: str) -> None:
        self.failures.pop(role, None)
        self.until_s.pop(role, None)

    def held_back(self, now_s: float) -> set[str]:
        return {role for role, until_s in self.until_s.items() if now_s < until_s}


class Controller:
    """The controller of one cluster. `scale`, `close` and `status` may be called while `run` runs."""

    def __init__(
        self, spec: ClusterSpec, key: Secret, boot: str, world: World, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._key, self._world, self._clock = spec, key, world, clock
        self._ledger = Ledger(boot, spec.counts)
        self._saving = asyncio.Lock()
        self._looked_s = clock()
        self._patience_s = policy.SILENT_S  # longer at first: units without a report leave the routers' tables
        self._census_s = 0.0  # when to read Ray's actors again
        self._units: dict[str, _Record] = {}
        self._suspects: dict[str, float] = {}  # Ray node -> until when
        self._backoff = _Backoff()
        self._problems: list[str] = []
        self._whole = False
        self._spared: tuple[str, ...] = ()  # units with a silence that is ignored
        self._doubt = ""

    async def resume(self) -> None:
        """Take over the goal and the units of a controller that died. Call it before `run`.

        Units of an earlier cluster of this name have another key and other flags, and are removed.
        """
        ledger = await asyncio.to_thread(self._world.load)
        names = await asyncio.to_thread(self._count)
        if ledger is not None and ledger.boot == self._ledger.boot:
            self._ledger = ledger
            self._units = {name: _Record(name, was_found=True) for name in names}
            return
        for name in names:
            await asyncio.to_thread(self._world.discard, name)
        self._ledger = msgspec.structs.replace(self._ledger, serial=0 if ledger is None else ledger.serial)

    async def run(self) -> None:
        """Run rounds without end. A round that fails is logged; the next one reads the state again."""
        routers = Routers(derive_key(self._key.text), self._spec.targets_s if self._spec.balance else None)
        try:
            while True:
                try:
                    await self.round(routers)
                except Exception as error:
                    logger.exception("a round failed")
                    self._note(f"controller: {type(error).__name__}: {error}")
                    self._census_s = 0.0
                await asyncio.sleep(PERIOD_S)
        finally:
            await routers.close()

    @property
    def goal(self) -> Goal:
        return Goal(self._ledger.counts, self._spec.grace_s, self._ledger.closing)

    async def scale(self, counts: Mapping[str, int]) -> None:
        """Set the number of units per role. Raises StartupError if such a cluster serves nothing, or while it
        closes."""
        if self._ledger.closing:
            raise StartupError(f"the cluster {self._spec.name!r} is closing")
        wanted = {**self._ledger.counts, **counts}
        check_counts(wanted)
        self._backoff = _Backoff()  # the user waits: try at once
        await self._write(counts=wanted)

    async def close(self) -> float:
        """End all units in order; `status` shows when none is left. Returns grace_s."""
        await self._write(closing=True)
        return self._spec.grace_s

    def status(self) -> ClusterStatus:
        units = sorted(self._units.values(), key=lambda unit: (ROLES.index(unit.role), len(unit.name), unit.name))
        return ClusterStatus(
            self._spec.name, dict(self._ledger.counts), self._ledger.closing, self._whole,
            tuple(unit.status(self._spec, is_spared=unit.name in self._spared) for unit in units),
            dict(self._backoff.failures), tuple(self._problems), self._doubt,
        )  # fmt: skip

    async def round(self, routers: Routers) -> None:
        """Read the state, decide and act, once."""
        views = await self._look()
        # only routers that just reported: waiting for one on a dead machine would delay the round
        urls = [
            view.url for view in views if view.role == ROUTER and view.phase is UnitPhase.READY and not view.silent_s
        ]
        tables = await routers.read(urls)
        goal = self.goal
        known = list(tables.values())
        self._whole = not goal.closing and policy.is_whole(goal, views, known)
        views = self._weigh(views, {node.url for table in known for node in table if node.posted and node.healthy})
        for view in views:
            if view.phase is not UnitPhase.WAITING and view.silent_s >= policy.SILENT_S:
                self._suspects[view.ray_node] = self._clock() + SUSPECT_S
        decision = policy.decide(goal, views, known, self._backoff.held_back(self._clock()))
        # the routers first, so that units that are gone get no requests meanwhile
        over = set(decision.discard)
        left = [view for view in views if view.name not in over]
        orders = {url: policy.unit_orders(left, table) for url, table in tables.items()}
        sent = [routers.send(url, some) for url, some in orders.items() if some]
        for problems in await asyncio.gather(*sent):
            for problem in problems:
                self._note(problem)
        for name in decision.discard:
            self._part(self._units.pop(name))
        await asyncio.to_thread(self._act, decision)
        for role in decision.create:
            await self._create(role)

    async def _look(self) -> list[UnitView]:
        """Ask every unit for a report. A unit that does not answer in time keeps its last one and counts as silent."""
        if self._clock() >= self._census_s:
            await self._take_census()
        units = list(self._units.values())
        for unit in units:
            self._ask(unit)
        if units:
            await asyncio.wait([unit.asking for unit in units if unit.asking], timeout=self._patience_s)
        self._patience_s = ANSWER_S
        passed_s = min(self._clock() - self._looked_s, MAX_SILENCE_S)
        self._looked_s = self._clock()
        for unit in units:
            unit.silent_s += passed_s
            if unit.asking is not None and unit.asking.done():
                self._receive(unit, unit.asking)
                unit.asking = None
        return [unit.view() for unit in units]

    async def _take_census(self) -> None:
        """Find the units that exist, and the silent ones on Ray nodes that Ray reports as dead."""
        for name in await asyncio.to_thread(self._count):
            self._units.setdefault(name, _Record(name, was_found=True))
        silent = [unit for unit in self._units.values() if unit.report and unit.silent_s >= policy.SILENT_S]
        if silent:
            living = {node.node_id for node in await asyncio.to_thread(self._world.ray_nodes)}
            for unit in silent:
                if unit.report is not None and unit.report.ray_node not in living:
                    unit.died = unit.died or "its Ray node is dead"
        self._census_s = self._clock() + CENSUS_PERIOD_S

    def _ask(self, unit: _Record) -> None:
        """Ask a unit, one question at a time. One without an answer for ASK_AGAIN_S is cancelled and repeated."""
        now_s = self._clock()
        if unit.asking is not None and not unit.asking.done() and now_s - unit.asked_s >= ASK_AGAIN_S:
            unit.asking.cancel()
            unit.asking = None
        if unit.asking is None:
            unit.asking, unit.asked_s = asyncio.create_task(self._world.report(unit.name)), now_s

    def _weigh(self, views: list[UnitView], healthy: set[str]) -> list[UnitView]:
        """`views` without silence that `policy.weigh` ignores. Notes when such a doubt begins and ends."""
        doubt_s = 0.0 if self._ledger.closing else self._spec.orphan_s + DOUBT_MARGIN_S  # all units end in any case
        weighed = policy.weigh(views, self._world.here, doubt_s, healthy)
        share = f"{weighed.num_answering} of {weighed.num_known} units answer this controller"
        before, self._spared = self._spared, weighed.spared
        self._doubt = f"only {share}" if weighed.spared else ""
        if weighed.spared and not before:
            self._note(f"only {share}: silent units are kept, unless Ray reports them as dead")
        freed = () if weighed.is_doubted else set(before).difference(weighed.spared)
        if freed and not weighed.spared:
            self._note(f"{share}: silence counts again")
        for name in freed:
            self._units[name].silent_s = 0.0  # its answer may be on the way
        return [replace(view, silent_s=0.0) if view.name in freed else view for view in weighed.units]

    def _receive(self, unit: _Record, asking: asyncio.Task[UnitReport]) -> None:
        try:
            unit.report, unit.silent_s = asking.result(), 0.0
        except TimeoutError:
            return
        except UnitDied as death:
            unit.died = str(death)
            return
        except Exception as error:  # a problem of one unit: the round goes on, and the unit counts as silent
            self._note(f"{unit.name}: {type(error).__name__}: {error}")
            return
        if unit.report.phase is UnitPhase.READY and not unit.was_ready:
            unit.was_ready = True
            self._backoff.worked(unit.role)

    def _count(self) -> list[str]:
        """Names of the units. Removes placement groups that a controller left without an actor."""
        names = self._world.find()
        for name in self._world.stray_groups():
            self._world.discard(name)
        return names

    def _act(self, decision: policy.Decision) -> None:
        """Run in a thread, because Ray's calls block."""
        for name in decision.discard:
            self._world.discard(name)
        for name in decision.leave:
            self._world.leave(name)
        for name, grace_s in decision.stop.items():
            self._world.stop(name, grace_s)

    def _part(self, unit: _Record) -> None:
        """Note why a unit is removed, unless it was stopped on purpose."""
        if unit.asking is not None:
            unit.asking.cancel()
        phase, report = unit.view().phase, unit.report
        if phase is UnitPhase.ENDED and report is not None and report.detail == "stopped":
            return
        why = unit.died or (report.detail if report is not None and report.detail else "")
        if phase is UnitPhase.WAITING:
            return  # it never ran: no room, or no longer wanted
        self._note(f"{unit.name}: {why or 'silent'}")
        if not unit.was_ready:
            self._backoff.failed(unit.role, self._clock())

    async def _create(self, role: str) -> None:
        spec = self._spec
        now_s = self._clock()
        self._suspects = {node: until_s for node, until_s in self._suspects.items() if now_s < until_s}
        # saved before its use, so that no two units ever have the same name
        await self._write(serial=self._ledger.serial + 1)
        name = f"{role}-{self._ledger.serial}"
        plan = UnitPlan(name, role, spec.arguments(role), spec.start_deadline_s, spec.orphan_s, spec.host)
        views = [unit.view() for unit in self._units.values()]
        ray_nodes = await asyncio.to_thread(self._world.ray_nodes)
        choice = policy.choose(
            spec.placement, role, spec.role(role).bundle, views, {each: spec.role(each).bundle for each in ROLES},
            ray_nodes, self._suspects, one_per_address=role == ROUTER and spec.router_port != 0,
        )  # fmt: skip
        self._units[name] = _Record(name, choice.target or "")
        await asyncio.to_thread(self._world.create, plan, self._key, spec.role(role).bundle, choice)

    async def _write(self, **changes: Any) -> None:
        self._ledger = msgspec.structs.replace(self._ledger, **changes)
        self._whole = False
        async with self._saving:  # so that the newest is written last
            await asyncio.to_thread(self._world.save, self._ledger)

    def _note(self, problem: str) -> None:
        logger.warning("%s", problem)
        if problem not in self._problems[-1:]:
            self._problems = [*self._problems[1 - PROBLEMS_KEPT :], problem]


class ControllerActor:
    """`Controller` as a Ray actor, which Ray restarts when it dies."""

    async def __init__(self, spec: ClusterSpec, key: Secret, boot: str) -> None:  # type: ignore[misc]  # Ray awaits it
        from pd_cluster.launch.on_ray.cluster import RayCluster

        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._controller = Controller(spec, key, boot, RayCluster(spec.name))
        await self._controller.resume()
        self._running = asyncio.get_running_loop().create_task(self._controller.run(), name="controller")

    async def status(self) -> ClusterStatus:
        return self._controller.status()

    async def scale(self, counts: dict[str, int]) -> None:
        await self._controller.scale(counts)

    async def close(self) -> float:
        return await self._controller.close()

    async def authentication_mode(self) -> str:
        return authentication_mode()
