"""The connector `nixl`: peer to peer over NIXL, with ZeroMQ for control messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_connectors.channel import ZmqChannel
from pd_connectors.nixl.transfer import NixlTransport
from pd_connectors.p2p import PeerToPeerConnector

if TYPE_CHECKING:
    from pd_connectors.base import ConnectorContext


class NixlConnector(PeerToPeerConnector):
    """Raises ConnectorUnavailable when the control port is taken, or the host is no address for peers;
    `register_kv_cache` raises it when NIXL is missing."""

    name = "nixl"

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(
            context,
            NixlTransport(f"{context.engine_id}/{context.epoch}"),
            ZmqChannel(context.cluster_key, context.host, context.port),
        )
