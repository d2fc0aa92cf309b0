"""Signed statements that travel through routers as opaque strings inside `kv_transfer_params`.

A *ticket* is what P hands out at admission and D must have before it reads. An *offer* is the router's list of prefill
nodes that D may ask. A *node order* tells a router about one of its nodes. All are signed with the cluster's key, so
that neither a client nor a foreign router can point D or a router at an address, a lease or a prompt of its choosing.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, Literal, TypeVar

import msgspec

from pd_connectors.protocol.adapters import AdapterRecord
from pd_connectors.protocol.errors import BadSignature, ProtocolMismatch, TicketError, TicketExpired
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.messages import MAC_BYTES, PROTOCOL_VERSION, LeaseRef, mac

STATEMENT_VERSION = 2  # of offers and orders; tickets and control messages have PROTOCOL_VERSION
TICKET_LIFETIME_S = 600.0  # far above any clock skew between nodes
MAX_LIFETIME_S = 86_400.0  # of a statement, from now. Signers give 600 s at most; the rest is for clocks that differ


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """P's signed promise: "read this prompt's KV here while the lease lives"."""

    request_id: str
    lease: LeaseRef
    generation: int
    expires_at_s: float  # wall clock; a leaked ticket is of use for minutes only. The lease itself expires much sooner
    fingerprint: str
    layout: BlockLayout
    prompt_digest: bytes
    num_tokens: int  # prompt tokens, all of which P computes
    num_samples: int  # first tokens that P samples (the request's n); read by a D that knows no sampling_digest
    host: str  # P's control address
    port: int
    version: int = PROTOCOL_VERSION
    # Digest of the parameters that decide P's first tokens. D adopts the tokens only if its own digest is equal. The KV
    # does not depend on them. b"": of an older P, which sends none; equal to no digest.
    sampling_digest: bytes = b""
    position_delta: int = 0  # what media of the prompt add to the positions of the tokens after it


FEED_ACTION = "feed"  # of an order to a node alone, to read its feed
ROLE_ACTION: Final = "role"  # to a router, about one node; and of a router to that node, which changes its role
BALANCE_ACTION: Final = "balance"  # to a router: what a balance has decided, for an answer with nodes and load
ORDER_HEADER = "x-pd-order"  # of a request: the signed NodeOrder
OFFER_HEADER = "x-pd-offer"  # of a request to a decode node: the signed Offer, in place of kv_transfer_params
NOT_SEEN = -1  # of the number of role changes that an order names
ALL_NODES = "*"  # in an order to a router; a node obeys its own id alone


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The router's list of nodes that may prefill for D: base URLs, best first."""

    prefill_urls: tuple[str, ...]
    expires_at_s: float
    version: int = STATEMENT_VERSION


class NodeOrder(msgspec.Struct, frozen=True, tag=True):
    """An order of a supervisor or operator to a router about one node. Idempotent.

    "reset_cache", "start_profile", "stop_profile", "role" and those about adapters are orders to the node itself, too.
    """

    action: Literal[
        "add", "remove", "drain", "resume", "reset_cache", "start_profile", "stop_profile", "feed", "role",
        "load_adapter", "unload_adapter", "balance",
    ]  # fmt: skip
    node: str  # the base URL for "add", else the node's id or its host:port; ALL_NODES for those that all nodes obey
    expires_at_s: float  # wall clock; until then a process that overhears the order can repeat it, so keep it short
    role: str = ""  # for "add" and "role": prefill, decode or mixed
    version: int = STATEMENT_VERSION
    is_forced: bool = False  # for "role": even if no node is left that decodes; "load_adapter": in place of another
    reader: str = ""  # for "feed": "ROUTER.PLACE", of the router's process; "": of a router that names it outside
    serial: int = 0  # for "feed": higher in each order of that process
    adapter: AdapterRecord | None = None  # for "load_adapter" and "unload_adapter"; to a router without a stamp
    # Of a router's order to a node: prepare reads the files; hold gives the name its meaning; drop ends a prepare
    step: Literal["prepare", "hold", "drop"] = "hold"
    # For "role". `sender`: "": an operator. `reason`: of the sender, in logs and GET /nodes. What the sender saw:
    # `role_changes` of the node, and the router's `NodeTable.role_state`; NOT_SEEN: it obeys whatever has changed
    sender: str = ""
    reason: str = ""
    seen_changes: int = NOT_SEEN
    seen_state: int = NOT_SEEN
    seen_stamp: int = NOT_SEEN  # of the newest record of a name that is free there; for "prepare"


Statement = TypeVar("Statement", Ticket, Offer, NodeOrder)


class _Versioned(msgspec.Struct):
    """The fields that every version of every statement has."""

    type: str
    version: int


def sign(key: bytes, statement: Ticket | Offer | NodeOrder) -> str:
    """The statement as a URL-safe string, signature first."""
    payload = msgspec.msgpack.encode(statement)
    return urlsafe_b64encode(mac(key, payload) + payload).decode()


def verify(key: bytes, token: str, kind: type[Statement], now_s: float) -> Statement:
    """The statement inside `token`. `now_s`: wall clock.

    Raises BadSignature, ProtocolMismatch for a statement of another protocol version, TicketExpired, or TicketError
    when the token is not such a statement.
    """
    what = kind.__name__.removeprefix("Node").lower()  # ticket, offer, order
    try:
        raw = urlsafe_b64decode(token.encode())
    except ValueError as error:
        raise TicketError("not base64") from error
    signature, payload = raw[:MAC_BYTES], raw[MAC_BYTES:]
    if not hmac.compare_digest(signature, mac(key, payload)):
        raise BadSignature(
            f"the {what} was not signed with this cluster's key: "
            "nodes, routers and `pd-cluster nodes` need the same $PD_CLUSTER_KEY or --cluster-key-file"
        )
    try:
        told, ours = (
            msgspec.msgpack.decode(payload, type=_Versioned),
            PROTOCOL_VERSION if kind is Ticket else STATEMENT_VERSION,
        )
        if told.type == kind.__name__ and told.version != ours:  # versions of other kinds say nothing
            raise ProtocolMismatch(
                f"the {what} speaks protocol {told.version}, this node {ours}: "
                "run the same release on all nodes and routers"
            )
        statement = msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the second one for a text that is not UTF-8
        raise TicketError(f"the {what} cannot be read: {error}") from error
    if not statement.expires_at_s <= now_s + MAX_LIFETIME_S:  # a NaN is not less than anything
        raise TicketError(f"the {what} expires in more than {MAX_LIFETIME_S:g} s, or never")
    if statement.expires_at_s < now_s:
        raise TicketExpired(f"the {what} expired {now_s - statement.expires_at_s:.1f} s ago")
    return statement
