"""When loads wait for nothing but what this node's own leases hold. Then all nodes of a circle may do so.

What A lends is held until B has read it, so until B has blocks for its load, and these may be what B lends to A. Leases
and loads cannot be preempted, so two mixed nodes that handed prompts to each other waited for the deadline of the
loads, 30 s. A node with loads that waited for LENT_WAIT_S gives one up instead: its prompt is computed here, or
elsewhere. The lease of that load ends, so the lender has room for a load of its own, which reads what is lent here.

Waiting begins anew when a lease of this node ends, or another load is the next to get blocks: then memory moves. What
a node of a lesser name lends is given up later, so that of the nodes of a circle only one computes a prompt again.

No node knows which node reads a lease of its own, so it cannot tell which of its loads holds that node up. One load is
given up at a time: of a lender of which none was, if there is one, and of those the one with the worst claim.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.load_memory import LoadMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request

# A handover to a D with room takes 10 to 500 ms, most of it P's computing; a lease that D reads ends within that
LENT_WAIT_S = 2.0
LATER_S = 3.0  # for which the others wait longer: a lease that its reader has left ends after 2 s


def patience_s(own_id: str, lender_id: str) -> float:
    """Seconds for which a node waits before it gives up a load from another one, or from itself."""
    return LENT_WAIT_S if own_id <= lender_id else LENT_WAIT_S + LATER_S


class LentMemory:
    """Tells for how long loads have waited for what leases hold.

    `tried`: the lenders of which a load was given up since memory moved last.
    """

    def __init__(
        self, blocks: BlockManager, queues: Queues, memory: KvMemory, loads: LoadMemory, clock: Callable[[], float]
    ) -> None:
        self._blocks, self._queues, self._memory, self._loads, self._clock = blocks, queues, memory, loads, clock
        self._waits: tuple[str | None, int] | None = None  # the load that is next, and leases that had ended by then
        self._since_s = self._paused_until_s = -inf
        self.tried: set[str] = set()

    def waited_s(self) -> float:
        """Call it after each round of reservations. 0: no load waits, something has moved, or a pause lasts."""
        first, blocks, now_s = self._first, self._blocks, self._clock()
        waits = None if first is None or not blocks.leases else (first.load_id, blocks.num_leases_ended)
        if waits is None or waits != self._waits:
            self._waits, self._since_s = waits, now_s
            self.tried.clear()
        return 0.0 if now_s < self._paused_until_s else now_s - self._since_s

    @property
    def _first(self) -> Request | None:
        return min(self._queues.reserving, key=lambda request: request.claim, default=None)

    def begin_anew(self) -> None:
        """Wait from the next call of `waited_s` on: no load waits, or none would get room by the end of leases."""
        self._waits = None

    def pause(self, lender: str) -> None:
        """Let a load that was given up have its effect before another one is. What has waited has still waited."""
        self.tried.add(lender)
        self._paused_until_s = self._clock() + LENT_WAIT_S

    @property
    def is_lacking(self) -> bool:
        """Whether what waits first lacks room, and would have it if no lease held any. It looks at all lent blocks."""
        refused, first = self._memory.refused, self._first
        if first is None:
            return False
        if refused is not None and refused.request.group.claim(refused.precedence) < first.claim:
            fits_without = partial(self._memory.fits_without, refused)
        else:
            fits_without = partial(self._loads.fits_without, first)
        return not fits_without(()) and fits_without(self._blocks.leases.values())
