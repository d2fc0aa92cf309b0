"""The slots of a STATE group: what a sequence goes on from, and checkpoints of it in the prefix cache.

    a slot is     held by                            written by
    live          one table                          each of its steps, with the state after the step's last token
    a source      tables that go on from it          no step: a hit's checkpoint, or what forks share
    a checkpoint  its table until the step that      that step, with the state after so many tokens
                  writes it has retired, then cached
    spare         a table of which steps can be      each second step that draws: it leaves what it has read as it was
                  taken back

So nothing writes a slot that the cache or a reader knows, and what a running step reads or writes has a reference. A
state has all tokens once: the step after one that is taken back (`take_back`) reads what that one has read.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, cast

from pd_cluster.scheduling.batch import StateStep
from pd_cluster.scheduling.block_table import Aside, GroupBlocks, Reversal, StateSlots
from pd_cluster.scheduling.slab_pool import SlabPool
from pd_connectors.base import CachedBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class StatePool(SlabPool):
    """The slots of the STATE group. All holders are StateSlots, with at most one slot in `ids`."""

    def new_holder(self, *, reverses: bool = False) -> StateSlots:
        return StateSlots(reverses=reverses)

    def fork(self, held: GroupBlocks) -> StateSlots:
        """Refer to the live slot, from which either holder goes on in a slot of its own."""
        slots = cast("StateSlots", held)
        assert slots.source is None, "a fork of what no step has gone on from"
        for slot in slots.ids:
            self.refs[slot] += 1
        return StateSlots(slots.first, slots.ids[:], slots.path[:], reverses=slots.reverses)

    def num_more(self, held: GroupBlocks, num_found: int, num_tokens: int) -> int:
        """What is loaded is a copy, which the sequence goes on in."""
        return 1 + cast("StateSlots", held).reverses

    def num_missing(self, held: GroupBlocks, start: int, end: int) -> int:
        slots = cast("StateSlots", held)
        return self._lacks_live(slots, start, end) + (slots.reverses and slots.spare is None and start < end)

    def _lacks_live(self, slots: StateSlots, start: int, end: int) -> bool:
        if not slots.ids:
            return True
        return start < end and (self.refs[slots.ids[0]] > 1 or slots.ids[0] in self.cache)

    def grow(self, held: GroupBlocks, start: int, end: int) -> tuple[int, tuple[int, int] | None]:
        """Take a live slot if there is none that a step may write, and a spare one."""
        slots = cast("StateSlots", held)
        if self._lacks_live(slots, start, end):
            if slots.ids:
                assert slots.source is None
                slots.source = slots.ids.pop()
                self.passing.pop(slots.source, None)  # another sequence's branch: it stays
                slots.path.clear()
            slots.ids.append(self.take())
        if slots.reverses and slots.spare is None and start < end:
            slots.spare = self.take()
        return 0, None

    def step(
        self, slots: StateSlots, start: int, end: int, saves: Sequence[tuple[int, int]], newest: int | None, *,
        draws: bool,
    ) -> StateStep:  # fmt: skip
        """Plan a step of tokens [start, end). It writes (tokens, slot) of `saves`, which were taken for it."""
        live, source = slots.ids[0], slots.source
        before = live if source is None else source
        slots.before = Reversal(start, live, slots.spare, source) if slots.reverses and draws else None
        if source is not None:
            slots.aside.append(Aside(end, source))
            slots.source = None
        elif slots.before is not None and slots.spare is not None:
            slots.ids[0], slots.spare = slots.spare, live
        slots.aside += [Aside(tokens, slot, is_checkpoint=True, is_newest=tokens == newest) for tokens, slot in saves]
        return StateStep(before if start else -1, slots.ids[0], tuple(saves))

    def take_back(self, slots: StateSlots) -> int:
        """Take the newest step back. It still runs; what it saves is right. Returns its start."""
        assert slots.before is not None, "a step that cannot be taken back"
        start, slots.ids[0], slots.spare, slots.source = slots.before
        slots.before = None
        if slots.source is not None:
            slots.aside.remove(next(one for one in slots.aside if one.slot == slots.source))
        return start

    def span(self, held: GroupBlocks, num_tokens: int) -> range:
        """The index of the state after `num_tokens`, from them alone: most steps of a decode are not planned here."""
        first = self.group.first_block(num_tokens)
        return range(first, first + 1)

    def ids_at(self, held: GroupBlocks, indices: range) -> list[int]:
        """The live slot, at whatever index its tokens put it."""
        assert len(indices) <= 1, "a holder has one state"
        return held.ids[: len(indices)]

    def hold(self, held: GroupBlocks, first: int, hashes: Iterable[bytes]) -> None:
        """Let a holder of nothing, or of a checkpoint, hold that of the first one of `hashes`, if it is cached."""
        super().hold(held, first, islice(hashes, 1))

    def truncate(self, held: GroupBlocks, num_blocks: int) -> None:
        slots = cast("StateSlots", held)
        if num_blocks > slots.first and slots.ids:
            return
        for slot in slots.references:
            self.drop(slot)
        slots.ids.clear()
        slots.path.clear()
        slots.aside.clear()
        self._keep_newest(slots)
        slots.source = slots.spare = slots.before = None

    def let_go(self, held: GroupBlocks, position: int, num_leased: int | None) -> None:
        """Release what steps have read that have retired."""
        slots = cast("StateSlots", held)
        for one in [one for one in slots.aside if not one.is_checkpoint and one.num_tokens <= position]:
            slots.aside.remove(one)
            self.drop(one.slot)

    def publish(self, held: GroupBlocks, hashes: Sequence[bytes], news: list[CachedBlock]) -> None:
        """Cache the checkpoints that `hashes` cover, and let go of them. No second copy is kept."""
        slots, size = cast("StateSlots", held), self.block_size // self.ratio
        for one in [one for one in slots.aside if one.is_checkpoint and one.num_tokens <= len(hashes) * size]:
            slots.aside.remove(one)
            block_hash = hashes[one.num_tokens // size - 1]
            cached = self.cache.find(block_hash)
            if cached is None:
                self.cache.insert(block_hash, one.slot, None)
                news.append(CachedBlock(block_hash, one.slot, self.index))
            self.drop(one.slot)
            if one.is_newest and (cached is None or cached != slots.newest):
                self._forget_newest(slots)
                if cached is None:
                    slots.newest = one.slot
                    self.passing[one.slot] = slots
            elif cached is not None and not one.is_newest:
                self.passing.pop(cached, None)

    def _forget_newest(self, slots: StateSlots) -> None:
        """Free the checkpoint before the newest one of an answer, unless a prompt has it or goes on from it."""
        slot = self._keep_newest(slots)
        if slot is not None and not self.refs[slot]:
            [(_, block_hash)] = self.cache.evict_subtree(slot)
            self.on_forgotten(block_hash)
            self._put_free(slot)

    def _keep_newest(self, slots: StateSlots) -> int | None:
        """Let the newest checkpoint of an answer stay. Returns its slot, if it would not have stayed; else None."""
        slot, slots.newest = slots.newest, None
        if slot is None or self.passing.get(slot) is not slots:
            return None
        del self.passing[slot]
        return slot

    def _put_free(self, block_id: int) -> None:
        self.passing.pop(block_id, None)
        super()._put_free(block_id)

    def due(self, held: GroupBlocks, *, is_cached: bool) -> float:
        return min((one.num_tokens for one in cast("StateSlots", held).aside), default=inf)
