"""The host blocks of all KV groups: those of swapped sequences, and the prefix cache's tier in host memory.

    a host block is   when
    free              nothing is in it that counts
    cached            it has the content of a hash; evicted when a block is wanted and none is free, the first in order
    taken             a swapped sequence, or a reader of files, has it

Evicted is first what the device has as well since it was loaded, then in the order in which it left the device. There
a tail goes before its head, so what is left here of a prompt mostly begins where the device's part ends. When what is
copied here and back: `host_copies`.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pd_cluster.scheduling.host_blocks import HostBlocks
from pd_cluster.scheduling.sequence_room import host_unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.cache_news import CacheNews

# Of a rank; stated, not measured. An H200 copies 53 GB/s each way; forwards beside it and the other way take their part
HOST_GB_S = 25.0


class HostTier:
    """The host blocks by group, and what the device gives up.

    on_saved: called with the group and hash of each block of which a save is planned.
    on_evicted: called with the group and hash of each cached one that the tier gives up. By default it tells the news
    if the device has it not.
    """

    def __init__(self, pools: tuple[BlockPool, ...], news: CacheNews, num_blocks: int, *, is_cache: bool) -> None:
        """`num_blocks`: units, see `host_unit`.  `is_cache`: whether anything but swapped sequences has some."""
        self._pools, self._news = pools, news
        self.is_cache = is_cache
        for pool in pools:
            pool.on_evicted = partial(self._note_lowered, pool)
            pool.on_forgotten = partial(self._note_forgotten, pool.index)
        per_unit = host_unit([pool.group for pool in pools], [pool.per_slab for pool in pools])
        self.groups = tuple(map(HostBlocks, per_unit))
        self.num_blocks = 0  # units
        self.gb_s = HOST_GB_S  # of copies each way
        self.on_evicted: Callable[[int, bytes], object] = self._note_gone
        self.on_saved: Callable[[int, bytes], None] = lambda group, block_hash: None
        # By the table that will write it: block -> (position of its first token, hash of what it held), in this order
        self.victims: dict[BlockTable, OrderedDict[int, tuple[int, bytes]]] = {}
        self._heir: BlockTable | None = None
        self.num_hit_tokens = self.num_loaded = self.num_saved = self.num_unsaved = 0
        self.num_loaded_bytes = self.num_saved_bytes = 0
        self.grow(num_blocks)

    @property
    def num_cached(self) -> int:
        """Blocks of all groups."""
        return sum(len(one.cached) for one in self.groups)

    @property
    def counters(self) -> dict[str, float]:
        """Totals since boot, by metric name without prefix. Bytes are those of all ranks."""
        if not self.is_cache:
            return {}
        return {
            "host_cache_hit_tokens_total": float(self.num_hit_tokens),
            "host_cache_loaded_blocks_total": float(self.num_loaded),
            "host_cache_saved_blocks_total": float(self.num_saved),
            "host_cache_evicted_unsaved_blocks_total": float(self.num_unsaved),
            "host_cache_loaded_bytes_total": float(self.num_loaded_bytes),
            "host_cache_saved_bytes_total": float(self.num_saved_bytes),
        }

    @property
    def gauges(self) -> dict[str, float]:
        """By metric name without prefix, and labels."""
        if not self.is_cache:
            return {}
        return {
            "host_cache_blocks|state=ready": float(sum(one.num_blocks for one in self.groups)),
            "host_cache_blocks|state=cached": float(self.num_cached),
            "host_cache_bytes_per_second": self.gb_s * 1e9,
        }

    def grow(self, num_blocks: int) -> None:
        """Have so many units, no fewer than before. The new ones can be copied from now on."""
        for one in self.groups:
            one.grow(num_blocks)
        self.num_blocks = num_blocks

    def take(self, group: int, num: int) -> list[int]:
        """Blocks for a swapped sequence, or for what is read from files: until `give_back` or `add`.

        So many are takeable.
        """
        blocks = [block for block in (self._take(group) for _ in range(num)) if block is not None]
        assert len(blocks) == num
        self.groups[group].taken.update(blocks)
        return blocks

    def _take(self, group: int) -> int | None:
        own = self.groups[group]
        if own.free:
            return own.free.pop()
        for block_hash, block in own.cached.items():
            if block not in own.pins:
                del own.cached[block_hash]
                self.on_evicted(group, block_hash)
                return block
        return None

    def add(self, group: int, block_hash: bytes, block: int) -> None:
        """Cache a taken block that has been filled. It is free if another one has this content."""
        own = self.groups[group]
        own.taken.remove(block)
        if block_hash in own.cached:
            own.free.append(block)
        else:
            own.cached[block_hash] = block

    def save(self, group: int, block_hash: bytes) -> int | None:
        """Cache a content of which a copy is planned. Returns its block, pinned; None if none can be taken."""
        own = self.groups[group]
        if (block := self._take(group)) is not None:
            own.cached[block_hash] = block
            own.pin(block)
            self.on_saved(group, block_hash)
            self.num_saved += 1
            self.num_saved_bytes += self._pools[group].group.block_bytes
        return block

    def has(self, group: int, block_hash: bytes) -> bool:
        """Whether a block of this or the device's memory has the content."""
        return block_hash in self.groups[group].cached or self._pools[group].cache.find(block_hash) is not None

    @contextmanager
    def bequeath(self, table: BlockTable) -> Iterator[None]:
        """What is evicted for the table's next blocks are its victims. A later step fills these blocks, in order."""
        self._heir = table if self.is_cache and len(self._pools) == 1 else None
        try:
            yield
        finally:
            self._heir = None

    def _note_lowered(self, pool: BlockPool, block_hash: bytes, block_id: int) -> None:
        """The device gives the block up. If it is here it becomes the last in the order."""
        cached = self.groups[pool.index].cached
        if block_hash in cached:
            cached.move_to_end(block_hash)
        elif (heir := self._heir) is not None:  # most are saved
            position = heir.groups[pool.index].end * pool.block_size
            self.victims.setdefault(heir, OrderedDict())[block_id] = position, block_hash
        else:
            self.note_lost(pool.index, block_hash)
            return
        self._news.lowered(pool.index, block_hash)

    def _note_forgotten(self, group: int, block_hash: bytes) -> None:
        """The device gives up what is of no more use. A copy that is here goes first."""
        if not self._note_gone(group, block_hash):
            self.groups[group].cached.move_to_end(block_hash, last=False)
            self._news.lowered(group, block_hash)

    def note_lost(self, group: int, block_hash: bytes) -> None:
        """A block that the device gave up is written. It may have been computed again meanwhile, and saved."""
        self.num_unsaved += self._note_gone(group, block_hash)

    def _note_gone(self, group: int, block_hash: bytes) -> bool:
        """A tier gives the block up. Returns whether no other one has it."""
        is_gone = not self.has(group, block_hash)
        if is_gone:
            self._news.evicted(group, block_hash)
        return is_gone

    def lose_victims(self, table: BlockTable) -> None:
        """Save none of the table's victims: their contents are gone unless a copy is left. Idempotent."""
        for _, block_hash in self.victims.pop(table, {}).values():
            self.note_lost(0, block_hash)

    def clear(self) -> None:
        """Forget all cached blocks. Loads that are queued go on: their prompts were found before.

        The caller forgets those of the device next. None of these counts as unsaved.
        """
        for table in tuple(self.victims):
            self.lose_victims(table)
        for group, own in enumerate(self.groups):
            for block_hash in own.clear():
                self.on_evicted(group, block_hash)

    # proof

    @property
    def idle(self) -> bool:
        """No host block is taken or pinned, as by queued loads, and no victim waits for a copy."""
        return not (self.victims or any(one.taken or one.pins for one in self.groups))

    def check(self) -> None:
        """Raise AssertionError unless every host block is accounted for once."""
        for own in self.groups:
            own.check()
            assert self.is_cache or not own.cached
        assert len(self._pools) == 1 or not self.victims
        for table, victims in self.victims.items():
            pool, held = self._pools[0], table.groups[0]
            for block_id, (position, _) in victims.items():
                assert pool.refs[block_id] == 1, "the block of a victim has not one holder"
                assert block_id not in pool.cache, "the block of a victim has a new content"
                assert held.ids[position // pool.block_size - held.first] == block_id, "a victim of another's block"
