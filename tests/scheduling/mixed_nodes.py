"""Mixed nodes that hand prompts to each other, in virtual time: schedulers, leases and loads are real."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import torch

from pd_cluster.engine.kv_transfers import KvTransfers
from pd_cluster.protocol.messages import FromEngine, NeedsPrefill, TicketOpened, Work
from pd_cluster.scheduling.sequence import Request
from pd_connectors.base import CacheDescription, ConnectorContext, Event, LeaseEnded, LoadDone, LoadDrained
from pd_connectors.loopback import LoopbackChannel, LoopbackNetwork, LoopbackTransport
from pd_connectors.p2p import PeerToPeerConnector
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.messages import SampledToken
from tests.scheduling.kv_groups import ONE_FULL
from tests.scheduling.simulated_client import Client
from tests.scheduling.simulation import BLOCK_SIZE
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import AddRequest

TICK_S = 0.02
DEADLINE_S = 30.0  # of a load, as by default
KV = ONE_FULL


@dataclass
class VirtualTime:
    """Seconds that pass only when told to."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class WatchedConnector(PeerToPeerConnector):
    """A connector that shows its events before the engine takes them. The node turns it, not a thread."""

    name = "loopback"
    watch: Callable[[Event], None]

    def poll(self) -> list[Event]:
        events = super().poll()
        for event in events:
            self.watch(event)
        return events


class MixedNode:
    """One node, and its clients' requests."""

    def __init__(self, network: LoopbackNetwork, time: VirtualTime, port: int, num_blocks: int) -> None:
        self.time, self.world = time, World(num_blocks=num_blocks)
        layout = BlockLayout(KV.groups(BLOCK_SIZE))
        context = ConnectorContext(
            engine_id=f"engine-{port}", epoch=1, fingerprint="f", layout=layout, cluster_key=b"k", host="sim", port=port
        )
        node = network.attach("sim", port)
        self.connector = WatchedConnector(context, LoopbackTransport(node), LoopbackChannel(node), clock=time)
        self.connector.watch = self._watch
        self.connector.open(CacheDescription((torch.zeros(num_blocks, *layout.groups[0].shape),), layout))
        self.replies: list[FromEngine] = []
        world = self.world
        self.transfers = KvTransfers(self.connector, world.scheduler, self.replies.append, world.take)
        self.reasons: list[str] = []  # of loads that failed
        self.failed: list[str] = []  # their requests
        self.asks_again = False  # then the test hands the prompt over again

    def admit(self, message: AddRequest) -> Request:
        request = Request.from_message(message)
        self.world.clients[message.request_id] = Client(request, [[]], [None])
        self.world.now_s = self.time.now_s
        self.transfers.admit(request)
        if request.lease_id is not None:
            self.world.leases[request.lease_id] = request
        return request

    def tickets(self) -> list[TicketOpened]:
        """Those that were opened since the last call. What asks for a P is told to compute here, as a rule."""
        replies, self.replies[:] = list(self.replies), []
        for reply in replies:
            if isinstance(reply, NeedsPrefill):
                self.reasons.append(reply.reason.partition(":")[0])
                self.failed.append(reply.request_id)
                if not self.asks_again:
                    self.transfers.prefill_locally(reply.request_id)
        return [reply for reply in replies if isinstance(reply, TicketOpened)]

    def turn(self) -> None:
        world, connector = self.world, self.connector
        world.now_s = self.time.now_s
        connector.turn()
        self.transfers.take_events()
        self._forget_ended()
        self.transfers.reserve()
        if not world.scheduler.has_work:
            return
        batch = world.start_step()
        world.now_s = self.time.now_s
        self._forget_ended()
        connector.recv_before(batch.loads)
        for load in batch.loads:
            [request] = [c.request for c in world.clients.values() if c.request.load_id == load.load_id]
            world.loads[load.load_id] = load, request
        connector.send_after(batch.begun)
        for lease_id, request in world.leases.items():
            if lease_id in world.published:
                connector.send_after([world.published[lease_id]])
            client = world.client(request)
            if client.terminal:
                connector.finish_lease(lease_id, tuple(map(SampledToken, client.outputs[0])))

    def release(self) -> None:
        """End all leases, as a router may."""
        for lease_id in list(self.world.leases):
            self.transfers.release(lease_id)
            self.world.published.pop(lease_id, None)
            del self.world.leases[lease_id]

    def _forget_ended(self) -> None:
        """As the core does."""
        for client in self.world.clients.values():
            if client.terminal:
                self.transfers.forget(client.request)

    def _watch(self, event: Event) -> None:
        world = self.world
        if isinstance(event, LeaseEnded):
            world.read_lease(event.lease_id)
            world.published.pop(event.lease_id, None)
            world.leases.pop(event.lease_id, None)
        elif isinstance(event, LoadDone | LoadDrained) and event.load_id in world.loads:
            load, request = world.loads.pop(event.load_id)
            world.write_load(load, request, good=isinstance(event, LoadDone))

    @property
    def is_done(self) -> bool:
        return all(client.terminal for client in self.world.clients.values())


@dataclass
class MixedNodes:
    """Nodes with so many blocks each."""

    sizes: tuple[int, ...]
    time: VirtualTime = field(default_factory=VirtualTime)

    def __post_init__(self) -> None:
        network = LoopbackNetwork(clock=self.time)
        self.nodes = [MixedNode(network, self.time, port, size) for port, size in enumerate(self.sizes, start=1)]
        self.wanted: dict[str, tuple[int | None, AddRequest]] = {}  # of prompts that are handed over, by request
        self._numbers = count()

    def hand_over(self, message: AddRequest, source: int, target: int | None) -> None:
        """Let `source` compute the message's prompt, and `target` answer. The ticket comes in a turn.

        None: no node reads the lease. A request that `target` has is one that asked again.
        """
        name = f"{message.request_id}-at-p{next(self._numbers)}"
        self.wanted[name] = target, message
        self.nodes[source].admit(msgspec.structs.replace(message, request_id=name, work=Work.PREFILL))

    def advance(self, duration_s: float) -> None:
        until_s = self.time.now_s + duration_s
        while self.time.now_s < until_s:
            for node in self.nodes:
                node.turn()
                for opened in node.tickets():
                    target, message = self.wanted.pop(opened.request_id)
                    taken = msgspec.structs.replace(
                        message, work=Work.TAKE_OVER, ticket=opened.ticket, load_deadline_s=DEADLINE_S
                    )
                    if target is not None:
                        self._take_over(self.nodes[target], taken)
            self.time.now_s += TICK_S

    def _take_over(self, node: MixedNode, message: AddRequest) -> None:
        assert message.ticket is not None
        if message.request_id in node.world.clients:
            node.transfers.use_ticket(message.request_id, message.ticket, DEADLINE_S)
        else:
            node.admit(message)

    @property
    def is_done(self) -> bool:
        return not self.wanted and all(node.is_done for node in self.nodes)

    def seconds_until_done(self, most_s: float) -> float:
        """How long all answers took."""
        start_s = self.time.now_s
        while not self.is_done:
            self.advance(0.1)
            assert self.time.now_s < start_s + most_s, "requests wait for each other"
        return self.time.now_s - start_s

    def check_empty(self) -> None:
        """Nothing is held any more, and each client saw what it had to."""
        self.advance(15.0)  # leases that their readers left, and reads that may still land
        for node in self.nodes:
            node.world.check_empty()
            assert len(node.connector.leases) == 0
