"""Ports between the ranks of one engine, and a further rank, for tests without processes."""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_connectors.loopback import LoopbackTransport
from pd_connectors.rank_reader import RankReader
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import CacheDescription
    from pd_connectors.loopback import LoopbackNetwork, LoopbackNode


class Wire:
    """One direction, in virtual time: in order, each message after a delay that the network draws."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network
        self._messages: deque[tuple[float, bytes]] = deque()

    @property
    def next_due(self) -> float:
        return self._messages[0][0] if self._messages else float("inf")

    def put(self, message: bytes) -> None:
        due = self._network.clock() + self._network.draw_delay_s()
        self._messages.append((max(due, self._messages[-1][0] if self._messages else 0.0), message))

    def take(self, now: float) -> list[bytes]:
        taken = []
        while self._messages and self._messages[0][0] <= now:
            taken.append(self._messages.popleft()[1])
        return taken


@dataclass
class WireEnd:
    """A RankPort over two wires. The test delivers what has arrived."""

    out: Wire
    handle: Callable[[bytes], None] = lambda message: None

    def send(self, message: bytes) -> None:
        self.out.put(message)

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        self.handle = handle


class VirtualRank:
    """A further rank of an engine of the simulation."""

    def __init__(self, network: LoopbackNetwork, rank: int, cache: CacheDescription) -> None:
        self.node: LoopbackNode = network.attach(f"rank-{rank}", 0)
        self.cache = cache
        self.paused_until = 0.0
        self.is_dead = False
        self._to_rank, self._to_zero = Wire(network), Wire(network)
        self.port = WireEnd(self._to_rank)  # rank 0's end
        self.reader = RankReader(LoopbackTransport(self.node, rank), WireEnd(self._to_zero))

    def start(self) -> None:
        """Rank 0 knows the rank's description when this returns."""
        self.reader.register(self.cache)
        for message in self._to_zero.take(float("inf")):
            self.port.handle(message)

    @property
    def next_due(self) -> float:
        if self.is_dead:
            return self._to_zero.next_due
        return min(self._to_zero.next_due, max(self.paused_until, min(self.node.next_due(), self._to_rank.next_due)))

    def turn(self, now: float) -> None:
        """Do what is due. What the rank had sent before it died still arrives."""
        if not self.is_dead and self.paused_until <= now:
            for message in self._to_rank.take(now):
                self.reader.take(message)
            if self.node.next_due() <= now:
                self.reader.take(b"")
        for message in self._to_zero.take(now):
            self.port.handle(message)


class QueuePort:
    """A RankPort between two threads of this process. Each end has a thread that calls its handler."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._handle: Callable[[bytes], None] | None = None
        self._has_handler = threading.Event()
        self.other: QueuePort = self
        self._thread = threading.Thread(target=self._run, name="rank-port", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        self.other._inbox.put(message)

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        self._handle = handle
        self._has_handler.set()

    def close(self) -> None:
        self._inbox.put(None)
        self._has_handler.set()
        self._thread.join(HANG_S)

    def _run(self) -> None:
        self._has_handler.wait()
        while (message := self._inbox.get()) is not None:
            assert self._handle is not None
            self._handle(message)


@dataclass
class PortPair:
    """Both ends of one port."""

    zero: QueuePort = field(default_factory=QueuePort)
    rank: QueuePort = field(default_factory=QueuePort)

    def __post_init__(self) -> None:
        self.zero.other, self.rank.other = self.rank, self.zero

    def close(self) -> None:
        self.zero.close()
        self.rank.close()
