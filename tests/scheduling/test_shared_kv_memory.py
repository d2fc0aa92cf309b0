"""The block manager over groups that share memory, against models that count and enumerate."""

from __future__ import annotations

import random
from collections import Counter
from itertools import product, takewhile
from math import inf
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.block_table import StateSlots
from pd_connectors.protocol.slabs import KvSlabs
from tests.scheduling.kv_groups import FULL, FULL_WINDOW, ONE_FULL, SETS, STATE, WINDOW, GroupSet, group
from tests.scheduling.world import is_hit

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_pool import BlockPool
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_connectors.protocol.layout import BlockRun

SIZE = 4
PICK = st.integers(0, 11)


def tokens_of(family: int, length: int) -> list[int]:
    """Prompts that branch: the first two blocks are those of `family` // 2."""
    return [10 + family // 2] * min(length, 2 * SIZE) + [20 + family] * max(0, length - 2 * SIZE)


def hashes_of(family: int, length: int) -> list[bytes]:
    tokens = tokens_of(family, length)
    return [bytes(tokens[:end]) for end in range(SIZE, length + 1, SIZE)]


class Holder:
    """A table and what is in it."""

    def __init__(self, table: BlockTable, family: int, length: int, computed: int) -> None:
        self.table, self.family = table, family
        self.length, self.computed = length, computed  # tokens: writable, computed


def is_room(blocks: BlockManager, slabs: KvSlabs, needs: list[int]) -> bool:
    """Whether slabs can be given to groups so that each gets its blocks. By enumeration."""
    pools = blocks.pools
    if len(pools) == 1:
        return sum(refs == 0 for refs in pools[0].refs) >= needs[0]
    loose, num_slack = list(needs), 0
    for slab in range(slabs.num_slabs):
        for index, count in enumerate(slabs.per_slab):
            used = sum(refs > 0 for refs in pools[index].refs[slab * count : (slab + 1) * count])
            if used:
                loose[index] -= count - used
                break
        else:
            num_slack += 1
    return any(
        sum(given) <= num_slack
        and all(n <= one * count for n, one, count in zip(loose, given, slabs.per_slab, strict=True))
        for given in product(range(num_slack + 1), repeat=len(pools))
    )


def cached_run(pool: BlockPool, hashes: list[bytes], first: int) -> int:
    """How many blocks of a prompt are cached in a row from index `first` on."""
    return len(
        list(takewhile(lambda one: one in pool.cache._by_hash, hashes[(first + 1) * pool.ratio - 1 :: pool.ratio]))
    )


class BlocksMachine(RuleBasedStateMachine):
    """Tables, leases, loads and swapped sequences over one group set."""

    kv: GroupSet = ONE_FULL

    @initialize(num_blocks=st.integers(2, 9), num_host_blocks=st.integers(0, 6), host_cache=st.booleans())
    def boot(self, num_blocks: int, num_host_blocks: int, *, host_cache: bool) -> None:
        self.slabs = self.kv.slabs(num_blocks)
        num_host_blocks *= 3 if host_cache else 1
        self.blocks = BlockManager(
            self.kv.groups(SIZE), self.slabs, num_host_blocks=num_host_blocks, host_cache=host_cache
        )
        self.holders: list[Holder] = []
        self.swapped: list[tuple[int, int, tuple[BlockRun, ...]]] = []
        self.names: set[str] = set()
        self.serial = 0

    def pick(self, pick: int) -> Holder | None:
        return self.holders[pick % len(self.holders)] if self.holders else None

    def may_grow(self, table: BlockTable, start: int, end: int) -> bool:
        needs = self.blocks.needs(table, start, end)
        has_room = self.blocks.can_grow(table, start, end)
        assert has_room == is_room(self.blocks, self.slabs, needs)
        return has_room

    def enter(self, family: int, length: int) -> Holder:
        table, hashes = self.blocks.open_table(), hashes_of(family, length)
        found = self.blocks.match(table, hashes)
        best = max((end for end in range(1, len(hashes) + 1) if is_hit(self.blocks, hashes, end)), default=0)
        assert found == best, "not the largest boundary that every cache has"
        in_both = (end for end in range(1, len(hashes) + 1) if is_hit(self.blocks, hashes, end, in_host=True))
        assert self.blocks.num_cached(hashes) == max(in_both, default=0) * SIZE
        for pool, held in zip(self.blocks.pools, table.groups, strict=True):
            own = [hashes[(index + 1) * pool.ratio - 1] for index in range(held.first, held.end)]
            assert held.first == pool.group.first_block(best * SIZE)
            assert held.end == best // pool.ratio
            assert held.ids == held.path == [pool.cache.find(one) for one in own]
        self.holders.append(Holder(table, family, best * SIZE, best * SIZE))
        return self.holders[-1]

    @rule(family=st.integers(0, 3), length=st.integers(1, 9 * SIZE), step=st.integers(1, 12))
    def compute(self, family: int, length: int, step: int) -> None:
        """A prompt is computed in steps, as far as there is room."""
        holder = self.enter(family, length)
        self.go_on_in_host(holder, length)
        while holder.computed < length and self.advance(holder, min(length, holder.computed + step)):
            pass

    def go_on_in_host(self, holder: Holder, length: int) -> None:
        """If there is room for the rest, the table gets the largest boundary of both tiers, and loads what it lacks."""
        blocks, start = self.blocks, holder.length // SIZE
        hashes, end = hashes_of(holder.family, length), holder.length
        if not self.may_grow(holder.table, holder.length, length + 1):
            return
        before = blocks.stats()
        end = blocks.match_host(holder.table, hashes, start, length + 1)
        best = max((n for n in range(1, len(hashes) + 1) if is_hit(blocks, hashes, n, in_host=True)), default=0)
        assert blocks.num_cached(hashes) == best * SIZE
        if len(blocks.pools) == 1 or end > start:
            assert end == best
        if end == start:
            assert blocks.stats() == before
            return
        assert blocks.can_grow(holder.table, end * SIZE, length + 1), "the rest has no room"
        loaded = {(group, device): one for group, one, _, device in blocks.copies.pending[holder.table]}
        for pool, held in zip(blocks.pools, holder.table.groups, strict=True):
            assert held.first == pool.group.first_block(end * SIZE)
            assert held.end == end // pool.ratio
            for index, block_id in enumerate(held.ids, held.first):
                own = hashes[(index + 1) * pool.ratio - 1]
                assert own == loaded.get((pool.index, block_id)) or block_id == pool.cache.find(own)
        while blocks.copies.pending:  # a load into a block with a victim waits for the save
            self.tick()
        holder.length = holder.computed = end * SIZE

    @rule()
    def tick(self) -> None:
        """A step is planned and retires."""
        if self.blocks.host.is_cache:
            saves, _ = self.blocks.copies.plan({}, step_s=inf, has_streams=False)
            self.blocks.copies.note_saved(saves)

    @rule(pick=PICK, step=st.integers(1, 9))
    def decode(self, pick: int, step: int) -> None:
        if (holder := self.pick(pick)) is not None:
            self.advance(holder, holder.computed + step)

    def advance(self, holder: Holder, end: int) -> bool:
        table = holder.table
        states = self.blocks.states
        if end > table.capacity or states is not None:
            if not self.may_grow(table, holder.computed, end):
                return False
            before = [Counter(held.ids) for held in table.groups]
            growth = self.blocks.grow(table, holder.computed, end)
            for new in growth.new_blocks:
                held = table.groups[new.group]
                index = new.first_block - held.first
                assert held.ids[index:] == list(new.block_ids)
                assert not before[new.group].keys() & set(new.block_ids)
        assert table.capacity >= end
        if states is not None:
            step = states.plan(table, holder.computed, end, end, draws=False)
            slots, pool = table.groups[-1], self.blocks.pools[-1]
            assert slots.ids == [step.slot]
            written = [step.slot, *(slot for _, slot in step.saves)]
            assert all(pool.refs[slot] == 1 and slot not in pool.cache for slot in written)
            assert step.source < 0 or pool.refs[step.source]
        for pool, held in zip(self.blocks.pools, table.groups, strict=True):
            if isinstance(held, StateSlots):
                continue
            for index in range(holder.computed // pool.block_size, pool.blocks_for(end)):
                assert pool.refs[held.ids[index - held.first]] == 1, "a shared block is written"
        holder.computed = end
        self.blocks.publish(table, hashes_of(holder.family, end)[: end // SIZE])
        self.blocks.let_go(table, end)
        for pool, held in zip(self.blocks.pools, table.groups, strict=True):
            if isinstance(held, StateSlots):
                assert len(held.ids) == 1, "one slot, whatever its index"
                continue
            assert held.first == pool.group.first_block(end)
            assert held.end >= pool.blocks_for(end)
        assert table.due > end
        return True

    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        if (holder := self.pick(pick)) is not None:
            self.holders.append(Holder(self.blocks.fork(holder.table), holder.family, holder.length, holder.computed))

    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        if (holder := self.pick(pick)) is not None:
            self.blocks.close(holder.table)
            self.holders.remove(holder)

    @rule(pick=PICK)
    def lease(self, pick: int) -> None:
        if (holder := self.pick(pick)) is not None:
            self.serial += 1
            self.names.add(f"{self.serial}")
            self.blocks.hold(f"{self.serial}", holder.table)
            self.holders.remove(holder)

    @rule(family=st.integers(0, 3), length=st.integers(1, 9 * SIZE), is_good=st.booleans())
    def load(self, family: int, length: int, *, is_good: bool) -> None:
        """A handoff. When it fails, what it would have written is out of use for a while."""
        table, hashes = self.enter(family, length).table, hashes_of(family, length)
        self.holders.pop()
        self.blocks.match_runs(table, hashes, length, is_handoff=True)
        if self.may_grow(table, length, length):
            num_cached = [cached_run(pool, hashes, pool.group.handed_over(length).start) for pool in self.blocks.pools]
            self.blocks.grow(table, length, length)
            self.serial += 1
            for pool, held, run, num in zip(
                self.blocks.pools, table.groups, self.blocks.uncached_runs(table), num_cached, strict=True
            ):
                due = pool.group.handed_over(length)
                assert held.first == due.start
                assert run.first_block == due.start + num
                assert run.span.stop == due.stop
                assert all(pool.refs[one] == 1 and one not in pool.cache for one in run.block_ids)
            if is_good:
                self.blocks.publish(table, hashes)
                self.holders.append(Holder(table, family, length, length))
                return
            self.names.add(f"{self.serial}")
            self.blocks.quarantine(f"{self.serial}", table)
        self.blocks.close(table)

    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        if self.names:
            name = sorted(self.names)[pick % len(self.names)]
            self.names.discard(name)
            self.blocks.end_lease(name)
            self.blocks.drain(name)

    @rule(pick=PICK)
    def swap_out(self, pick: int) -> None:
        holder = self.pick(pick)
        if holder is not None and self.blocks.can_swap_out(holder.table, holder.computed):
            num_held = sum(
                pool.blocks_for(holder.computed) - held.first
                for pool, held in zip(self.blocks.pools, holder.table.groups, strict=True)
            )
            before = [dict(enumerate(held.ids, held.first)) for held in holder.table.groups]
            copies, host = self.blocks.swap_out(holder.table, holder.computed)
            assert len(copies) == num_held
            self.swapped.append((holder.family, holder.computed, host))
            sources = iter(copies)
            for index, run in enumerate(host):
                for block in run.span:
                    copy = next(sources)
                    assert copy == (index, before[index][block], run.ids_of(range(block, block + 1))[0])
            self.holders.remove(holder)

    @rule(pick=PICK)
    def swap_in(self, pick: int) -> None:
        if not self.swapped:
            return
        family, computed, host = self.swapped[pick % len(self.swapped)]
        table = self.blocks.open_table()
        self.blocks.match_runs(table, hashes_of(family, computed), computed)
        needs = self.blocks.needs(table, computed, computed + 1)
        if not self.blocks.has_room(needs):
            self.blocks.close(table)
            return
        copies = self.blocks.swap_in(table, host, needs)
        self.blocks.grow(table, computed, computed + 1)
        self.swapped.remove((family, computed, host))
        held = {(index, one) for index, groups in enumerate(table.groups) for one in groups.ids}
        assert {(index, to) for index, _, to in copies} <= held
        for index, source, to in copies:
            groups = table.groups[index]
            assert host[index].first_block + host[index].block_ids.index(source) == groups.first + groups.ids.index(to)
        assert [one.first for one in table.groups] == [pool.group.first_block(computed) for pool in self.blocks.pools]
        self.holders.append(Holder(table, family, computed, computed))

    @rule()
    def forget(self) -> None:
        self.blocks.forget_unused()
        assert not any(pool.cache.num_evictable for pool in self.blocks.pools)

    @rule(needs=st.lists(st.integers(0, 8), min_size=3, max_size=3))
    def ask(self, needs: list[int]) -> None:
        needs = needs[: len(self.blocks.pools)]
        assert self.blocks.has_room(needs) == is_room(self.blocks, self.slabs, needs)

    @invariant()
    def accounts_balance(self) -> None:
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        stats = self.blocks.stats()
        assert stats.num_blocks == stats.free + stats.cached + stats.in_use == self.blocks.num_blocks
        assert self.blocks.num_available == stats.free + stats.cached
        for one in stats.groups:
            assert one.num_blocks == one.free + one.cached + one.in_use

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for holder in self.holders:
            self.blocks.close(holder.table)
        for name in self.names:
            self.blocks.end_lease(name)
            self.blocks.drain(name)
        for *_, host in self.swapped:
            self.blocks.free_host(host)
        self.blocks.check()
        assert self.blocks.idle
        assert self.blocks.num_available == self.blocks.num_blocks
        self.blocks.forget_unused()
        self.blocks.check()
        assert self.blocks.stats().free == self.blocks.num_blocks


def run_machine(name: str, max_examples: int) -> None:
    machine = type("Machine", (BlocksMachine,), {"kv": SETS[name]})
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=30, deadline=None, derandomize=True,
            suppress_health_check=checks,
        ),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", SETS)
def test_blocks_and_slabs_are_conserved_and_hits_are_the_largest(name: str) -> None:
    run_machine(name, 10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SETS)
def test_many_operations_conserve_blocks_and_slabs(name: str) -> None:
    run_machine(name, 400)


def manager(kv: GroupSet, num_slabs: int) -> BlockManager:
    return BlockManager(kv.groups(SIZE), KvSlabs(num_slabs, 0, kv.per_slab))


def compute(blocks: BlockManager, family: int, length: int) -> BlockTable:
    """A prompt in one step, without a look into the cache."""
    table = blocks.open_table()
    blocks.grow(table, 0, length)
    if blocks.states is not None:
        blocks.states.plan(table, 0, length, length, draws=False)
    blocks.publish(table, hashes_of(family, length))
    blocks.let_go(table, length)
    return table


def owned(pool: BlockPool) -> int:
    return pool.stats().num_blocks


def test_a_window_holds_what_the_next_token_reads() -> None:
    """Window of 6 tokens, blocks of 4: position 20 reads from position 15 on."""
    blocks = manager(FULL_WINDOW, 20)
    table = compute(blocks, 0, 20)
    full, window = table.groups
    assert (full.first, len(full.ids)) == (0, 5)
    assert (window.first, len(window.ids)) == (3, 2)
    assert blocks.pools[1].stats().cached == 3, "dead blocks stay findable"
    blocks.check()


def test_a_hit_needs_the_window_before_it_only() -> None:
    blocks = manager(FULL_WINDOW, 20)
    blocks.close(compute(blocks, 0, 20))
    pool = blocks.pools[1]
    for one in hashes_of(0, 8):  # far behind: no continuation at 20 reads it
        pool.evict_subtree(pool.cache.find(one))  # type: ignore[attr-defined]
    table = blocks.open_table()
    assert blocks.match(table, hashes_of(0, 20)) == 5
    assert table.groups[1].first == 3
    blocks.close(table)
    assert blocks.num_cached(hashes_of(0, 12)) == 0, "block 1 is gone, which position 12 reads"
    assert blocks.num_cached(hashes_of(0, 16)) == 16
    last = pool.cache.find(hashes_of(0, 20)[-1])
    pool.evict_subtree(last)  # type: ignore[attr-defined]
    assert blocks.num_cached(hashes_of(0, 20)) == 16


def test_an_idle_slab_changes_hands_and_takes_descendants_along() -> None:
    kv = GroupSet(((FULL, 0), (WINDOW, 1)), (2, 2))
    blocks = manager(kv, 4)
    full, window = blocks.pools
    blocks.close(compute(blocks, 0, 4 * SIZE))
    assert (owned(full), owned(window)) == (4, 4)
    table = blocks.open_table()
    blocks.grow(table, 0, SIZE)
    assert blocks.num_cached(hashes_of(0, 4 * SIZE)) == 4 * SIZE, "blocks of the window that died first went first"
    blocks.check()
    assert blocks.can_grow(table, SIZE, 4 * SIZE)
    blocks.grow(table, SIZE, 4 * SIZE)
    assert blocks.num_cached(hashes_of(0, SIZE)) == 0
    blocks.check()


def test_what_another_group_wants_in_the_same_growth_is_left_for_it() -> None:
    """One idle slab of FULL, which is older than a cached block in a busy one: the WINDOW needs the slab."""
    kv = GroupSet(((FULL, 0), (WINDOW, 2)), (2, 4))
    blocks = manager(kv, 4)
    old = compute(blocks, 0, 2 * SIZE)
    young = compute(blocks, 2, 2 * SIZE)
    blocks.close(old)
    blocks.truncate(young, 1)
    needs = [1, 4]
    assert blocks.has_room(needs) == is_room(blocks, KvSlabs(4, 0, kv.per_slab), needs)
    blocks.check()


def test_a_group_gives_an_empty_slab_back() -> None:
    blocks = manager(GroupSet(((FULL, 0), (WINDOW, 0.5)), (5, 1)), 6)
    table = blocks.open_table()
    blocks.grow(table, 0, 5 * SIZE)
    assert [owned(pool) for pool in blocks.pools] == [5, 5]
    blocks.let_go(table, 5 * SIZE - 1)  # not published: free
    assert [owned(pool) for pool in blocks.pools] == [5, 1]
    assert blocks.num_available == 4 * 5
    blocks.close(table)
    assert [owned(pool) for pool in blocks.pools] == [0, 0]


@pytest.mark.long
def test_a_tie_of_room_is_never_lost_in_the_order_of_taking() -> None:
    """Whatever the state, a growth that the room test admits succeeds in every group."""
    for seed in range(200):
        rng = random.Random(seed)
        kv = rng.choice([one for one in SETS.values() if len(one.kinds) > 1])
        blocks = manager(kv, rng.randint(3, 9))
        tables: list[BlockTable] = []
        for _ in range(30):
            table, length = blocks.open_table(), rng.randint(1, 5 * SIZE)
            if blocks.can_grow(table, 0, length):
                blocks.grow(table, 0, length)
                if rng.random() < 0.7:
                    blocks.publish(table, hashes_of(rng.randrange(4), length))
                blocks.let_go(table, length)
            tables.append(table)
            if rng.random() < 0.6:
                blocks.close(tables.pop(rng.randrange(len(tables))))
            blocks.check()


def test_the_first_block_of_each_kind() -> None:
    assert [group(WINDOW, 4, 6).first_block(p) for p in (0, 5, 8, 9, 12, 13)] == [0, 0, 0, 1, 1, 2]
    assert [group(STATE, 4).first_block(p) for p in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]
    assert group(FULL, 4).first_block(100) == 0
