"""Plans what chunks do with the states of their sequences: which slots they read, write, and keep as checkpoints."""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING, cast

from pd_cluster.scheduling.checkpoints import kept, newest
from pd_cluster.scheduling.state_pool import StatePool

if TYPE_CHECKING:
    from pd_cluster.scheduling.batch import StateStep
    from pd_cluster.scheduling.block_table import BlockTable, StateSlots
    from pd_cluster.scheduling.slab_memory import SlabMemory


class StateSteps:
    """The steps in the slots of one STATE group."""

    def __init__(self, memory: SlabMemory, pool: StatePool, *, prefix_caching: bool) -> None:
        self._memory, self._pool, self._keeps = memory, pool, prefix_caching
        self._one = [int(other is pool) for other in memory.pools]  # a slot, as needs by group
        self.watermark = [0 for _ in memory.pools]  # blocks by group that a checkpoint leaves to the next tokens
        self.num_saved = self.num_unsaved = 0  # checkpoints since boot; for those there was no slot

    @classmethod
    def of(cls, memory: SlabMemory, *, prefix_caching: bool) -> StateSteps | None:
        """None: no group is a STATE group."""
        pools = [pool for pool in memory.pools if isinstance(pool, StatePool)]
        assert len(pools) <= 1, "several STATE groups"
        return cls(memory, pools[0], prefix_caching=prefix_caching) if pools else None

    def plan(self, table: BlockTable, start: int, end: int, num_prompt: int, *, draws: bool) -> StateStep:
        """Plan a chunk [start, end) of a table that has a slot to write. `draws`: something is drawn after it.

        Checkpoints take slots as far as there are some beyond the watermark: until their step has retired nothing can
        evict them, and a decode would be preempted for them. `table.capacity` then ends before the next checkpoint.
        """
        slots, size = self._slots(table), self._pool.block_size
        stay = kept(start, end, num_prompt, table.branch, size) if self._keeps else []
        last = newest(start, end, num_prompt, size) if self._keeps else None
        # A step that was taken back runs all the same, and saves what this one would
        saved = {one.num_tokens for one in slots.aside if one.is_checkpoint}
        saves = []
        for boundary in stay if last is None or last in stay else [*stay, last]:
            if boundary in saved:
                continue
            if self._memory.has_room(list(map(add, self._one, self.watermark))):
                self._memory.free_for(self._one)
                saves.append((boundary, self._pool.take()))
                self.num_saved += 1
            else:
                self.num_unsaved += 1
        step = self._pool.step(slots, start, end, saves, None if last in stay else last, draws=draws)
        table.capacity = min(table.capacity, end if slots.reverses else (end // size + 1) * size - 1)
        table.due = min(table.due, self._pool.due(slots, is_cached=True))
        return step

    def take_back(self, table: BlockTable) -> int:
        """Take back the newest step of a table, which drew nothing. Returns its start."""
        table.capacity = 0
        return self._pool.take_back(self._slots(table))

    def is_unread(self, table: BlockTable) -> bool:
        """Whether no step has gone on from the state yet that the table holds, so that its live slot has another."""
        return self._slots(table).source is not None

    def _slots(self, table: BlockTable) -> StateSlots:
        return cast("StateSlots", table.groups[self._pool.index])
