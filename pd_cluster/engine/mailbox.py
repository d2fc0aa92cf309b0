"""What the step loop needs of the way to its API process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.messages import FromEngine, ToEngine


class Mailbox(Protocol):
    """Receives and sends on the step loop's thread. Messages of either side arrive in order."""

    def wake(self) -> None:
        """End the current or the next `wait`. May be called from any thread."""

    def wait(self, timeout_s: float) -> bool:
        """Flush, then wait for a message or a `wake`. Returns False after `timeout_s` without one."""

    def receive(self) -> Sequence[ToEngine]:
        """Returns the messages that have arrived. Never blocks."""

    def send(self, message: FromEngine) -> None:
        """Queue a message for the next `flush` or `wait`, so that the tokens of one step travel together."""

    def flush(self) -> None:
        """Send the queued messages. Never blocks."""
