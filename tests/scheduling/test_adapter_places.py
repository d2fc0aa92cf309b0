"""Slots of adapters: which are replaced, which requests wait, and that none of them waits for ever."""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING

import msgspec
import pytest

from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.sequence import Request
from pd_connectors.protocol.adapters import IN_HOST, ON_DEVICE
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from pd_cluster.scheduling.adapter_places import AdapterPlaces


def places_of(world: World) -> AdapterPlaces:
    return world.scheduler._queues.adapters


def with_adapters(names: str, num_slots: int, **more: object) -> World:
    world = World(num_slots=num_slots, **more)  # type: ignore[arg-type]
    places_of(world).in_host |= dict.fromkeys(names, True)
    return world


def ask(world: World, name: str, adapter: str) -> None:
    world.submit(message(name, prompt(5), adapter=adapter))
    world.run_until_idle()


def test_the_one_used_least_recently_is_replaced() -> None:
    world = with_adapters("abcd", 2)
    for number, adapter in enumerate("abac"):
        ask(world, f"{number}", adapter)
    assert places_of(world).tiers == {"a": ON_DEVICE, "b": IN_HOST, "c": ON_DEVICE, "d": IN_HOST}
    ask(world, "5", "d")
    assert places_of(world).tiers == {"a": IN_HOST, "b": IN_HOST, "c": ON_DEVICE, "d": ON_DEVICE}
    assert places_of(world).droppable == ["b", "a", "c", "d"], "no slot, then the longest without one"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_enters_when_its_adapter_is_there_and_others_go_on(depth: int) -> None:
    world = with_adapters("a", 1, depth=depth)
    free = world.submit(message("free", prompt(5), max_tokens=30)).sequences[0].seq_id
    world.start_step()
    asked = world.submit(message("asked", prompt(9), adapter="a")).sequences[0].seq_id
    batch = world.start_step()
    assert batch.adapters == ((0, "a"),)
    assert [chunk.seq_id for chunk in batch.chunks] == [free]
    for _ in range(depth):
        batch = world.start_step()
        assert not batch.adapters
    assert {chunk.seq_id for chunk in batch.chunks} == {free, asked}, "when the step that copies has retired"


def test_one_that_is_not_in_host_memory_is_wanted() -> None:
    world = with_adapters("ab", 2)
    places_of(world).in_host["b"] = False
    world.submit(message("other", prompt(9), adapter="b"))
    ask_a = world.submit(message("asked", prompt(9), adapter="a"))
    while not world.client(ask_a).terminal:
        world.start_step()
        assert places_of(world).wanted == "b"
    places_of(world).in_host["b"] = True
    world.run_until_idle()
    world.check_empty()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_no_request_waits_for_ever(num_slots: int) -> None:
    """Others with as many adapters as there are slots come without end. It waits for those that run, no longer."""
    world, names = with_adapters("abc", num_slots, depth=2, max_num_seqs=6), count()

    def crowd() -> None:
        while world.scheduler.num_running + world.scheduler.num_waiting < 5:
            number = next(names)
            world.submit(message(f"{number}", prompt(5), adapter="ab"[number % num_slots], max_tokens=7 + number % 5))

    for _ in range(20):
        crowd()
        world.start_step()
    asked = world.submit(message("asked", prompt(5), adapter="c", max_tokens=3))
    for _ in range(12 + 12 + 3 + 6):  # those that run, those before it in turn, its tokens, and copies
        crowd()
        world.start_step()
    assert world.client(asked).terminal


def take_prompts(world: World, parked: list[Request], loads: list[Request]) -> None:
    """End loads, and begin those for which there is memory."""
    for request in loads:
        load = next(load for load, other in world.loads.values() if other is request)
        world.finish_load(load)
        world.give_first_tokens(request)
    loads.clear()
    for request in tuple(parked):
        if world.reserve(request) is not None:
            parked.remove(request)
            loads.append(request)


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
def test_random_walk(seed: int) -> None:
    """Short memory, loads, aborts, n > 1, unloads: each answer is right, each chunk finds its adapter."""
    rng = random.Random(seed)
    world = with_adapters(
        "abcde", rng.choice((1, 2, 3)), depth=rng.choice((1, 2)), num_blocks=rng.choice((12, 20)),
        num_host_blocks=rng.choice((0, 10)), max_num_seqs=rng.choice((2, 5)), shortest_first=rng.random() < 0.5,
    )  # fmt: skip
    places, open_, parked, loads = places_of(world), list[Request](), list[Request](), list[Request]()
    for number in range(80):
        if rng.random() < 0.6:
            adapter, n = rng.choice(["", *sorted(places.in_host)]), rng.choice((1, 1, min(3, world.max_num_seqs)))
            more = {"max_tokens": rng.randint(1, 12), "n": n, "group": rng.choice(("", "g")), "adapter": adapter}
            asked = message(f"r{number}", prompt(rng.choice((3, 17, 40)), number % 3), **more)  # type: ignore[arg-type]
            if is_handed_over := rng.random() < 0.3:
                asked = msgspec.structs.replace(asked, work=Work.TAKE_OVER)
            open_.append(world.submit(asked))
            if is_handed_over:
                parked.append(open_[-1])
        if rng.random() < 0.05 and open_ and (stopped := rng.choice(open_)) not in (*parked, *loads):
            world.stop(stopped)
        take_prompts(world, parked, loads)
        if rng.random() < 0.1:
            for adapter in sorted(places.in_host):
                if not places.num_live[adapter] and adapter != "a":
                    places.forget(adapter)
                    places.in_host[adapter] = True
                    break
        world.start_step()
        world.check()
    while parked or loads:
        take_prompts(world, parked, loads)
        world.start_step()
        world.now_s += 1
        assert world.now_s < 3000, "stuck"
    world.run_until_idle()
    for request in open_:
        world.client(request).check()
    world.check_empty()
    assert not any(places.num_live.values())


def test_a_loaded_prompt_waits_for_its_adapter() -> None:
    world = with_adapters("ab", 1)
    world.submit(message("first", prompt(5), adapter="a", max_tokens=9))
    for _ in range(3):
        world.start_step()
    asked = world.submit(message("asked", prompt(20), work=Work.TAKE_OVER, adapter="b"))
    load = world.reserve(asked)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(asked)
    world.run_until_idle()
    world.client(asked).check()
    world.check_empty()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_loaded_prompt_and_one_that_needs_its_blocks_do_not_wait_for_each_other(depth: int) -> None:
    """The first in turn has the slot and finds no blocks; the second holds the blocks and has no slot."""
    world = with_adapters("abc", 1, num_blocks=12, depth=depth)
    world.submit(message("running", prompt(5), adapter="c", max_tokens=12))
    for _ in range(4):
        world.start_step()
    asked = world.submit(message("asked", prompt(130), adapter="b"))
    taken = world.submit(message("taken", prompt(70, 1), work=Work.TAKE_OVER, adapter="a"))
    load = world.reserve(taken)
    assert load is not None
    world.start_step()
    world.finish_load(load)
    world.give_first_tokens(taken)
    world.run_until_idle()
    for request in (asked, taken):
        world.client(request).check()
    world.check_empty()
