"""Nodes that signed orders add and remove: `POST /nodes`, `DELETE /nodes/{id}`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd_connectors.protocol.errors import HandoffError, ProtocolMismatch
from pd_connectors.protocol.ticket import NodeOrder, verify
from pd_http.errors import InvalidRequest, NotAuthorized, OrderVersion
from pd_router.errors import HandingOver, NodeConflict, NodeUnknown
from pd_router.sources.base import make_spec
from pd_router.sources.node_change import RestartState

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.nodes.node import Node, NodeSpec
    from pd_router.nodes.node_table import NodeTable
    from pd_router.sources.base import NamedNode

log = logging.getLogger("pd_router")
POSTED = "posted"


class PostedNodes:
    """Executes signed orders. Unlike other sources it is not watched: an order is in effect when its answer is sent.

    The set lives as long as the router, and its successor has it, too (SIGHUP). Operators post nodes to every router,
    and again to a router that restarts.
    """

    def __init__(self, table: NodeTable, key: bytes, wall_clock: Callable[[], float]) -> None:
        self._table = table
        self._key = key
        self._wall_clock = wall_clock
        self._specs: dict[str, NodeSpec] = {}  # by URL
        self.known: Callable[[], dict[str, tuple[NamedNode, ...]]] = dict  # the nodes of the sources, for a successor
        self.is_handed_over = False  # a successor has a copy, or is about to get one: it would miss further orders

    def read(self, signed: str | None, action: str) -> NodeOrder:
        """The order inside a header. Raises HandingOver, NotAuthorized, OrderVersion, InvalidRequest."""
        if self.is_handed_over:
            raise HandingOver("a successor is replacing this router; repeat the order in a few seconds")
        if not signed:
            raise NotAuthorized("send the signed order in the header x-pd-order")
        try:
            order = verify(self._key, signed, NodeOrder, self._wall_clock())
        except ProtocolMismatch as error:
            raise OrderVersion(str(error)) from error
        except HandoffError as error:
            raise NotAuthorized(str(error)) from error
        if order.action != action:
            raise InvalidRequest(f"the order is for {order.action!r}, the request for {action!r}")
        return order

    def adding(self, order: NodeOrder) -> tuple[NodeSpec, bool]:
        """The node that an order adds, and whether it is new. A posted node keeps the role that it has reported.

        Raises InvalidRequest, NodeConflict.
        """
        try:
            spec = make_spec(order.node, order.role)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        known = next((node for node in self._table.nodes if node.url == spec.url), None)
        if known is not None and known.role_changes is not None and spec.url in self._specs:
            return spec, False
        if known is not None and known.role is not spec.role and spec.url not in self._specs:
            raise NodeConflict(f"{spec.url} is a {known.role.value} node by source {self._table.source_of(known)}")
        return spec, known is None or known.role is not spec.role

    def restart_state(self) -> RestartState:
        """The changes that orders have made, and the nodes that sources have reported, for a successor."""
        posted = tuple((spec.url, spec.role.value) for spec in self._specs.values())
        drained = {node.url: node.epoch for node in self._table.nodes if node.draining}
        return RestartState(posted, drained, self.known())

    def adopt(self, restart_state: RestartState) -> None:
        """Take over all that orders have changed. A node that has restarted since it was drained is not drained.

        By a new order it is, until its next /health: the worker that took the order may have seen a later boot.
        """
        specs = (make_spec(url, role) for url, role in restart_state.posted)
        self._specs = {spec.url: spec for spec in specs}
        self._apply()
        for node in self._table.nodes:
            before, epoch = node.drained_epoch, restart_state.drained.get(node.url)
            node.drained_epoch = epoch
            node.epoch = epoch if node.epoch is None else node.epoch
            is_draining = node.url in restart_state.drained and (epoch in (None, node.epoch) or epoch != before)
            if is_draining and not node.draining:
                log.info("node %s (%s) is drained by order", node.node_id, node.url)
            node.draining = is_draining

    def check_removable(self, node: Node) -> None:
        """Raises NodeConflict for a node that was not added by an order. One that is leaving is removable."""
        if not node.gone and node.url not in self._specs:
            source = self._table.source_of(node)
            raise NodeConflict(
                f"node {node.node_id} was not posted; its source is {source}: remove it there, or drain it"
            )

    def find(self, name: str) -> Node:
        """The node with the id or host:port `name`. Raises NodeUnknown for none, NodeConflict for several."""
        found = self._table.find(name)
        if not found:
            raise NodeUnknown(f"no node is called {name!r}; GET /nodes lists the nodes")
        if len(found) > 1:
            raise NodeConflict(f"{len(found)} nodes have the name {name!r}; use host:port")
        return found[0]

    def _apply(self) -> None:
        self._table.apply(POSTED, self._specs.values())
