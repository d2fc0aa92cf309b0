"""Restarts the processes of a cluster when they die, at the times that `Restarts` decides."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pd_cluster.launch.restarts import GiveUp
from pd_cluster.launch.supervise import describe_death

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pd_cluster.launch.restarts import Restarts
    from pd_cluster.launch.supervise import Child, Supervisor


@dataclass(frozen=True, slots=True)
class Service:
    """A process to keep running. A restart uses the same arguments, address and inherited sockets."""

    name: str
    arguments: tuple[str, ...]
    ready_marker: str
    start_deadline_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    sockets: tuple[int, ...] = ()  # file descriptors of listening sockets that the process inherits


class Keeper:
    """Starts services, and restarts those that die during `run`. `say` gets a line for each death and each return."""

    def __init__(
        self,
        supervisor: Supervisor,
        restarts: Restarts,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._restarts = restarts
        self._say = say
        self._clock = clock
        self._services: dict[str, Service] = {}
        self._children: dict[str, Child] = {}

    async def start(self, service: Service) -> Child:
        """Start a service for the first time. Raises OSError."""
        child = await self._spawn(service)
        self._services[service.name], self._children[service.name] = service, child
        return child

    def revise(self, name: str, arguments: tuple[str, ...]) -> None:
        """Change the arguments of the service's next start."""
        self._services[name] = replace(self._services[name], arguments=arguments)

    async def run(self) -> str:
        """Restart services until the cluster cannot go on. Returns the reason. Call it when all services are ready."""
        for name in self._services:
            self._restarts.ready(name, self._clock())
        keeping = [asyncio.create_task(self._keep(name), name=f"keep {name}") for name in self._services]
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep(self, name: str) -> str:
        end = await self._end_of(self._children[name])
        while True:
            down_since_s = self._clock()
            verdict = self._restarts.died(name, down_since_s)
            if isinstance(verdict, GiveUp):
                return f"{end}; {verdict.reason}"
            self._say(f"{end}: restarting it in {verdict.delay_s:g} s (restart {verdict.number})")
            await asyncio.gather(self._supervisor.clear(name), asyncio.sleep(verdict.delay_s))
            end = await self._live(self._services[name], down_since_s)

    async def _live(self, service: Service, down_since_s: float) -> str:
        """Start a process and wait for its end. Returns how it ended."""
        try:
            child = await self._spawn(service)
        except OSError as error:
            return f"{service.name} cannot be started: {error}"
        news: set[asyncio.Future[Any]] = {child.ready, child.exited}
        await asyncio.wait(news, timeout=service.start_deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if child.ready.done():
            now_s = self._clock()
            self._restarts.ready(service.name, now_s)
            self._say(f"{service.name} is back: it was down for {now_s - down_since_s:.1f} s")
        elif not child.exited.done():
            self._say(f"{service.name} was not ready within {service.start_deadline_s:g} s: stopping it")
            await self._supervisor.stop([child], 0)
        return await self._end_of(child)

    async def _end_of(self, child: Child) -> str:
        await self._supervisor.ended(child)
        return describe_death(child)

    async def _spawn(self, service: Service) -> Child:
        return await self._supervisor.start(
            service.name, service.arguments, service.ready_marker, service.environment, service.sockets
        )
