"""Client of the cluster's routers: reads their tables of nodes and sends them signed orders."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import httpx
import msgspec

from pd_cluster.balancing.balancer import Balancer
from pd_cluster.balancing.snapshot import BalanceTargets
from pd_cluster.launch.node_commands import order_request
from pd_cluster.launch.on_ray.policy import RoutedNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.launch.on_ray.policy import UnitOrder

DEADLINE_S = 3.0  # of a call; the next round asks a router that took longer again


class _Outstanding(msgspec.Struct):
    prefill_bytes: int
    sequences: int


class _Entry(msgspec.Struct):
    url: str
    role: str
    state: str
    healthy: bool
    source: str | None
    outstanding: _Outstanding
    role_changes: int | None = None


class _Table(msgspec.Struct):
    nodes: list[_Entry]


class Routers:
    """Calls routers by URL. A router that does not answer is not an error: the next round asks it again."""

    def __init__(self, key: bytes, targets_s: tuple[float, float] | None = None) -> None:
        """`targets_s`: by which a balance runs beside this, with the routers of the last `read`."""
        self._key = key
        self._client = httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False)
        self._balancing: asyncio.Task[None] | None = None
        if targets_s is not None:
            self._balancer = Balancer(self._client, (), key, BalanceTargets(*targets_s))
            self._balancing = asyncio.create_task(self._balancer.run(), name="balance")

    async def close(self) -> None:
        if self._balancing is not None:
            self._balancing.cancel()
            await asyncio.wait({self._balancing})
        await self._client.aclose()

    async def read(self, urls: Iterable[str]) -> dict[str, tuple[RoutedNode, ...]]:
        """The nodes that each router knows, by the router's URL. Routers that do not answer are left out."""
        asked = list(urls)
        if self._balancing is not None:
            self._balancer.routers = asked
        tables = await asyncio.gather(*(self._read_one(url) for url in asked))
        return {url: table for url, table in zip(asked, tables, strict=True) if table is not None}

    async def _read_one(self, url: str) -> tuple[RoutedNode, ...] | None:
        try:
            answer = await self._client.get(f"{url}/nodes")
            table = msgspec.json.decode(answer.content, type=_Table)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None
        return tuple(
            RoutedNode(
                entry.url, entry.role, entry.state, entry.healthy, entry.source == "posted",
                entry.outstanding.prefill_bytes + entry.outstanding.sequences, bool(entry.role_changes),
            )
            for entry in table.nodes
        )  # fmt: skip

    async def send(self, url: str, orders: Sequence[UnitOrder]) -> list[str]:
        """Send orders to a router, one after the other. Returns the first problem; later orders are not sent then."""
        for order in orders:
            method, path, headers = order_request(self._key, order.action, order.node, order.role, time.time())
            try:
                answer = await self._client.request(method, url + path, headers=headers)
            except httpx.HTTPError as error:
                return [f"router {url}: {order.action} {order.node}: {type(error).__name__}"]
            if answer.status_code >= 400:
                return [f"router {url}: {order.action} {order.node}: {answer.status_code} {answer.text[:200]}"]
        return []
