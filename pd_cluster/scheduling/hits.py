"""What of a prompt is cached: the largest boundary that every KV group accepts, or the runs of each group alone.

A boundary is a number of tokens, a multiple of every group's block size. A group accepts boundary b when its blocks
[first_block(b), b // block_size) are cached. The hash of a block is that of the whole prompt up to its end, so one
chain of hashes, in the smallest block size, serves all groups.
"""

from __future__ import annotations

from itertools import islice
from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.prefix_cache import PrefixCache
    from pd_cluster.scheduling.tiers import Tiers


class Hits:
    """The hits in the caches of all groups. Lengths are in blocks of `block_size`, the smallest."""

    def __init__(
        self, pools: Sequence[BlockPool], block_size: int, caches: Sequence[PrefixCache | Tiers] | None = None
    ) -> None:
        """`caches`: by group, what to look into; None: what is on the device. Only that can be held."""
        self._caches = [pool.cache for pool in pools] if caches is None else caches
        self._pools = pools
        self._block_size = block_size
        self._trees = [pool for pool in pools if pool.is_tree]
        self._others = [pool for pool in pools if not pool.is_tree]
        self._unit = lcm(*(pool.ratio for pool in pools))
        self._is_lone = len(self._trees) == len(pools) == 1  # each block of a tree alone ends at a boundary

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """The length of the largest boundary."""
        return len(self._caches[0].match(hashes)) if self._is_lone else self.find(hashes)[0]

    def hold(self, table: BlockTable, hashes: Iterable[bytes]) -> int:
        """Let the table hold what a sequence that continues at the largest boundary needs. Returns its length."""
        if self._is_lone:
            self._trees[0].hold(table.groups[0], 0, hashes)
            return len(table.groups[0].ids)
        table.branch, known = self.common(hashes)
        boundary = self.largest(known, table.branch)
        table.branch *= self._block_size
        self.hold_at(table, known, boundary)
        return boundary

    def hold_at(self, table: BlockTable, hashes: Sequence[bytes], boundary: int) -> None:
        """Let the table hold what a sequence that continues at this boundary, a hit, needs."""
        for tree in self._trees:  # may hold more
            tree.truncate(table.groups[tree.index], boundary // tree.ratio)
        firsts = [pool.group.first_block(boundary * self._block_size) for pool in self._pools]
        self.hold_runs(table, hashes[:boundary], firsts)

    def hold_runs(self, table: BlockTable, hashes: Iterable[bytes], firsts: Sequence[int]) -> None:
        """Let the table hold, of each group alone, the longest cached run of blocks from index `firsts[group]` on."""
        known = hashes if self._is_lone else list(hashes)
        for pool, held, first in zip(self._pools, table.groups, firsts, strict=True):
            pool.hold(held, first, islice(known, (first + 1) * pool.ratio - 1, None, pool.ratio))

    def needed(self, hashes: Sequence[bytes], boundary: int) -> list[tuple[int, bytes]] | None:
        """The (group, hash) of the blocks that a boundary needs of groups that are no trees. None: one is not cached.

        The prompt is cached in all trees.
        """
        missing, needed = self._look_up(hashes, boundary)
        return needed if missing is None and not boundary % self._unit else None

    def find(self, hashes: Iterable[bytes]) -> tuple[int, list[bytes]]:
        """The largest boundary, and the hashes that were looked at: as few as the first tree allows."""
        common, known = self.common(hashes)
        return self.largest(known, common), known

    def common(self, hashes: Iterable[bytes]) -> tuple[int, list[bytes]]:
        """The length that all trees have, or of all `hashes` where there is none, and the hashes that were looked at.

        Without a tree: all, since the end of a prompt may be cached while its beginning is not; none if nothing is.
        """
        known: list[bytes] = []
        first = self._trees[0] if self._trees else None
        if first is None and not any(len(self._caches[pool.index]) for pool in self._others):
            return 0, known
        cache, ratio = (None, 1) if first is None else (self._caches[first.index], first.ratio)
        for block_hash in hashes:
            known.append(block_hash)
            if cache is not None and not len(known) % ratio and cache.find(block_hash) is None:
                break
        boundary = len(known)
        for tree in self._trees:
            found = self._caches[tree.index].match(known[tree.ratio - 1 :: tree.ratio])
            boundary = min(boundary, tree.ratio * len(found))
        return boundary, known

    def largest(self, known: Sequence[bytes], boundary: int) -> int:
        """The largest boundary up to this length, which all trees have."""
        missing: int | None = boundary
        while missing is not None:  # every boundary between the missing block's start and the last one needs it too
            boundary = missing - missing % self._unit
            missing = self._look_up(known, boundary)[0]
        return boundary

    def _look_up(self, hashes: Sequence[bytes], boundary: int) -> tuple[int | None, list[tuple[int, bytes]]]:
        """The start of a block that this boundary needs and that is not cached, or None; and what it needs."""
        needed = []
        for pool in self._others:
            for index in range(pool.group.first_block(boundary * self._block_size), boundary // pool.ratio):
                block_hash = hashes[(index + 1) * pool.ratio - 1]
                if self._caches[pool.index].find(block_hash) is None:
                    return index * pool.ratio, []
                needed.append((pool.index, block_hash))
        return None, needed
