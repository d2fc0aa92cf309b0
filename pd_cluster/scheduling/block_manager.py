"""Which tables, leases and quarantines hold which KV blocks. Ids only; the tensor lives in the worker.

    a device block is    when                                            counted as
    free                 no reference, not in the prefix cache           free
    cached               no reference, in the prefix cache               cached
    in use               a table, a lease or a quarantine refers to it   in_use

A *table* is one holder's blocks in prompt order, plus its *path* in the prefix cache. Path and table differ where
another holder cached the same prefix first: the table's own copy stays private, and it refers to the cached twin as
well, so that a cached block never outlives its parents' references (see prefix_cache.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import KvStats
from pd_cluster.scheduling.cache_news import CacheNews
from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_connectors.base import CachedBlock
from pd_connectors.protocol.layout import BlockRun

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True, eq=False)
class BlockTable:
    """One holder's blocks. Changed by the block manager only."""

    ids: list[int] = field(default_factory=list)  # ids[i] holds tokens [i * block_size, (i + 1) * block_size)
    path: list[int] = field(default_factory=list)  # cached blocks of the same content as ids[: len(path)]
    capacity: int = 0  # positions below this can be written without `grow`


@dataclass(frozen=True, slots=True)
class Growth:
    """How a table changed: ids[first_block : first_block + len(block_ids)] are now `block_ids`."""

    first_block: int
    block_ids: tuple[int, ...]
    copy: tuple[int, int] | None  # (from, to): the first new block replaces a shared block and needs its content


class BlockManager:
    """Reference counts over the device pool, the prefix cache, leases, quarantines, and the host pool for swapping."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens
        self.num_host_blocks = num_host_blocks
        self.prefix_caching = prefix_caching
        self._num_groups = num_groups  # of layers, each with a tensor of its own; see `runs`
        self.num_evicted = 0  # since boot
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cache = PrefixCache()
        self.news = CacheNews()
        self._tables: set[BlockTable] = set()
        self._leases: dict[str, BlockTable] = {}
        self._leased: Counter[int] = Counter()  # block -> leases that hold it
        self._quarantines: dict[str, list[int]] = {}
        self._host_free = list(range(num_host_blocks - 1, -1, -1))
        self._host_used: set[int] = set()

    # sizes

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + self._cache.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def stats(self) -> KvStats:
        free, cached = len(self._free), self._cache.num_evictable
        return KvStats(
            num_blocks=self.num_blocks,
            free=free,
            cached=cached,
            in_use=self.num_blocks - free - cached,
            leased=len(self._leased),
            quarantined=sum(map(len, self._quarantines.values())),
        )

    # tables

    def open_table(self) -> BlockTable:
        """An empty table. Close it (or `hold` it under a lease), whatever happens."""
        table = BlockTable()
        self._tables.add(table)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks. The first that writes the shared last block gets a copy of it."""
        for block_id in table.ids:
            self._refs[block_id] += 1
        for own, cached in zip(table.ids, table.path, strict=False):
            if own != cached:
                self._refs[cached] += 1
        table.capacity = 0  # both tables must `grow` before they are written
        twin = BlockTable(table.ids[:], table.path[:])
        self._tables.add(twin)
        return twin

    def close(self, table: BlockTable) -> None:
        """Release all blocks of the table. Idempotent."""
        self._tables.discard(table)
        self.truncate(table, 0)

    def can_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether there are blocks to make positions [start, end) writable."""
        num_new = max(0, self.blocks_for(end) - len(table.ids))
        return num_new + self._is_shared(table, start) <= self.num_available

    def grow(self, table: BlockTable, start: int, end: int) -> Growth:
        """Make positions [start, end) writable. The caller has asked `can_grow`.

        All tokens before `start` are computed, so of the table's blocks only the one of `start` can be shared.
        """
        assert self.can_grow(table, start, end)
        ids, first = table.ids, start // self.block_size
        shared = self._is_shared(table, start)
        num_new = max(0, self.blocks_for(end) - len(ids))
        copy = None
        begin = len(ids)
        if shared:
            copy = (ids[first], self._take_free())
            self._drop(ids[first])
            ids[first] = copy[1]
            begin = first
        ids.extend(self._take_free() for _ in range(num_new))
        table.capacity = len(ids) * self.block_size
        return Growth(begin, tuple(ids[begin:]), copy)

    def _is_shared(self, table: BlockTable, position: int) -> bool:
        index = position // self.block_size
        return index < len(table.ids) and self._refs[table.ids[index]] > 1

    def runs(self, table: BlockTable, first_block: int, end_block: int) -> tuple[BlockRun, ...]:
        """Blocks [first_block, end_block) of a table by group. One table serves all groups: they run in lock step."""
        return (BlockRun(first_block, tuple(table.ids[first_block:end_block])),) * self._num_groups

    def truncate(self, table: BlockTable, num_blocks: int) -> None:
        """Release all but the table's first blocks, the last one first, so that only leaves are evicted."""
        ids, path = table.ids, table.path
        for index in range(len(ids) - 1, num_blocks - 1, -1):
            self._drop(ids[index])
            if index < len(path) and path[index] != ids[index]:
                self._drop(path[index])
        del ids[num_blocks:]
        del path[num_blocks:]
        table.capacity = 0

    def _take_free(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id = self._evict()
            self.num_evicted += 1
        self._refs[block_id] = 1
        return block_id

    def _evict(self) -> int:
        block_id, block_hash = self._cache.evict()
        self.news.evicted(block_hash)
        return block_id

    def _acquire(self, block_id: int) -> None:
        """Refer to a cached block."""
        if self._refs[block_id] == 0:
            self._cache.take_up(block_id)
        self._refs[block_id] += 1

    def _drop(self, block_id: int) -> None:
        refs = self._refs[block_id] - 1
        assert refs >= 0, f"block {block_id} was released twice"
        self._refs[block_id] = refs
        if refs == 0:
            if block_id in self._cache:
                self._cache.let_go(block_id)
            else:
                self._free.append(block_id)

    # prefix cache

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """The number of tokens in the longest cached run of `hashes`."""
        return len(self._cache.match(hashes)) * self.block_size

    def match(self, table: BlockTable, hashes: Iterable[bytes]) -> int:
        """Extend a table that holds nothing but cached blocks by the longest cached run of `hashes` behind them.

        The blocks are pinned when they are found, so none of them can be evicted. Returns the number of blocks held.
        """
        assert len(table.ids) == len(table.path), "only a table of nothing but cached blocks can be matched further"
        if self.prefix_caching:
            for block_id in self._cache.match(islice(hashes, len(table.ids), None)):
                self._acquire(block_id)
                table.ids.append(block_id)
                table.path.append(block_id)
        return len(table.ids)

    def publish(self, table: BlockTable, hashes: list[bytes]) -> list[CachedBlock]:
        """Cache the table's first len(hashes) blocks: full, computed, and the step that computed them has retired.

        Returns the blocks that the cache did not know.
        """
        news: list[CachedBlock] = []
        if not self.prefix_caching:
            return news
        ids, path = table.ids, table.path
        for index in range(len(path), len(hashes)):
            cached = self._cache.find(hashes[index])
            if cached is None:
                self._cache.insert(hashes[index], ids[index], path[-1] if path else None)
                cached = ids[index]
                news.append(CachedBlock(hashes[index], cached))
            else:
                self._acquire(cached)
            path.append(cached)
        return news

    def forget_unused(self) -> None:
        """Free all cached blocks that nothing refers to."""
        while self._cache.num_evictable:
            self._free.append(self._evict())

    # leases, quarantine

    def hold(self, lease_id: str, table: BlockTable) -> None:
        """Give the table to the lease. The caller must not use it any more."""
        assert lease_id not in self._leases, f"lease {lease_id} holds blocks already"
        self._leases[lease_id] = table
        self._leased.update(table.ids)

    def end_lease(self, lease_id: str) -> bool:
        """Free the blocks of a lease. Returns False if it holds none."""
        table = self._leases.pop(lease_id, None)
        if table is None:
            return False
        for block_id in table.ids:
            self._leased[block_id] -= 1
            if not self._leased[block_id]:
                del self._leased[block_id]
        self.close(table)
        return True

    def quarantine(self, load_id: str, table: BlockTable, first_block: int) -> None:
        """Take blocks from `first_block` on out of the table, and out of use, until `drain(load_id)`."""
        assert first_block >= len(table.path), "a cached block cannot be the target of a load"
        self._quarantines.setdefault(load_id, []).extend(table.ids[first_block:])
        del table.ids[first_block:]
        table.capacity = 0

    def drain(self, load_id: str) -> None:
        """Free the quarantined blocks of a load that cannot write any more. Unknown ids are ignored."""
        for block_id in self._quarantines.pop(load_id, ()):
            self._drop(block_id)

    # host pool

    @property
    def num_host_free(self) -> int:
        return len(self._host_free)

    def swap_out(self, table: BlockTable, num_blocks: int) -> list[tuple[int, int]]:
        """Reserve host blocks for the table's first `num_blocks` and close it. Returns (device, host) pairs to copy."""
        pairs = [(block_id, self._host_free.pop()) for block_id in table.ids[:num_blocks]]
        self._host_used.update(host for _, host in pairs)
        self.close(table)
        return pairs

    def swap_in(self, table: BlockTable, host_block_ids: list[int]) -> list[tuple[int, int]]:
        """Add the swapped-out blocks that the table lacks, and free the host blocks.

        Returns (host, device) pairs to copy. The caller has made sure that there are enough, and swaps nothing out in
        the same step (a step copies out before it copies in: a host block freed here must not be written by it).
        """
        pairs = [(host, self._take_free()) for host in host_block_ids[len(table.ids) :]]
        table.ids.extend(block_id for _, block_id in pairs)
        self.free_host(host_block_ids)
        return pairs

    def free_host(self, host_block_ids: list[int]) -> None:
        for host in host_block_ids:
            self._host_used.remove(host)
            self._host_free.append(host)

    # proof

    @property
    def idle(self) -> bool:
        """No table, lease or quarantine is left, and the host pool is empty."""
        return not (self._tables or self._leases or self._quarantines or self._host_used)

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for once. O(blocks); run when idle and in tests."""
        expected = [0] * self.num_blocks
        for table in self._tables:
            assert len(table.path) <= len(table.ids), f"a path of {len(table.path)} over {len(table.ids)} blocks"
            for block_id in table.ids:
                expected[block_id] += 1
            for own, cached in zip(table.ids, table.path, strict=False):
                assert cached in self._cache, f"block {cached} is on a path but not cached"
                expected[cached] += own != cached
        for block_ids in self._quarantines.values():
            for block_id in block_ids:
                expected[block_id] += 1
        wrong = [(i, *pair) for i, pair in enumerate(zip(self._refs, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"(block, references, holders) disagree: {wrong[:8]}"
        assert all(table in self._tables for table in self._leases.values()), "a lease holds a closed table"
        leased = Counter(block_id for table in self._leases.values() for block_id in table.ids)
        assert leased == self._leased, f"leased blocks miscounted: {leased} held, {self._leased} counted"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        unreferenced = {i for i, refs in enumerate(self._refs) if refs == 0}
        reusable = {i for i in unreferenced if i in self._cache}
        assert free == unreferenced - reusable, f"free list off by {sorted(free ^ (unreferenced - reusable))[:8]}"
        self._cache.check(self._refs)
        assert len(reusable) == self._cache.num_evictable
        host = set(self._host_free)
        assert len(host) == len(self._host_free), "a host block is free twice"
        assert not host & self._host_used, "a host block is free and used"
        assert len(host) + len(self._host_used) == self.num_host_blocks, "host blocks lost"
