"""How much of a prompt is cached: the largest boundary that every KV group accepts.

A boundary is a number of tokens, a multiple of every group's block size. A group accepts boundary b when its blocks
[first_block(b), b // block_size) are cached. The hash of a block is that of the whole prompt up to its end, so one
chain of hashes, in the smallest block size, serves all groups.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable


class TreeHits:
    """The hits in the cache of one group, which is a tree."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        return len(self._pool.cache.match(hashes))

    def hold(self, table: BlockTable, hashes: Iterable[bytes]) -> int:
        held, pool = table.groups[0], self._pool
        ids, path = held.ids, held.path
        assert len(ids) == len(path), "only a table of nothing but cached blocks can be matched further"
        for block_id in pool.cache.match(islice(hashes, len(ids), None)):
            pool.acquire(block_id)
            ids.append(block_id)
            path.append(block_id)
        return len(ids)


class GroupHits:
    """The hits in the caches of any groups. Lengths are in blocks of `block_size`, the smallest."""

    def __init__(self, pools: Sequence[BlockPool], block_size: int) -> None:
        self._pools = pools
        self._block_size = block_size
        self._trees = [pool for pool in pools if pool.is_tree]
        self._others = [pool for pool in pools if not pool.is_tree]
        self._unit = max(pool.ratio for pool in pools)

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """The length of the largest boundary."""
        return self._find(hashes)[0]

    def hold(self, table: BlockTable, hashes: Iterable[bytes]) -> int:
        """Let the table hold what a sequence that continues at the largest boundary needs. Returns its length."""
        boundary, known = self._find(hashes)
        for pool, held in zip(self._pools, table.groups, strict=True):
            blocks = range(pool.group.first_block(boundary * self._block_size), boundary // pool.ratio)
            found = [pool.cache.find(_hash(known, index, pool.ratio)) for index in blocks]
            pool.hold(held, blocks.start, [block_id for block_id in found if block_id is not None])
        return boundary

    def _find(self, hashes: Iterable[bytes]) -> tuple[int, list[bytes]]:
        """The largest boundary, and the hashes that were looked at: as few as the first tree allows."""
        known: list[bytes] = []
        first = self._trees[0] if self._trees else None
        for block_hash in hashes:
            known.append(block_hash)
            if first is not None and not len(known) % first.ratio and first.cache.find(block_hash) is None:
                break
        boundary = len(known)
        for tree in self._trees:
            boundary = min(boundary, tree.ratio * len(tree.cache.match(known[tree.ratio - 1 :: tree.ratio])))
        boundary -= boundary % self._unit
        while boundary and (missing := self._missing(known, boundary)) is not None:
            boundary = missing - missing % self._unit
        return boundary, known

    def _missing(self, known: list[bytes], boundary: int) -> int | None:
        """The start of a block that this boundary needs, and which is not cached.

        Every boundary between that start and this one needs the block too.
        """
        for pool in self._others:
            blocks = range(pool.group.first_block(boundary * self._block_size), boundary // pool.ratio)
            for index in blocks:
                if pool.cache.find(_hash(known, index, pool.ratio)) is None:
                    return index * pool.ratio
        return None

    def boundaries(self, hashes: Sequence[bytes], first: int) -> set[int]:
        """Those from `first` on that are hits, of a prompt that is cached in all trees."""
        unit, size = self._unit, self._block_size
        hits = set(range(-(-first // unit) * unit, len(hashes) + 1, unit))
        for pool in self._others:
            num_cached = 0  # in a row
            for index in range(pool.group.first_block(first * size), len(hashes) // pool.ratio):
                is_cached = pool.cache.find(_hash(hashes, index, pool.ratio)) is not None
                num_cached = num_cached + 1 if is_cached else 0
                end = (index + 1) * pool.ratio
                if num_cached < index + 1 - pool.group.first_block(end * size):
                    hits.discard(end)
        return hits


def _hash(hashes: Sequence[bytes], index: int, ratio: int) -> bytes:
    """The hash of block `index` of a group."""
    return hashes[(index + 1) * ratio - 1]
