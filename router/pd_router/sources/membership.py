"""Which nodes of a source are in use: readiness admits nodes, and only their end takes them out. Pure: no IO, no clock.

the source says of a node                           the node is
it is ready                                         in use
it is not ready (any more), and it was in use       in use: that its requests fail, the router sees by /health
it is not ready, and it was not in use              not in use
it has ended: deleted, final phase, new address,    out
  or another instance is at its URL
nothing, and it names other nodes that serve        out
nothing, and it names none that serves              *held*: in use as long as it lives

A source that says the last is *doubted*. It is an error of the source rather than an order, since a node that was meant
to go ends its process or is drained. So there is no time limit: a held node is out when it has not answered /health for
GONE_S, when it has restarted (its address may be another node's now), when an order has drained it and all others, or
when a whole reading of the source names a node that serves. A drained one stays as long as the others, or it would come
back without its order. Nodes that decode are looked at apart too: without one a router serves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pd_router.sources.base import NamedNode, Roster

GONE_S = 30.0  # ten checks of /health in a row without an answer in time: a machine may be busy


@dataclass(frozen=True, slots=True)
class Sight:
    """What the router itself sees of a node. `down_s`: since its last good /health; inf: it had none."""

    serves: bool
    decodes: bool
    down_s: float
    restarts: int
    is_drained: bool = False


NOT_SEEN = Sight(serves=False, decodes=True, down_s=0.0, restarts=0)


class Membership:
    """The nodes of one source. `sights`: by URL, of the nodes in the router's table."""

    def __init__(self) -> None:
        self.is_doubted = False
        self._named: dict[str, NamedNode] = {}
        self._read: set[str] = set()  # URLs that the last whole reading named
        self.held: dict[str, tuple[NamedNode, int]] = {}  # with its restarts when it was named last

    @property
    def in_use(self) -> tuple[NamedNode, ...]:
        return (*self._named.values(), *(node for node, _ in self.held.values()))

    def restore(self, nodes: Iterable[NamedNode], reported: Roster, sights: Mapping[str, Sight]) -> None:
        """Hold what another router had in use. `reported`: what the source has said to this one, nothing perhaps."""
        self.held |= {node.spec.url: (node, 0) for node in nodes if node.spec.url not in self._named}
        self.receive(reported, sights)

    def receive(self, reported: Roster, sights: Mapping[str, Sight]) -> None:
        """Take what the source says."""
        restarts = {url: sight.restarts for url, sight in sights.items()}
        before = {url: (node, restarts.get(url, 0)) for url, node in self._named.items()} | self.held
        self._named = {}
        for node in reported.nodes:
            known, _ = before.get(node.spec.url, (None, 0))
            if node.is_ready or (known is not None and known.key == node.key):
                self._named.setdefault(node.spec.url, node)
        spoken_of = {node.spec.url for node in reported.nodes}
        self._read = spoken_of if reported.is_whole else self._read
        self.held = {
            url: held for url, held in before.items() if url not in spoken_of and held[0].key not in reported.ended
        }
        self.look(sights)

    def look(self, sights: Mapping[str, Sight]) -> None:
        """Judge again what is held: the nodes have answered or failed since."""
        seen = {url: (sights.get(url, NOT_SEEN), restarts) for url, (_, restarts) in self.held.items()}
        held = {url: one for url, (one, known) in seen.items() if one.down_s < GONE_S and one.restarts == known}
        live = [sight for sight in held.values() if not sight.is_drained]
        up = [sights[url] for url in self._read.intersection(self._named, sights) if sights[url].serves]
        decode_is_lost = any(sight.decodes for sight in live) and not any(sight.decodes for sight in up)
        self.is_doubted = bool(live) and (not up or decode_is_lost)
        self.held = {url: node for url, node in self.held.items() if self.is_doubted and url in held}
