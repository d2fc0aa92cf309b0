"""What a sequence holds of a STATE group: a live slot, what its step reads, checkpoints. Contents by `FakeWorker`."""

from __future__ import annotations

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling import state_steps
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.block_table import StateSlots
from pd_cluster.scheduling.cache_news import block_id
from pd_cluster.scheduling.checkpoints import GRID, kept, newest
from pd_cluster.scheduling.state_pool import StatePool
from pd_connectors.protocol.feed import DEVICE, HOST
from pd_connectors.protocol.slabs import KvSlabs
from tests.scheduling.kv_groups import FULL, FULL_STATE, LATENT_STATE, STATE, GroupSet
from tests.scheduling.simulation import BLOCK_SIZE, message, prompt
from tests.scheduling.test_shared_kv_memory import SIZE, hashes_of
from tests.scheduling.world import World


def test_states_are_kept_at_ends_branches_and_a_grid() -> None:
    assert kept(0, 2 * GRID + 70, 2 * GRID + 70, 192, 64) == [192, GRID, 2 * GRID, 2 * GRID + 64]
    assert kept(192, 300, 1000, 192, 64) == []
    assert kept(0, 64, 64, 0, 64) == [64], "the prompt's end is one"
    assert kept(0, 192, 192, 0, 64) == [128, 192], "and the last that the same prompt can go on from"
    assert kept(0, 193, 193, 0, 64) == [192]
    assert newest(127, 128, 100, 64) == 128
    assert newest(128, 129, 100, 64) is None
    assert newest(0, 300, 300, 64) is None, "a prompt has no answer yet"
    assert newest(0, 300, 120, 64) == 256, "computed again after a preemption"


def manager(num_slabs: int) -> BlockManager:
    return BlockManager(FULL_STATE.groups(SIZE), FULL_STATE.slabs(num_slabs), num_host_blocks=9)


def test_a_prompt_takes_one_slot_and_one_for_each_checkpoint() -> None:
    blocks = manager(12)
    table = blocks.open_table()
    assert blocks.states is not None
    blocks.grow(table, 0, 9 * SIZE)
    slots, pool = table.groups[1], blocks.pools[1]
    assert len(slots.references) == 1
    first = blocks.states.plan(table, 0, 4 * SIZE, 9 * SIZE, draws=False)
    assert (first.source, first.saves) == (-1, ())
    last = blocks.states.plan(table, 4 * SIZE, 9 * SIZE, 9 * SIZE, draws=True)
    assert last.source == last.slot == first.slot
    (before, _), (boundary, saved) = last.saves
    assert (before, boundary) == (8 * SIZE, 9 * SIZE)
    blocks.publish(table, hashes_of(0, 9 * SIZE))
    assert slots.references == [last.slot], "the checkpoints are let go of"
    assert saved in pool.cache
    blocks.close(table)
    other = blocks.open_table()
    assert blocks.match(other, hashes_of(0, 9 * SIZE)) == 9
    blocks.grow(other, 9 * SIZE, 10 * SIZE)
    step = blocks.states.plan(other, 9 * SIZE, 10 * SIZE, 10 * SIZE, draws=True)
    assert step.source == saved != step.slot
    assert pool.refs[saved] == 1, "until the step has retired"
    blocks.let_go(other, 10 * SIZE - 1)
    assert pool.refs[saved] == 1
    blocks.let_go(other, 10 * SIZE)
    assert pool.refs[saved] == 0
    blocks.close(other)
    blocks.check()


def test_what_no_step_has_gone_on_from_is_not_swapped() -> None:
    """The live slot of a hit has nothing in it before the first step."""
    world = World(kv=LATENT_STATE, num_blocks=40, num_host_blocks=40)
    world.submit(message("a", prompt(3 * BLOCK_SIZE)))
    world.run_until_idle()
    blocks = world.blocks
    table, hashes = blocks.open_table(), world.prefixes[max(world.prefixes, key=lambda one: len(world.prefixes[one]))]
    assert blocks.match(table, hashes) == 3
    blocks.grow(table, 3 * BLOCK_SIZE, 4 * BLOCK_SIZE)
    assert not blocks.can_swap_out(table, 3 * BLOCK_SIZE)
    assert blocks.states is not None
    blocks.states.plan(table, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE, draws=True)
    assert blocks.can_swap_out(table, 3 * BLOCK_SIZE + 1)
    blocks.close(table)
    world.check_empty()


@pytest.mark.parametrize("end", range(3 * SIZE + 1, 5 * SIZE + 2))
@pytest.mark.parametrize("chunk", [3 * SIZE - 1, 3 * SIZE, 3 * SIZE + 1])
def test_a_swapped_state_is_loaded_wherever_chunks_ended(chunk: int, end: int) -> None:
    """Steps of decodes that only add a token are not planned here, and a chunk may end at any token."""
    blocks = manager(12)
    table = blocks.open_table()
    assert blocks.states is not None
    blocks.grow(table, 0, end)
    step = blocks.states.plan(table, 0, chunk, 2 * SIZE, draws=False)
    blocks.publish(table, hashes_of(0, chunk // SIZE * SIZE))
    blocks.let_go(table, chunk)
    assert blocks.can_swap_out(table, end)
    out, runs = blocks.swap_out(table, end)
    assert [device for group, device, _ in out if group] == [step.slot]
    again = blocks.open_table()
    blocks.match_runs(again, hashes_of(0, chunk // SIZE * SIZE), end)
    copies = blocks.swap_in(again, runs, blocks.needs(again, end, end + 1))
    assert [[host] for group, host, _ in copies if group] == [list(runs[1].block_ids)]
    blocks.grow(again, end, end + 1)
    step = blocks.states.plan(again, end, end + 1, 2 * SIZE, draws=True)
    assert [step.source] == [device for group, _, device in copies if group]
    blocks.close(again)
    blocks.check()


@pytest.mark.parametrize("length", [BLOCK_SIZE, 3 * BLOCK_SIZE - 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1])
def test_the_same_prompt_and_the_next_turn_find_a_state(length: int) -> None:
    """The last token of a prompt is always computed, so what is the same ends before it."""
    world = World(kv=FULL_STATE, num_blocks=60)
    world.submit(message("a", prompt(length), max_tokens=3))
    world.run_until_idle()
    again = world.submit(message("same", prompt(length), max_tokens=3))
    world.run_until_idle()
    turn = world.submit(message("turn", prompt(length) + prompt(9, 1), max_tokens=3))
    world.run_until_idle()
    assert again.num_cached_tokens == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert turn.num_cached_tokens == length // BLOCK_SIZE * BLOCK_SIZE
    world.check_empty()


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_keeps_its_newest_state_alone(depth: int) -> None:
    world = World(kv=LATENT_STATE, num_blocks=60, depth=depth)
    world.submit(message("a", prompt(BLOCK_SIZE + 3), max_tokens=5 * BLOCK_SIZE))
    world.run_until_idle()
    assert len(world.blocks.pools[1].cache) == 2, "the prompt's end, and the newest of the answer"
    world.check_empty()


@pytest.mark.parametrize("length", [BLOCK_SIZE + 3, 2 * BLOCK_SIZE + 3])
def test_draws_that_sit_out_at_boundaries_lose_no_newest_state(length: int) -> None:
    """The step is planned again, and ends at the same boundary."""
    late = False
    world = World(kv=FULL_STATE, num_blocks=60, are_late=lambda: late)
    request = world.submit(
        message("a", prompt(length), max_tokens=3 * BLOCK_SIZE, grammar="g", ignore_eos=False, seed=5)
    )
    num_tokens, states = 0, world.blocks.states
    assert states is not None
    while not request.finished:
        num_tokens = len(request.sequences[0].token_ids)
        late = not late and num_tokens % BLOCK_SIZE == 0
        world.start_step()
    world.run_until_idle()
    num_ends = num_tokens // BLOCK_SIZE - length // BLOCK_SIZE
    assert num_ends > 1
    assert world.scheduler.counters["draws_sat_out_total"] == num_ends
    assert states.num_saved == 1 + num_ends, "each boundary once"
    assert len(world.blocks.pools[1].cache) == 2, "the prompt's end, and the newest of the answer"
    world.check_empty()


def test_a_newest_state_that_is_cached_already_is_not_the_one_before() -> None:
    """Of two slots with the same content the first is cached, and stays."""
    blocks = manager(12)
    table, hashes = blocks.open_table(), hashes_of(0, SIZE)
    blocks.grow(table, 0, SIZE)
    pool, slots = blocks.pools[1], table.groups[1]
    assert isinstance(pool, StatePool)
    assert isinstance(slots, StateSlots)
    for _ in range(2):
        pool.step(slots, 0, SIZE, [(SIZE, pool.take())], SIZE, draws=True)
        pool.publish(slots, hashes, [])
        assert pool.cache.find(hashes[0]) is not None
    blocks.close(table)
    blocks.check()


def test_a_forgotten_state_that_host_memory_has_is_expected_there_and_leaves_it_first() -> None:
    blocks = BlockManager(FULL_STATE.groups(SIZE), FULL_STATE.slabs(12), num_host_blocks=2, host_cache=True)
    blocks.news.switch(is_on=True)
    table, hashes = blocks.open_table(), hashes_of(0, 3 * SIZE)
    assert blocks.states is not None
    blocks.grow(table, 0, 3 * SIZE)
    for end in (1, 2):
        blocks.states.plan(table, (end - 1) * SIZE, end * SIZE, SIZE, draws=True)
        blocks.publish(table, hashes[:end])
        assert blocks.host.save(1, hashes[end - 1]) is not None, "copied ahead"
    blocks.name([(2 * SIZE, 77)], 0, hashes[:2])
    assert [one.tier for one in blocks.news.take()[1]] == [DEVICE]
    blocks.states.plan(table, 2 * SIZE, 3 * SIZE, SIZE, draws=True)
    blocks.publish(table, hashes)
    assert len(blocks.pools[1].cache) == 2, "the prompt's end, and the newest of the answer"
    assert blocks.news.take() == ((), (), ((block_id(hashes[1]), HOST),))
    assert list(blocks.host.groups[1].cached) == [hashes[1], hashes[0]], "in the order of eviction"
    blocks.close(table)
    blocks.check()


def test_a_branch_is_known_by_what_host_memory_has_too() -> None:
    """The heads of three prompts are equal. Of the second one the state at their end is kept, for the third."""
    world = World(kv=FULL_STATE, num_blocks=5, num_host_blocks=100, host_cache=True)
    world.blocks.copies.step_tokens = 32 * BLOCK_SIZE  # so much is saved ahead
    head, hits = prompt(4 * BLOCK_SIZE), []
    for number in range(3):
        request = world.submit(message(f"r{number}", head + prompt(3 * BLOCK_SIZE + 1, 1 + number), max_tokens=1))
        world.run_until_idle()
        hits.append(request.num_cached_tokens)
        world.submit(message(f"{number} later", prompt(3, 3), max_tokens=5, ignore_eos=True))  # its steps copy all
        world.run_until_idle()
        for pool in world.blocks.pools:
            pool.forget_unused()
    assert hits == [0, 0, 4 * BLOCK_SIZE]
    world.check_empty()


def test_without_room_no_state_is_kept_and_nothing_else_changes() -> None:
    world = World(kv=GroupSet(((FULL, 0), (STATE, 0)), (20, 1)), num_blocks=2)  # a slab of blocks, and two states
    assert world.blocks.states is not None
    world.submit(message("a", prompt(2 * BLOCK_SIZE + 1), max_tokens=3, grammar="g", ignore_eos=False))
    world.run_until_idle()
    assert (world.blocks.states.num_saved, world.blocks.states.num_unsaved) == (0, 1)
    world.check_empty()


@pytest.mark.long
def test_no_decode_is_preempted_for_states_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can evict a checkpoint until its step has retired, and a decode wants a block before that."""

    def num_preempted() -> float:
        world = World(kv=FULL_STATE, num_blocks=6, depth=2, max_num_seqs=8)
        for number in range(6):
            world.submit(message(f"{number}", prompt(20 + number, number), max_tokens=60))
        world.run_until_idle()
        world.check_empty()
        assert world.blocks.states is not None
        assert bool(world.blocks.states.num_saved) is keeps
        return sum(count for name, count in world.scheduler.counters.items() if name.startswith("preemptions"))

    keeps = True
    num_with_states = num_preempted()
    monkeypatch.setattr(state_steps, "kept", lambda *_: [])
    monkeypatch.setattr(state_steps, "newest", lambda *_: None)
    keeps = False
    assert num_with_states == num_preempted() == 1


@pytest.mark.parametrize("num_slabs", range(3, 7))
def test_a_state_is_kept_as_far_as_there_is_room_beyond_the_watermark(num_slabs: int) -> None:
    """A slab each of FULL and of the live slot are taken; the watermark is a slot, and blocks of one more slab."""
    blocks = BlockManager(FULL_STATE.groups(SIZE), KvSlabs(num_slabs, 0, FULL_STATE.per_slab))
    table = blocks.open_table()
    assert blocks.states is not None
    blocks.states.watermark = [4, 1]
    blocks.grow(table, 0, 2 * SIZE)
    step = blocks.states.plan(table, 0, 2 * SIZE, 2 * SIZE + 1, draws=False)
    assert [end for end, _ in step.saves] == [2 * SIZE] * (num_slabs > 4)
    assert (blocks.states.num_saved, blocks.states.num_unsaved) == ((1, 0) if num_slabs > 4 else (0, 1))


@pytest.mark.long_cases
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 3])
def test_answers_of_one_prompt_read_its_state_and_write_their_own(depth: int, length: int) -> None:
    world = World(kv=FULL_STATE, num_blocks=60, depth=depth)
    world.submit(message("a", prompt(length), n=4, max_tokens=2 * BLOCK_SIZE))
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_draw_that_sits_out_leaves_the_state_before_its_chunk(depth: int) -> None:
    """Its tokens are computed again, from the same state: a step that went on from the new one would be seen."""
    late = iter([True, False, True, True, False] * 40)
    world = World(kv=FULL_STATE, num_blocks=60, depth=depth, are_late=lambda: next(late, False))
    world.submit(message("a", prompt(2 * BLOCK_SIZE + 3), max_tokens=2 * BLOCK_SIZE, grammar="g", ignore_eos=False))
    world.submit(message("n", prompt(BLOCK_SIZE, 1), n=2, max_tokens=9, grammar="g", ignore_eos=False))
    world.run_until_idle()
    assert world.scheduler.counters["draws_sat_out_total"] > 5
    world.check_empty()


@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE])
def test_a_lease_shows_the_state_after_the_last_token_of_the_prompt(length: int) -> None:
    """However long it is held, and whatever else is computed."""
    world = World(kv=FULL_STATE, num_blocks=30, depth=2)
    request = world.submit(message("p", prompt(length), work=Work.PREFILL))
    world.run_until_idle()
    for number in range(4):
        world.submit(message(f"{number}", prompt(length), max_tokens=2 * BLOCK_SIZE))
    world.run_until_idle()
    assert request.lease_id is not None
    world.end_lease(request.lease_id)
    world.check_empty()
