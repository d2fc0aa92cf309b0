"""Measures the links to all peers by the reads of their KV, and logs which of them are slow."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pd_connectors.link_speed import CAUSES
from pd_connectors.slow_link import why_slow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_connectors.peer import Peer
    from pd_connectors.transport import Address, ReadEnded

logger = logging.getLogger(__name__)


class LinkWatch:
    """`peers`: those of the reader, which adds and drops them. `host`: the address that the node itself advertises."""

    def __init__(self, peers: Mapping[Address, Peer], host: str) -> None:
        self._peers, self._host = peers, host
        self.memory = ""  # torch's name of the device that has our cache; set before the first load

    def speeds(self) -> dict[str, float]:
        """Bytes per second of the link to each peer, by host:port, where enough was read to know it."""
        return {peer.name: peer.link.bytes_per_s for peer in list(self._peers.values()) if peer.link.bytes_per_s}

    def are_slow(self) -> dict[str, bool]:
        """Whether each of these is far slower than it must be."""
        return {peer.name: bool(peer.why_slow) for peer in list(self._peers.values()) if peer.link.bytes_per_s}

    def ended(self, peer: Peer, ended: ReadEnded, now: float) -> None:
        """Take the end of a read into account."""
        link, is_gpu = peer.link, self.memory == "cuda"
        was_slow, told = link.is_slow, peer.why_slow
        link.ended(ended.read_id, now, is_good=not ended.error)
        where, gbps = peer.name, link.bytes_per_s / 1e9
        if link.is_slow and not was_slow and is_gpu:
            logger.warning("KV comes from %s at %.2g GB/s. Likely causes %s", where, gbps, CAUSES)
        is_one_host = peer.address[0] == self._host
        why = why_slow(link.bytes_per_s, link.best_bytes_per_s, is_gpu=is_gpu, is_one_host=is_one_host)
        if why and not told:
            logger.warning("the link is slow: KV comes from %s at %.2g GB/s, %s", where, gbps, why)
        elif told and not why:
            logger.info("the link is no longer slow: KV comes from %s at %.2g GB/s", where, gbps)
        peer.why_slow = why
