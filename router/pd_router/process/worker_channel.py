"""A worker's side of the channel to its supervisor."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import msgspec

from pd_router.errors import HandingOver, Stopping
from pd_router.process import worker_messages as messages

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from pd_router.admission.key_limits import KeyUsage
    from pd_router.sources.base import NamedNode
    from pd_router.sources.node_change import NodeChange, RestartState

log = logging.getLogger("pd_router")


class WorkerChannel:
    """Changes and questions of one worker. Set `adopt`, `topics` and `on_lost` before `run`."""

    def __init__(self, number: int, channel: socket.socket, num_frozen: int = 0) -> None:
        self.number: int | None = number
        self.num_frozen = num_frozen  # of this number's processes before this one
        self.adopt: Callable[[RestartState], None]
        self.topics: dict[str, Callable[[], Any]] = {}  # what other workers may ask for
        self.on_lost: Callable[[], None]
        self.receive_usage: Callable[[int, KeyUsage | None], None] = lambda worker, usage: None
        self._socket = channel
        self._ids = itertools.count(time.monotonic_ns())  # a late answer to the process before this one is none
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._adopted, self._go = asyncio.Event(), asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    def inherited(cls, environ: MutableMapping[str, str] = os.environ) -> WorkerChannel | None:
        """The channel of this process. None: it is no worker."""
        if not (given := environ.pop(messages.WORKER_ENV, "")):
            return None
        number, fd, num_frozen = given.split(":")
        channel = socket.socket(fileno=int(fd))
        channel.set_inheritable(False)
        return cls(int(number), channel, int(num_frozen))

    async def run(self) -> None:
        """Follow the supervisor until cancelled, or until it has ended: then this worker drains."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=messages.MAX_LINE_BYTES)
        decoder = msgspec.json.Decoder(messages.ToWorker)
        self._beat()
        try:
            while line := await reader.readline():
                self._take(decoder.decode(line))
        except OSError as error:
            log.warning("the channel to the supervisor broke: %s", error)
        except Exception:  # a bug: the worker must not serve on without orders
            log.exception("a message of the supervisor cannot be obeyed")
        finally:
            self._writer.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(_stopping())
            self._adopted.set()  # what waits to serve goes on, and is then stopped
            self._go.set()
        log.error("the supervisor of this worker has ended: stopping")
        self.on_lost()

    async def adopted(self) -> None:
        """Return when the changes made before this worker's start are known: it then polls the nodes that they name."""
        await self._adopted.wait()

    async def ready(self) -> None:
        """Return when changes wait for this worker: it then has those made before. Call it after `adopted`."""
        self._tell(messages.Ready())
        await self._go.wait()

    def serving(self) -> None:
        self._tell(messages.Serving())

    def know(self, nodes: dict[str, tuple[NamedNode, ...]]) -> None:
        """Tell the supervisor the nodes of the sources, for processes that start while a source is away."""
        self._tell(messages.Known(nodes))

    async def commit(self, change: NodeChange) -> None:
        number = next(self._ids)
        if (await self._answer_to(number, messages.Commit(number, change))).is_refused:
            raise HandingOver("a successor is replacing this router; repeat the order in a few seconds")

    async def ask(self, topic: str) -> dict[int, Any]:
        number = next(self._ids)
        answers: dict[int, Any] = (await self._answer_to(number, messages.Ask(number, topic))).answers
        return answers

    def share(self, usage: KeyUsage) -> None:
        """Tell the other workers what API keys have used here."""
        self._tell(messages.Used(usage))

    async def _answer_to(self, number: int, message: messages.Commit | messages.Ask) -> Any:
        """The supervisor answers every message, whatever becomes of the other workers. Raises Stopping without one."""
        if self._writer is None or self._writer.is_closing():
            raise _stopping()
        self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._tell(message)
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def _take(self, message: messages.ToWorker) -> None:
        match message:
            case messages.State(version, restart_state):
                self.adopt(restart_state)
                self._adopted.set()
                self._tell(messages.Applied(version))
            case messages.Asked(worker, number, topic):
                self._tell(messages.Reported(worker, number, self.topics[topic]()))
            case messages.UsedBy(worker, usage):
                self.receive_usage(worker, usage)
            case messages.Go():
                self._go.set()
            case messages.Committed() | messages.AllTold():
                waiting = self._waiting.get(message.id)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message)

    def _beat(self) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._tell(messages.Alive())
            asyncio.get_running_loop().call_later(messages.ALIVE_S, self._beat)

    def _tell(self, message: messages.ToSupervisor) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():  # else nothing is reported any more, and `run` ends
            self._writer.write(messages.line_of(message))


def _stopping() -> Stopping:
    return Stopping("the supervisor of this worker has ended: the worker stops")
