"""The handoff's errors and failure reasons.

HandoffError
├── TicketError            a ticket that must not be acted on
│   ├── BadSignature       not signed with this cluster's key
│   └── TicketExpired
├── HandshakeError         two nodes that must not exchange KV
│   ├── ProtocolMismatch
│   ├── FingerprintMismatch
│   └── LayoutMismatch
├── ConnectorUnavailable   an optional backend is not installed or did not start
├── NixlError              a NIXL call failed (`nixl/agent.py`)
│   └── EndpointFailed, MayStillLand
└── StoreUnavailable       the store of a pool does not answer (`store.py`)
"""

from __future__ import annotations

from enum import StrEnum


class HandoffError(Exception):
    """Base of everything that can go wrong between two nodes."""


class TicketError(HandoffError):
    """The ticket is malformed or must not be acted on."""


class BadSignature(TicketError):
    """The ticket was not signed with this cluster's key."""


class TicketExpired(TicketError):
    """The ticket's lease has run out."""


class HandshakeError(HandoffError):
    """The two nodes must not exchange KV."""


class ProtocolMismatch(HandshakeError):
    """The peer speaks another protocol version."""


class FingerprintMismatch(HandshakeError):
    """The peer's KV was computed with other weights, RoPE or layout version."""


class LayoutMismatch(HandshakeError):
    """The peer's KV groups differ from ours, or cannot be split over the ranks of both sides."""


class ConnectorUnavailable(HandoffError):
    """An optional backend is not installed or did not start."""


class LoadFailure(StrEnum):
    """Why a load ended without KV. A failure is a value; each is counted under this name."""

    REJECTED = "rejected"  # ticket, handshake or layout refused before any read
    UNREACHABLE = "unreachable"  # no connection to the peer's control port, or it broke
    PEER_FROZEN = "peer_frozen"  # the peer does not answer, or its engine makes no progress
    PEER_RESTARTED = "peer_restarted"  # another epoch answers under the ticket's address
    LEASE_ENDED = "lease_ended"  # P released, expired or aborted it
    READ_FAILED = "read_failed"  # the transport reported an error
    NOT_CONFIRMED = "not_confirmed"  # P could not vouch for the bytes after the last read
    NO_ROOM = "no_room"  # what this node lends is what its load wants, and that did not change
    DEADLINE = "deadline"  # the load's own deadline passed
    CANCELLED = "cancelled"  # this side asked for it


class LeaseEnd(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"  # D (or the router) has no more use for it
    EXPIRED = "expired"  # no reader renewed it in time
    REVOKED = "revoked"  # P aborted the request or shuts down
