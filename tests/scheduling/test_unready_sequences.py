"""Sequences that the worker cannot draw yet: their prompts go on, and nothing is computed for them in vain."""

from __future__ import annotations

import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.unready import UNREADY_DEADLINE_S
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

GRAMMAR = "of the worker"


class Gate:
    """The worker's answer about every sequence."""

    is_closed = True

    def __call__(self, seq_id: int) -> bool:
        return self.is_closed


@pytest.fixture
def gate() -> Gate:
    return Gate()


def chunks(world: World) -> list[tuple[int, int, int]]:
    """Of the next step: sequence, tokens, samples."""
    return [(chunk.seq_id, chunk.num_tokens, chunk.num_samples) for chunk in world.start_step().chunks]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("length", "n"), [(40, 1), (40, 3), (1, 1), (2, 1), (17, 2)])
def test_a_prompt_is_computed_up_to_its_last_token(length: int, n: int, depth: int, gate: Gate) -> None:
    world = World(is_unready=gate, depth=depth)
    asked = world.submit(message("a", prompt(length), n=n, grammar=GRAMMAR, ignore_eos=False))
    free = world.submit(message("b", prompt(3, family=1), max_tokens=9))
    lead, other = asked.sequences[0].seq_id, free.sequences[0].seq_id
    assert set(chunks(world)) == {(other, 3, 1)} | ({(lead, length - 1, 0)} if length > 1 else set())
    for _ in range(3):
        assert chunks(world) == [(other, 1, 1)], "the free row has its token of each step"
    gate.is_closed = False
    assert (lead, 1, n) in chunks(world), "in the step after the answer"
    world.run_until_idle()
    world.client(asked).check()
    world.check_empty()


def test_a_grammar_that_is_ready_at_once_costs_no_step(gate: Gate) -> None:
    gate.is_closed = False
    world = World(is_unready=gate)
    asked = world.submit(message("a", prompt(20), grammar=GRAMMAR, ignore_eos=False))
    assert chunks(world) == [(asked.sequences[0].seq_id, 20, 1)]
    assert not world.scheduler.unready


def test_a_cached_prompt_waits_for_its_last_token(gate: Gate) -> None:
    world = World(is_unready=gate)
    world.submit(message("a", prompt(17)))
    world.run_until_idle()
    asked = world.submit(message("b", prompt(17), grammar=GRAMMAR, ignore_eos=False))
    for _ in range(3):
        assert chunks(world) == []
    gate.is_closed = False
    assert chunks(world) == [(asked.sequences[0].seq_id, 1, 1)]
    world.run_until_idle()
    world.client(asked).check()


def test_a_loaded_prompt_waits_without_a_slot_and_is_passed(gate: Gate) -> None:
    """A D that has P's KV, and P's token or none, must not draw either."""
    for redraws in (False, True):
        gate.is_closed = True
        world = World(is_unready=gate, max_num_seqs=1)
        asked = world.submit(message("a", prompt(20), work=Work.TAKE_OVER, grammar=GRAMMAR, ignore_eos=False))
        load = world.reserve(asked, redraws=redraws)
        assert load is not None
        world.start_step()
        world.give_first_tokens(asked)
        world.finish_load(load)
        free = world.submit(message("b", prompt(5, family=1), max_tokens=2))
        while not free.finished:
            assert [seq_id for seq_id, *_ in chunks(world)] == [free.sequences[0].seq_id]
        gate.is_closed = False
        assert chunks(world) == [(asked.sequences[0].seq_id, 1, 1)] or asked.finished
        world.run_until_idle()
        world.client(asked).check()
        world.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_that_sat_out_is_left_out_until_it_is_ready(depth: int, gate: Gate) -> None:
    lateness = iter([False, True])
    gate.is_closed = False
    world = World(is_unready=gate, are_late=lambda: next(lateness, False), depth=depth)
    asked = world.submit(message("a", prompt(20), grammar=GRAMMAR, ignore_eos=False, max_tokens=9, seed=2))
    world.start_step()
    world.start_step()
    gate.is_closed = True
    world.settle()
    num_tokens = world.worker.num_tokens_computed
    for _ in range(4):
        assert chunks(world) == []
    assert world.worker.num_tokens_computed == num_tokens
    gate.is_closed = False
    assert len(chunks(world)) == 1
    world.run_until_idle()
    world.client(asked).check()
    world.check_empty()


def test_a_sequence_that_is_never_ready_ends_at_its_deadline(gate: Gate) -> None:
    """From the first step that leaves it out: not while its prompt is computed."""
    world = World(is_unready=gate, max_num_batched_tokens=4)
    asked = world.submit(message("a", prompt(33), grammar=GRAMMAR, ignore_eos=False))
    for _ in range(8):
        assert len(chunks(world)) == 1
    for _ in range(int(UNREADY_DEADLINE_S)):
        assert chunks(world) == []
        assert not asked.finished
    world.start_step()
    assert asked.finished
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("work", [Work.GENERATE, Work.PREFILL])
def test_an_abort_leaves_nothing_behind(work: Work, gate: Gate) -> None:
    world = World(is_unready=gate)
    asked = world.submit(message("a", prompt(40), work=work, grammar=GRAMMAR, ignore_eos=False))
    for _ in range(3):
        world.start_step()
    world.stop(asked)
    assert not world.scheduler.unready
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_held_sequence_can_be_preempted(num_host_blocks: int, gate: Gate) -> None:
    world = World(is_unready=gate, num_blocks=6, num_host_blocks=num_host_blocks)
    better = world.submit(message("a", prompt(20), max_tokens=70))
    asked = world.submit(message("b", prompt(20, family=1), grammar=GRAMMAR, ignore_eos=False))
    world.now_s = -1000.0  # the deadline is another test's
    world.start_step()
    table = asked.sequences[0].table
    assert table is not None
    num_held = len(table.groups[0].ids)
    while table.groups[0].ids:
        assert num_held
        world.start_step()
        world.now_s -= 1
    gate.is_closed = False
    world.run_until_idle()
    for request in (better, asked):
        world.client(request).check()
    world.check_empty()
