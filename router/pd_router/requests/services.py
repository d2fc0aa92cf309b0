"""The objects that all requests of a router share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_connectors.protocol.ticket import Offer, sign
from pd_http.body_turns import BodyTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_http.held_bytes import HeldBytes
    from pd_router.admission.key_admission import KeyAdmission
    from pd_router.config import RouterConfig
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.nodes.upstream import Upstream
    from pd_router.policy.route import RoutePolicy
    from pd_router.records.metrics import RouterMetrics
    from pd_router.records.recent_requests import RecentRequests
    from pd_router.records.request_sinks import RequestSinks
    from pd_router.requests.background import Background


@dataclass(frozen=True, slots=True)
class Services:
    """Built once by the app."""

    config: RouterConfig
    table: NodeTable
    policy: RoutePolicy
    upstream: Upstream
    metrics: RouterMetrics
    background: Background
    sinks: RequestSinks
    recent: RecentRequests
    key: bytes
    wall_clock: Callable[[], float]
    held: HeldBytes
    admission: KeyAdmission | None = None  # None: every client may use the router
    turns: BodyTurns = field(default_factory=BodyTurns)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)  # set when this router leaves without a successor

    @property
    def longest_body(self) -> int:
        """Largest accepted request body in bytes."""
        return min(self.config.max_body_bytes, self.table.longest_body or self.config.max_body_bytes)

    def signed_offer(self, nodes: Iterable[Node]) -> str:
        """The signed list of prefill nodes that a decode node may ask, best first."""
        return sign(self.key, Offer(tuple(node.url for node in nodes), self.wall_clock() + self.config.offer_ttl_s))
