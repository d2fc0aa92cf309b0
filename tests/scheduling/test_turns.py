"""Groups share slots and memory: what one HTTP request asks for gets the turns of one, however much that is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pd_cluster.errors import Overloaded
from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.request_group import LEAST_EXCESS, RequestGroup
from pd_cluster.scheduling.turns import Turns
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.sequence import Request, Sequence

NUM_VICTIMS = 20
BETWEEN = 6  # steps from one victim to the next
RATIO = 3  # of a victim's time to its first token beside a hog, to its time alone
RATIO_OF_MEMORY = 4  # the same where the hog's own growth takes what it yields
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]


def first_token_steps(world: World, victims: Iterable[Request]) -> Iterator[int]:
    """Steps until each has its first token, one after the other, `BETWEEN` steps apart."""
    for victim in victims:
        begun_s = world.now_s
        while not world.client(victim).outputs[0]:
            assert world.now_s - begun_s < 500, "a victim starves"
            world.start_step()
        yield int(world.now_s - begun_s)
        for _ in range(BETWEEN):
            if world.scheduler.has_work:
                world.start_step()


def victims_of(world: World) -> Iterator[Request]:
    for index in range(NUM_VICTIMS):
        yield world.submit(message(f"victim-{index}", prompt(20, index), max_tokens=4))


ABUSES: dict[str, dict[str, int]] = {
    "many prompts with many samples": {"prompts": 40, "n": 8, "max_tokens": 40},
    "many prompts": {"prompts": 60, "n": 1, "max_tokens": 60},
    "many prompts of one token": {"prompts": 120, "n": 1, "max_tokens": 1},
    "many samples": {"prompts": 1, "n": 8, "max_tokens": 100},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("abuse", "num_blocks", "depth"),
    [
        *((abuse, *world) for abuse in ABUSES for world in ((400, 2), (40, 1))),
        pytest.param("many prompts with many samples", 400, 1, marks=pytest.mark.slow),
    ],
)
def test_a_client_beside_an_abusive_one_has_its_first_tokens(abuse: str, num_blocks: int, depth: int) -> None:
    """In virtual time: every victim, whether slots are short (400 blocks) or memory is (40)."""
    sizes = ABUSES[abuse]

    def world() -> World:
        return World(
            num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=64, max_waiting=1000, depth=depth,
            forgets=True,
        )  # fmt: skip

    quiet = world()
    alone = max(first_token_steps(quiet, victims_of(quiet)))
    busy = world()
    for index in range(sizes["prompts"]):
        hog = message(f"hog-{index}", prompt(30, index), n=sizes["n"], max_tokens=sizes["max_tokens"], group="hog")
        busy.submit(hog)
    for _ in range(5):
        busy.start_step()
    beside = max(first_token_steps(busy, victims_of(busy)))
    assert beside <= (RATIO if num_blocks == 400 else RATIO_OF_MEMORY) * alone
    if num_blocks == 40:  # in the other world nothing is given up
        busy.run_until_idle(limit=20_000, check_each=16)
        busy.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_priority_goes_before_what_a_group_owes(depth: int) -> None:
    """The group with all slots takes the blocks of a sequence of lower priority that waits with them: else both wait
    for each other, and the engine stands still."""
    world = World(num_blocks=8, max_num_seqs=2, depth=depth, forgets=True)
    low = world.submit(message("low", prompt(33, 1), work=Work.TAKE_OVER, max_tokens=20, priority=1))
    load = world.reserve(low)
    assert load is not None
    world.submit(message("high", prompt(33, 2), n=2, max_tokens=37))
    world.start_step()
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(low)
    world.run_until_idle(limit=500)
    world.check_empty()


def test_prefill_legs_of_one_request_take_turns_with_others() -> None:
    """On P a sequence holds its slot for its prompt only: what counts there is when its group last had a turn."""
    world = World(num_blocks=400, max_num_batched_tokens=32, max_waiting=1000, forgets=True)
    for index in range(40):
        world.submit(message(f"hog-{index}", prompt(30, index), work=Work.PREFILL, group="hog"))
    for _ in range(3):
        world.start_step()
    victim = world.submit(message("victim", prompt(20, 7), work=Work.PREFILL))
    for _ in range(3):
        world.start_step()
    assert victim.finished
    assert sum(client.terminal for client in world.clients.values()) < 10


@pytest.mark.long
def test_a_group_that_waits_is_not_starved_by_those_that_come_later() -> None:
    """A stream of newcomers takes every slot but one from a hog, and that one goes on until all of it is done."""
    world = World(num_blocks=400, max_num_batched_tokens=64, max_waiting=1000, forgets=True)
    hogs = [world.submit(message(f"hog-{i}", prompt(30, i), max_tokens=5, group="hog")) for i in range(12)]
    for index in range(400):  # one in each step
        world.submit(message(f"newcomer-{index}", prompt(5, index), max_tokens=4))
        world.start_step()
        if all(hog.finished for hog in hogs):
            return
    raise AssertionError(f"{sum(not hog.finished for hog in hogs)} of the hog's prompts have not ended")


def test_one_request_fills_half_of_the_queue() -> None:
    world = World(max_waiting=10)
    for index in range(5):
        world.submit(message(f"hog-{index}", prompt(4), group="hog"))
    with pytest.raises(Overloaded):
        world.submit(message("hog-5", prompt(4), group="hog"))
    for index in range(5):
        world.submit(message(f"other-{index}", prompt(4)))
    with pytest.raises(Overloaded):
        world.submit(message("one more", prompt(4)))
    world.run_until_idle()
    assert world.scheduler.num_queued == 0
    world.check_empty()


@pytest.mark.long
def test_several_samples_wait_for_no_slots_at_once() -> None:
    """A request with n = 4 begins in the one slot that is free, and what comes after it is not held up behind it."""
    world = World(num_blocks=100)
    for index in range(3):
        world.submit(message(f"long-{index}", prompt(8, index), max_tokens=100))
    world.start_step()
    wide = world.submit(message("wide", prompt(8, 5), n=4, max_tokens=3))
    world.start_step()
    assert all(world.client(wide).outputs)
    world.run_until_idle()
    world.check_empty()


def test_a_step_has_every_sample_of_one_request() -> None:
    world = World(num_blocks=800, max_num_seqs=64, max_num_batched_tokens=512, forgets=True)
    world.submit(message("wide", prompt(10), n=40, max_tokens=5))
    world.start_step()
    assert len(world.start_step().chunks) == 40
    world.run_until_idle()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_is_short_every_sequence_of_a_group_gets_to_its_end(seed: int) -> None:
    """Random groups, short of slots, memory, or both. `World` compares every answer."""
    rng = random.Random(seed)
    world = World(
        num_blocks=rng.choice((24, 40, 300)), num_host_blocks=rng.choice((0, 8)), max_num_seqs=rng.randint(4, 12),
        depth=rng.randint(1, 2), max_waiting=1000, forgets=True,
    )  # fmt: skip
    for index in range(40):
        group, n = f"g{rng.randrange(4)}", rng.choice((1, 1, 2, 4))
        world.submit(message(f"r{index}", prompt(rng.randint(1, 40), index), max_tokens=20, n=n, group=group))
        for _ in range(rng.randint(0, 3)):
            world.start_step()
    world.run_until_idle(limit=20_000)
    world.check_empty()


def slots_of_equals() -> list[list[int]]:
    """Eight groups have two slots each. Others come and take one of them at a time. The slots of each, by step."""
    world = World(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, forgets=True)
    for index in range(8):
        world.submit(message(f"rich-{index}", prompt(10, index), n=2, max_tokens=60))
        world.start_step()
    rich = [client.request.group for client in world.clients.values()]
    slots = []
    for index in range(4):
        world.submit(message(f"poor-{index}", prompt(10, 100 + index), max_tokens=4))
        for _ in range(4):
            world.start_step()
            slots.append([group.num_slots for group in rich])
    return slots


@pytest.mark.long
def test_of_equal_groups_the_oldest_yields() -> None:
    """Runs agree, though their groups have other addresses, by which a set would order them."""
    runs = [slots_of_equals() for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert [1, *[2] * 7] in runs[0]


# against models


def batches_of(seed: int, *, plain: bool, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """Of random requests of one prompt and n = 1. `plain`: without turns, in the order of precedence."""
    with monkeypatch.context() as patch:
        if plain:
            patch.setattr(Turns, "in_turn", lambda _, ordered: iter(ordered))
            patch.setattr(Turns, "has_rich", False)
            patch.setattr(RequestGroup, "owes", lambda *_: False)
        rng = random.Random(seed)
        world = World(
            num_blocks=rng.randint(12, 40), num_host_blocks=rng.choice((0, 8)), depth=rng.randint(1, 2),
            max_num_batched_tokens=rng.choice((16, 64)), max_num_seqs=rng.randint(1, 6), forgets=True,
        )  # fmt: skip
        batches: list[Batch] = []
        for index in range(40):
            work = Work.TAKE_OVER if rng.random() < 0.3 else Work.GENERATE
            size, priority = rng.randint(1, 60), int(rng.random() < 0.1)
            text = prompt(size, rng.randrange(3))
            request = world.submit(
                message(f"r{index}", text, max_tokens=rng.randint(1, 30), work=work, priority=priority)
            )
            if work is Work.TAKE_OVER:
                load = world.reserve(request)
                if load is None:
                    world.scheduler.fall_back_to_local(request)
                else:
                    world.finish_load(load)
                    world.give_first_tokens(request)
            num_steps = rng.randint(0, 4)
            batches.extend(world.start_step() for _ in range(num_steps) if world.scheduler.has_work)
        world.run_until_idle()
        world.check_empty()
        return batches


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_ordinary_traffic_is_scheduled_as_by_a_plain_queue(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one prompt and n = 1: the very same batches."""
    found, expected = (batches_of(seed, plain=plain, monkeypatch=monkeypatch) for plain in (False, True))
    assert found == expected


class Checked(Turns):
    """Compares each order with the plain definition of claims."""

    def in_turn(self, ordered: Iterable[Sequence]) -> Iterator[Sequence]:
        waiting = list(ordered)
        ordered = super().in_turn(waiting)
        left = dict.fromkeys(waiting)
        while left:
            best = min(left, key=lambda seq: (seq.request.group.claim(seq.precedence), seq.precedence))
            seq = next(ordered)
            assert seq.request.group.claim(seq.precedence) <= best.request.group.claim(best.precedence)
            del left[seq]
            yield seq
        assert next(ordered, None) is None


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_random_groups_are_served_by_their_claims(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in the end, where nothing but slots is short, no group holds two slots more than one that waits."""
    monkeypatch.setattr("pd_cluster.scheduling.scheduler.Turns", Checked)
    rng = random.Random(seed)
    depth = rng.randint(1, 2)
    world = World(num_blocks=300, num_host_blocks=8, max_num_seqs=rng.randint(2, 6), depth=depth, max_waiting=1000)
    for index in range(50):
        group, n = f"g{rng.randrange(6)}", rng.choice((1, 1, 2, min(4, world.max_num_seqs)))
        n = min(n, world.max_num_seqs)
        world.submit(message(f"r{index}", prompt(rng.randint(1, 20), index), max_tokens=30, n=n, group=group))
        for _ in range(rng.randint(0, 3)):
            world.start_step()
        if index % 10 == 9:
            settle_turns(world)
    world.run_until_idle(limit=20_000)
    world.check_empty()


def settle_turns(world: World) -> None:
    """Nothing new comes for some steps: then the slots are shared evenly."""
    for _ in range(16 * world.depth):
        world.start_step()
    for _ in range(8):  # a step that preempts or waits to may stand between
        world.start_step()
        if is_even(world):
            return
    raise AssertionError("slots are not shared evenly")


def is_even(world: World) -> bool:
    live = [client.request for client in world.clients.values() if not client.terminal]
    held = {request.group: request.group.num_slots for request in live}
    waiting = {request.group for request in live if request.group.waiting}
    return all(most < held[group] + LEAST_EXCESS for group in waiting for most in held.values())
