"""Follows the sources of nodes and updates the node table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from pd_router.nodes.node import Role
from pd_router.sources.base import Roster, is_logged
from pd_router.sources.membership import Membership, Sight

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pd_router.nodes.node import Node, NodeSpec
    from pd_router.nodes.node_table import NodeTable
    from pd_router.sources.base import NamedNode, NodeSource

    Known = dict[str, tuple[NamedNode, ...]]  # by source: its nodes in use

log = logging.getLogger("pd_router")
RESTART_S = 1.0  # until a source that failed is started again
LOOK_S = 0.5  # between two looks at the nodes of a doubted source


@dataclass(slots=True, eq=False)
class FollowedSource:
    """One source and its nodes."""

    source: NodeSource
    received_s: float  # when it could be read, or the router's start
    received: asyncio.Event = field(default_factory=asyncio.Event)
    reported: Roster | None = None
    membership: Membership = field(default_factory=Membership)
    applied: tuple[NodeSpec, ...] = ()
    was_doubted: bool = False  # by the log


class Discovery:
    """Writes the nodes of each source to the table, under the name of the source."""

    def __init__(
        self, sources: Sequence[NodeSource], table: NodeTable, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._table = table
        self._sleep = sleep
        self._on_change: Callable[[Known], None] | None = None
        self.followed = tuple(FollowedSource(source, table.clock()) for source in sources)

    async def run(self) -> None:
        """Follow every source until cancelled."""
        async with asyncio.TaskGroup() as group:
            for one in self.followed:
                group.create_task(self._follow(one))
            group.create_task(self._look())

    async def received_all(self, deadline_s: float) -> None:
        """Wait until every source has named its nodes once, but not longer than `deadline_s`."""
        try:
            async with asyncio.timeout(deadline_s):
                for one in self.followed:
                    await one.received.wait()
        except TimeoutError:
            silent = [one.source.name for one in self.followed if not one.received.is_set()]
            log.warning("starting without the nodes of sources that have not answered: %s", ", ".join(silent))

    def known(self) -> Known:
        return {one.source.name: one.membership.in_use for one in self.followed}

    def restore(self, known: Known) -> None:
        """Use what another process had in use, at this one's start: a source may be away just now, or wrong."""
        if self._on_change is not None:
            return
        for one in self.followed:
            one.membership.restore(known.get(one.source.name, ()), one.reported or Roster(()), self._sights())
            self._apply(one)
        urls = {named.spec.url for nodes in known.values() for named in nodes}
        for node in self._table.nodes:
            node.was_up |= node.url in urls

    def tell(self, on_change: Callable[[Known], None]) -> None:
        """Call it with what is known now, and whenever that changes."""
        self._on_change = on_change
        on_change(self.known())

    async def _follow(self, one: FollowedSource) -> None:
        name, num_failures = one.source.name, 0
        while True:
            try:
                async with contextlib.aclosing(one.source.watch()) as words:
                    async for reported in words:
                        one.received_s, num_failures = self._table.clock(), 0
                        if reported != one.reported:  # most readings of a source change nothing
                            one.membership.receive(reported, self._sights())
                            self._apply(one)
                            one.reported = reported
                        one.received.set()
                log.error("node source '%s' has ended; starting it again", name)
            except Exception:  # a bug in one source: its last nodes stay, the other sources continue
                num_failures += 1
                if is_logged(num_failures):
                    log.exception("node source '%s' failed (%d in a row); starting it again", name, num_failures)
            await self._sleep(RESTART_S)

    def _apply(self, one: FollowedSource) -> None:
        if (nodes := tuple(node.spec for node in one.membership.in_use)) != one.applied:
            one.applied = nodes
            self._table.apply(one.source.name, one.applied)
            if self._on_change is not None:
                self._on_change(self.known())

    async def _look(self) -> None:
        """Look again at the nodes of doubted sources, and tell when a doubt begins and ends."""
        while True:
            await asyncio.sleep(LOOK_S)
            for one in self.followed:
                before, member = one.was_doubted, one.membership
                if before or member.is_doubted:
                    member.look(self._sights())
                    self._apply(one)
                one.was_doubted = member.is_doubted
                if one.was_doubted and not before:
                    log.warning(
                        "node source '%s' is doubted: it names no node that serves, or none that decodes, and %d that "
                        "it no longer names do. They stay in use while they live: to take them out, drain them all "
                        "(`pd-cluster nodes drain`) or end their processes", one.source.name, len(member.held),
                    )  # fmt: skip
                elif before and not one.was_doubted:
                    log.info("node source '%s' is believed again; it has %d nodes", one.source.name, len(one.applied))

    def _sights(self) -> dict[str, Sight]:
        now_s = self._table.clock()
        return {node.url: _sight(node, now_s) for node in self._table.nodes}


def _sight(node: Node, now_s: float) -> Sight:
    down_s = 0.0 if node.down_since_s is None else now_s - node.down_since_s
    serves = node.reachable and not node.draining
    return Sight(serves, node.role is not Role.PREFILL, down_s if node.was_up else inf, node.restarts, node.draining)
