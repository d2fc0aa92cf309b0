"""Orders that a router gives to all of its nodes: `POST /reset_prefix_cache`, `/start_profile` and the like."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.ticket import ALL_NODES, ORDER_HEADER, NodeOrder, sign
from pd_http.endpoints import NODE_ACTIONS
from pd_http.errors import InvalidRequest, NotAuthorized
from pd_http.node_answers import object_in
from pd_http.reply import json_response
from pd_router.errors import NodeFailed, NoNode
from pd_router.nodes.upstream import LegFailed, Refused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_router.nodes.node import Node
    from pd_router.requests.services import Services
    from pd_router.sources.posted import PostedNodes

ORDER_LIFETIME_S = 30.0  # more than clocks differ
MAX_ORIGIN_CHARS = 128  # of a client's origin, in an error


class ClusterOrders:
    """Handler of the paths of NODE_ACTIONS. A node obeys orders to itself alone, so the router signs one for each."""

    def __init__(self, services: Services, posted: PostedNodes) -> None:
        self._s = services
        self._posted = posted

    async def give(self, request: Request) -> Response:
        """200 when every node that is reachable obeys. Raises NoNode, NodeFailed, and errors about the order."""
        path = request.url.path
        self.allowed(request, NODE_ACTIONS[path])
        nodes = [node for node in self._s.table.nodes if node.reachable]
        if not nodes:
            raise NoNode("no node is reachable; try again later")
        reported = await asyncio.gather(*(self._tell(node, path) for node in nodes))
        answers = {node.node_id: answer for node, (_, answer) in zip(nodes, reported, strict=True)}
        answers |= {node.node_id: {"error": "not reachable"} for node in self._s.table.nodes if node not in nodes}
        refusals = [status for status, _ in reported if status != 200]
        if refusals and all(status < 500 for status in refusals):
            error = InvalidRequest(f"not every node obeyed: {_reasons(answers)}", status=refusals[0])
            return json_response(error.to_body() | {"success": False, "nodes": answers}, error.status)
        if refusals:
            raise NodeFailed(f"not every node obeyed: {_reasons(answers)}")
        return json_response({"success": True, "nodes": answers})

    def allowed(self, request: Request, action: str) -> NodeOrder | None:
        """The signed order to all nodes; None where --admin-endpoints lets clients order. Raises PdError."""
        if self._s.config.admin_endpoints == "signed":
            order = self._posted.read(request.headers.get(ORDER_HEADER), action)
            if order.node != ALL_NODES:
                raise InvalidRequest(f"the order names node {order.node!r}, the request goes to all: {ALL_NODES!r}")
            return order
        self._check_origin(request)
        if self._s.admission is not None:
            self._s.admission.find(request.headers.raw)
        return None

    def _check_origin(self, request: Request) -> None:
        """Raises NotAuthorized for an unsigned order of a web page from an origin that is not allowed.

        Browsers send a POST without a body to any server and ask for no consent first. They name the page's origin.
        """
        origin, allowed = request.headers.get("origin"), self._s.config.allowed_origins
        if origin is not None and "*" not in allowed and origin not in allowed:
            raise NotAuthorized(f"pages of {origin[:MAX_ORIGIN_CHARS]!r} may not give orders: see --allowed-origins")

    async def _tell(self, node: Node, path: str) -> tuple[int, dict[str, Any]]:
        """The status and the body of the node's answer; 502 without one."""
        s = self._s
        expires_at_s = s.wall_clock() + ORDER_LIFETIME_S
        order = NodeOrder(action=NODE_ACTIONS[path], node=node.node_id, expires_at_s=expires_at_s)  # type: ignore[arg-type]
        headers = {ORDER_HEADER: sign(s.key, order)}
        try:
            answer = await s.upstream.post_whole(node, path, headers, b"{}", s.config.control_timeout_s)
        except Refused as refusal:
            answer = refusal.answer
        except LegFailed as failure:
            return 502, {"error": str(failure).removeprefix(f"{node.node_id}: ")}
        return answer.status, dict(object_in(answer.body))


def _reasons(answers: dict[str, dict[str, Any]]) -> str:
    """What each node that did not obey said: the message of its error, else all of its answer."""
    said: dict[str, object] = {}
    for name, answer in answers.items():
        if answer.get("success") is not True:
            error = answer.get("error") or answer
            said[name] = error.get("message", error) if isinstance(error, dict) else error
    return "; ".join(f"{name}: {text}" for name, text in said.items())
