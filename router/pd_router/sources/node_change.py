"""The changes that orders make to the node table, as values that routers pass on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from pd_router.sources.base import NamedNode  # noqa: TC001  # msgspec reads the fields' types

ChangeKind = Literal["add", "remove", "drain", "resume"]


class NodeChange(msgspec.Struct, frozen=True):
    """One change, by the node's URL: another process may not know the node's id yet."""

    kind: ChangeKind
    url: str
    role: str = ""  # of `add`
    epoch: int | None = None  # of `drain`: a node that has restarted since is no longer drained


@dataclass(frozen=True, slots=True)
class RestartState:
    """What orders have changed and sources have reported, for a successor and for the other workers of a router.

    A source may be away when a process starts. Loads and speeds are not handed over: they are learned in seconds.
    """

    posted: tuple[tuple[str, str], ...] = ()  # (URL, role) of nodes that were added
    drained: dict[str, int | None] = field(default_factory=dict)  # URL -> epoch of nodes that were drained
    known: dict[str, tuple[NamedNode, ...]] = field(default_factory=dict)  # by source: its nodes in use

    def changed(self, change: NodeChange) -> RestartState:
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
        return replace(self, posted=tuple(posted.items()), drained=drained)

    def to_line(self) -> bytes:
        return msgspec.json.encode(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> RestartState:
        """Raises ValueError."""
        if not line.startswith(b'{"posted":'):
            raise ValueError("it tells no orders")
        return msgspec.json.decode(line, type=cls)
