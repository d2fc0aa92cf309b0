"""A network inside one process, with faults: the channel and the transport that the protocol's tests run on.

Everything random comes from one seeded generator and every time from one injected clock, so a failing schedule can be
replayed. Messages may be lost, repeated, delayed and overtaken; blocks are really copied, one by one, at random moments
of a read, so that what a peer overwrites meanwhile is really seen; reads may fail or hang; a node may crash.

As a connector of its own name, `loopback` serves nodes that live in one process: one mixed node that reads its own
leases, or several that share a `LoopbackNetwork` (`options=(("network", network),)`). It does not work between
processes.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.channel import Channel, FromOwner, FromReader, Incoming
from pd_connectors.p2p import PeerToPeerConnector
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.protocol.slices import slices_between
from pd_connectors.rank_reader import RankReader
from pd_connectors.ranked_transport import RankedTransport
from pd_connectors.transport import (
    Address,
    Completion,
    Connected,
    ConnectFailed,
    GroupIds,
    PeerKey,
    ReadEnded,
    ReadId,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.protocol.messages import ToOwner, ToReader
    from pd_connectors.protocol.slices import SliceRead
    from pd_connectors.rank_port import RankPort

FIRST_PORT = 20_000


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities per message or per read."""

    drop: float = 0.0
    duplicate: float = 0.0
    max_delay_s: float = 0.0  # of each message and of each copied block, uniform from 0: later ones overtake
    fail_read: float = 0.0  # ends with an error, some of its blocks copied
    hang_read: float = 0.0  # does not end before its endpoint is torn down; neither does a read of a crashed node


class LoopbackNetwork:
    """The network between nodes of one process, with its faults. It owns the random numbers."""

    def __init__(
        self, faults: Faults | None = None, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.faults = faults or Faults()
        self.clock = clock
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self._serials = itertools.count(1)
        self._nodes: dict[Address, LoopbackNode] = {}
        self._by_serial: dict[int, LoopbackNode] = {}

    def attach(self, host: str, port: int) -> LoopbackNode:
        """Add a node under an address. Raises ConnectorUnavailable when the address has one."""
        with self.lock:
            serial = next(self._serials)
            address = (host, port or FIRST_PORT + serial)
            if address in self._nodes:
                raise ConnectorUnavailable(f"{address[0]}:{address[1]} is taken")
            node = LoopbackNode(self, address, serial)
            self._nodes[address] = self._by_serial[serial] = node
            return node

    def detach(self, node: LoopbackNode) -> None:
        """Remove a node that was closed or has crashed. Messages that it has sent may still arrive. Idempotent."""
        with self.lock:
            node.is_alive = False
            if self._nodes.get(node.address) is node:
                del self._nodes[node.address]
            self._by_serial.pop(node.serial, None)

    def at(self, address: Address) -> LoopbackNode | None:
        """The node that has this address now."""
        return self._nodes.get(address)

    def numbered(self, serial: int) -> LoopbackNode | None:
        """The node with this serial, if it still lives."""
        return self._by_serial.get(serial)

    def draw_delay_s(self) -> float:
        """The delay of the next message or copy."""
        return self.random.uniform(0.0, self.faults.max_delay_s) if self.faults.max_delay_s else 0.0


class LoopbackNode:
    """State that one node's channel and transport share: an inbox, and copies that its reads have not made yet."""

    def __init__(self, network: LoopbackNetwork, address: Address, serial: int) -> None:
        self.network = network
        self.address = address
        self.serial = serial
        self.is_alive = True
        self.cache: CacheDescription | None = None
        self.awake = threading.Event()
        self._order = itertools.count()
        self._inbox: list[tuple[float, int, Callable[[], Incoming]]] = []
        self._tasks: list[tuple[float, int, Callable[[], None]]] = []

    def deliver(self, make: Callable[[], Incoming]) -> None:
        """Schedule the arrival of a message."""
        network = self.network
        with network.lock:
            copies = 1 + (network.random.random() < network.faults.duplicate)
            for _ in range(copies):
                if network.random.random() >= network.faults.drop:
                    due = network.clock() + network.draw_delay_s()
                    heapq.heappush(self._inbox, (due, next(self._order), make))
        self.awake.set()

    def schedule(self, delay_s: float, task: Callable[[], None]) -> None:
        """Run `task` on the thread that turns this node."""
        with self.network.lock:
            heapq.heappush(self._tasks, (self.network.clock() + delay_s, next(self._order), task))
        self.awake.set()

    def take_due_messages(self) -> list[Incoming]:
        """Returns the messages that have arrived by now."""
        messages = []
        with self.network.lock:
            while self._inbox and self._inbox[0][0] <= self.network.clock():
                messages.append(heapq.heappop(self._inbox)[2]())
        return messages

    def run_due_tasks(self) -> None:
        """Run the copies and completions of the data plane that are due by now."""
        while True:
            with self.network.lock:
                if not self._tasks or self._tasks[0][0] > self.network.clock():
                    return
                task = heapq.heappop(self._tasks)[2]
            task()

    def next_due(self) -> float:
        """When the next message, copy or completion is due. inf: there is none."""
        with self.network.lock:
            return min((heap[0][0] for heap in (self._inbox, self._tasks) if heap), default=float("inf"))


class LoopbackChannel(Channel):
    """Messages travel as objects; a reader's name is its node's serial, so that answers never reach a successor."""

    def __init__(self, node: LoopbackNode) -> None:
        self._node = node
        self._num_dropped = 0

    @property
    def port(self) -> int:
        return self._node.address[1]

    def ask(self, owner: Address, message: ToOwner) -> None:
        there = self._node.network.at(owner) if self._node.is_alive else None
        if there is None:
            self._num_dropped += 1
            return
        there.deliver(partial(FromReader, str(self._node.serial).encode(), message))

    def reply(self, reader: bytes, message: ToReader) -> None:
        there = self._node.network.numbered(int(reader)) if self._node.is_alive else None
        if there is None:
            self._num_dropped += 1
            return
        there.deliver(partial(FromOwner, self._node.address, message))

    def receive(self) -> list[Incoming]:
        return self._node.take_due_messages()

    def forget(self, owner: Address) -> None:
        """Does nothing: the loopback has no connections."""

    def wait(self, timeout_s: float) -> None:
        until_due_s = self._node.next_due() - self._node.network.clock()
        self._node.awake.wait(max(0.0, min(timeout_s, until_due_s)))
        self._node.awake.clear()

    def wake(self) -> None:
        self._node.awake.set()

    def stats(self) -> dict[str, float]:
        return {"bad_frames_total": 0.0, "frames_dropped_total": float(self._num_dropped)}

    def close(self) -> None:
        self._node.network.detach(self._node)


class _Description(msgspec.Struct, frozen=True):
    """What `describe` puts on the wire."""

    serial: int
    num_blocks: tuple[int, ...]  # by group


_decode = msgspec.msgpack.Decoder(_Description).decode


@dataclass(slots=True)
class _Read:
    peer: PeerKey
    is_over: bool = False
    lost_source: bool = False


class LoopbackTransport(Transport):
    """Copies blocks between the caches of two nodes of one network. Each rank has a node of its own, for its cache."""

    def __init__(self, node: LoopbackNode, rank: int = 0) -> None:
        self._node = node
        self._rank = rank
        self._network = node.network
        self._completions: list[Completion] = []
        self._endpoints: dict[PeerKey, _Description] = {}
        self._reads: dict[ReadId, _Read] = {}  # in flight

    def register(self, cache: CacheDescription) -> None:
        self._node.cache = cache

    def describe(self) -> bytes:
        assert self._node.cache is not None
        num_blocks = tuple(tensor.shape[0] for tensor in self._node.cache.tensors)
        return msgspec.msgpack.encode(_Description(self._node.serial, num_blocks))

    def connect(self, peer: PeerKey, description: bytes) -> None:
        there = _decode(description)

        def finish() -> None:
            if self._network.numbered(there.serial) is None:
                self._completions.append(ConnectFailed(peer, "the node has ended"))
                return
            self._endpoints[peer] = there
            self._completions.append(Connected(peer))

        self._node.schedule(self._network.draw_delay_s(), finish)

    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        endpoint = self._endpoints.get(peer)
        if endpoint is None or not _are_there(remote, endpoint.num_blocks):
            error = "the endpoint was torn down" if endpoint is None else "no such block"
            self._completions.append(ReadEnded(read_id, error))
            self._node.awake.set()
            return
        read = self._reads[read_id] = _Read(peer)
        assert self._node.cache is not None
        copies = [
            partial(self._copy, read, endpoint.serial, part, *pair)
            for part in slices_between(peer.rank, peer.num_ranks, self._node.cache.layout, self._rank, peer.num_groups)
            for pair in zip(remote[part.group], local[part.group], strict=True)
        ]
        delays = [self._network.draw_delay_s() for _ in copies]
        for copy, delay_s in zip(copies, delays, strict=True):
            self._node.schedule(delay_s, copy)
        faults, rng = self._network.faults, self._network.random
        fate = rng.random()
        if fate < faults.hang_read:
            return
        if fate < faults.hang_read + faults.fail_read:
            self._node.schedule(rng.uniform(0.0, max(delays)), partial(self._end, read_id, "injected failure"))
        else:
            self._node.schedule(max(delays), partial(self._end, read_id, ""))

    def disconnect(self, peer: PeerKey) -> None:
        self._endpoints.pop(peer, None)
        for read_id in [read_id for read_id, read in self._reads.items() if read.peer == peer]:
            end = partial(self._end, read_id, "the endpoint was torn down")
            self._node.schedule(self._network.draw_delay_s(), end)  # until then its blocks may still land

    def _copy(self, read: _Read, serial: int, part: SliceRead, theirs: int, ours: int) -> None:
        if read.is_over:
            return
        source = self._network.numbered(serial)
        if source is None:
            read.lost_source = True  # crashed: the rest never comes
            return
        assert source.cache is not None
        assert self._node.cache is not None
        target, origin = (cache.tensors[part.group] for cache in (self._node.cache, source.cache))
        head_bytes = target[ours][0].nbytes
        first, there, count = (n // head_bytes for n in (part.local_offset, part.remote_offset, part.num_bytes))
        target[ours][first : first + count].copy_(origin[theirs][there : there + count])

    def _end(self, read_id: ReadId, error: str) -> None:
        read = self._reads.get(read_id)
        if read is None or (read.lost_source and not error):
            return  # ended already, or it hangs as a read of a dead peer does
        read.is_over = True
        del self._reads[read_id]
        self._completions.append(ReadEnded(read_id, error))

    def poll(self) -> list[Completion]:
        self._node.run_due_tasks()
        completions, self._completions = self._completions, []
        return completions

    def set_waker(self, wake: Callable[[], None]) -> None:
        """The node wakes its own thread."""

    def close(self, deadline_s: float) -> None:
        for peer in list(self._endpoints):
            self.disconnect(peer)
        if self._rank:  # rank 0's node goes with its channel
            self._network.detach(self._node)


class LoopbackConnector(PeerToPeerConnector):
    """See the module. options: `network`, a LoopbackNetwork to share; without it the node is alone with itself."""

    name = "loopback"

    def __init__(self, context: ConnectorContext) -> None:
        node = _attach(context, context.port)
        transport = RankedTransport(LoopbackTransport(node), context.layout, context.rank_ports)
        super().__init__(context, transport, LoopbackChannel(node))

    @classmethod
    def serve_rank(cls, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> RankReader:
        reader = RankReader(LoopbackTransport(_attach(context, 0), context.rank), port)
        reader.open(cache)
        return reader


def _are_there(ids: GroupIds, num_blocks: tuple[int, ...]) -> bool:
    return all(0 <= one < count for group, count in zip(ids, num_blocks, strict=False) for one in group)


def _attach(context: ConnectorContext, port: int) -> LoopbackNode:
    network = dict(context.options).get("network") or LoopbackNetwork()
    if not isinstance(network, LoopbackNetwork):
        raise ConnectorUnavailable(f"option network is no LoopbackNetwork but a {type(network).__name__}")
    return network.attach(context.host, port)
