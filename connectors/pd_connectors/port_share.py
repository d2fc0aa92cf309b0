"""Several RankPorts over one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.rank_port import RankPort


class PortShare:
    """One of several RankPorts over one. `share_port` makes them on both ends, in the same number.

    before: called before each message is handed on, on the port's thread.
    """

    def __init__(self, port: RankPort, index: int) -> None:
        self._port = port
        self._prefix = bytes((index,))
        self._early: list[bytes] = []  # before the handler was set
        self._handle: Callable[[bytes], None] | None = None
        self._lock = threading.Lock()
        self.before: Callable[[], None] = _nothing

    def send(self, message: bytes) -> None:
        self._port.send(self._prefix + message)

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        with self._lock:
            for message in self._early:
                handle(message)
            self._early.clear()
            self._handle = handle

    def deliver(self, message: bytes) -> None:
        """Hand a message on."""
        with self._lock:
            if self._handle is None:
                self._early.append(message)
                return
        self.before()
        self._handle(message)


def share_port(port: RankPort, count: int) -> tuple[PortShare, ...]:
    """So many ports over one."""
    shares = tuple(PortShare(port, index) for index in range(count))
    port.set_handler(lambda message: shares[message[0]].deliver(message[1:]))
    return shares


def _nothing() -> None:
    """Before a message that needs no preparation."""
