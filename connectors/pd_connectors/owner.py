"""P's half of a peer-to-peer exchange: answers readers from the lease table. No IO of its own, no threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_connectors.handshake import transport_checksum
from pd_connectors.protocol.messages import (
    Confirm,
    Hello,
    HelloReply,
    Release,
    Renew,
    ToOwner,
    ToReader,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import ConnectorContext
    from pd_connectors.lease import LeaseTable
    from pd_connectors.protocol.messages import LeaseRef


class Owner:
    """Owned by the control thread. reply: sends to a reader. is_frozen: True if no step of the engine ends."""

    def __init__(
        self,
        context: ConnectorContext,
        leases: LeaseTable,
        reply: Callable[[bytes, ToReader], None],
        is_frozen: Callable[[], bool],
    ) -> None:
        self._context = context
        self._leases = leases
        self._reply = reply
        self._is_frozen = is_frozen
        self._description: bytes | None = None
        self._attached: dict[str, set[bytes]] = {}  # lease id -> the readers that renew it

    def open(self, description: bytes) -> None:
        """Answer greetings from now on. `description`: how peers reach the transport."""
        self._description = description

    def on_message(self, reader: bytes, message: ToOwner) -> None:
        """Answer one message."""
        match message:
            case Hello(nonce=nonce):
                self._introduce(reader, nonce)
            case Renew(lease) | Confirm(lease=lease) | Release(lease) if not self._is_ours(lease):
                self._introduce(reader, b"")
            case Renew(lease):
                state = self._leases.renew(lease)
                if state.ended is None:
                    self._attached.setdefault(lease.lease_id, set()).add(reader)
                self._reply(reader, msgspec.structs.replace(state, is_frozen=True) if self._is_frozen() else state)
            case Confirm():
                self._reply(reader, self._leases.confirm(message))
            case Release(lease, done=True):
                self._leases.release(lease)
            case Release(lease):
                self._detach(lease, reader)

    def push(self) -> None:
        """Send the changed leases to their attached readers."""
        for state in self._leases.take_changed():
            lease_id = state.lease.lease_id
            for reader in self._attached.get(lease_id, ()):
                self._reply(reader, state)
            if state.ended is not None:
                self._attached.pop(lease_id, None)

    def _detach(self, lease: LeaseRef, reader: bytes) -> None:
        readers = self._attached.get(lease.lease_id, set())
        readers.discard(reader)
        if not readers and self._attached.pop(lease.lease_id, None) is not None:
            self._leases.abandon(lease)

    def _introduce(self, reader: bytes, nonce: bytes) -> None:
        if self._description is None:
            return  # not up yet; the reader repeats its greeting
        context = self._context
        reply = HelloReply(
            engine_id=context.engine_id,
            epoch=context.epoch,
            fingerprint=context.fingerprint,
            layout=context.layout,
            transport=self._description,
            checksum=transport_checksum(self._description),
            nonce=nonce,
        )
        self._reply(reader, reply)

    def _is_ours(self, lease: LeaseRef) -> bool:
        return (lease.engine_id, lease.epoch) == (self._context.engine_id, self._context.epoch)
