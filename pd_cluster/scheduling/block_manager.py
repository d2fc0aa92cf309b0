"""Which tables, leases and quarantines hold which KV blocks. Ids only; the memory lies in the worker.

Each KV group has a pool of blocks with a prefix cache of its own (`block_pool`); several share memory (`slab_memory`).
A *table* is one holder's blocks of every group (`block_table`). Operations here are on all groups at once.

Sizes in *units*: with one group a unit is a block. With several a slab has as many units as the least common multiple
of the blocks that groups have in one.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.batch import NewBlocks
from pd_cluster.scheduling.block_table import BlockTable, Growth
from pd_cluster.scheduling.cache_news import CacheNews
from pd_cluster.scheduling.hits import Hits
from pd_cluster.scheduling.host_copies import HostCopies
from pd_cluster.scheduling.host_hits import HostHits
from pd_cluster.scheduling.host_tier import HostTier
from pd_cluster.scheduling.sequence_room import cache_tokens, most_held
from pd_cluster.scheduling.slab_memory import SlabMemory
from pd_cluster.scheduling.state_steps import StateSteps
from pd_connectors.protocol.layout import BlockRun, KVKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.protocol.messages import KvStats
    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import GroupBlocks
    from pd_cluster.scheduling.host_copies import Copy
    from pd_connectors.base import CachedBlock
    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs


class BlockManager:
    """The pools of all groups, with the tables, leases and quarantines that refer to their blocks.

    `states`: the slots of a STATE group; None: there is no such group.
    """

    def __init__(
        self, groups: Sequence[KVGroup], slabs: KvSlabs, *, num_host_blocks: int = 0, host_cache: bool = False,
        prefix_caching: bool = True,
    ) -> None:  # fmt: skip
        """`num_host_blocks`: units (`host_unit`), to swap, and with `host_cache` for a tier of the prefix cache."""
        # its tables would begin empty, hits and handoffs would leave it out, and nothing of it would be published
        assert not any(group.optional for group in groups), "no model has an optional KV group yet"
        self.block_size = min(group.block_size for group in groups)  # tokens; of hashes
        self.prefix_caching = prefix_caching
        assert all(group.block_size % self.block_size == 0 for group in groups), "block sizes that do not divide"
        self._groups, self._slabs = groups, slabs
        self._memory = SlabMemory(groups, [group.block_size // self.block_size for group in groups], slabs)
        self.pools: tuple[BlockPool, ...] = self._memory.pools
        self.has_room, self.has_room_without = self._memory.has_room, self._memory.has_room_without
        self.has_free, self.free_for = self._memory.has_free, self._memory.free_for
        self.num_units = self._memory.units_of
        self._mortal = tuple(pool for pool in self.pools if not pool.is_tree)  # their blocks die
        self.states = StateSteps.of(self._memory, prefix_caching=prefix_caching)
        self._paged = tuple(pool for pool in self.pools if pool.group.kind is not KVKind.STATE)
        self._hits = Hits(self.pools, self.block_size)
        self.news = CacheNews([pool.index for pool in self.pools if pool.is_tree])
        self.host = HostTier(self.pools, self.news, num_host_blocks, is_cache=host_cache and prefix_caching)
        self.copies = HostCopies(self.pools, self.host)
        self._host_hits = HostHits(self._memory, self.block_size, self._hits, self.copies)
        self.match_host, self.lacking = self._host_hits.extend, self._host_hits.lacking
        self._tables: set[BlockTable] = set()
        self.leases: dict[str, BlockTable] = {}
        self.num_leases_ended = 0
        self._quarantines: dict[str, list[list[int]]] = {}  # by group

    # sizes

    @property
    def has_mortal(self) -> bool:
        """Whether blocks of a group die."""
        return bool(self._mortal)

    @property
    def num_blocks(self) -> int:
        """Units of memory."""
        return self._memory.num_units

    @property
    def num_available(self) -> int:
        """Units without a reference."""
        return self._memory.num_available

    @property
    def num_free_tokens(self) -> int:
        """The longest sequence for which there is room now, in tokens. A multiple of `block_size`."""
        size = self.block_size
        if len(self.pools) == 1:
            return self.num_available * size
        most = self.num_tokens // size
        return bisect_left(range(most), True, key=lambda n: not self.has_room(self.needs_of((n + 1) * size))) * size

    @property
    def num_evicted(self) -> int:
        """Blocks since boot."""
        return sum(pool.num_evicted for pool in self.pools)

    def needs_of(self, num_tokens: int) -> list[int]:
        """The blocks by group of a sequence of so many tokens that is prefilled."""
        return [most_held(group, num_tokens) for group in self._groups]

    @cached_property
    def num_tokens(self) -> int:
        """The longest sequence that fits into an empty cache, in tokens."""
        return cache_tokens(self._groups, self._slabs)

    def stats(self) -> KvStats:
        taken = self._quarantines.values()
        return self._memory.stats([sum(len(ids[pool.index]) for ids in taken) for pool in self.pools])

    # tables

    def open_table(self, *, reverses: bool = False) -> BlockTable:
        """An empty table. Close it (or `hold` it under a lease), whatever happens.

        `reverses`: its steps that draw may be taken back (`Sequence.sit_out`).
        """
        table = BlockTable(tuple(pool.new_holder(reverses=reverses) for pool in self.pools))
        self._tables.add(table)
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table of the same blocks. The first that writes the shared last block gets a copy of it."""
        twin = BlockTable(tuple(pool.fork(held) for pool, held in self._by_group(table)), branch=table.branch)
        table.capacity = 0  # both tables must `grow` before they are written
        self._tables.add(twin)
        return twin

    def close(self, table: BlockTable) -> None:
        """Release all blocks of the table. Idempotent."""
        self._tables.discard(table)
        self.copies.cancel(table)
        self.truncate(table, 0)

    def needs(self, table: BlockTable, start: int, end: int) -> list[int]:
        """The blocks to take by group, to make positions [start, end) writable."""
        groups = table.groups  # `zip` with `strict` takes as long as the rest, here and where steps grow tables
        return [pool.num_missing(groups[pool.index], start, end) for pool in self.pools]

    def can_grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Whether there are blocks to make positions [start, end) writable."""
        return self._memory.has_room(self.needs(table, start, end))

    def grow(self, table: BlockTable, start: int, end: int) -> Growth:
        """Make positions [start, end) writable. The caller has asked for room.

        All tokens before `start` are computed, so of the table's blocks only the one of `start` can be shared.
        """
        needs = self.needs(table, start, end)
        assert self._memory.has_room(needs)
        self._memory.free_for(needs)
        new, copies = [], []
        for pool in self.pools:
            if needs[pool.index]:
                held = table.groups[pool.index]
                begin, copy = pool.grow(held, start, end)
                if pool.group.kind is not KVKind.STATE:
                    new.append(NewBlocks(pool.index, held.first + begin, tuple(held.ids[begin:])))
                if copy is not None:
                    copies.append((pool.index, *copy))
        table.capacity = self.end_of(table)
        return Growth(tuple(new), tuple(copies))

    def _by_group(self, table: BlockTable) -> Iterable[tuple[BlockPool, GroupBlocks]]:
        return zip(self.pools, table.groups, strict=True)

    def end_of(self, table: BlockTable) -> int:
        """Positions below this have a block in every group, which may be shared."""
        end = inf
        for pool in self._paged:
            held = table.groups[pool.index]
            if (own := (held.first + len(held.ids)) * pool.block_size) < end:
                end = own
        return int(end)

    def whole(self, table: BlockTable) -> tuple[NewBlocks, ...]:
        """All blocks, for a worker that knows none of them."""
        return tuple(NewBlocks(i, held.first, tuple(held.ids)) for i, held in enumerate(table.groups))

    def handed_over(self, table: BlockTable, num_tokens: int, num_computed: int) -> tuple[BlockRun, ...]:
        """The blocks that a handoff of the first `num_tokens` moves, as far as `num_computed` make them final."""
        runs = []
        for pool, held in self._by_group(table):
            blocks = pool.group.handed_over(num_tokens, num_computed)
            runs.append(BlockRun(blocks.start, tuple(pool.ids_at(held, blocks))))
        return tuple(runs)

    def uncached_runs(self, table: BlockTable) -> tuple[BlockRun, ...]:
        """The blocks after those that are published or matched: the targets of a load."""
        groups = table.groups
        return tuple(BlockRun(one.first + len(one.path), tuple(one.ids[len(one.path) :])) for one in groups)

    def truncate(self, table: BlockTable, num_blocks: int) -> None:
        """Release all but what the first `num_blocks` (of `block_size` tokens) hold.

        Where blocks die the rest may not be enough to continue there: `match` again before that.
        """
        for pool, held in zip(self.pools, table.groups, strict=True):
            pool.truncate(held, num_blocks // pool.ratio)
        table.capacity = 0
        table.due = 0

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Release the blocks after the first `num_tokens`, which it got for drafts. No running step may write them."""
        if table.capacity - num_tokens < self.block_size:
            return  # as most often: the group of the smallest blocks has none, and so no group has
        for pool, held in self._by_group(table):
            pool.truncate(held, pool.blocks_for(num_tokens))
        table.capacity = self.end_of(table)

    def let_go(self, table: BlockTable, position: int, num_leased: int | None = None) -> None:
        """Release the blocks that no token from `position` on reads. Those in the cache stay findable.

        `num_leased`: what a handoff of a prompt of so many tokens moves is kept.
        """
        for pool in self._mortal:
            pool.let_go(table.groups[pool.index], position, num_leased)
        due = inf
        for pool in self.pools:
            if (own := pool.due(table.groups[pool.index], is_cached=self.prefix_caching)) < due:
                due = own
        table.due = due

    def drop_targets(self, table: BlockTable, num_blocks: int) -> None:
        """Release the targets of a load from block `num_blocks` (of `block_size` tokens) on."""
        for pool, held in self._by_group(table):
            pool.truncate(held, max(held.first + len(held.path), num_blocks // pool.ratio))
        table.capacity = 0

    # prefix cache

    def num_cached(self, hashes: Iterable[bytes]) -> int:
        """The number of tokens up to the largest boundary of `hashes` that is a hit."""
        return self._host_hits.num_cached(hashes) * self.block_size

    def match(self, table: BlockTable, hashes: Iterable[bytes]) -> int:
        """Let a table that holds nothing but cached blocks hold those of the largest boundary of `hashes`.

        The blocks are pinned when they are found, so none of them can be evicted. Returns the number of blocks up to
        the boundary, of which those that are dead there are not held.
        """
        return self._hits.hold(table, hashes if self.prefix_caching else ())

    def match_runs(
        self, table: BlockTable, hashes: Iterable[bytes], num_tokens: int, *, is_handoff: bool = False
    ) -> None:
        """Let a table hold what is cached of what a sequence holds that continues after `num_tokens`: by group, a run
        of `hashes` from its first block on. `is_handoff`: of what a handoff of a prompt of `num_tokens` moves.
        """
        groups = [pool.group for pool in self.pools]
        firsts = [one.handed_over(num_tokens).start if is_handoff else one.first_block(num_tokens) for one in groups]
        self._hits.hold_runs(table, hashes if self.prefix_caching else (), firsts)

    def publish(self, table: BlockTable, hashes: list[bytes]) -> list[CachedBlock]:
        """Cache the table's first len(hashes) blocks: full, computed, and the step that computed them has retired.

        Returns the blocks that the cache did not know.
        """
        news: list[CachedBlock] = []
        if self.prefix_caching:
            for pool in self.pools:
                pool.publish(table.groups[pool.index], hashes, news)
            if self.host.is_cache:
                for one in news:
                    self.news.raised(one.group, one.hash)
        return news

    def num_published(self, table: BlockTable) -> int:
        """The number of blocks that are published in every group."""
        ends = ((pool, table.groups[pool.index]) for pool in self._paged)
        return min((held.first + len(held.path)) * pool.ratio for pool, held in ends)

    def name(self, steps: Sequence[tuple[int, int]], first: int, hashes: Sequence[bytes]) -> int:
        """Name the hits of a prompt of which the blocks with `hashes` are published. See `CacheNews.name`."""
        return self.news.name(steps, first, hashes, self.block_size, self._hits.needed)

    def forget_unused(self) -> None:
        """Free all cached blocks that nothing refers to, and those in host memory."""
        num_unsaved = self.host.num_unsaved
        self.host.clear()
        for pool in self.pools:
            pool.forget_unused()
        self.host.num_unsaved = num_unsaved  # nothing came too late

    # leases, quarantine

    def hold(self, lease_id: str, table: BlockTable) -> None:
        """Give the table to the lease. The caller must not use it any more."""
        assert lease_id not in self.leases, f"lease {lease_id} holds blocks already"
        self.leases[lease_id] = table
        for pool, held in self._by_group(table):
            pool.leased.update(held.ids)

    def end_lease(self, lease_id: str) -> bool:
        """Free the blocks of a lease. Returns False if it holds none."""
        table = self.leases.pop(lease_id, None)
        if table is None:
            return False
        self.num_leases_ended += 1
        for pool, held in self._by_group(table):
            for block_id in held.ids:
                pool.leased[block_id] -= 1
                if not pool.leased[block_id]:
                    del pool.leased[block_id]
        self.close(table)
        return True

    def quarantine(self, load_id: str, table: BlockTable) -> None:
        """Take the targets of a load out of the table, and out of use, until `drain(load_id)`."""
        taken = self._quarantines.setdefault(load_id, [[] for _ in self.pools])
        for held, ids in zip(table.groups, taken, strict=True):
            ids += held.ids[len(held.path) :]
            del held.ids[len(held.path) :]
        table.capacity = 0

    def drain(self, load_id: str) -> None:
        """Free the quarantined blocks of a load that cannot write any more. Unknown ids are ignored."""
        for pool, ids in zip(self.pools, self._quarantines.pop(load_id, ()), strict=False):
            for block_id in ids:
                pool.drop(block_id)

    @property
    def is_lent(self) -> bool:
        """Whether a lease or a quarantine holds blocks."""
        return bool(self.leases or self._quarantines)

    # host pool

    def can_swap_out(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether the table has blocks of the first `num_tokens`, all loaded, and the host memory room for them."""
        if not num_tokens or table in self.copies.pending or (self.states and self.states.is_unread(table)):
            return False
        needs = (len(pool.span(held, num_tokens)) for pool, held in self._by_group(table))
        return all(num <= own.num_takeable for num, own in zip(needs, self.host.groups, strict=True))

    def swap_out(self, table: BlockTable, num_tokens: int) -> tuple[list[Copy], tuple[BlockRun, ...]]:
        """Reserve host blocks for the first `num_tokens` and close the table.

        Returns the copies (group, device, host), and the host blocks by group.
        """
        copies, runs = [], []
        for pool, held in self._by_group(table):
            blocks = pool.span(held, num_tokens)
            ids = pool.ids_at(held, blocks)
            taken = self.host.take(pool.index, len(ids))
            copies += [(pool.index, *pair) for pair in zip(ids, taken, strict=True)]
            runs.append(BlockRun(blocks.start, tuple(taken)))
        self.close(table)
        return copies, tuple(runs)

    def swap_in(self, table: BlockTable, host_blocks: tuple[BlockRun, ...], needs: Sequence[int]) -> list[Copy]:
        """Add the swapped-out blocks that the table lacks, and free the host blocks.

        `needs`: what the table will take in all, by group; there is room for it. Returns the copies (group, host,
        device). The caller swaps nothing out in the same step (a step copies out before it copies in: a host block
        freed here must not be written by it).
        """
        copies: list[Copy] = []
        self._memory.free_for(needs)
        for (pool, held), run in zip(self._by_group(table), host_blocks, strict=True):
            for host in islice(run.block_ids, held.end - run.first_block, None):
                held.ids.append(pool.take())
                copies.append((pool.index, host, held.ids[-1]))
        self.free_host(host_blocks)
        return copies

    def free_host(self, host_blocks: tuple[BlockRun, ...]) -> None:
        for own, run in zip(self.host.groups, host_blocks, strict=False):
            own.give_back(run.block_ids)

    # proof

    @property
    def idle(self) -> bool:
        """No table, lease or quarantine is left, and no host block is in use."""
        return self.host.idle and not (self._tables or self.leases or self._quarantines)

    def check(self) -> None:
        """Raise AssertionError unless every block is accounted for once. O(blocks); run when idle and in tests."""
        assert all(table in self._tables for table in self.leases.values()), "a lease holds a closed table"
        for pool in self.pools:
            tables = [table.groups[pool.index] for table in self._tables]
            leased = [table.groups[pool.index] for table in self.leases.values()]
            quarantined = [block_id for taken in self._quarantines.values() for block_id in taken[pool.index]]
            pool.check(tables, leased, quarantined)
        assert self.copies.pending.keys() <= self._tables, "a closed table is loaded"
        self.copies.check()
        self.host.check()
        self._memory.check()
