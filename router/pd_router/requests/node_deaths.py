"""The nodes that one request may have stopped: a request that kills or freezes nodes must not reach all of them.

A node that refuses, drains, or was down before it was asked does not count. One that is judged frozen counts until the
request gets a token: unless it stood still before the request came, by a check of /health that was begun before. A
request that waits after the cause is not distinguished from it. A whole answer shows no token before its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import NodesDied, NodesFrozen
from pd_router.nodes.liveness import is_freeze

if TYPE_CHECKING:
    from pd_router.nodes.node import Node


class NodeDeaths:
    """The nodes that one request may have stopped. `limit`: number of them after which the request fails."""

    __slots__ = ("_dead", "_frozen", "_limit", "_met", "_num_outlived", "_polls")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._met: dict[Node, int | None] = {}
        self._polls: dict[Node, int] = {}  # checks of the node's /health that had begun when it met the request
        self._frozen: set[Node] = set()
        self._dead: list[tuple[Node, int | None]] = []  # a node that was started again may die again
        self._num_outlived = 0  # of the deaths, the first so many

    def meet(self, node: Node) -> None:
        """Note that the request goes to `node`, or to a node that may pass it on to `node`."""
        if node not in self._met or (node, self._met[node]) in self._dead:
            self._met[node], self._polls[node] = node.epoch, node.liveness.num_polls

    @property
    def suspects(self) -> list[tuple[Node, int | None]]:
        """Nodes that met the request and are not known to have died, with their boot epoch at that time."""
        return [met for met in self._met.items() if met not in self._dead]

    def epoch_of(self, node: Node) -> int | None:
        """The node's boot epoch when it met the request."""
        return self._met.get(node, node.epoch)

    def spare(self, node: Node) -> None:
        """Ignore later deaths of `node`: it refused, froze or took no connection, so the request is no cause."""
        self._met.pop(node, None)

    def add(self, node: Node) -> None:
        """Count `node`, which has died since it met the request, once."""
        death = (node, self.epoch_of(node))
        if death not in self._dead:
            self._dead.append(death)

    def freeze(self, node: Node) -> None:
        """Count `node`, which is judged frozen, and the other frozen nodes that may have the request from it."""
        for one in (node, *self._met):
            since = one.liveness.frozen_at
            if (one is node or is_freeze(one.liveness.down)) and self._polls.get(one, since) < since:
                self._frozen.add(one)

    def ran(self) -> None:
        """Note that the request got tokens: it is no cause if nodes freeze that it has met so far."""
        self._frozen.clear()
        self._polls.clear()

    def outlive(self) -> None:
        """Do not count the deaths so far: another node has served the request beyond the place of the last one."""
        self._num_outlived = len(self._dead)

    def check(self) -> None:
        """Raises NodesDied or NodesFrozen if the request must not go to another node."""
        dead = [node for node, _ in self._dead[self._num_outlived :]]
        nodes = [*dead, *(node for node in self._frozen if node not in dead)]
        if len(nodes) >= self._limit:
            names, what = ", ".join(node.node_id for node in nodes), "died" if dead else "stood still"
            kind = NodesDied if dead else NodesFrozen
            raise kind(f"{len(nodes)} nodes {what} while they served this request ({names}); it is not tried again")
