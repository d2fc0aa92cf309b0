"""How the loads of one reader ended, for its statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_connectors.base import LoadDone, LoadFailed
from pd_connectors.protocol.errors import LoadFailure

if TYPE_CHECKING:
    from pd_connectors.base import Event


class LoadCounters:
    """Counted by the control thread, read by any."""

    def __init__(self, num_groups: int) -> None:
        self.failed = dict.fromkeys(LoadFailure, 0)
        self.done = 0
        self.group_bytes = (0,) * num_groups  # that were read, by group of the layout
        self.transfer_s = 0.0

    def count(self, event: Event) -> None:
        """Take note of a load's end; other events change nothing."""
        match event:
            case LoadFailed(_, reason, _):
                self.failed[reason] += 1
            case LoadDone():
                self.done += 1
                self.group_bytes = tuple(a + b for a, b in zip(self.group_bytes, event.group_bytes, strict=True))
                self.transfer_s += event.transfer_s

    def stats(self) -> dict[str, float]:
        """See Connector.stats. The sum over all groups has a name of its own, so that no query counts bytes twice."""
        return {
            "kv_transfer_bytes_total": float(sum(self.group_bytes)),
            **{f"kv_group_transfer_bytes_total|group={i}": float(n) for i, n in enumerate(self.group_bytes)},
            "kv_transfer_seconds_total": self.transfer_s,
            "loads_done_total": float(self.done),
            **{f"loads_failed_total|reason={reason}": float(n) for reason, n in self.failed.items()},
        }
