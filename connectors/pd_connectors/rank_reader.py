"""A further rank's transport, driven by rank 0's RankedTransport through a port."""

from __future__ import annotations

import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING

from pd_connectors.rank_messages import (
    Close,
    Describe,
    Described,
    Died,
    FromRank,
    Report,
    carry_out,
    decode_to_rank,
    encode,
)

if TYPE_CHECKING:
    from pd_connectors.base import CacheDescription
    from pd_connectors.rank_port import RankPort
    from pd_connectors.transport import Transport

CLOSE_DEADLINE_S = 5.0
_WAKE, _END = b"", None  # besides messages, which are never empty

logger = logging.getLogger(__name__)


class RankReader:
    """Lets peers read this rank's cache, and reads theirs into it as rank 0 says.

    `open` starts its thread, which makes every call of the transport. The simulation calls `register` and `take`.
    """

    def __init__(self, transport: Transport, port: RankPort) -> None:
        self._transport = transport
        self._port = port
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._description = b""
        self._deadline_s = CLOSE_DEADLINE_S
        self._thread = threading.Thread(target=self._run, name="pd-rank-reader", daemon=True)

    def open(self, cache: CacheDescription) -> None:
        """Register this rank's cache and serve rank 0 from now on. Raises ConnectorUnavailable."""
        self.register(cache)
        self._transport.set_waker(partial(self._inbox.put, _WAKE))
        self._port.set_handler(self._inbox.put)
        self._thread.start()

    def register(self, cache: CacheDescription) -> None:
        """Make this rank's cache readable, and tell rank 0 how to reach it. Raises ConnectorUnavailable."""
        self._transport.register(cache)
        self._description = self._transport.describe()
        self._send(Described(self._description))

    def take(self, message: bytes) -> bool:
        """Do what a message of rank 0 says; none if it is empty. Then report what has completed. False: the last."""
        goes_on = True
        match decode_to_rank(message) if message else None:
            case Describe():
                self._send(Described(self._description))
            case Close(deadline_s):
                self._deadline_s, goes_on = deadline_s, False
            case None:
                pass
            case call:
                carry_out(call, self._transport)
        if completions := self._transport.poll():
            self._send(Report.of(completions))
        return goes_on

    def close(self) -> None:
        """End the thread and free the transport. Idempotent."""
        self._inbox.put(_END)
        self._thread.join(CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            logger.error("the rank's reader did not end within %g s", CLOSE_DEADLINE_S)

    def _send(self, message: FromRank) -> None:
        self._port.send(encode(message))

    def _run(self) -> None:
        try:
            while (message := self._inbox.get()) is not _END and self.take(message):
                pass
        except Exception as error:  # our own bug: rank 0 must learn of it, or no load would ever drain
            logger.exception("the rank's reader failed")
            self._send(Died(repr(error)))
        finally:
            self._transport.close(self._deadline_s)
