"""The tasks that follow the nodes of the table: from a node's addition to its removal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable


class NodeTasks:
    """Runs each of `works` for every node. A work runs until it is cancelled and raises nothing else."""

    def __init__(self, table: NodeTable, *works: Callable[[Node], Coroutine[None, None, None]]) -> None:
        self._table = table
        self._works = works

    async def run(self) -> None:
        """Until cancelled. A node delays no other node's work."""
        changed = self._table.changed
        running: dict[Node, list[asyncio.Task[None]]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                changed.clear()
                for node in set(running).difference(self._table.nodes):
                    for task in running.pop(node):
                        task.cancel()
                for node in set(self._table.nodes).difference(running):
                    running[node] = [group.create_task(work(node)) for work in self._works]
                await changed.wait()
