"""What runs beside a router's app, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pd_router.watch.node_tasks import NodeTasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

    from starlette.applications import Starlette

    from pd_router.admission.key_file import KeyFile
    from pd_router.process.worker_channel import WorkerChannel
    from pd_router.requests.services import Services
    from pd_router.sources.discovery import Discovery
    from pd_router.sources.node_change import RestartState
    from pd_router.sources.posted import PostedNodes
    from pd_router.watch.adapter_keeper import AdapterKeeper
    from pd_router.watch.feed_follower import FeedFollower
    from pd_router.watch.health import HealthPoller

    RequestPort: TypeAlias = Callable[[Services], contextlib.AbstractAsyncContextManager[object]]
    Start: TypeAlias = Callable[[Coroutine[None, None, None]], None]

# For releasing tickets and finishing prefills when the router stops; leases that are left expire by themselves.
BACKGROUND_DEADLINE_S = 2.0


@dataclass(frozen=True, slots=True)
class Lifespan:
    """`run` is the app's lifespan. `worker`, `restart_state`, `ports`: as in `create_app`."""

    services: Services
    discovery: Discovery
    posted: PostedNodes
    poller: HealthPoller
    feeds: FeedFollower
    adapters: AdapterKeeper
    keys: KeyFile | None
    worker: WorkerChannel | None
    restart_state: RestartState | None
    ports: Sequence[RequestPort]

    def adopt(self, state: RestartState) -> None:
        """Take over the nodes and orders that another router process had."""
        self.discovery.restore(state.known)  # first: some of them may be drained
        self.posted.adopt(state)

    @contextlib.asynccontextmanager
    async def run(self, app: Starlette) -> AsyncIterator[None]:
        """Start all that runs, yield when the nodes were looked at once, and end what runs when the app ends."""
        running: list[asyncio.Task[None]] = []
        async with self.services.upstream:
            try:
                await self._start(lambda work: running.append(asyncio.create_task(work)))
                async with contextlib.AsyncExitStack() as stack:
                    for port in self.ports:
                        await stack.enter_async_context(port(self.services))
                    yield
            finally:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
                await self.services.background.close(BACKGROUND_DEADLINE_S)
                await asyncio.to_thread(self.services.sinks.close)

    async def _start(self, start: Start) -> None:
        """`start`: runs a task until the end."""
        config, table, worker = self.services.config, self.services.table, self.worker
        start(self.discovery.run())
        await self.discovery.received_all(config.control_timeout_s)
        if worker is not None:
            start(worker.run())
            await worker.adopted()
        elif self.restart_state is not None:
            self.adopt(self.restart_state)  # before the first health check, which finds restarted nodes
        await self.poller.poll_all()  # so that the first request finds the healthy nodes
        start(NodeTasks(table, self.poller.follow, self.feeds.follow, self.adapters.follow).run())
        self._follow_keys(start)
        if worker is not None:
            await worker.ready()
            self.discovery.tell(worker.know)

    def _follow_keys(self, start: Start) -> None:
        admission = self.services.admission
        if self.keys is None or admission is None:
            return
        count = self.services.metrics.key_files.labels
        start(self.keys.follow(admission.adopt, lambda result: count(result).inc()))
        if self.worker is not None:
            self.worker.receive_usage = admission.receive_usage
            start(admission.share_usage(self.worker.share))
