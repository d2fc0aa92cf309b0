"""`POST /nodes/{id}/role`: the router passes a signed order on to the node, which changes its role without a restart.

The node's own word for its role is what every router goes by, so one router is enough to give the order. A router that
dies before the answer has changed nothing, or the node tells it: the order can be repeated.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_connectors.protocol.ticket import BALANCE_ACTION, NOT_SEEN, ORDER_HEADER, ROLE_ACTION, NodeOrder, sign
from pd_http.endpoints import ROLE_PATH
from pd_http.errors import InvalidRequest, PdError
from pd_http.node_answers import object_in
from pd_http.reply import json_response
from pd_router.edge.cluster_orders import ORDER_LIFETIME_S
from pd_router.edge.node_orders import ordered_node
from pd_router.errors import NodeConflict, NodeFailed
from pd_router.nodes.node import DECODERS, Node, Role
from pd_router.nodes.role_order_note import RoleOrderNote
from pd_router.nodes.upstream import LegFailed, Refused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from pd_router.edge.worker_views import WorkerViews
    from pd_router.requests.services import Services
    from pd_router.sources.posted import PostedNodes

_OTHER = "it is of another engine or release"


class RoleOrders:
    """Gives one order at a time, in this process: two at once could each count on the other's node to decode."""

    def __init__(self, services: Services, posted: PostedNodes, views: WorkerViews) -> None:
        self._s = services
        self._posted = posted
        self._views = views
        self._turn = asyncio.Lock()

    async def give(self, request: Request) -> Response:
        """200 with the node as `GET /nodes` shows it. Raises NodeConflict, NodeFailed, and errors about the order."""
        node, order = ordered_node(self._posted, request, ROLE_ACTION)
        if order.role not in tuple(Role):
            raise InvalidRequest(f"bad role {order.role!r}: write one of {', '.join(Role)}")
        role = Role(order.role)
        sender = "operator" if not order.sender else BALANCE_ACTION if order.sender == BALANCE_ACTION else "other"
        try:
            await self._obey(node, role, order)
        except PdError:
            self._s.metrics.role_orders.labels(sender, "refused").inc()
            raise
        self._s.metrics.role_orders.labels(sender, "obeyed").inc()
        return json_response(await self._views.node(node))

    async def _obey(self, node: Node, role: Role, order: NodeOrder) -> None:
        """Raises NodeConflict, NodeFailed."""
        async with self._turn:
            if node.gone:
                raise NodeConflict(f"node {node.node_id} is leaving: it was removed and finishes its requests")
            self._check_state(order)
            if role is Role.PREFILL and node.role is not role and not order.is_forced:
                self._check_decodes(node)
            await self._tell(node, role, order)

    def _check_state(self, order: NodeOrder) -> None:
        """Raises NodeConflict if a role has changed, or a node come or gone, since the sender of the order looked."""
        if order.seen_state not in (NOT_SEEN, self._s.table.role_state):
            raise NodeConflict("nodes or roles have changed since the sender of the order saw them: look again")

    def _check_decodes(self, node: Node) -> None:
        """Raises NodeConflict if a model of `node` would be left without a healthy node that decodes."""
        others = [n for n in self._s.table.healthy(DECODERS, None) if n is not node]
        models = node.models or {None}
        left = sorted(str(model) for model in models if not any(one.serves(model) for one in others))
        if left:
            which = "" if node.models is None else f" for {', '.join(left)}"
            raise NodeConflict(
                f"no other node that decodes is healthy{which}: prefill nodes would serve alone, or requests get 503. "
                "--force changes the role all the same"
            )

    async def _tell(self, node: Node, role: Role, given: NodeOrder) -> None:
        s = self._s
        order = NodeOrder(
            ROLE_ACTION, node.node_id, s.wall_clock() + ORDER_LIFETIME_S, role.value, sender=given.sender,
            reason=given.reason, seen_changes=given.seen_changes,
        )  # fmt: skip
        headers = {ORDER_HEADER: sign(s.key, order)}
        try:
            answer = await s.upstream.post_whole(node, ROLE_PATH, headers, b"{}", s.config.control_timeout_s)
            reported = object_in(answer.body)
        except Refused as refusal:
            error = object_in(refusal.answer.body).get("error")
            why = error.get("message") if isinstance(error, dict) else _OTHER
            raise NodeConflict(f"node {node.node_id} refuses ({refusal}): {why}") from refusal
        except LegFailed as failure:
            text = "it may have changed its role all the same, which GET /nodes shows; the order can be repeated"
            raise NodeFailed(f"node {node.node_id} gave no answer ({failure}): {text}") from failure
        if reported.get("role") != role.value:
            raise NodeConflict(f"node {node.node_id} takes no role orders: {_OTHER}")
        node.receive_role(reported["role"], reported.get("role_changes"))
        node.role_order = RoleOrderNote.read(reported.get("role_order"), s.table.clock())
