"""`/nodes`, `/load` and `/metrics` of all workers of a router, answered by one of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pd_router.errors import WorkerLate
from pd_router.nodes.node_report import describe, report

if TYPE_CHECKING:
    from pd_router.edge.workers import Workers
    from pd_router.nodes.node import Node
    from pd_router.nodes.node_table import NodeTable
    from pd_router.records.metrics import RouterMetrics

NODES, METRICS = "nodes", "metrics"  # topics of `Workers.ask`


class WorkerViews:
    """What a client sees of the router, whichever worker it has met."""

    def __init__(self, table: NodeTable, metrics: RouterMetrics, workers: Workers) -> None:
        self._table = table
        self._metrics = metrics
        self._workers = workers
        self.topics = {NODES: lambda: report(table), METRICS: lambda: metrics.exposition().decode()}

    async def nodes(self) -> list[dict[str, Any]]:
        """The nodes as this worker sees them, `outstanding` summed over all workers."""
        return self._sums(report(self._table), await self._workers.ask(NODES))

    async def node(self, node: Node) -> dict[str, Any]:
        """One node in the same way, also one that has left. Raises WorkerLate if a worker's requests are not known."""
        others = await self._workers.ask(NODES)
        if late := [number for number, reported in others.items() if reported is None]:
            raise WorkerLate(f"workers {late} do not tell their requests to {node.node_id}; repeat the order")
        return self._sums([describe(self._table, node)], others)[0]

    async def load(self) -> int:
        """Generations under way."""
        return sum(node["outstanding"]["sequences"] for node in await self.nodes())

    async def metrics(self) -> bytes:
        """The exposition; of several workers, each sample with the label `worker`.

        They are not summed: the counters of one that is replaced begin at 0, which a sum would hide from `rate`.
        """
        own = self._metrics.exposition()
        if self._workers.number is None:
            return own
        others = {number: part for number, part in (await self._workers.ask(METRICS)).items() if part is not None}
        return labelled({self._workers.number: own.decode(), **others})

    def _sums(self, nodes: list[dict[str, Any]], others: dict[int, Any]) -> list[dict[str, Any]]:
        own = {_key(entry): entry["outstanding"] for entry in nodes}
        for entry in (entry for other in others.values() for entry in other or ()):
            outstanding = own.get(_key(entry))
            for name, value in entry["outstanding"].items():
                if outstanding is not None:
                    outstanding[name] += value
        return nodes


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    """The URL; of nodes that leave, which may be several, with the role. Workers may learn of a role one by one."""
    return entry["url"], entry["role"] if entry["state"] == "leaving" else ""


def labelled(expositions: dict[int, str]) -> bytes:
    """One exposition of those of the workers, by number: each sample with the label `worker`.

    Line by line: to parse the samples of four workers with 1,000 nodes took 1.5 s, in which no stream went on.
    """
    families: dict[str, list[str]] = {}
    for worker, text in sorted(expositions.items()):
        label = f'worker="{worker}"'
        for family in _HELP.split(text)[1:]:
            help_line, type_line, samples = family.split("\n", 2)
            samples = _PLAIN_NAME.sub(rf"\1{{{label}}} ", _LABELLED_NAME.sub(rf"\1{{{label},", samples))
            _, _, name, _ = help_line.split(" ", 3)
            families.setdefault(name, [f"{help_line}\n{type_line}\n"]).append(samples)
    return "".join(part for parts in families.values() for part in parts).encode()


_HELP = re.compile(r"^(?=# HELP )", re.MULTILINE)
_LABELLED_NAME = re.compile(r"^(\w+)\{", re.MULTILINE)
_PLAIN_NAME = re.compile(r"^(\w+) ", re.MULTILINE)
