"""The nodes that died while they served one request: a request that kills nodes must not reach all of them.

A node that refuses, drains, is frozen, or was down before it was asked does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_http.errors import NodesDied

if TYPE_CHECKING:
    from pd_router.node_table import Node


class Casualties:
    """The nodes that died while they served one request. `limit`: number of deaths after which the request fails."""

    __slots__ = ("_dead", "_limit", "_met", "_num_outlived")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._met: dict[Node, int | None] = {}
        self._dead: list[tuple[Node, int | None]] = []  # a node that was started again may die again
        self._num_outlived = 0  # of the deaths, the first so many

    def meet(self, node: Node) -> None:
        """Note that the request goes to `node`, or to a node that may pass it on to `node`."""
        if node not in self._met or (node, self._met[node]) in self._dead:
            self._met[node] = node.epoch

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

    def outlive(self) -> None:
        """Do not count the deaths so far: another node has served the request beyond the place of the last one."""
        self._num_outlived = len(self._dead)

    def check(self) -> None:
        """Raises NodesDied if the request must not go to another node."""
        dead = self._dead[self._num_outlived :]
        if len(dead) >= self._limit:
            names = ", ".join(node.node_id for node, _ in dead)
            raise NodesDied(f"{len(dead)} nodes died while they served this request ({names}); it is not tried again")
