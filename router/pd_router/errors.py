"""Errors that the router itself answers with, in OpenAI's shape.

RouterError
├── InvalidRequest   400  the request can never be served
├── NotAuthorized    401  an order about a node without this cluster's signature
├── ModelNotFound    404
├── NodeUnknown      404
├── NodeConflict     409  an order that the router must not obey as things are
├── HandingOver      503  an order about a node, while a successor takes the router's place
├── BodyTooLarge     413
├── NodesDied        500  several nodes died while they served the request; it must not be tried again
├── NodeFailed       502  a node broke or refused, and no other could take over
├── NoNode           503  no healthy node of the needed role
├── Stopping         503  the router ends before the request could
└── StartupError          a flag, file or port that must be changed before the router can start
"""

from __future__ import annotations

from pd_http.refusal import error_body


class RouterError(Exception):
    """Base. `status` is the HTTP status, `kind` OpenAI's `error.type`, `code` a stable machine-readable word."""

    status = 500
    kind = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.param = param
        if status is not None:
            self.status = status


class InvalidRequest(RouterError):
    """The request can never be served."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_value"


class NotAuthorized(RouterError):
    """An order about a node that this cluster's key has not signed, or that has expired."""

    status = 401
    kind = "authentication_error"
    code = "bad_signature"


class NodeUnknown(RouterError):
    """No such node."""

    status = 404
    kind = "invalid_request_error"
    code = "node_not_found"


class NodeConflict(RouterError):
    """The order fits the node's place or state in no way; the message says what would."""

    status = 409
    kind = "invalid_request_error"
    code = "node_conflict"


class HandingOver(RouterError):
    """An order about a node would be lost: a successor takes the router's place just now."""

    status = 503
    code = "handing_over"


class ModelNotFound(RouterError):
    """No node serves this model."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(RouterError):
    """The request body is longer than `max_body_mb`."""

    status = 413
    kind = "invalid_request_error"
    code = "body_too_large"


class NodesDied(RouterError):
    """Several nodes died while they served the request: it may be what kills them."""

    status = 500
    code = "nodes_died"


class NodeFailed(RouterError):
    """A node broke or refused, and no other could take over."""

    status = 502
    code = "node_failed"


class NoNode(RouterError):
    """No healthy node of the needed role."""

    status = 503
    code = "no_healthy_node"


class Stopping(RouterError):
    """The router was told to stop, and the request was not over when `drain_s` was."""

    status = 503
    code = "router_stopping"


class StartupError(RouterError):
    """The router cannot start as configured; the message says what to change."""

    code = "startup"


def to_body(error: RouterError) -> bytes:
    return error_body(str(error), error.kind, error.code, error.param)
