"""When loads wait for nothing but what this node's own leases hold. Then all nodes of a circle may do so.

What A lends is held until B has read it, so until B has blocks for its load, and these may be what B lends to A. Leases
and loads cannot be preempted, so two mixed nodes that handed prompts to each other waited for the deadline of the
loads, 30 s. A node with loads that waited for LENT_WAIT_S gives one up instead: its prompt is computed here, or
elsewhere. The lease of that load ends, so the lender has room for a load of its own, which reads what is lent here.

Waiting begins anew when a lease of this node ends, or another load is the next to get blocks: then memory moves. What
a node of a lesser name lends is given up later, so that of the nodes of a circle only one computes a prompt again.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request

# A handover to a D with room takes 10 to 500 ms, most of it P's computing; a lease that D reads ends within that
LENT_WAIT_S = 2.0
LATER_S = 3.0  # for which the others wait longer: a lease that its reader has left ends after 2 s


def patience_s(own_id: str, lender_id: str) -> float:
    """Seconds for which a node waits before it gives up a load from another one, or from itself."""
    return LENT_WAIT_S if own_id <= lender_id else LENT_WAIT_S + LATER_S


class LentMemory:
    """Tells for how long loads have waited for what leases hold."""

    def __init__(self, blocks: BlockManager, queues: Queues, memory: KvMemory, clock: Callable[[], float]) -> None:
        self._blocks, self._queues, self._memory, self._clock = blocks, queues, memory, clock
        self._waits: tuple[Request | None, int] = (None, 0)  # what waits first, and leases that had ended by then
        self._since_s = inf

    def waited_s(self) -> float:
        """Call it after each round of reservations. 0: no load waits, or something has moved."""
        first, blocks = self._first, self._blocks
        waits = first, blocks.num_leases_ended
        if first is None or not blocks.is_lent or waits != self._waits:
            self._waits, self._since_s = waits, self._clock()
            return 0.0
        return self._clock() - self._since_s

    @property
    def _first(self) -> Request | None:
        return min(self._queues.reserving, key=lambda request: request.claim, default=None)

    def begin_anew(self) -> None:
        """Wait from now on: a load was given up, or would get no room by that."""
        self._since_s = self._clock()

    @property
    def is_lacking(self) -> bool:
        """Whether what waits first would have room if no lease held any. It looks at every block that is lent."""
        refused, first = self._memory.refused, self._first
        if first is None:
            return False
        if refused is not None and refused.request.group.claim(refused.precedence) < first.claim:
            needs = self._memory.needs(refused)
        else:
            assert first.table is not None
            needs = self._blocks.needs(first.table, first.sequences[0].num_cached_tokens, first.num_loaded_tokens)
        return self._blocks.has_room_unlent(needs)
