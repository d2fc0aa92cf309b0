"""A unit: one process of the cluster. Its actor starts the process, reports on it and ends it.

    starting -> ready -> leaving -> stopping -> ended
        └─────────┴─────────┴──────────┴──────────┘   the process may end at any time

An ended unit is not restarted: the controller makes another one. Nothing here imports Ray; `cluster.py` wraps the class
as an actor.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import httpx

from pd_cluster.errors import StartupError
from pd_cluster.launch.on_ray.spec import ROUTER
from pd_cluster.launch.supervise import Supervisor, describe_death
from pd_connectors.protocol.keys import KEY_ENV

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.launch.supervise import Child

logger = logging.getLogger("pd_cluster.ray")

HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 5.0
HUNG_S = 30.0  # a ready process is stopped after so long without an answer
STOP_MARGIN_S = 15.0  # after the time for requests, for the engine's stop
ORPHAN_PERIOD_S = 1.0
TAIL_LINES = 5
READY_MARKER = {ROUTER: "router ready on "}
_PROGRAM = (sys.executable, "-P", "-m", "pd_cluster.launch.cli")
_URL = re.compile(r"http://\S+")
_EPOCH = re.compile(r"epoch ([0-9a-f]+)")


class UnitPhase(StrEnum):
    """Phase of a unit. Only the controller sets WAITING and LOST."""

    WAITING = "waiting"  # no report from the actor yet: Ray has no room, or the actor is starting
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"  # gets no new requests
    STOPPING = "stopping"  # got SIGTERM
    ENDED = "ended"
    LOST = "lost"  # the actor is dead, or has been silent for too long


@dataclass(frozen=True, slots=True)
class Secret:
    """The cluster's key on its way to a process; its repr does not show it."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The process that an actor runs. `arguments`: of `pd-cluster ROLE`, without address and name.

    `host`: the address to listen on and to advertise; "": the Ray node's.
    """

    name: str
    role: str
    arguments: tuple[str, ...]
    start_deadline_s: float
    orphan_s: float
    host: str = ""


@dataclass(frozen=True, slots=True)
class UnitReport:
    """State of a unit. `phase_s`: seconds in this phase. `url` and `epoch` (hexadecimal, of nodes only): when ready."""

    phase: UnitPhase
    phase_s: float
    ray_node: str
    host: str
    url: str = ""
    epoch: str = ""
    pid: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the actor runs. `gpus`: the GPUs that Ray assigned, for CUDA_VISIBLE_DEVICES."""

    ray_node: str
    host: str
    gpus: tuple[str, ...] = ()


class Unit:
    """Runs one process. Call `begin` once. Every call of `report` shows that a controller lives.

    `abandon` is called when the process has ended and no controller has called for `orphan_s`: it must end this actor.
    """

    def __init__(
        self,
        plan: UnitPlan,
        key: Secret,
        place: Place,
        abandon: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._key, self._place, self._abandon, self._clock = plan, key, place, abandon, clock
        self._phase = UnitPhase.STARTING
        self._since_s = self._received_s = clock()
        self._url = self._epoch = self._detail = ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._child: Child | None = None
        self._stop = asyncio.Event()
        self._grace_s = 0.0
        self._life: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start the process. Call it inside a running event loop."""
        self._life = asyncio.get_running_loop().create_task(self._live(), name=f"life of {self._plan.name}")

    def report(self) -> UnitReport:
        self._received_s = self._clock()
        return UnitReport(
            self._phase, self._clock() - self._since_s, self._place.ray_node, self._place.host,
            self._url, self._epoch, 0 if self._child is None else self._child.pid, self._detail,
        )  # fmt: skip

    def leave(self) -> None:
        """Enter LEAVING. The controller tells the routers to send no new requests."""
        if self._phase is UnitPhase.READY:
            self._enter(UnitPhase.LEAVING)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM. Requests have `grace_s` to end, then the process is killed."""
        if self._phase is not UnitPhase.ENDED:
            self._grace_s = grace_s
            self._stop.set()

    async def _live(self) -> None:
        detail = ""
        try:
            async with Supervisor(self._show) as supervisor:
                detail = await self._run(supervisor)
        except (StartupError, OSError) as error:
            detail = str(error)
        except Exception as error:
            logger.exception("unit %s failed", self._plan.name)
            detail = f"{type(error).__name__}: {error}"
        finally:
            # in every case: a unit that reports a dead process as running would never be replaced
            self._detail = detail or "ended"
            if self._tail and not self._stop.is_set():
                self._detail += ": " + " | ".join(self._tail)
            self._enter(UnitPhase.ENDED)
        await self._orphaned()  # while a controller lives, it removes the actor
        self._abandon()

    async def _run(self, supervisor: Supervisor) -> str:
        """Run the process. Returns why it ended. Raises StartupError, OSError."""
        plan = self._plan
        marker = READY_MARKER.get(plan.role, "ready: ")
        child = self._child = await supervisor.start(plan.name, self._command(), marker, self._environment())
        stop = asyncio.create_task(self._stop.wait())
        orphaned = asyncio.create_task(self._orphaned())
        ready = asyncio.create_task(supervisor.wait_ready([child], plan.start_deadline_s))
        waits: set[asyncio.Task[Any]] = {stop, orphaned}
        try:
            await asyncio.wait({*waits, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._take_address(child.ready.result())
                waits |= {child.exited, asyncio.create_task(self._hung())}
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if child.process.returncode is not None:
                await supervisor.first_death()  # its last lines
                await supervisor.clear(child.name)  # its engine holds memory of a GPU that Ray assigns next
                return describe_death(child)
            self._enter(UnitPhase.STOPPING)
            grace_s = self._grace_s + STOP_MARGIN_S if stop.done() else 0.0
            killed = await supervisor.stop([child], grace_s)
            if not stop.done():
                return "no controller asked for its state" if orphaned.done() else f"gave no answer for {HUNG_S:g} s"
            return "had to be killed" if killed else "stopped"
        finally:
            for task in (waits | {ready}) - {child.exited}:
                task.cancel()
            await asyncio.gather(*(waits | {ready}) - {child.exited}, return_exceptions=True)

    def _command(self) -> list[str]:
        plan = self._plan
        command = [*_PROGRAM, plan.role, f"--host={self._place.host}", *plan.arguments]
        if plan.role != ROUTER:
            command += ["--port=0", f"--advertise-host={self._place.host}", f"--node-id={plan.name}"]
        return command

    def _environment(self) -> dict[str, str]:
        """A node sees only the GPUs that Ray assigned, and does not inherit Ray's token."""
        devices = ",".join(self._place.gpus)
        return {KEY_ENV: self._key.text, "CUDA_VISIBLE_DEVICES": devices, "RAY_AUTH_TOKEN": ""}

    def _take_address(self, ready_line: str) -> None:
        url, epoch = _URL.search(ready_line), _EPOCH.search(ready_line)
        if url is None:
            raise StartupError(f"no address in {ready_line!r}")
        self._url, self._epoch = url.group(), epoch.group(1) if epoch else ""
        self._enter(UnitPhase.READY)

    async def _hung(self) -> None:
        """Wait until the process has given no HTTP answer for HUNG_S. Any answer counts."""
        path = "/nodes" if self._plan.role == ROUTER else "/health"
        answered_s = self._clock()
        async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            while self._clock() - answered_s < HUNG_S:
                await asyncio.sleep(HEALTH_PERIOD_S)
                try:
                    await client.get(self._url + path)
                except httpx.HTTPError:
                    continue
                answered_s = self._clock()

    async def _orphaned(self) -> None:
        while self._clock() - self._received_s < self._plan.orphan_s:  # noqa: ASYNC110  # the passing of time sets no event
            await asyncio.sleep(min(ORPHAN_PERIOD_S, self._plan.orphan_s / 4))

    def _enter(self, phase: UnitPhase) -> None:
        self._phase, self._since_s = phase, self._clock()

    def _show(self, name: str, line: str) -> None:
        """Write a line to the actor's log, which Ray keeps."""
        self._tail.append(line)
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
