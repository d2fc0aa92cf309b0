"""Checks that this machine's network fits the handoff's settings, before any process is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.launch.up_flags import POOL_CONNECTORS
from pd_connectors.curve import require_curve
from pd_connectors.nixl.machine import local_network

if TYPE_CHECKING:
    from pd_cluster.config import HandoffConfig


def check_network(handoff: HandoffConfig) -> None:
    """Raises ConnectorUnavailable for settings with which NIXL cannot work here, or not safely."""
    if "nixl" in (handoff.connector, handoff.pool_handoff if handoff.connector in POOL_CONNECTORS else ""):
        require_curve()
        local_network(handoff.advertise_host, handoff.kv_port_range)
