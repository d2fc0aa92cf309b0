"""The errors that only the router answers with. Those that nodes answer with too are in `pd_http.errors`.

PdError
├── KeyRefused, DashboardClosed              401, 403
├── NodeUnknown, NotRouted, NodeConflict     404, 404, 409
├── RateLimited, TooManyWatchers             429
├── NodeFailed, NoNode                       502, 503: of the nodes
└── HandingOver, WorkerLate, Stopping, TooManyUnfinished     503: of the router
"""

from __future__ import annotations

from pd_http.errors import PdError


class KeyRefused(PdError, status=401, kind="authentication_error", code="invalid_api_key"):
    """The request names no API key of this router."""


class RateLimited(PdError, status=429, kind="rate_limit_error", code="rate_limit_exceeded"):
    """The key has used what it may, or the nodes have no time for the request."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NodeUnknown(PdError, status=404, kind="invalid_request_error", code="node_not_found"):
    """No node has this id or address."""


class NodeConflict(PdError, status=409, kind="invalid_request_error", code="node_conflict"):
    """The order contradicts the node's source or state. The message names the orders that are possible."""


class HandingOver(PdError, status=503, code="handing_over"):
    """An order about a node would be lost: a successor is replacing this router."""


class WorkerLate(PdError, status=503, code="worker_late"):
    """An order is obeyed, but a worker of the router does not tell its requests to the node. Repeat the order."""


class NodeFailed(PdError, status=502, code="node_failed"):
    """A node broke off or refused, and no other node could take over."""


class NoNode(PdError, status=503, code="no_healthy_node"):
    """There is no healthy node of the needed role."""


class Stopping(PdError, status=503, code="router_stopping"):
    """The router was asked to stop, and the request did not end within `drain_s`."""


class DashboardClosed(PdError, status=403, kind="permission_error", code="dashboard_closed"):
    """The dashboard is not for this client (`dashboard` of the router's settings)."""


class TooManyWatchers(PdError, status=429, kind="rate_limit_error", code="too_many_watchers"):
    """Enough pages show the dashboard already."""


class NotRouted(PdError, status=404, kind="invalid_request_error", code="not_found"):
    """The path is not one that clients of a gateway may call."""


class TooManyUnfinished(PdError, status=503, code="too_many_unfinished"):
    """Requests that have not arrived whole take all the memory that they may (`max_unfinished_mb`)."""
