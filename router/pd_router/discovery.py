"""Follows the sources of nodes and updates the node table."""

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
RESTART_S = 1.0  # until a source that failed is started again


class Discovery:
    """Writes the nodes of each source to the table, under the name of the source."""

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
        """Wait until every source has named its nodes once, but not longer than `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                for heard in self._heard.values():
                    await heard.wait()
        except TimeoutError:
            silent = [source.name for source, heard in self._heard.items() if not heard.is_set()]
            log.warning("starting without the nodes of sources that have not answered: %s", ", ".join(silent))

    async def _follow(self, source: NodeSource, heard: asyncio.Event) -> None:
        while True:
            try:
                async with contextlib.aclosing(source.watch()) as sets:
                    async for nodes in sets:
                        self._table.apply(source.name, nodes)
                        heard.set()
                log.error("node source '%s' has ended; starting it again", source.name)
            except Exception:  # a bug in one source: its last nodes stay, the other sources continue
                log.exception("node source '%s' failed; starting it again", source.name)
            await self._sleep(RESTART_S)
