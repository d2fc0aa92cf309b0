"""Which blocks a step copies to host memory and back, beside its forward and planned last in it.

What is about to leave the device is copied ahead, and what a prompt finds in host memory is loaded into blocks that its
table has taken. These copies run on side streams (`BlockCopies`). A long prompt takes all of its blocks at once and
fills them many steps later: what they held before, its *victims*, are saved meanwhile. Why no copy needs more of a
fence:

    a save's source     is cached, so nothing writes it until it is taken, by a later step, which waits for the side
                        stream. A transfer that writes it starts when this step has retired, its side copies with it.
                        Or it is a victim: one prompt alone has the block and has planned no step that reaches it
    a load's target     belongs to a table that this step does not compute; later steps wait for the side stream. If
                        the table is closed first, whatever takes the block waits likewise
    a host block        that is saved by one step is found from the next one on: its main stream has waited for the
                        save. A swap into a block that a side copy reads or writes is of a later step. Queued loads
                        pin their sources, and a save pins its target until its step has retired: till then nothing
                        outside the streams may read it
"""

from __future__ import annotations

from collections import OrderedDict, deque
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.scheduling.checkpoints import most_taken
from pd_cluster.scheduling.copy_room import CopyRoom
from pd_cluster.scheduling.sequence_room import LEAST_HOST_UNITS
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.host_tier import HostTier

Copy = tuple[int, int, int]  # (group, from, to)
# Blocks of a step, each way: of 8 MiB (8B) they take 40 ms. Prompts fill 128 of each group in a step of 8,192 tokens
LOADS = SAVES = 256
# Of the seconds that a step computes, those for which it copies each way. Beside 32 decodes (5.3 ms, 8B) these are, at
# 25 GB/s, 8 blocks. 8 loads prolong the step by 5%, 32 double it, and prolong one of 2,048 tokens by 6.7%
COPY_SHARE = 1.0, 0.5  # without streams, and beside them
# Blocks that are copied before they are evicted: those that a step of prompts fills and LEAST_AHEAD more, for decodes.
# Or 1 / AHEAD_SHARE of a group's; where it has victims at most MOST_AHEAD: so many loads, 16,384 tokens, wait for none
LEAST_AHEAD, AHEAD_SHARE, MOST_AHEAD = 8, 16, 256
STEPS_AHEAD = 2  # victims are saved when so many steps of prompts may reach their blocks
LOAD_WAIT_S = 0.002  # until the step after one that only loads: it is planned, launched and retired


class HostCopies:
    """The loads that are queued, and the copies of the next step."""

    def __init__(self, pools: tuple[BlockPool, ...], tier: HostTier) -> None:
        self._pools, self.tier, self._groups = pools, tier, tier.groups
        self.wait_s = LOAD_WAIT_S
        self.most_loads, self.most_saves = LOADS, SAVES
        self.pending: OrderedDict[BlockTable, deque[tuple[int, bytes, int, int]]] = OrderedDict()
        self.step_tokens = 0  # of a step of prompts at most
        self._first = 0  # the group of which a step saves blocks first
        self._load_room, self._save_room = CopyRoom(), CopyRoom()

    def load_s(self, num_bytes: float, *, has_streams: bool) -> float:
        """About the seconds until blocks of so many bytes would be loaded, in turns with those that are queued."""
        queued = (len(one) * self._pools[one[0][0]].group.block_bytes for one in self.pending.values())
        num_bytes += sum(min(num_bytes, one) for one in queued)
        return num_bytes / (self.tier.gb_s * 1e9 * COPY_SHARE[has_streams]) + self.wait_s

    def copy_s(self, copies: Iterable[Copy]) -> float:
        """Seconds of copies in one direction, of which the first is the group."""
        return sum(self._pools[group].group.block_bytes for group, _, _ in copies) / (self.tier.gb_s * 1e9)

    def queue(self, table: BlockTable, loads: Iterable[tuple[int, bytes, int]]) -> None:
        """Load blocks (group, hash, device block) of a table, which no step may compute while it is in `pending`."""
        queued: deque[tuple[int, bytes, int, int]] = deque()
        for group, block_hash, device in loads:
            own = self._groups[group]
            host = own.cached[block_hash]
            own.cached.move_to_end(block_hash)  # pinned blocks last: `_take` does not search
            own.pin(host)
            queued.append((group, block_hash, host, device))
        self.pending[table] = queued

    def cancel(self, table: BlockTable) -> None:
        """Forget what is not loaded yet of a table that is closed. Idempotent."""
        for group, _, host, _ in self.pending.pop(table, ()):
            self._groups[group].unpin(host)
        self.tier.lose_victims(table)

    def holds_up(self, table: BlockTable, start: int) -> bool:
        """Whether a sequence that enters this step computes from `start` on in a later one: its blocks are loaded then,
        or what those that it fills first held can be saved in this one. A part that is lost would make useless what is
        saved of the rest of a prompt.
        """
        first, _ = next(iter(self.tier.victims.get(table, {}).values()), (inf, b""))
        return table in self.pending or (first < start + self.step_tokens and self._groups[0].num_takeable > 0)

    def plan(
        self, written: Mapping[BlockTable, int], *, step_s: float, has_streams: bool
    ) -> tuple[list[Copy], list[Copy]]:
        """The saves and loads of a step of which all else is planned. When it retires, `note_saved` is due.

        `written`: of the tables with victims that sequences run with, the tokens that steps have been planned for.
        `step_s`: predicted seconds of what the step computes; inf: nothing, and nothing waits for its copies.
        """
        assert self.tier.is_cache, "host memory that only swapped sequences use has nothing to copy"
        seconds, bytes_per_s = step_s * COPY_SHARE[has_streams], self.tier.gb_s * 1e9
        self._load_room.begin(seconds, bytes_per_s, self.most_loads)
        loads = self._plan_loads(self._load_room)
        saves, room = list[Copy](), self._save_room
        room.begin(seconds, bytes_per_s, self.most_saves)
        for table in sorted(self.tier.victims, key=self.pending.__contains__):
            # Prompts that run have half, loads the rest
            room.share = 0.5 if self.pending and table not in self.pending else 1.0
            self._save_victims(table, written, room, saves, has_streams=has_streams)
        is_waited_for = loads and step_s == inf  # then the prompts' first tokens would wait for more saves than loads
        room.share = min(1.0, len(loads) / self.most_saves) if is_waited_for else 1.0
        for pool in self._pools[self._first :] + self._pools[: self._first]:
            self._mark(pool, room, saves)
            if room.waits:  # for a block of this group, which is first again
                self._first = pool.index
                break
        else:
            self._first = (self._first + 1) % len(self._pools)  # each is first in turn: a hit needs all of them
        for group, block_hash, host, _ in loads:  # not before the saves: these two run in any order
            own = self._groups[group]
            own.unpin(host)
            if own.cached.get(block_hash) == host:  # not after `clear`
                # The device has it, as its newest, but for a state: there it becomes the sequence's own
                own.cached.move_to_end(block_hash, last=self._pools[group].group.kind is KVKind.STATE)
        return saves, [(group, host, device) for group, _, host, device in loads]

    def _plan_loads(self, room: CopyRoom) -> list[tuple[int, bytes, int, int]]:
        """The next loads. Tables that wait take turns, or a long prompt would hold up short ones for a second.

        Their sources stay pinned. A load into a block with a victim waits until the step after its save.
        """
        loads: list[tuple[int, bytes, int, int]] = []
        for table, queued in tuple(self.pending.items()):
            victims, num = self.tier.victims.get(table, ()), len(loads)
            while queued and queued[0][3] not in victims and room.take(self._pools[queued[0][0]].group.block_bytes):
                loads.append(queued.popleft())
            if not queued:
                del self.pending[table]
            elif len(loads) > num:
                self.pending.move_to_end(table)
        self.tier.num_loaded += len(loads)
        self.tier.num_loaded_bytes += room.num_bytes
        return loads

    def _save_victims(
        self, table: BlockTable, written: Mapping[BlockTable, int], room: CopyRoom, saves: list[Copy],
        *, has_streams: bool,
    ) -> None:  # fmt: skip
        """Save a table's victims, as far as the step has room. Those that a step writes by now are lost.

        Where no stream waits, what the next step may write is saved even if the step takes longer by it. Else 427
        blocks of the conversation trace were lost, and 0.1 of 13.3% of its hits: beside the short end of a prompt.
        """
        pool, victims = self._pools[0], self.tier.victims[table]
        num_bytes = pool.group.block_bytes
        is_loaded = table in self.pending  # then no step computes it, and its loads wait
        end = 0 if is_loaded else written.get(table)
        soon = inf if is_loaded or end is None else end + STEPS_AHEAD * self.step_tokens
        due = 0 if end is None or is_loaded or has_streams else end + self.step_tokens
        while victims:
            block_id, (position, block_hash) = next(iter(victims.items()))
            has_copy = self.tier.has(0, block_hash)
            if end is not None and position < end:
                self.tier.note_lost(0, block_hash)
            elif end is None or position >= soon or not (has_copy or room.take(num_bytes, is_due=position < due)):
                return
            elif not has_copy:
                if (host := self.tier.save(0, block_hash)) is None:
                    if is_loaded:
                        self.tier.lose_victims(table)  # what its loads read may be all that host memory has
                    return
                saves.append((0, block_id, host))
            del victims[block_id]
        del self.tier.victims[table]

    def _mark(self, pool: BlockPool, room: CopyRoom, saves: list[Copy]) -> None:
        """Save those of a group's next blocks to be evicted that are not here, as far as the step has room.

        Looked at are as many as the next step may evict and write; not more than half as many as the tier has, or it
        would copy the same ones again and again. `clean_to`: of all blocks that have left the order of eviction or
        will, so many have a copy. So the order is looked at again only when a part of them has left it.
        """
        cache, own = pool.cache, self._groups[pool.index]
        ahead = min(self._num_ahead(pool), own.num_blocks // LEAST_HOST_UNITS) - pool.num_spare
        spare = ahead // 4
        num_clean = ahead + spare
        num_let_go = cache.num_left + cache.num_evictable  # what comes after these has no copy
        if ahead <= 0 or min(cache.num_left + ahead, num_let_go) <= own.clean_to:
            return
        for place, (block_id, block_hash) in enumerate(cache.oldest(ahead + spare)):
            if block_hash in own.cached:
                own.cached.move_to_end(block_hash)
                continue
            if block_id in pool.passing:
                num_clean = min(num_clean, place)  # looked at again: it stays when its sequence ends
                continue
            host = self.tier.save(pool.index, block_hash) if room.take(pool.group.block_bytes) else None
            if host is None:
                return
            saves.append((pool.index, block_id, host))
        own.clean_to = min(cache.num_left + num_clean, num_let_go)

    def _num_ahead(self, pool: BlockPool) -> int:
        """A prompt takes the blocks of all its tokens at once. Where groups share memory it evicts what is oldest, of
        each group: of those that hold 1 / AHEAD_SHARE of it so many states, and other blocks.
        """
        share = min(len(pool.refs) // AHEAD_SHARE, MOST_AHEAD if len(self._pools) == 1 else len(pool.refs))
        return max(most_taken(pool.group, self.step_tokens) + LEAST_AHEAD, share)

    def note_saved(self, saves: Iterable[Copy]) -> None:
        """Note that the step of these saves has retired."""
        for group, _, host in saves:
            self._groups[group].unpin(host)

    def check(self) -> None:
        """Raise AssertionError unless every queued load has its source."""
        for queued in self.pending.values():
            for group, block_hash, host, _ in queued:
                own = self._groups[group]
                assert own.pins[host], "the source of a queued load may be evicted"
                assert host in own.orphans or own.cached[block_hash] == host, "a queued load reads another block"
