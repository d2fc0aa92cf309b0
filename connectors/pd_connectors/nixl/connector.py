"""The connector `nixl`: peer to peer over NIXL, with ZeroMQ for control messages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd_connectors.nixl.machine import local_network
from pd_connectors.nixl.transfer import NixlTransport
from pd_connectors.p2p import PeerToPeerConnector
from pd_connectors.rank_reader import RankReader
from pd_connectors.ranked_transport import RankedTransport
from pd_connectors.zmq_channel import ZmqChannel

if TYPE_CHECKING:
    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.rank_port import RankPort

logger = logging.getLogger(__name__)


class NixlConnector(PeerToPeerConnector):
    """The connector that reads KV through NIXL.

    Raises ConnectorUnavailable when the control port is taken, or `host` is no address for peers or of no interface of
    this machine. `register_kv_cache` raises ConnectorUnavailable when NIXL is missing, or no port is free for KV.
    """

    name = "nixl"

    def __init__(self, context: ConnectorContext) -> None:
        channel = ZmqChannel(context.cluster_key, context.host, context.port, context.max_readers)
        try:
            network = local_network(context.host, context.kv_ports)
            for line in network.notes():
                logger.warning("%s", line)
            local = NixlTransport(f"{context.engine_id}/{context.epoch}", network)
            transport = RankedTransport(local, context.layout, context.rank_ports)
        except BaseException:
            channel.close()
            raise
        super().__init__(context, transport, channel)

    @classmethod
    def serve_rank(cls, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> RankReader:
        network = local_network(context.host, context.kv_ports)
        name = f"{context.engine_id}/{context.epoch}/{context.rank}"
        reader = RankReader(NixlTransport(name, network, context.rank), port)
        reader.open(cache)
        return reader
