"""The host blocks of all KV groups: those of swapped sequences, and the prefix cache's tier in host memory.

    a host block is   when
    free              nothing is in it that counts
    cached            it has the content of a hash; evicted when a block is wanted and none is free, the first in order
    taken             a swapped sequence, or a reader of files, has it

What is about to leave the device is copied here ahead (`plan_saves`), and what a prompt finds here is loaded into
blocks that its table has taken (`queue`, `plan_loads`). These copies run on a side stream beside the forward of their
step (`BlockCopies`), and both are planned last in a step. A long prompt takes all of its blocks at once and fills them
many steps later: what they held before, its *victims*, are saved meanwhile. Why no copy needs more of a fence:

    a save's source     is cached, so nothing writes it until it is taken, by a later step, which waits for the side
                        stream. A transfer that writes it starts when this step has retired, its side copies with it.
                        Or it is a victim: one prompt alone has the block and has planned no step that reaches it
    a load's target     belongs to a table that this step does not compute; later steps wait for the side stream. If
                        the table is closed first, whatever takes the block waits likewise
    a host block        that is saved by one step is found from the next one on: its main stream has waited for the
                        save. A swap into a block that a side copy reads or writes is of a later step. Queued loads
                        pin their sources, and a save pins its target until its step has retired: till then nothing
                        outside the streams may read it

Evicted is first what the device has as well since it was loaded, then in the order in which it left the device. There
a tail goes before its head, so what is left here of a prompt mostly begins where the device's part ends.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.copy_room import CopyRoom
from pd_cluster.scheduling.host_blocks import HostBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.cache_news import CacheNews
    from pd_connectors.base import CachedBlock

# Blocks of a step, each way: of 8 MiB (8B) they take 40 ms. Prompts fill 128 of each group in a step of 8,192 tokens
LOADS = SAVES = 256
# Of the seconds that a step computes, those for which it copies each way, at HOST_GB_S. Beside 32 decodes (5.3 ms, 8B)
# these are 8 blocks. 8 loads prolong the step by 5%, 32 double it, and prolong one of 2,048 tokens by 6.7%
COPY_SHARE = 1.0, 0.5  # without streams, and beside them
# Blocks that are copied before they are evicted: those that a step of prompts fills and LEAST_AHEAD more, for decodes.
# Or 1 / AHEAD_SHARE of a group's; where it has victims at most MOST_AHEAD: so many loads, 16,384 tokens, wait for none
LEAST_AHEAD, AHEAD_SHARE, MOST_AHEAD = 8, 16, 256
STEPS_AHEAD = 2  # victims are saved when so many steps of prompts may reach their blocks
# Of a rank; stated, not measured. An H200 copies 53 GB/s each way; forwards beside it and the other way take their part
HOST_GB_S = 25.0
LOAD_WAIT_S = 0.002  # until the step after one that only loads: it is planned, launched and retired


class HostTier:
    """The host blocks by group, and the copies to and from them that wait for a step.

    on_saved: called with the group and hash of each block of which a save is planned.
    on_evicted: called with the group, hash and block of each cached one that the tier gives up. By default it tells the
    news if the device has it not.
    """

    def __init__(self, pools: tuple[BlockPool, ...], news: CacheNews, num_blocks: int, *, is_cache: bool) -> None:
        """`num_blocks`: of each group.  `is_cache`: whether anything but swapped sequences has some."""
        self._pools, self._news = pools, news
        self.is_cache = is_cache
        for pool in pools:
            pool.on_evicted = partial(self._note_lowered if is_cache else self._note_gone, pool)
        self.groups = tuple(HostBlocks() for _ in pools)
        self.num_blocks = 0  # of each group
        self.gb_s, self.wait_s = HOST_GB_S, LOAD_WAIT_S
        self.most_loads, self.most_saves = LOADS, SAVES
        self.on_evicted: Callable[[int, bytes, int], None] = self._note_evicted
        self.on_saved: Callable[[int, bytes], None] = lambda group, block_hash: None
        self.pending: OrderedDict[BlockTable, deque[tuple[int, bytes, int, int]]] = OrderedDict()
        self.step_tokens = 0  # of a step of prompts at most
        # By the table that will write it: block -> (position of its first token, hash of what it held), in this order
        self.victims: dict[BlockTable, OrderedDict[int, tuple[int, bytes]]] = {}
        self._heir: BlockTable | None = None
        self._clean_to = [0] * len(pools)  # see `_mark`
        self._first = 0  # the group of which a step saves blocks first
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
            "host_cache_blocks|state=ready": float(self.num_blocks * len(self.groups)),
            "host_cache_blocks|state=cached": float(self.num_cached),
            "host_cache_bytes_per_second": self.gb_s * 1e9,
        }

    def grow(self, num_blocks: int) -> None:
        """Have `num_blocks` of each group, no fewer than before. The new ones can be copied from now on."""
        assert num_blocks >= self.num_blocks, "host memory that may be in use is taken away"
        for one in self.groups:
            one.free[:0] = range(num_blocks - 1, self.num_blocks - 1, -1)
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
                self.on_evicted(group, block_hash, block)
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

    @contextmanager
    def bequeath(self, table: BlockTable) -> Iterator[None]:
        """What is evicted for the table's next blocks are its victims. A later step fills these blocks, in order."""
        self._heir = table if self.is_cache and len(self._pools) == 1 else None
        try:
            yield
        finally:
            self._heir = None

    def _note_gone(self, pool: BlockPool, block_hash: bytes, _: int = -1) -> None:
        """No tier has the block."""
        if pool.is_tree:
            self._news.evicted(block_hash)
        else:
            self._news.evicted_in(pool.index, block_hash)

    def _note_lowered(self, pool: BlockPool, block_hash: bytes, block_id: int) -> None:
        """The device gives the block up. If it is here it becomes the last in the order."""
        cached = self.groups[pool.index].cached
        if block_hash in cached:
            cached.move_to_end(block_hash)
            self._news.lowered(pool.index, block_hash)
        elif (heir := self._heir) is not None:
            position = heir.groups[pool.index].end * pool.block_size
            self.victims.setdefault(heir, OrderedDict())[block_id] = position, block_hash
            self._news.lowered(pool.index, block_hash)  # most are saved
        else:
            self._note_lost(pool, block_hash)

    def _note_lost(self, pool: BlockPool, block_hash: bytes) -> None:
        """A block that the device gave up is written. It may have been computed again meanwhile, and saved."""
        if block_hash not in self.groups[pool.index].cached and pool.cache.find(block_hash) is None:
            self.num_unsaved += 1
            self._note_gone(pool, block_hash)

    def _note_evicted(self, group: int, block_hash: bytes, _: int) -> None:
        if self._pools[group].cache.find(block_hash) is None:
            self._note_gone(self._pools[group], block_hash)

    def note_raised(self, blocks: Iterable[CachedBlock]) -> None:
        """Note that the device has these blocks (again)."""
        for one in blocks:
            self._news.raised(one.group, one.hash)

    def clear(self) -> None:
        """Forget all cached blocks. Loads that are queued go on: their prompts were found before.

        The caller forgets those of the device next. None of these counts as unsaved.
        """
        for table in tuple(self.victims):
            self._lose(table)
        for group, own in enumerate(self.groups):
            cached = own.cached
            own.cached = OrderedDict()
            for block_hash, block in cached.items():
                self.on_evicted(group, block_hash, block)
                (own.orphans.add if block in own.pins else own.free.append)(block)
        self._clean_to = [0] * len(self._pools)

    # copies

    def load_s(self, num_bytes: float, *, has_streams: bool) -> float:
        """About the seconds until blocks of so many bytes would be loaded, in turns with those that are queued."""
        queued = (len(one) * self._pools[one[0][0]].group.block_bytes for one in self.pending.values())
        num_bytes += sum(min(num_bytes, one) for one in queued)
        return num_bytes / (self.gb_s * 1e9 * COPY_SHARE[has_streams]) + self.wait_s

    def copy_s(self, copies: Iterable[tuple[int, int, int]]) -> float:
        """Seconds of copies in one direction, of which the first is the group."""
        return sum(self._pools[group].group.block_bytes for group, _, _ in copies) / (self.gb_s * 1e9)

    def queue(self, table: BlockTable, loads: Iterable[tuple[int, bytes, int]]) -> None:
        """Load blocks (group, hash, device block) of a table, which no step may compute while it is in `pending`."""
        queued: deque[tuple[int, bytes, int, int]] = deque()
        for group, block_hash, device in loads:
            own = self.groups[group]
            host = own.cached[block_hash]
            own.cached.move_to_end(block_hash)  # pinned blocks last: `_take` does not search
            own.pin(host)
            queued.append((group, block_hash, host, device))
        self.pending[table] = queued

    def cancel(self, table: BlockTable) -> None:
        """Forget what is not loaded yet of a table that is closed. Idempotent."""
        for group, _, host, _ in self.pending.pop(table, ()):
            self.groups[group].unpin(host)
        self._lose(table)

    def _lose(self, table: BlockTable) -> None:
        """Give its victims up."""
        for _, block_hash in self.victims.pop(table, {}).values():
            self._note_lost(self._pools[0], block_hash)

    def holds_up(self, table: BlockTable, start: int) -> bool:
        """Whether a sequence that enters this step computes from `start` on in a later one: its blocks are loaded then,
        or what those that it fills first held can be saved in this one. A part that is lost would make useless what is
        saved of the rest of a prompt.
        """
        first, _ = next(iter(self.victims.get(table, {}).values()), (inf, b""))
        return table in self.pending or (first < start + self.step_tokens and self.groups[0].num_takeable > 0)

    def plan_copies(
        self, written: Mapping[BlockTable, int], *, step_s: float, has_streams: bool
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """The saves and loads of a step of which all else is planned. When it retires, `note_saved` is due.

        `written`: of the tables with victims that sequences run with, the tokens that steps have been planned for.
        `step_s`: predicted seconds of what the step computes; inf: nothing, and nothing waits for its copies.
        """
        if not self.is_cache:
            return [], []
        room_of = partial(CopyRoom, step_s * COPY_SHARE[has_streams], self.gb_s * 1e9)
        loads = self._plan_loads(room_of(self.most_loads))
        saves, room = list[tuple[int, int, int]](), room_of(self.most_saves)
        for table in sorted(self.victims, key=self.pending.__contains__):  # prompts that run have half, loads the rest
            room.share = 0.5 if self.pending and table not in self.pending else 1.0
            self._save_victims(table, written, room, saves, has_streams=has_streams)
        is_waited_for = loads and step_s == inf  # then the prompts' first tokens would wait for more saves than loads
        room.share = min(1.0, len(loads) / self.most_saves) if is_waited_for else 1.0
        self._first = (self._first + 1) % len(self._pools)  # each group is first in turn: a hit needs all of them
        for pool in self._pools[self._first :] + self._pools[: self._first]:
            self._mark(pool, room, saves)
        for group, block_hash, host, _ in loads:  # not before the saves: these two run in any order
            own = self.groups[group]
            own.unpin(host)
            if own.cached.get(block_hash) == host:  # not after `clear`
                own.cached.move_to_end(block_hash, last=False)  # the device has it, as its newest
        return saves, [(group, host, device) for group, _, host, device in loads]

    def _plan_loads(self, room: CopyRoom) -> list[tuple[int, bytes, int, int]]:
        """The next loads. Tables that wait take turns, or a long prompt would hold up short ones for a second.

        Their sources stay pinned. A load into a block with a victim waits until the step after its save.
        """
        loads: list[tuple[int, bytes, int, int]] = []
        for table, queued in tuple(self.pending.items()):
            victims, num = self.victims.get(table, ()), len(loads)
            while queued and queued[0][3] not in victims and room.take(self._pools[queued[0][0]].group.block_bytes):
                loads.append(queued.popleft())
            if not queued:
                del self.pending[table]
            elif len(loads) > num:
                self.pending.move_to_end(table)
        self.num_loaded += len(loads)
        self.num_loaded_bytes += room.num_bytes
        return loads

    def _save_victims(
        self, table: BlockTable, written: Mapping[BlockTable, int], room: CopyRoom, saves: list[tuple[int, int, int]],
        *, has_streams: bool,
    ) -> None:  # fmt: skip
        """Save a table's victims, as far as the step has room. Those that a step writes by now are lost.

        Where no stream waits, what the next step may write is saved even if the step takes longer by it. Else 427
        blocks of the conversation trace were lost, and 0.1 of 13.3% of its hits: beside the short end of a prompt.
        """
        pool, victims = self._pools[0], self.victims[table]
        num_bytes = pool.group.block_bytes
        is_loaded = table in self.pending  # then no step computes it, and its loads wait
        end = 0 if is_loaded else written.get(table)
        soon = inf if is_loaded or end is None else end + STEPS_AHEAD * self.step_tokens
        due = 0 if end is None or is_loaded or has_streams else end + self.step_tokens
        while victims:
            block_id, (position, block_hash) = next(iter(victims.items()))
            has_copy = block_hash in self.groups[0].cached or pool.cache.find(block_hash) is not None
            if end is not None and position < end:
                self._note_lost(pool, block_hash)
            elif end is None or position >= soon or not (has_copy or room.take(num_bytes, is_due=position < due)):
                return
            elif not has_copy and not self._save(pool, block_id, block_hash, saves):
                if is_loaded:
                    self._lose(table)  # what its loads read may be all that host memory has
                return
            del victims[block_id]
        del self.victims[table]

    def _save(self, pool: BlockPool, block_id: int, block_hash: bytes, saves: list[tuple[int, int, int]]) -> bool:
        """Plan a save. Returns False if no host block can be taken."""
        if (host := self._take(pool.index)) is None:
            return False
        own = self.groups[pool.index]
        own.cached[block_hash] = host
        own.pin(host)
        saves.append((pool.index, block_id, host))
        self.on_saved(pool.index, block_hash)
        self.num_saved += 1
        self.num_saved_bytes += pool.group.block_bytes
        return True

    def _mark(self, pool: BlockPool, room: CopyRoom, saves: list[tuple[int, int, int]]) -> None:
        """Save those of a group's next blocks to be evicted that are not here, as far as the step has room.

        Looked at are as many as the next step may evict and write; not more than half as many as the tier has, or it
        would copy the same ones again and again. `_clean_to`: of all blocks that have left the order of eviction or
        will, so many have a copy. So the order is looked at again only when a part of them has left it.
        """
        share = len(pool.refs) // AHEAD_SHARE
        share = min(share, MOST_AHEAD) if len(self._pools) == 1 else share
        ahead = min(max(pool.blocks_for(self.step_tokens) + LEAST_AHEAD, share), self.num_blocks // 2) - pool.num_spare
        cache, own, spare = pool.cache, self.groups[pool.index], ahead // 4
        if ahead <= 0 or cache.num_left + ahead <= self._clean_to[pool.index]:
            return
        for block_id, block_hash in cache.oldest(ahead + spare):
            if block_hash in own.cached:
                own.cached.move_to_end(block_hash)
                continue
            if not room.take(pool.group.block_bytes) or not self._save(pool, block_id, block_hash, saves):
                return
        self._clean_to[pool.index] = cache.num_left + ahead + spare

    def note_saved(self, saves: Iterable[tuple[int, int, int]]) -> None:
        """Note that the step of these saves has retired."""
        for group, _, host in saves:
            self.groups[group].unpin(host)

    # proof

    @property
    def idle(self) -> bool:
        """No host block is taken or pinned, and nothing waits for a copy."""
        return not (self.pending or self.victims or any(one.taken or one.pins for one in self.groups))

    def check(self) -> None:
        """Raise AssertionError unless every host block is accounted for once, and every pin has its reason."""
        for own in self.groups:
            own.check(self.num_blocks)
            assert self.is_cache or not own.cached
        for queued in self.pending.values():
            for group, block_hash, host, _ in queued:
                own = self.groups[group]
                assert own.pins[host], "the source of a queued load may be evicted"
                assert host in own.orphans or own.cached[block_hash] == host, "a queued load reads another block"
        assert len(self._pools) == 1 or not self.victims
        for table, victims in self.victims.items():
            pool, held = self._pools[0], table.groups[0]
            for block_id, (position, _) in victims.items():
                assert pool.refs[block_id] == 1, "the block of a victim has not one holder"
                assert block_id not in pool.cache, "the block of a victim has a new content"
                assert held.ids[position // pool.block_size - held.first] == block_id, "a victim of another's block"
