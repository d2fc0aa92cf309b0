"""One owner of leases, as its reader knows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pd_connectors.link_speed import LinkSpeed

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import LeaseRef
    from pd_connectors.pull import Pull
    from pd_connectors.transport import Address, PeerKey

PEER_IDLE_S = 300.0  # an endpoint without a load for so long is torn down

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Greeting:
    """A Hello that is repeated until it is answered. Times are of the control thread's clock."""

    nonce: bytes
    hello_at: float
    deadline: float


@dataclass(slots=True)
class PeerEndpoint:
    """The transport's connection to one boot epoch of a peer."""

    key: PeerKey
    deadline: float  # until which it must be ready
    ready: bool = False

    def serves(self, lease: LeaseRef) -> bool:
        """Whether the lease's blocks are read over it."""
        return (self.key.engine_id, self.key.epoch) == (lease.engine_id, lease.epoch)


@dataclass(slots=True)
class Peer:
    """An address that tickets name, with its greeting, endpoint and loads."""

    address: Address
    idle_since: float  # when its last load ended; not valid while it has loads
    greeting: Greeting | None = None
    endpoint: PeerEndpoint | None = None
    pulls: dict[str, Pull] = field(default_factory=dict)  # live and draining
    link: LinkSpeed = field(default_factory=LinkSpeed)  # over all of its endpoints
    why_slow: str = ""  # see `slow_link.why_slow`
    is_lost: bool = False  # the connection broke, and no message has arrived since
    doubted: tuple[str, int] | None = None  # the boot that left a question unanswered; no message has arrived since

    @property
    def name(self) -> str:
        host, port = self.address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def doubt(self, lease: LeaseRef) -> None:
        """Note, and say once, that the lease's owner does not answer where its tickets say."""
        if self.doubted is None:
            causes = "it stands still, the network is cut, or its --advertise-host is wrong"
            logger.warning("prefill node %s does not answer at %s: %s", lease.engine_id, self.name, causes)
        self.doubted = lease.engine_id, lease.epoch

    def doubts(self, lease: LeaseRef) -> bool:
        """Whether the lease is of the boot that left a question unanswered. A later one may just have started."""
        return self.doubted == (lease.engine_id, lease.epoch)

    def has_idled(self, now: float) -> bool:
        """Whether no load has needed it for PEER_IDLE_S."""
        return not self.pulls and now - self.idle_since >= PEER_IDLE_S

    def next_timer(self, drain_deadline_s: float) -> float:
        """When something of it is due. inf: never. `drain_deadline_s`: of loads that have failed."""
        timers = [inf]
        if not self.pulls:
            timers.append(self.idle_since + PEER_IDLE_S)
        for pull in self.pulls.values():
            if pull.is_live:
                timers.append(pull.next_timer())
            elif self.endpoint is not None and pull.endpoint == self.endpoint.key:
                timers.append(pull.failed_at + drain_deadline_s)
        if self.greeting is not None:
            timers += [self.greeting.hello_at, self.greeting.deadline]
        if self.endpoint is not None and not self.endpoint.ready:
            timers.append(self.endpoint.deadline)
        return min(timers)

    @property
    def is_wanted(self) -> bool:
        """True if a message to this peer may still be needed."""
        return self.greeting is not None or any(pull.is_live for pull in self.pulls.values())
