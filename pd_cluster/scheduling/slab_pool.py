"""The blocks of one of several KV groups, in the slabs that it owns: see `slab_memory`."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

from pd_cluster.scheduling.block_pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_connectors.protocol.layout import KVGroup


class SharedSlabs(Protocol):
    """What the groups' pools share: see `SlabMemory`."""

    unowned: list[int]
    idle: dict[int, tuple[int, SlabPool]]
    clock: Iterator[int]


class SlabPool(BlockPool):
    """The blocks of one group in the slabs that it owns. Block i is in slab i // per_slab."""

    def __init__(
        self, memory: SharedSlabs, index: int, group: KVGroup, ratio: int, num_slabs: int, per_slab: int
    ) -> None:
        super().__init__(index, group, ratio, num_slabs, per_slab)
        self._memory = memory
        self.keeps_first = False
        self.free_in = {}
        self.used = [0] * num_slabs  # referenced blocks
        self.open: OrderedDict[int, None] = OrderedDict()  # slabs with a free block, busy ones first
        self.num_loose = 0  # unreferenced blocks in busy slabs
        self.num_takeable = 0  # free blocks
        self.let_go_at = [0] * len(self.refs)  # of cached ones

    @property
    def num_spare(self) -> int:
        return self.num_takeable + len(self._memory.unowned) * self.per_slab

    def take(self) -> int:
        memory, slab = self._memory, next(iter(self.open), None)
        if slab is None:
            slab = memory.unowned.pop()
            self.free_in[slab] = list(reversed(self.ids_of(slab)))
            self.open[slab] = None
            self.num_takeable += self.per_slab
            memory.idle[slab] = (0, self)
        self._use(slab)
        self.num_takeable -= 1
        block_id = self.free_in[slab].pop()
        if not self.free_in[slab]:
            del self.open[slab]
        self.refs[block_id] = 1
        return block_id

    def evict_subtree(self, block_id: int) -> None:
        """Evict an unreferenced block, and what hangs below it."""
        for evicted, block_hash in reversed(self.cache.evict_subtree(block_id)):  # tails first, as elsewhere
            self.on_evicted(block_hash, evicted)
            self.num_evicted += 1
            self._put_free(evicted)

    def acquire(self, block_id: int) -> None:
        if self.refs[block_id] == 0:
            self._use(block_id // self.per_slab)
        super().acquire(block_id)

    def drop(self, block_id: int) -> None:
        if self.refs[block_id] != 1:
            super().drop(block_id)
            return
        slab, now = block_id // self.per_slab, next(self._memory.clock)
        self.refs[block_id] = 0
        self.used[slab] -= 1
        if self.used[slab]:
            self.num_loose += 1
        else:
            self.num_loose -= self.per_slab - 1
            self._memory.idle[slab] = (now, self)
            if slab in self.open:
                self.open.move_to_end(slab)
        if block_id in self.cache:
            self.cache.let_go(block_id)
            self.let_go_at[block_id] = now
        else:
            self._put_free(block_id)

    def _use(self, slab: int) -> None:
        """Note the first reference to one of the slab's blocks."""
        if self.used[slab]:
            self.num_loose -= 1
        else:
            self.num_loose += self.per_slab - 1
            del self._memory.idle[slab]
            if slab in self.open:
                self.open.move_to_end(slab, last=False)
        self.used[slab] += 1

    def _put_free(self, block_id: int) -> None:
        slab = block_id // self.per_slab
        free = self.free_in[slab]
        free.append(block_id)
        self.num_takeable += 1
        self.open[slab] = None
        if self.used[slab]:
            self.open.move_to_end(slab, last=False)
        elif len(free) == self.per_slab:  # it goes back
            self.num_takeable -= self.per_slab
            del self.open[slab], self.free_in[slab], self._memory.idle[slab]
            self._memory.unowned.append(slab)
