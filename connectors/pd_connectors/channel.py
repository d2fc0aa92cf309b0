"""The control plane under a peer-to-peer connector: messages between a reader and the owners of its leases.

A channel drops what it cannot deliver and counts it: the protocol survives any loss. It never raises for what a peer
does and never blocks outside `wait`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import ToOwner, ToReader
    from pd_connectors.transport import Address


@dataclass(frozen=True, slots=True)
class FromReader:
    """A message to the owner half. Answers go to `reader`, with `reply`."""

    reader: bytes
    message: ToOwner


@dataclass(frozen=True, slots=True)
class FromOwner:
    """A message to the reader half."""

    owner: Address
    message: ToReader


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The connection to an owner broke, or was refused. ZeroMQ tries again, with growing pauses, unless the handshake
    failed; an owner that lives answers within a moment."""

    owner: Address


Incoming = FromReader | FromOwner | OwnerLost


class Channel(ABC):
    """Owned by the control thread, which makes every call but `wake` (any thread) and `port`."""

    @property
    @abstractmethod
    def port(self) -> int:
        """Where readers reach this node."""

    @abstractmethod
    def ask(self, owner: Address, message: ToOwner) -> None:
        """Send to the owner of leases that listens at an address."""

    @abstractmethod
    def reply(self, reader: bytes, message: ToReader) -> None:
        """Send to a reader that has spoken before."""

    @abstractmethod
    def receive(self) -> list[Incoming]:
        """Returns messages that have arrived. Empty: there are no more for now."""

    @abstractmethod
    def forget(self, owner: Address) -> None:
        """Close the connection to an owner. The next `ask` opens it again."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives, `wake` was called, or the time is over."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or next `wait`."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters; see Connector.stats."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""
