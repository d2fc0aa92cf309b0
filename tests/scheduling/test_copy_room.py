"""How many copies to and from host memory a step has, and what loads are told to take."""

from __future__ import annotations

import random
from collections import Counter
from math import inf
from typing import TYPE_CHECKING

import pytest

from pd_cluster.scheduling.copy_room import CopyRoom
from tests.scheduling.kv_groups import FULL, FULL_WINDOW, ONE_FULL, STATE, GroupSet
from tests.scheduling.test_host_tier import admitted, computed, manager, step, with_states
from tests.scheduling.test_shared_kv_memory import SIZE, hashes_of

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_manager import BlockManager


def pace(blocks: BlockManager, block_s: float) -> None:
    """Let a block of the first group take so many seconds."""
    blocks.host.gb_s, blocks.copies.wait_s = blocks.pools[0].group.block_bytes / block_s / 1e9, 0.0


def test_loads_take_their_bytes_at_25_gb_a_second_and_a_step_more() -> None:
    """Two milliseconds. Beside streams at half the speed."""
    copies = manager(4, 4).copies
    assert copies.load_s(25e9, has_streams=False) == pytest.approx(1.002)
    assert copies.load_s(25e9, has_streams=True) == pytest.approx(2.002)


@pytest.mark.parametrize(("step_s", "num"), [(5e-3, 7), (40e-3, 57), (0.1e-3, 0), (1.0, 256), (inf, 256)])
def test_a_step_loads_what_half_of_it_takes_beside_streams(step_s: float, num: int) -> None:
    """Blocks of 0.35 ms: no more than it takes to hold up the next step."""
    blocks = manager(300, 400)
    pace(blocks, 0.35e-3)
    host = blocks.host
    for block_hash, block in zip(hashes_of(0, 300 * SIZE), host.take(0, 300), strict=True):
        host.add(0, block_hash, block)
    table = blocks.open_table()
    assert blocks.match_host(table, hashes_of(0, 290 * SIZE), 0, 291 * SIZE) == 290
    _, loads = blocks.copies.plan({}, step_s=step_s, has_streams=True)
    assert len(loads) == num
    alone = blocks.copies.load_s(10 * blocks.pools[0].group.block_bytes, has_streams=False)
    beside = min(10, 290 - num)
    assert alone == pytest.approx((10 + beside) * 0.35e-3), "what is queued takes turns with it"
    blocks.close(table)
    blocks.check()


@pytest.mark.parametrize("step_s", [4e-3, 40e-3])
def test_the_price_of_loads_beside_streams_is_that_of_the_steps_that_they_need(step_s: float) -> None:
    """With a constant number of loads in a step, 40,000 tokens took 79 steps of 38 ms and were priced 0.2 s."""
    blocks = manager(600, 700)
    pace(blocks, 0.35e-3)
    host = blocks.host
    hashes = [hashes_of(0, 200 * SIZE), hashes_of(2, 300 * SIZE)]
    for one in hashes:
        for block_hash, block in zip(one, host.take(0, len(one)), strict=True):
            host.add(0, block_hash, block)
    prices, tables = [], [blocks.open_table() for _ in hashes]
    for table, one in zip(tables, hashes, strict=True):
        prices.append(blocks.copies.load_s(len(one) * blocks.pools[0].group.block_bytes, has_streams=True))
        assert blocks.match_host(table, one, 0, (len(one) + 1) * SIZE) == len(one)
    num_steps = 0
    while blocks.copies.pending:
        blocks.copies.plan({}, step_s=step_s, has_streams=True)
        num_steps += 1
    assert num_steps * step_s == pytest.approx(prices[1], rel=0.25)
    assert prices[0] == pytest.approx(200 * 0.7e-3)
    for table in tables:
        blocks.close(table)
    blocks.check()


@pytest.mark.long
@pytest.mark.parametrize("kv", [ONE_FULL, FULL_WINDOW])
@pytest.mark.parametrize("num", [8, 32])
def test_beside_streams_a_step_saves_in_all_groups_what_its_prompts_evict(kv: GroupSet, num: int) -> None:
    """64 tokens a block: beside a stream 512 tokens take 16 ms and 2,048 take 46, and a block of all groups 0.35."""
    blocks = manager(30 * num, 6000, kv)
    block_bytes = sum(pool.group.block_bytes for pool in blocks.pools)
    host = blocks.host
    host.gb_s = block_bytes / 0.35e-3 / 1e9
    saved = Counter[int]()
    families = range(0, 120, 2)
    for family in families:
        blocks.close(computed(blocks, family, num * SIZE))
        saves, _ = blocks.copies.plan({}, step_s=4e-3 + num * 1.4e-3, has_streams=True)
        saved.update(group for group, _, _ in saves)
        blocks.copies.note_saved(saves)
        blocks.check()
    assert min(saved[pool.index] for pool in blocks.pools) >= 20 * num
    assert not host.num_unsaved
    assert all(blocks.num_cached(hashes_of(family, num * SIZE)) for family in families)


def test_a_step_that_only_loads_saves_no_more_than_that() -> None:
    """It saved up to 128 blocks, 20 ms, for which the first token of a prompt of three blocks waited."""
    blocks = manager(60, 400)
    for family in range(0, 20, 2):
        blocks.close(computed(blocks, family, 8 * SIZE))
        step(blocks)
    table = blocks.open_table()
    assert blocks.match_host(table, hashes_of(0, 3 * SIZE), 0, 4 * SIZE) == 3
    blocks.host.groups[0].clean_to = 0
    blocks.close(computed(blocks, 30, 40 * SIZE))
    copies = step(blocks)
    assert len(copies.load) == 3
    assert 0 < len(copies.save) <= 3
    assert len(step(blocks).save) > 3
    blocks.close(table)


@pytest.mark.parametrize(("step_s", "num"), [(5e-3, 14), (10e-3, 28), (0.3e-3, 0)])
def test_without_streams_saves_take_as_long_as_the_step(step_s: float, num: int) -> None:
    """128 blocks, 20 to 43 ms, were saved beside steps of 13 ms."""
    blocks = manager(800, 1000)
    pace(blocks, 0.35e-3)
    blocks.close(computed(blocks, 0, 800 * SIZE))
    saves, _ = blocks.copies.plan({}, step_s=step_s, has_streams=False)
    assert len(saves) == num
    if not num:  # a block that takes longer than a step goes with the second one
        saves, _ = blocks.copies.plan({}, step_s=step_s, has_streams=False)
        assert len(saves) == 1
    assert (blocks.copies.copy_s(saves) > step_s) == (not num)


@pytest.mark.parametrize("seed", range(20))
def test_steps_copy_no_longer_than_their_share_and_a_block(seed: int) -> None:
    """Blocks of up to three steps' seconds, as states are beside short steps. Each of them gets its turn."""
    rng, room = random.Random(seed), CopyRoom()
    given_s = taken_s = 0.0
    wanted = [rng.choice([1, 1, 40]) * rng.uniform(1e-4, 2e-4) for _ in range(300)]
    longest_s, num_steps = max(wanted), 0
    while wanted:
        step_s, own_s = rng.uniform(1e-3, 3e-3), 0.0
        room.begin(step_s, 1e9, 256)
        while wanted and room.take(round(wanted[0] * 1e9)):
            own_s += wanted.pop(0)
        given_s, taken_s, num_steps = given_s + step_s, taken_s + own_s, num_steps + 1
        assert own_s < step_s + longest_s
        assert taken_s < given_s + longest_s
        if not own_s:
            assert not room.take(1000), "a small one would take its seconds"
        assert num_steps < 300 * 3, "a block waits for ever"


def test_beside_decodes_of_six_milliseconds_a_state_at_most_is_saved_and_the_next_groups_turn_comes() -> None:
    """Of 65 MB, 2.6 ms at 25 GB/s: four of them were 10 ms."""
    blocks = manager(60, 400, GroupSet(((FULL, 0), (STATE, 0)), (6, 1)))
    for family in range(0, 80, 2):
        blocks.close(with_states(blocks, family, 4 * SIZE, 4 * SIZE))
    state_bytes = blocks.pools[1].group.block_bytes
    blocks.host.gb_s = state_bytes / 2.6e-3 / 1e9
    saved = Counter[int]()
    for step_s in (6e-3, 2e-3) * 40:
        saves, _ = blocks.copies.plan({}, step_s=step_s, has_streams=True)
        assert blocks.copies.copy_s(saves) <= 3e-3 + 2.6e-3
        assert sum(group == 1 for group, _, _ in saves) <= 1
        blocks.copies.note_saved(saves)
        saved.update(group for group, _, _ in saves)
    assert saved[0], "of keys and values too"
    assert saved[1]


def test_groups_take_turns_where_a_step_saves_few() -> None:
    blocks = manager(60, 400, FULL_WINDOW)
    blocks.copies.most_saves = 4
    saved = Counter[int]()
    for family in range(0, 60, 2):
        blocks.close(computed(blocks, family, 8 * SIZE))
        saves, _ = blocks.copies.plan({}, step_s=inf, has_streams=True)
        assert len(saves) <= 4
        saved.update(group for group, _, _ in saves)
        blocks.copies.note_saved(saves)
    assert min(saved[0], saved[1]) >= max(saved.values()) // 3, saved


@pytest.mark.parametrize(("has_streams", "step_s", "num"), [(False, 0.5e-3, 8), (True, 3e-3, 4)])
def test_what_the_next_step_overwrites_is_saved_where_no_stream_waits(
    *, has_streams: bool, step_s: float, num: int
) -> None:
    """A hole of 100 blocks, beside the short end of another prompt, made useless what was saved after it."""
    blocks = manager(24, 80)
    blocks.host.grow(80)
    blocks.close(computed(blocks, 0, 24 * SIZE))
    blocks.copies.step_tokens = 8 * SIZE
    table = admitted(blocks, 24)
    pace(blocks, 0.35e-3)
    saves, _ = blocks.copies.plan({table: 0}, step_s=step_s, has_streams=has_streams)
    assert [device for _, device, _ in saves] == table.groups[0].ids[:num]
    assert (blocks.copies.copy_s(saves) > step_s) != has_streams, "then the step model learns nothing"
    blocks.close(table)
