"""The way between rank 0 of an engine and another rank, for what their connectors tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class RankPort(Protocol):
    """One end, on rank 0 or on the other rank. Messages arrive once each, in the order in which they were sent.

    On the other rank a message takes its place among the steps: the handler is called after the steps that rank 0 had
    launched by `send` were launched there, and before any later step, by the thread that launches steps. So a copy of
    blocks that the handler queues on the device reads what rank 0 means.
    """

    def send(self, message: bytes) -> None:
        """Send to the other end. Callable from any thread; neither waits nor raises. A rank that is lost ends the
        engine, so the sender of a message to it need not know."""

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        """`handle` is called with each message, also with those that came before this call. It does not wait."""
