"""The errors that only the router answers with. Those that nodes answer with too are in `pd_http.errors`.

PdError
├── NotAuthorized    401  an order about a node without a valid signature of this cluster's key
├── OrderVersion     409  an order about a node in another protocol version
├── NodeUnknown      404
├── NodeConflict     409  an order that contradicts the node's source or state
├── HandingOver      503  an order about a node, while a successor replaces this router
├── NodeFailed       502  a node broke off or refused, and no other node could take over
├── NoNode           503  no healthy node of the needed role
└── Stopping         503  the router stops before the request is done
"""

from __future__ import annotations

from pd_http.errors import PdError


class OrderVersion(PdError):
    """An order about a node in another protocol version. The sender must be upgraded, or the router."""

    status = 409
    kind = "invalid_request_error"
    code = "protocol_mismatch"


class NotAuthorized(PdError):
    """An order about a node that this cluster's key has not signed, or that has expired."""

    status = 401
    kind = "authentication_error"
    code = "bad_signature"


class NodeUnknown(PdError):
    """No node has this id or address."""

    status = 404
    kind = "invalid_request_error"
    code = "node_not_found"


class NodeConflict(PdError):
    """The order contradicts the node's source or state; the message says what is possible."""

    status = 409
    kind = "invalid_request_error"
    code = "node_conflict"


class HandingOver(PdError):
    """An order about a node would be lost: a successor is replacing this router."""

    status = 503
    code = "handing_over"


class NodeFailed(PdError):
    """A node broke off or refused, and no other node could take over."""

    status = 502
    code = "node_failed"


class NoNode(PdError):
    """No healthy node of the needed role."""

    status = 503
    code = "no_healthy_node"


class Stopping(PdError):
    """The router was told to stop, and the request did not end within `drain_s`."""

    status = 503
    code = "router_stopping"
