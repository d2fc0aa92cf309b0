"""The objects that all requests of a router share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.admission.key_admission import KeyAdmission
    from pd_router.background import Background
    from pd_router.config import RouterConfig
    from pd_router.metrics import RouterMetrics
    from pd_router.node_table import NodeTable
    from pd_router.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Services:
    """Built once by the app."""

    config: RouterConfig
    table: NodeTable
    upstream: Upstream
    metrics: RouterMetrics
    background: Background
    key: bytes
    wall_clock: Callable[[], float]
    admission: KeyAdmission | None = None  # None: every client may use the router

    @property
    def longest_body(self) -> int:
        """Largest accepted request body in bytes."""
        return min(self.config.max_body_bytes, self.table.longest_body or self.config.max_body_bytes)
