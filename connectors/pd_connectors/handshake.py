"""What two nodes check about each other before one reads the other's memory. Pure functions."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from pd_connectors.protocol.errors import (
    FingerprintMismatch,
    GeometryMismatch,
    HandshakeError,
    ProtocolMismatch,
)
from pd_connectors.protocol.ticket import PROTOCOL_VERSION, Geometry, Ticket

if TYPE_CHECKING:
    from pd_connectors.protocol.messages import HelloReply


def transport_checksum(transport: bytes) -> bytes:
    """blake2b over a transport's endpoint description. NIXL itself accepts a description with a flipped byte."""
    return blake2b(transport, digest_size=16, person=b"pd-transport").digest()


def check_ticket(ticket: Ticket, fingerprint: str, geometry: Geometry) -> None:
    """Refuse a ticket whose KV this engine cannot use. Raises a HandshakeError that says which and why."""
    if ticket.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"the ticket speaks protocol {ticket.version}, this node {PROTOCOL_VERSION}")
    _check_kv(ticket.fingerprint, ticket.geometry, fingerprint, geometry)


def check_reply(reply: HelloReply, fingerprint: str, geometry: Geometry) -> None:
    """Refuse a peer. Raises a HandshakeError that says why."""
    _check_kv(reply.fingerprint, reply.geometry, fingerprint, geometry)
    if transport_checksum(reply.transport) != reply.checksum:
        raise HandshakeError(f"the transport description of {reply.engine_id} arrived damaged (checksum mismatch)")


def _check_kv(their_fingerprint: str, theirs: Geometry, fingerprint: str, ours: Geometry) -> None:
    if their_fingerprint != fingerprint:
        raise FingerprintMismatch(
            f"the peer's KV fingerprint is {their_fingerprint}, ours {fingerprint}: other weights, RoPE or layout"
        )
    if theirs.block_size != ours.block_size:
        raise GeometryMismatch(
            f"the peer's blocks hold {theirs.block_size} tokens, ours {ours.block_size}: "
            "start both nodes with the same block_size"
        )
    if theirs != ours:
        raise GeometryMismatch(f"the peer's blocks are {theirs}, ours {ours}")
