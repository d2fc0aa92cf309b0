"""One owner of leases, as its reader knows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_connectors.link_speed import LinkSpeed

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import LeaseRef
    from pd_connectors.pull import Pull
    from pd_connectors.transport import Address, PeerKey


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
    is_doubted: bool = False  # it left a question unanswered, and no message has arrived since

    @property
    def is_wanted(self) -> bool:
        """True if a message to this peer may still be needed."""
        return self.greeting is not None or any(pull.is_live for pull in self.pulls.values())
