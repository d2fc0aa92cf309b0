"""What this machine's network says about a handoff, asked before anything is spawned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.launch.up_flags import POOL_CONNECTORS
from pd_connectors.curve import require_curve
from pd_connectors.nixl.machine import local_network

if TYPE_CHECKING:
    from pd_cluster.config import HandoffConfig


def check_network(handoff: HandoffConfig) -> None:
    """Raises ConnectorUnavailable for a node that NIXL could not, or should not, serve as it is configured."""
    if "nixl" in (handoff.connector, handoff.pool_handoff if handoff.connector in POOL_CONNECTORS else ""):
        require_curve()
        local_network(handoff.advertise_host, handoff.kv_port_range)
