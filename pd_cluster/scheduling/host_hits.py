"""How a hit goes on in host memory: the largest boundary of which each group has what it needs in either tier."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pd_cluster.scheduling.hits import Hits
from pd_cluster.scheduling.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.host_copies import HostCopies
    from pd_cluster.scheduling.slab_memory import SlabMemory


class HostHits:
    """Hits over both tiers, and how a table gets them."""

    def __init__(self, memory: SlabMemory, block_size: int, device: Hits, copies: HostCopies) -> None:
        """`device`: the hits in what is on the device."""
        self._memory, self._pools, self._size = memory, memory.pools, block_size
        self._device, self._copies, self._tier = device, copies, copies.tier
        self._caches = [Tiers(pool.cache, own) for pool, own in zip(memory.pools, copies.tier.groups, strict=True)]
        self._both = Hits(memory.pools, block_size, self._caches)

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """The length of the largest boundary, in blocks."""
        return (self._both if self._tier.num_cached else self._device).num_cached(hashes)

    def lacking(
        self, hashes: Sequence[bytes], has: Callable[[int, bytes], bool]
    ) -> tuple[int, list[tuple[int, bytes]]]:
        """The largest boundary, in blocks, with what a third tier `has` of a group, and what of it these two lack.

        The latter are (group, hash), of each group in the prompt's order.
        """
        caches = [
            Tiers(pool.cache, own, partial(has, pool.index))
            for pool, own in zip(self._pools, self._tier.groups, strict=True)
        ]
        boundary, known = Hits(self._pools, self._size, caches).find(hashes)
        lacking = []
        for pool, cache in zip(self._pools, self._caches, strict=True):
            first = pool.group.first_block(boundary * self._size)
            rest = known[(first + 1) * pool.ratio - 1 : boundary : pool.ratio]
            lacking += [(pool.index, one) for one in rest if cache.find(one) is None]
        return boundary, lacking

    def extend(
        self, table: BlockTable, hashes: Iterable[bytes], start: int, end: int,
        loads_sooner: Callable[[int, int], bool] = lambda boundary, num_bytes: True,
    ) -> int:  # fmt: skip
        """Let a table that holds the device's hit of `start` blocks, and has room up to `end` tokens, hold the largest
        one of both tiers. What the device has not of it is queued to be loaded.

        While the table is in `HostCopies.pending` no step computes it. `loads_sooner`: whether a hit of so many blocks
        is worth so many bytes to load. Returns the hit in blocks; `start` also where there is no room, as where slabs
        of another group hold a part of it.
        """
        if not self._tier.num_cached:
            return start
        common, known = self._both.common(hashes)
        table.branch = max(table.branch, common * self._size)
        boundary = self._both.largest(known, common)
        if boundary <= start:
            return start
        firsts = [pool.group.first_block(boundary * self._size) for pool in self._pools]
        self._device.hold_runs(table, known[:boundary], firsts)
        needs, rests, num_bytes = [], [], 0
        for pool, held, first in zip(self._pools, table.groups, firsts, strict=True):
            rest = known[(first + len(held.ids) + 1) * pool.ratio - 1 : boundary : pool.ratio]
            found = [pool.cache.find(one) for one in rest]  # in a tree nothing
            on_device = [block_id for block_id in found if block_id is not None]
            for block_id in on_device:
                pool.acquire(block_id)  # nothing may evict it
            rests.append(list(zip(rest, found, strict=True)))
            needs.append(pool.num_more(held, len(on_device), end))
            num_bytes += (len(found) - len(on_device)) * pool.group.block_bytes
        if self._memory.has_room(needs) and loads_sooner(boundary, num_bytes):
            self._place(table, rests, needs)
            return boundary
        for pool, one in zip(self._pools, rests, strict=True):
            for _, found_id in one:
                if found_id is not None:
                    pool.drop(found_id)
        self._device.hold_at(table, known, start)
        return start

    def _place(self, table: BlockTable, rests: list[list[tuple[bytes, int | None]]], needs: list[int]) -> None:
        """Give the table blocks for what it lacks of a hit: by group the (hash, block of the device or None) of it."""
        self._memory.free_for(needs)
        loads = []
        with self._tier.bequeath(table):
            for pool, held, rest in zip(self._pools, table.groups, rests, strict=True):
                for block_hash, block_id in rest:
                    if block_id is None:
                        block_id = pool.take()
                        loads.append((pool.index, block_hash, block_id))
                    held.ids.append(block_id)
        if loads:
            self._copies.queue(table, loads)
