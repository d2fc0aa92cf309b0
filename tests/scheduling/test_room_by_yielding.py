"""What yields its memory when several KV groups share it, at what cost that is found, and what goes on at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.sequence import SequenceStatus
from tests.scheduling.kv_groups import FULL, ONE_FULL, SETS, STATE, WINDOW, GroupSet
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.block_table import BlockTable


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_loaded_sequence_waits_while_memory_is_lent_and_else_begins_again_at_once(is_lent: bool) -> None:
    """Each slab of WINDOW holds a block of another holder, so no slab is left for the second block of FULL."""
    world = World(kv=GroupSet(((FULL, 0), (WINDOW, 1.5)), (1, 3)), num_blocks=4)
    blocks = world.blocks

    def held(num_tokens: int) -> BlockTable:
        table = blocks.open_table()
        blocks.grow(table, 0, num_tokens)
        return table

    first = [held(BLOCK_SIZE), held(BLOCK_SIZE)]
    request = world.submit(message("r", prompt(BLOCK_SIZE), work=Work.TAKE_OVER, max_tokens=8))
    load = world.reserve(request)
    assert load is not None
    world.start_step()
    last = [held(BLOCK_SIZE)]
    for table in first:
        blocks.close(table)
    last.append(held(BLOCK_SIZE * blocks._memory.num_slack))
    blocks.let_go(last[1], 10**6)
    for index, table in enumerate(last if is_lent else ()):
        blocks.hold(f"lent-{index}", table)
    world.finish_load(load)
    world.give_first_tokens(request)
    batch = world.start_step()
    assert bool(batch.chunks) is not is_lent, "a turn without work for the worker lets the engine sleep"
    assert world.scheduler.counters["preemptions_recompute_total"] == (not is_lent)
    for index, table in enumerate(last):
        if is_lent:
            blocks.end_lease(f"lent-{index}")
        else:
            blocks.close(table)
    batch = world.start_step()
    [seq] = request.sequences
    assert seq.status is SequenceStatus.RUNNING
    assert batch.chunks[0].start >= BLOCK_SIZE, "what was loaded is used, and what was computed again"
    world.run_until_idle()
    world.check_empty()


class Asked:
    """Counts the tables of which the blocks are counted when a block manager is asked for room."""

    def __init__(self, blocks: BlockManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tables = 0
        has_room_without = blocks.has_room_without

        def look(tables: Iterable[BlockTable]) -> Iterator[BlockTable]:
            for table in tables:
                self.num_tables += 1
                yield table

        monkeypatch.setattr(blocks, "has_room_without", lambda needs, tables: has_room_without(needs, look(tables)))


NUM_SEQS = 16


def full_of_decodes(kv: GroupSet, num_blocks: int) -> World:
    """As many running sequences as there are slots, each but the first at the end of its block."""
    world = World(kv=kv, num_blocks=num_blocks, max_num_seqs=NUM_SEQS, max_num_batched_tokens=400)
    for index in range(NUM_SEQS):
        world.submit(message(f"{index}", prompt(BLOCK_SIZE - 3 * (not index), index), max_tokens=40))
    world.start_step()
    return world


@pytest.mark.long
def test_one_victim_is_looked_at_when_it_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    world = full_of_decodes(GroupSet(((FULL, 0), (WINDOW, 8)), (4, 4)), 3 * NUM_SEQS // 2)
    asked = Asked(world.blocks, monkeypatch)
    before = world.scheduler.counters["preemptions_recompute_total"]
    world.start_step()
    num_preempted = int(world.scheduler.counters["preemptions_recompute_total"] - before)
    assert num_preempted
    assert asked.num_tables == num_preempted, "not all tables for each"
    world.run_until_idle()
    world.check_empty()


def test_blocks_that_make_no_room_are_looked_at_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = full_of_decodes(GroupSet(((FULL, 0), (WINDOW, 8)), (4, 4)), 3 * NUM_SEQS // 2)
    monkeypatch.setattr(world.blocks._memory, "_has_slabs", lambda needs, num_loose, num_slack: False)
    asked = Asked(world.blocks, monkeypatch)
    batch = world.scheduler.schedule()
    assert len(batch.chunks) == 1
    assert asked.num_tables == NUM_SEQS - 2, "not again for each of the other sequences"


@pytest.mark.long
@pytest.mark.parametrize("kv", [ONE_FULL, GroupSet(((FULL, 0), (WINDOW, 1)), (2, 3))])
def test_room_is_not_asked_for_again_with_each_victim_that_runs(kv: GroupSet, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(kv=kv, num_blocks=2 * NUM_SEQS, max_num_seqs=NUM_SEQS + 1, max_num_batched_tokens=400, depth=2)
    for index in range(NUM_SEQS):
        world.submit(message(f"{index}", prompt(BLOCK_SIZE, index), max_tokens=60, group="many"))
    for _ in range(3):
        world.start_step()
    asked, held = Asked(world.blocks, monkeypatch), 0
    world.submit(message("last", prompt(9 * BLOCK_SIZE), max_tokens=2, group="one"))
    for _ in range(4):
        before = asked.num_tables
        world.start_step()
        held = max(held, asked.num_tables - before)
    assert held <= (0 if kv is ONE_FULL else NUM_SEQS)
    world.run_until_idle()
    world.check_empty()


def test_running_streams_want_no_further_states() -> None:
    """Only blocks: a stream writes its state in place. A spare slot is kept for what a fork or a hit needs."""
    world = full_of_decodes(GroupSet(((FULL, 0), (STATE, 0)), (1, 20)), 400)
    assert len(world.blocks.pools[1].refs) > 300
    claimant = world.submit(message("claimant", prompt(3 * BLOCK_SIZE)))
    memory, [seq] = world.scheduler._memory, claimant.sequences
    needs = world.blocks.needs_of(3 * BLOCK_SIZE)
    blocks, states = (a - b for a, b in zip(memory.wanted(seq), needs, strict=True))
    assert blocks == NUM_SEQS - 1 + 4, "the next blocks of streams, and 1% of all"
    assert states == 1


@pytest.mark.long_cases
@pytest.mark.parametrize("kv", ["full+state", "latent+state", "full+window", "full+half state"])
@pytest.mark.parametrize("length", [5, BLOCK_SIZE, BLOCK_SIZE + 4])
@pytest.mark.parametrize("num_blocks", [2, 3])
def test_siblings_yield_to_the_lead_what_they_share_with_it(kv: str, length: int, num_blocks: int) -> None:
    """A lease holds the rest. What all of them share is free of copies for the last one that has it."""
    world = World(kv=SETS[kv], num_blocks=num_blocks, max_num_seqs=8)
    lender = world.submit(message("p", prompt(length, 1), work=Work.PREFILL))
    world.run_until_idle()
    request = world.submit(message("a", prompt(length), n=3, max_tokens=6, ignore_eos=True))
    lead, *siblings = request.sequences
    for _ in range(20):
        world.start_step()
        world.check()
        assert lead.table is not None or not any(seq.table for seq in siblings), "the lead yields to its siblings"
    if kv.endswith("+state"):  # of another kind it may need a block more than the lease leaves
        assert lead.status is SequenceStatus.FINISHED, "it waits for the lease"
    assert lender.lease_id is not None
    world.end_lease(lender.lease_id)
    world.run_until_idle()
    world.check_empty()
