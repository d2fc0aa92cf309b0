"""The connections of a server, and which one is ended for a new one when the table is full. No sockets."""

from __future__ import annotations

import ipaddress
from itertools import chain
from typing import TYPE_CHECKING, Generic, TypeVar

from pd_http.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Hashable

Key = TypeVar("Key", bound="Hashable")
HANDSHAKE_PART = 8  # connections in handshake give way first while they have more than an eighth of the places


class ConnectionTable(Generic[Key]):
    """The open connections: at most `max_connections`, and at most `max_per_address` of one address.

    A full table ends the connection that has waited longest for its client. If the new connection's address has its
    share, the ended connection is one of that address. HTTP lets a server close idle connections; clients reopen them.
    So connections that are silent, or held open with half a request, push out each other, and a request that is sent
    at once is served. A new connection is refused only if every connection has a complete request under way.

    Connections in a TLS handshake give way before all others, but hold an eighth of the places: else each new client
    would end the handshake of the one before it, where the other places have idle connections.
    """

    def __init__(self, max_connections: int, max_per_address: int = 0) -> None:
        """`max_per_address`: 0 for three quarters of all."""
        self.max_connections = max_connections
        self.max_per_address = max_per_address or max(1, max_connections * 3 // 4)
        self._address_of: dict[Key, str] = {}
        self._count: dict[str, int] = {}
        self._waiting: dict[Key, None] = {}  # oldest first
        self._waiting_of: dict[str, dict[Key, None]] = {}
        self._shaking: dict[Key, None] = {}  # in a handshake, oldest first
        self._shaking_of: dict[str, dict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def join(self, key: Key, host: str, *, is_shaking: bool = False) -> Key | Refusal | None:
        """Add `key`, which waits for its client. Returns the connection to end for it, a Refusal, or None."""
        address = network_of(host)
        given_way: Key | None = None
        if self._count.get(address, 0) >= self.max_per_address:
            given_way = _first(self._shaking_of[address], self._waiting_of[address], self.max_per_address)
            if given_way is None:
                return Refusal.CONNECTIONS_OF_ADDRESS
        elif len(self) >= self.max_connections:
            given_way = _first(self._shaking, self._waiting, self.max_connections)
            if given_way is None:
                return Refusal.CONNECTIONS
        if given_way is not None:
            self.leave(given_way)
        self._address_of[key] = address
        self._count[address] = self._count.get(address, 0) + 1
        shaking_of = self._shaking_of.setdefault(address, {})
        self._waiting_of.setdefault(address, {})
        if is_shaking:
            self._shaking[key] = shaking_of[key] = None
        else:
            self.waits(key)
        return given_way

    def leave(self, key: Key) -> None:
        """Remove the connection `key`, which has closed. Does nothing for a key that is not in the table."""
        address = self._address_of.get(key)
        if address is None:
            return
        self.works(key)
        self._shaking.pop(key, None)
        self._shaking_of[address].pop(key, None)
        del self._address_of[key]
        self._count[address] -= 1
        if not self._count[address]:
            del self._count[address], self._waiting_of[address], self._shaking_of[address]

    def waits(self, key: Key) -> None:
        """Note that `key` waits for its client from now on. A wait that had begun starts again."""
        address = self._address_of.get(key)
        if address is not None:
            self.works(key)
            self._waiting[key] = None
            self._waiting_of[address][key] = None

    def works(self, key: Key) -> None:
        """Note that a complete request of `key` is under way."""
        if key in self._waiting:
            del self._waiting[key]
            del self._waiting_of[self._address_of[key]][key]


def _first(shaking: dict[Key, None], waiting: dict[Key, None], places: int) -> Key | None:
    """The connection that gives way, of those that share `places`."""
    is_crowded = len(shaking) > places // HANDSHAKE_PART
    return next(chain(shaking, waiting) if is_crowded else chain(waiting, shaking), None)


def network_of(host: str) -> str:
    """The network that counts as one client: an IPv4 address, or an IPv6 /64, all of which a host may use."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
