"""The blocks of one KV group: references, free blocks, the prefix cache. Here it is alone and has all of the memory.

    a block is    when                                            counted as
    free          no reference, not in the prefix cache           free
    cached        no reference, in the prefix cache               cached
    in use        a table, a lease or a quarantine refers to it   in_use

FULL and LATENT caches are trees: a table with content that another holder cached first keeps its own copy, and
refers to the cached twin as well, so that a cached block never outlives its parents' references (`prefix_cache`). A
WINDOW or STATE cache is not a tree: there a copy has no twin. A cached block that nothing refers to makes way for a new
copy of the same content, but in a tree that is alone: hits read what was computed first.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from math import inf
from operator import countOf
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import KvGroupStats
from pd_cluster.scheduling.block_table import GroupBlocks
from pd_cluster.scheduling.prefix_cache import PrefixCache
from pd_connectors.base import CachedBlock
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_connectors.protocol.layout import KVGroup


class BlockPool:
    """`ratio`: of the group's block size to the block size of the hashes."""

    def __init__(self, index: int, group: KVGroup, ratio: int, num_slabs: int, per_slab: int) -> None:
        self.index = index
        self.group = group
        self.block_size = group.block_size
        self.ratio = ratio
        self.is_tree = group.kind in (KVKind.FULL, KVKind.LATENT)
        self.keeps_first = self.is_tree  # of copies, even if nothing refers to it
        self.num_evicted = 0  # since boot
        self.refs = [0] * (num_slabs * per_slab)
        self.per_slab = per_slab
        self.free = list(range(per_slab - 1, -1, -1))
        self.free_in = {0: self.free}  # owned slab -> its free blocks
        self.cache = PrefixCache()
        self.on_evicted: Callable[[bytes, int], None] = lambda block_hash, block_id: None
        self.on_forgotten: Callable[[bytes], object] = lambda block_hash: None  # of a block that nothing evicted
        self.passing: dict[int, GroupBlocks] = {}  # cached for a holder that forgets it soon: not worth a copy
        self.leased: Counter[int] = Counter()  # block -> leases that hold it

    # sizes

    @property
    def num_owned(self) -> int:
        """Blocks in the group's memory."""
        return len(self.free_in) * self.per_slab

    @property
    def num_free(self) -> int:
        return sum(map(len, self.free_in.values()))

    @property
    def num_spare(self) -> int:
        """Blocks that can be taken before one is evicted."""
        return len(self.free)

    def stats(self, num_quarantined: int = 0) -> KvGroupStats:
        free, cached = self.num_free, self.cache.num_evictable
        return KvGroupStats(
            kind=self.group.kind,
            num_blocks=self.num_owned,
            free=free,
            cached=cached,
            in_use=self.num_owned - free - cached,
            leased=len(self.leased),
            quarantined=num_quarantined,
        )

    def ids_of(self, slab: int) -> range:
        return range(slab * self.per_slab, (slab + 1) * self.per_slab)

    def blocks_for(self, num_tokens: int) -> int:
        """The index after the block of the last token."""
        return -(-num_tokens // self.block_size)

    def num_more(self, held: GroupBlocks, num_found: int, num_tokens: int) -> int:
        """Blocks to take beside `num_found` that follow the held ones, for a sequence of so many tokens."""
        return self.blocks_for(num_tokens) - held.end - num_found

    # references

    def take(self) -> int:
        """A block for a new content. The caller has made sure that there is one."""
        if self.free:
            block_id = self.free.pop()
        else:
            block_id = self._evict()
            self.num_evicted += 1
        self.refs[block_id] = 1
        return block_id

    def _evict(self) -> int:
        block_id, block_hash = self.cache.evict()
        self.on_evicted(block_hash, block_id)
        return block_id

    def acquire(self, block_id: int) -> None:
        """Refer to a cached block."""
        if self.refs[block_id] == 0:
            self.cache.take_up(block_id)
        self.refs[block_id] += 1

    def drop(self, block_id: int) -> None:
        refs = self.refs[block_id] - 1
        assert refs >= 0, f"block {block_id} was released twice"
        self.refs[block_id] = refs
        if refs == 0:
            if block_id in self.cache:
                self.cache.let_go(block_id)
            else:
                self.free.append(block_id)

    def _put_free(self, block_id: int) -> None:
        self.free.append(block_id)

    def forget_unused(self) -> None:
        """Free all cached blocks that nothing refers to."""
        while self.cache.num_evictable:
            self._put_free(self._evict())

    # tables

    def num_missing(self, held: GroupBlocks, start: int, end: int) -> int:
        """The number of blocks to take, to make positions [start, end) writable."""
        ids, size = held.ids, self.block_size
        num_held, index = len(ids), start // size - held.first
        num_new = -(-end // size) - held.first - num_held
        if num_new < 0:
            num_new = 0
        return num_new + 1 if -1 < index < num_held and self.refs[ids[index]] > 1 else num_new

    def grow(self, held: GroupBlocks, start: int, end: int) -> tuple[int, tuple[int, int] | None]:
        """Make positions [start, end) writable. Returns the first changed index into the ids, and the copy to make."""
        ids, size, copy = held.ids, self.block_size, None
        begin, index = len(ids), start // size - held.first
        num_new = -(-end // size) - held.first - begin
        if -1 < index < begin and self.refs[ids[index]] > 1:
            begin = index
            copy = (ids[begin], self.take())
            self.drop(ids[begin])
            ids[begin] = copy[1]
        for _ in range(num_new):
            ids.append(self.take())
        return begin, copy

    def num_sharing(self, held: GroupBlocks, start: int, closed: Iterable[int] = ()) -> int:
        """References of others, but for those of `closed`, to the block that `start` is written to, so to a copy."""
        index = start // self.block_size
        written = [block_id for block_id in self.ids_at(held, range(index, index + 1)) if block_id not in self.cache]
        return sum(self.refs[block_id] - 1 - countOf(closed, block_id) for block_id in written)

    def new_holder(self, *, reverses: bool = False) -> GroupBlocks:
        return GroupBlocks()

    def fork(self, held: GroupBlocks) -> GroupBlocks:
        """Refer to the holder's blocks once more."""
        for block_id in held.references:
            self.refs[block_id] += 1
        return GroupBlocks(held.first, held.ids[:], held.path[:])

    def span(self, held: GroupBlocks, num_tokens: int) -> range:
        """The indices of the blocks that the holder has of its first `num_tokens`, all computed."""
        return range(held.first, self.blocks_for(num_tokens))

    def ids_at(self, held: GroupBlocks, indices: range) -> list[int]:
        """The holder's blocks at `indices`, which it has."""
        return held.ids[indices.start - held.first : indices.stop - held.first] if indices else []

    def hold(self, held: GroupBlocks, first: int, hashes: Iterable[bytes]) -> None:
        """Let a holder of cached blocks hold the longest cached run of `hashes`, which begin at the index `first`.

        In a tree the run begins with the blocks that are held. Else it takes their place.
        """
        assert len(held.ids) == len(held.path), "only a table of nothing but cached blocks can be matched further"
        found = self.cache.match(islice(hashes, len(held.ids) if self.is_tree else 0, None))
        for block_id in found:
            self.acquire(block_id)
        if not self.is_tree:
            self.truncate(held, 0)
            held.first = first
        held.ids += found
        held.path += found

    def truncate(self, held: GroupBlocks, num_blocks: int) -> None:
        """Release the blocks from index `num_blocks` on, the last one first, so that only leaves are evicted."""
        ids, path, num_kept = held.ids, held.path, max(0, num_blocks - held.first)
        for index in range(len(ids) - 1, num_kept - 1, -1):
            self.drop(ids[index])
            if index < len(path) and path[index] != ids[index]:
                self.drop(path[index])
        del ids[num_kept:]
        del path[num_kept:]

    def let_go(self, held: GroupBlocks, position: int, num_leased: int | None) -> None:
        """Release what no token from `position` on reads, and no handoff of `num_leased` moves. Not in a tree."""
        first = self.group.first_block(position)
        self.let_go_before(held, first if num_leased is None else min(first, self.group.handed_over(num_leased).start))

    def let_go_before(self, held: GroupBlocks, first: int) -> None:
        """Release the blocks before index `first`, which are dead. Those in the cache stay findable. Not in a tree."""
        num_dead = first - held.first
        if num_dead <= 0:
            return
        for block_id in held.ids[:num_dead]:
            self.drop(block_id)
        del held.ids[:num_dead]
        del held.path[:num_dead]
        held.first = first

    def publish(self, held: GroupBlocks, hashes: Sequence[bytes], news: list[CachedBlock]) -> None:
        """Cache the blocks that `hashes` cover. `news` gets those that the cache did not know."""
        ids, path, cache, is_tree, ratio = held.ids, held.path, self.cache, self.is_tree, self.ratio
        for index in range(held.first + len(path), len(hashes) // ratio):
            block_hash, own = hashes[(index + 1) * ratio - 1], ids[index - held.first]
            cached = cache.find(block_hash)
            if cached is None:
                cache.insert(block_hash, own, path[-1] if path and is_tree else None)
                cached = own
                news.append(CachedBlock(block_hash, own, self.index))
            elif not self.refs[cached] and not self.keeps_first:  # no second copy is kept
                cache.replace(cached, own)
                self._put_free(cached)
                cached = own
            elif is_tree:
                self.acquire(cached)
            else:
                cached = own
            path.append(cached)

    def due(self, held: GroupBlocks, *, is_cached: bool) -> float:
        """When so many tokens are computed there is a block to publish, or one that is dead."""
        size, group = self.block_size, self.group
        due: float = (held.first + len(held.path) + 1) * size if is_cached else inf
        if not self.is_tree:
            due = min(due, (held.first + 1) * size + (group.window - 1 if group.kind is KVKind.WINDOW else 1))
        return due

    # proof

    def check(self, tables: list[GroupBlocks], leased: list[GroupBlocks], quarantined: list[int]) -> None:
        """Raise AssertionError unless every block is accounted for once."""
        expected = [0] * len(self.refs)
        for block_id in chain(quarantined, *(held.references for held in tables)):
            expected[block_id] += 1
        for held in tables:
            assert len(held.path) <= len(held.ids), f"a path of {len(held.path)} over {len(held.ids)} blocks"
            for own, cached in zip(held.ids, held.path, strict=False):
                assert cached in self.cache or not self.is_tree, f"block {cached} is on a path but not cached"
                assert own == cached or self.is_tree, "a twin in a cache that is no tree"
        wrong = [(i, *pair) for i, pair in enumerate(zip(self.refs, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"(block, references, holders) disagree: {wrong[:8]}"
        counted = Counter(block_id for held in leased for block_id in held.ids)
        assert counted == self.leased, f"leased blocks miscounted: {counted} held, {self.leased} counted"
        self.cache.check(self.refs)
        free = [block_id for ids in self.free_in.values() for block_id in ids]
        assert len(set(free)) == len(free), "a block is free twice"
        unreferenced = {i for slab in self.free_in for i in self.ids_of(slab) if self.refs[i] == 0}
        reusable = {i for i in unreferenced if i in self.cache}
        assert set(free) == unreferenced - reusable, f"free: off by {sorted(set(free) ^ (unreferenced - reusable))[:8]}"
        assert len(reusable) == self.cache.num_evictable
