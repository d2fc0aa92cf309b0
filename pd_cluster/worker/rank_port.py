"""One end of the way between the connectors' parts on two ranks: see `pd_connectors.rank_port`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pd_cluster.worker.rank_frames import PortMessage

if TYPE_CHECKING:
    from collections.abc import Callable


class LinkPort:
    """A RankPort over the frames of a RankLink."""

    def __init__(self, rank: int, send: Callable[[PortMessage], None]) -> None:
        """`rank`: the further rank. `send` may be called from any thread."""
        self._rank = rank
        self._send = send
        self._lock = threading.RLock()  # orders early messages before those that come meanwhile; a handler may send
        self._early: list[bytes] = []
        self._handle: Callable[[bytes], None] = self._early.append

    def send(self, message: bytes) -> None:
        self._send(PortMessage(self._rank, message))

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        with self._lock:
            for message in self._early:
                handle(message)
            self._handle = handle

    def deliver(self, message: bytes) -> None:
        """Call the handler, or keep the message for it."""
        with self._lock:
            self._handle(message)
