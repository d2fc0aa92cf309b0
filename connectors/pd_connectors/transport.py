"""The data plane under a peer-to-peer connector: reads of a peer's blocks into our own. No torch, no policy.

A transport never blocks its caller and never raises for what a peer does: everything comes back through `poll`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import CacheDescription

Address = tuple[str, int]
ReadId = tuple[str, int]  # load id, number of the read within the load
GroupIds = tuple[tuple[int, ...], ...]  # block ids by group of the reader's layout; () for one that is not read


@dataclass(frozen=True, slots=True)
class PeerKey:
    """The key of one endpoint. A restarted peer, or a second connection to the same peer, has another key."""

    address: Address
    engine_id: str
    epoch: int
    attempt: int
    num_ranks: int = 1  # over which the peer splits its blocks
    rank: int = 0  # of the peer, in a key that one rank's transport has of one rank of the peer
    num_groups: int | None = None  # KV groups that the peer has too, the first ones of our layout; None: all


@dataclass(frozen=True, slots=True)
class Connected:
    """The endpoint is ready for reads."""

    peer: PeerKey


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """The endpoint could not be set up; nothing of it remains."""

    peer: PeerKey
    detail: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """The read is terminal: from now on nothing of it can land. `error` is "" when every byte is in."""

    read_id: ReadId
    error: str = ""
    endpoint_broken: bool = False  # no further read of this peer will succeed before a new handshake
    post_s: float = field(default=0.0, compare=False)  # `read` to posted, where that is known


Completion = Connected | ConnectFailed | ReadEnded


class Transport(ABC):
    """Owned by the control thread, which makes every call but `set_waker`."""

    @abstractmethod
    def register(self, cache: CacheDescription) -> None:
        """Make the cache readable by peers and writable by reads. Called once, first.

        Raises ConnectorUnavailable when the backend does not start."""

    @abstractmethod
    def describe(self) -> bytes:
        """The description that a peer needs to read from here. Only the peer's transport understands it."""

    @abstractmethod
    def connect(self, peer: PeerKey, description: bytes) -> None:
        """Set an endpoint up. Connected or ConnectFailed follows, unless `disconnect` comes first."""

    @abstractmethod
    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        """Start reading the peer's blocks `remote` into our blocks `local`, group by group and pair by pair.

        Exactly one ReadEnded follows, however long it takes.
        """

    @abstractmethod
    def disconnect(self, peer: PeerKey) -> None:
        """Give the endpoint up. Its reads end as soon as nothing of them can land any more: at once where tearing down
        is a fence, else when they are terminal by themselves. Unknown peers are ignored."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Returns the completions since the last call."""

    @abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called from any thread after a completion becomes available to `poll`."""

    @abstractmethod
    def close(self, deadline_s: float) -> None:
        """Tear everything down; gives up on calls that hang after `deadline_s`. Idempotent."""
