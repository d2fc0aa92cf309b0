"""The nodes behind the router: who they are, how they do, and how much they have been given."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from yarl import URL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

    from pd_router.config import RouterConfig


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


@dataclass(slots=True, eq=False)
class Node:
    """One node. Written by the health poller, by failures seen on legs, and by charges."""

    url: str  # base URL, no trailing slash
    role: Role
    node_id: str  # from /health; until then host:port
    reachable: bool = False  # the last /health was good, and nothing failed to connect since
    ejected_until_s: float = 0.0
    failures_in_row: int = 0
    epoch: int | None = None  # the engine's boot; None for nodes that tell none
    models: frozenset[str] | None = None  # None: not known, so any model is tried
    prefill_bytes: int = 0  # outstanding prompt bytes: prefill work grows with the prompt
    decode_sequences: int = 0  # outstanding generations
    urls: dict[str, URL] = field(default_factory=dict)

    def is_healthy(self, now_s: float) -> bool:
        return self.reachable and now_s >= self.ejected_until_s

    def serves(self, model: str | None) -> bool:
        return model is None or self.models is None or model in self.models

    def at(self, path: str) -> URL:
        """The parsed URL of `path` on this node; parsing one costs more than looking it up."""
        url = self.urls.get(path)
        if url is None:
            url = self.urls[path] = URL(self.url + path)
        return url


class Charge:
    """Work booked on a node at the moment it is chosen, so that a burst spreads; given back exactly once."""

    __slots__ = ("_node", "_prefill_bytes", "_sequences")

    def __init__(self, node: Node, *, prefill_bytes: int = 0, sequences: int = 0) -> None:
        node.prefill_bytes += prefill_bytes
        node.decode_sequences += sequences
        self._node = node
        self._prefill_bytes = prefill_bytes
        self._sequences = sequences

    def prefill_done(self) -> None:
        self._node.prefill_bytes -= self._prefill_bytes
        self._prefill_bytes = 0

    def release(self) -> None:
        self.prefill_done()
        self._node.decode_sequences -= self._sequences
        self._sequences = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class NodeTable:
    """All nodes in the order of the flags. `clock`: monotonic seconds."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float]) -> None:
        self._eject_after = config.eject_after
        self._eject_s = config.eject_s
        self.clock = clock
        flags = ((Role.PREFILL, config.prefill), (Role.DECODE, config.decode), (Role.MIXED, config.mixed))
        self.nodes = tuple(_make_node(url, role) for role, urls in flags for url in urls)

    def healthy(self, roles: Iterable[Role], model: str | None) -> list[Node]:
        now_s = self.clock()
        wanted = tuple(roles)
        return [n for n in self.nodes if n.role in wanted and n.is_healthy(now_s) and n.serves(model)]

    def knows_model(self, model: str) -> bool:
        """Whether some node serves `model`, or might: a node that never told its models."""
        return any(node.serves(model) for node in self.nodes)

    def answered(self, node: Node) -> None:
        node.failures_in_row = 0

    def failed(self, node: Node, *, unreachable: bool) -> None:
        """A leg to `node` got no proper HTTP answer.

        Nobody listening puts the node out until /health answers again; other failures add up.
        """
        if unreachable:
            node.reachable = False
        node.failures_in_row += 1
        if node.failures_in_row >= self._eject_after:
            node.ejected_until_s = self.clock() + self._eject_s
            node.failures_in_row = 0

    def report(self) -> list[dict[str, object]]:
        """For `GET /nodes`."""
        now_s = self.clock()
        return [
            {
                "node_id": node.node_id,
                "role": node.role.value,
                "url": node.url,
                "healthy": node.is_healthy(now_s),
                "outstanding": {"prefill_bytes": node.prefill_bytes, "sequences": node.decode_sequences},
                "epoch": node.epoch,
                "models": None if node.models is None else sorted(node.models),
            }
            for node in self.nodes
        ]


def _make_node(url: str, role: Role) -> Node:
    return Node(url=url.rstrip("/"), role=role, node_id=urlsplit(url).netloc)
