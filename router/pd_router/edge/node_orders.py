"""The endpoints that change which nodes are used. Each needs an order signed with the cluster's key."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pd_connectors.protocol.ticket import ORDER_HEADER
from pd_http.errors import InvalidRequest
from pd_http.reply import json_response
from pd_router.sources.node_change import NodeChange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from pd_connectors.protocol.ticket import NodeOrder
    from pd_router.edge.worker_views import WorkerViews
    from pd_router.edge.workers import Workers
    from pd_router.nodes.node import Node
    from pd_router.sources.posted import PostedNodes


class Admin:
    """Handlers. Each answers with the node as `GET /nodes` shows it, when all workers have it, or raises a PdError."""

    def __init__(
        self, posted: PostedNodes, workers: Workers, views: WorkerViews, poll: Callable[[Node], Awaitable[None]]
    ) -> None:
        """`poll`: asks a node for its /health, and so for the epoch that a drain is for."""
        self._posted = posted
        self._workers = workers
        self._views = views
        self._poll = poll

    async def add(self, request: Request) -> Response:
        """`POST /nodes`. 201 for a new node, 200 for a known one. The node gets requests once its /health is good."""
        spec, is_new = self._posted.adding(self._posted.read(request.headers.get(ORDER_HEADER), "add"))
        if is_new:
            await self._workers.commit(NodeChange("add", spec.url, spec.role.value))
        return await self._tell(self._posted.find(urlsplit(spec.url).netloc), 201 if is_new else 200)

    async def remove(self, request: Request) -> Response:
        """`DELETE /nodes/{id}`: the node gets no new requests, and is forgotten when nothing is `outstanding`."""
        node, _ = ordered_node(self._posted, request, "remove")
        self._posted.check_removable(node)
        if not node.gone:
            await self._workers.commit(NodeChange("remove", node.url))
        return await self._tell(node)

    async def drain(self, request: Request) -> Response:
        """`POST /nodes/{id}/drain`: no new requests until the node restarts or is resumed. Repeat it to see progress.

        `outstanding` counts this router's requests only, and a lease's KV outlives its prefill.
        """
        node, _ = ordered_node(self._posted, request, "drain")
        if not node.draining:
            await self._poll(node)  # one that has just restarted would be drained for its boot before
            await self._workers.commit(NodeChange("drain", node.url, epoch=node.epoch))
        return await self._tell(node)

    async def resume(self, request: Request) -> Response:
        """`DELETE /nodes/{id}/drain`."""
        node, _ = ordered_node(self._posted, request, "resume")
        await self._workers.commit(NodeChange("resume", node.url))
        return await self._tell(node)

    async def _tell(self, node: Node, status: int = 200) -> Response:
        return json_response(await self._views.node(node), status)


def ordered_node(posted: PostedNodes, request: Request, action: str) -> tuple[Node, NodeOrder]:
    """The node that both the path and the signed order name. Raises InvalidRequest if they differ."""
    order = posted.read(request.headers.get(ORDER_HEADER), action)
    node = posted.find(request.path_params["id"])
    if not node.goes_by(order.node):
        raise InvalidRequest(f"the order names node {order.node!r}, the request {node.node_id!r}")
    return node, order
