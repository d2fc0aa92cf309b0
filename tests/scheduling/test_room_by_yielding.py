"""What yields its memory when several KV groups share it, at what cost that is found, and what goes on at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.sequence import SequenceStatus
from tests.scheduling.kv_groups import FULL, WINDOW, GroupSet
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
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
