"""What two nodes check about each other before one reads the other's memory. Pure functions."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from pd_connectors.protocol.errors import (
    FingerprintMismatch,
    HandshakeError,
    ProtocolMismatch,
)
from pd_connectors.protocol.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.protocol.messages import HelloReply
    from pd_connectors.protocol.ticket import Ticket


def transport_checksum(transport: bytes) -> bytes:
    """blake2b over a transport's endpoint description. NIXL itself accepts a description with a flipped byte."""
    return blake2b(transport, digest_size=16, person=b"pd-transport").digest()


def check_ticket(ticket: Ticket, fingerprint: str, layout: BlockLayout) -> None:
    """Refuse a ticket for KV that this engine cannot use. Raises a HandshakeError that says which and why."""
    if ticket.version != PROTOCOL_VERSION:
        raise ProtocolMismatch(f"the ticket speaks protocol {ticket.version}, this node {PROTOCOL_VERSION}")
    if ticket.position_delta:
        raise HandshakeError(
            f"media of the prompt shift its positions by {ticket.position_delta}: this node decodes prompts of text"
        )
    _check_kv(ticket.fingerprint, ticket.layout, fingerprint, layout)


def check_reply(reply: HelloReply, fingerprint: str, layout: BlockLayout) -> None:
    """Refuse a peer. Raises a HandshakeError that says why."""
    _check_kv(reply.fingerprint, reply.layout, fingerprint, layout)
    if transport_checksum(reply.transport) != reply.checksum:
        raise HandshakeError(f"the transport description of {reply.engine_id} arrived damaged (checksum mismatch)")


def _check_kv(their_fingerprint: str, theirs: BlockLayout, fingerprint: str, ours: BlockLayout) -> None:
    num_common = ours.num_common(theirs)  # first, because it names the difference
    if their_fingerprint != fingerprint:
        raise FingerprintMismatch(
            f"the peer's KV fingerprint is {their_fingerprint}, ours {fingerprint}: other weights, RoPE or layout"
        )
    for group in theirs.groups[:num_common]:
        group.rank_shape(theirs.tp_size)  # the peer's degree may differ from ours, if its heads can be split so
