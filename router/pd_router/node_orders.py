"""The endpoints that change which nodes are used. Each needs an order signed with the cluster's key."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd_http.errors import InvalidRequest
from pd_http.reply import json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_router.node_table import Node, NodeTable
    from pd_router.sources.posted import PostedNodes

log = logging.getLogger("pd_router")
ORDER = "x-pd-order"  # request header: a signed NodeOrder


class Admin:
    """Handlers. Each answers with the node as `GET /nodes` shows it, or raises a PdError."""

    def __init__(self, table: NodeTable, posted: PostedNodes) -> None:
        self._table = table
        self._posted = posted

    async def add(self, request: Request) -> Response:
        """`POST /nodes`. 201 for a new node, 200 for a known one. The node gets requests once its /health is good."""
        node, is_new = self._posted.add(self._posted.read(request.headers.get(ORDER), "add"))
        return self._tell(node, 201 if is_new else 200)

    async def remove(self, request: Request) -> Response:
        """`DELETE /nodes/{id}`: the node gets no new requests, and is forgotten when nothing is `outstanding`."""
        node = self._ordered(request, "remove")
        self._posted.remove(node)
        return self._tell(node)

    async def drain(self, request: Request) -> Response:
        """`POST /nodes/{id}/drain`: no new requests until the node restarts or is resumed. Repeat it to see progress.

        `outstanding` counts this router's requests only, and a lease's KV outlives its prefill.
        """
        node = self._ordered(request, "drain")
        if not node.draining:
            log.info("node %s (%s) is drained by order", node.node_id, node.url)
        node.draining = True
        return self._tell(node)

    async def resume(self, request: Request) -> Response:
        """`DELETE /nodes/{id}/drain`."""
        node = self._ordered(request, "resume")
        node.draining = False
        return self._tell(node)

    def _ordered(self, request: Request, action: str) -> Node:
        """The node that both the path and the order name. Raises InvalidRequest if they differ."""
        order = self._posted.read(request.headers.get(ORDER), action)
        node = self._posted.find(request.path_params["id"])
        if not node.goes_by(order.node):
            raise InvalidRequest(f"the order names node {order.node!r}, the request {node.node_id!r}")
        return node

    def _tell(self, node: Node, status: int = 200) -> Response:
        return json_response(self._table.describe(node), status)
