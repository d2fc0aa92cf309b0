"""A real engine in the event loop of a test: steps run between the turns of the API side, without processes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pd_cluster.engine.client import RequestStream, is_terminal
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.protocol.messages import AddRequest, EngineNews, EngineReady, EngineStats
from tests.drafters import at_fixed_prices
from tests.engine.test_core_pipeline import FakeMailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import NodeConfig
    from pd_cluster.protocol.messages import ToEngine
    from pd_cluster.scheduling.drafts import Drafter
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_connectors.base import Connector

TURNS_OF_OTHERS = 20  # of the loop between two steps, so that each step's tokens are a frame of their own


class InLoopEngine:
    """Implements EngineClient. Steps run while `running`, as a task, and a request is open."""

    def __init__(
        self, config: NodeConfig, executor: DeviceExecutor, connector: Connector, drafter: Drafter | None = None
    ) -> None:
        self._mailbox = FakeMailbox()
        config = replace(config, scheduler=replace(config.scheduler, async_scheduling="off"))
        self._core = at_fixed_prices(EngineCore(config, executor, connector, self._mailbox, drafter=drafter))
        self._streams: dict[str, RequestStream] = {}
        self._open: set[str] = set()
        self._rests = asyncio.Event()
        self.requests: list[AddRequest] = []
        self.news = NewsMirror()
        self.alive, self.frozen, self.num_freezes = True, "", 0
        self.on_freeze: Callable[[], None] = lambda: None
        self.on_adapter: Callable[[Any], None] = lambda message: None
        self.stats: EngineStats | None = None
        self.ready: EngineReady | None = EngineReady(
            engine_id="in-loop",
            epoch=1,
            num_blocks=config.cache.num_blocks or 0,
            block_size=config.cache.block_size,
            max_model_len=512,
            fingerprint=executor.model.fingerprint,
            connector="loopback",
            control_port=0,
            max_num_seqs=config.scheduler.max_num_seqs or 0,
        )

    def open(self, request: AddRequest) -> RequestStream:
        stream = RequestStream(request.request_id, self.send, self._forget)
        self.requests.append(request)
        self.news.note_sent(request)
        self._streams[request.request_id] = stream
        self._open.add(request.request_id)
        self.send(request)
        return stream

    def send(self, message: ToEngine) -> None:
        self._mailbox.inbox.append(message)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def rest(self) -> None:
        """Wait until nothing is left of any request."""
        self._rests.clear()
        await self._rests.wait()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            busy = self._core.turn()
            if not busy:
                self._core.settle()
            self._deliver()
            for _ in range(TURNS_OF_OTHERS):
                await asyncio.sleep(0)
            if not busy:
                if not self._open:
                    self._rests.set()
                await asyncio.sleep(0.001)  # a grammar is compiled by threads

    def _deliver(self) -> None:
        outbox, self._mailbox.outbox[:] = list(self._mailbox.outbox), []
        for message in outbox:
            if isinstance(message, EngineStats):
                self.stats = message
                continue
            if isinstance(message, EngineNews):
                self.news.take(message)
                continue
            name = getattr(message, "request_id", "")
            if is_terminal(message):  # type: ignore[arg-type]
                self._open.discard(name)
            if name in self._streams:
                self._streams[name].push(message)  # type: ignore[arg-type]
