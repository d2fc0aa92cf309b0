"""Runs the sources of nodes, and keeps the node table as they say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pd_router.node_table import NodeTable
    from pd_router.sources.base import NodeSource

log = logging.getLogger("pd_router")
RESTART_S = 1.0  # a source that broke down is begun again after this


class Discovery:
    """Writes the node table through `NodeTable.apply`, for each source under its name."""

    def __init__(
        self,
        sources: Sequence[NodeSource],
        table: NodeTable,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._table = table
        self._sleep = sleep
        self._heard = {source: asyncio.Event() for source in sources}

    async def run(self) -> None:
        """Follow every source until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source, heard in self._heard.items():
                group.create_task(self._follow(source, heard))

    async def heard_all(self, deadline_s: float) -> None:
        """Until every source has named its nodes once; after `deadline_s` the router goes on with those it has."""
        try:
            async with asyncio.timeout(deadline_s):
                for heard in self._heard.values():
                    await heard.wait()
        except TimeoutError:
            silent = [source.name for source, heard in self._heard.items() if not heard.is_set()]
            log.warning("starting without the nodes of: %s", ", ".join(silent))

    async def _follow(self, source: NodeSource, heard: asyncio.Event) -> None:
        while True:
            try:
                async with contextlib.aclosing(source.watch()) as sets:
                    async for nodes in sets:
                        self._table.apply(source.name, nodes)
                        heard.set()
                log.error("the source of nodes '%s' has ended; beginning again", source.name)
            except Exception:  # a bug in one source: its last nodes stay, and so do the other sources
                log.exception("the source of nodes '%s' broke down; beginning again", source.name)
            await self._sleep(RESTART_S)
