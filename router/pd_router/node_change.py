"""The changes that orders make to the node table, as values that routers pass on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

ChangeKind = Literal["add", "remove", "drain", "resume"]


class NodeChange(msgspec.Struct, frozen=True):
    """One change, by the node's URL: another process may not know the node's id yet."""

    kind: ChangeKind
    url: str
    role: str = ""  # of `add`
    epoch: int | None = None  # of `drain`: a node that has restarted since is no longer drained


@dataclass(frozen=True, slots=True)
class Heritage:
    """All that orders have changed, for a successor and for the other workers of a router.

    Loads and speeds are not handed over: a router learns them again in seconds.
    """

    posted: tuple[tuple[str, str], ...] = ()  # (URL, role) of nodes that were added
    drained: dict[str, int | None] = field(default_factory=dict)  # URL -> epoch of nodes that were drained

    def changed(self, change: NodeChange) -> Heritage:
        posted, drained = dict(self.posted), dict(self.drained)
        match change.kind:
            case "add":
                posted[change.url] = change.role
            case "remove":
                posted.pop(change.url, None)
                drained.pop(change.url, None)
            case "drain":
                drained[change.url] = change.epoch
            case "resume":
                drained.pop(change.url, None)
        return Heritage(tuple(posted.items()), drained)

    def to_line(self) -> bytes:
        return msgspec.json.encode({"posted": self.posted, "drained": self.drained}) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Heritage:
        """Raises ValueError, KeyError, TypeError."""
        values = msgspec.json.decode(line)
        return cls(tuple((url, role) for url, role in values["posted"]), dict(values["drained"]))
