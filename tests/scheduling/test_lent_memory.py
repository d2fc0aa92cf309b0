"""Which loads lack nothing but what leases hold: room counts as where blocks are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import Work
from tests.scheduling.kv_groups import SETS
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.sequence import Request

LOAD_BLOCKS = 3


def take(world: World, num_blocks: int) -> BlockTable:
    table = world.blocks.open_table()
    world.blocks.grow(table, 0, num_blocks * BLOCK_SIZE)
    return table


def lend(world: World, num_blocks: int) -> None:
    world.blocks.hold("lease", take(world, num_blocks))


def refused_load(world: World) -> Request:
    request = world.submit(message("waiting", [3] * LOAD_BLOCKS * BLOCK_SIZE, work=Work.TAKE_OVER))
    request.load_id = "waiting#1"
    assert world.scheduler.reserve(request) is None
    return request


def test_a_prompt_that_is_refused_needs_nothing_of_what_streams_hold_of_it() -> None:
    """It is next, and would enter if no lease held blocks: its system prompt is cached, and a stream holds that."""
    world = World(num_blocks=9)
    blocks, scheduler, system = world.blocks, world.scheduler, [1 + at % 7 for at in range(4 * BLOCK_SIZE)]
    world.submit(message("stream", [*system, 1], max_tokens=12))
    world.start_step()
    lend(world, 3)
    refused = world.submit(message("refused", [*system, *[2] * (2 * BLOCK_SIZE)]))
    world.start_step()
    waiting = refused_load(world)
    assert blocks.num_available == 1, "it wants 2, and as a prompt 1 more for streams; without the lease there are 4"
    assert scheduler.lent.is_lacking
    assert blocks.num_available == 1
    blocks.end_lease("lease")
    assert not scheduler.lent.is_lacking
    world.start_step()
    assert refused.sequences[0].num_scheduled_tokens
    scheduler.abort(waiting)


@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("num_lent", range(1, 6))
def test_blocks_that_are_kept_for_streams_are_not_room(*, num_lent: int, has_stream: bool) -> None:
    world = World(num_blocks=10)
    blocks, scheduler = world.blocks, world.scheduler
    if has_stream:
        world.submit(message("stream", [1], max_tokens=12))
        world.start_step()
    lend(world, num_lent)
    other = take(world, blocks.num_available)
    waiting = refused_load(world)
    assert scheduler.lent.is_lacking == (num_lent >= LOAD_BLOCKS + has_stream)
    is_lacking = scheduler.lent.is_lacking
    blocks.end_lease("lease")
    assert (scheduler.reserve(waiting) is not None) == is_lacking
    blocks.close(other)


def test_pins_that_a_reservation_drops_are_room() -> None:
    """A load that waits after the first one pins its prefix anew before each step."""
    world = World(num_blocks=6)
    blocks, scheduler = world.blocks, world.scheduler
    prefix = [5] * 2 * BLOCK_SIZE
    world.submit(message("cached", [*prefix, 1]))
    world.run_until_idle()
    lend(world, 2)
    other = take(world, 1)
    waiting = world.submit(message("waiting", [3] * 4 * BLOCK_SIZE, work=Work.TAKE_OVER))
    pinning = world.submit(message("pinning", [*prefix, *[2] * 3 * BLOCK_SIZE], work=Work.TAKE_OVER))
    for request in (waiting, pinning):
        request.load_id = f"{request.request_id}#1"
        assert scheduler.reserve(request) is None
    assert blocks.num_available == 1, "two are pinned"
    assert scheduler.lent.is_lacking
    blocks.end_lease("lease")
    assert scheduler.reserve(waiting) is not None
    blocks.close(other)


def test_while_nothing_is_lent_no_load_waits_for_leases() -> None:
    world = World(num_blocks=6)
    lent, blocks = world.scheduler.lent, world.blocks
    other = take(world, 4)
    waiting = refused_load(world)
    for now_s in (0.0, 1.0):
        world.now_s = now_s
        assert lent.waited_s() == 0
    lend(world, 1)
    for now_s, waited_s in ((5.0, 0.0), (6.0, 1.0), (8.0, 3.0)):
        world.now_s = now_s
        assert lent.waited_s() == waited_s
    world.scheduler.drop_load(waiting)
    waiting.load_id = "waiting#2"
    assert world.scheduler.reserve(waiting) is None
    assert lent.waited_s() == 0, "another load, though of the same request"
    world.now_s = 9.0
    assert lent.waited_s() == 1
    blocks.end_lease("lease")
    assert lent.waited_s() == 0
    blocks.close(other)


def state_of(world: World, request: Request) -> tuple[object, ...]:
    """What a request holds and what a cache knows, with the order in which that is evicted."""
    assert request.table is not None
    held = [(one.first, tuple(one.ids), tuple(one.path)) for one in request.table.groups]
    pools = [
        (tuple(pool.refs), tuple(pool.cache.evictable), pool.num_free, len(pool.cache)) for pool in world.blocks.pools
    ]
    lead = request.sequences[0]
    return held, request.table.capacity, lead.num_cached_tokens, lead.num_computed_tokens, pools


@pytest.mark.parametrize("kv", ["full", "full+window", "full+state", "full+far state"])
@pytest.mark.parametrize("num_taken", range(5))
def test_the_question_whether_a_load_lacks_lent_memory_changes_nothing(kv: str, num_taken: int) -> None:
    """With nothing active a prompt may give up what is cached of it: not because it was asked."""
    world = World(num_blocks=6, kv=SETS[kv])
    blocks, loads = world.blocks, world.scheduler._load_memory
    prefix = prompt(2 * BLOCK_SIZE)
    world.submit(message("cached", [*prefix, 1], max_tokens=1))
    world.run_until_idle()
    waiting = world.submit(message("waiting", [*prefix, *[3] * 3 * BLOCK_SIZE], work=Work.TAKE_OVER))
    waiting.load_id = "waiting#1"
    assert world.scheduler.pin(waiting) or blocks.has_mortal
    lent = [take(world, 1) for _ in range(num_taken) if blocks.has_room([1] * len(blocks.pools))]
    before = state_of(world, waiting)
    answers = [loads.fits_without(waiting, tables) for tables in ((), lent, ())]
    assert answers[0] == answers[2]
    assert answers[1] or not answers[0]
    assert state_of(world, waiting) == before
    assert loads._take_load_blocks(waiting, waiting.num_loaded_tokens, is_prefix=False) == answers[0]
    for table in lent:
        blocks.close(table)
    world.stop(waiting)
    world.check_empty()
