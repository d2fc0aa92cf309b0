"""What every connector promises, whatever it moves blocks by. See `harness` for how to run this on one of your own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from pd_connectors.protocol.errors import LoadFailure
from tests.conformance.harness import SIZE, End
from tests.deadlines import wait_until

if TYPE_CHECKING:
    from tests.conformance.harness import Harness, Prompt, Reader

pytestmark = pytest.mark.timeout(180)


def begin_found(harness: Harness, reader: Reader, prompt: Prompt) -> str:
    """A load that has found something. A quick reader may give up before, and asks again."""
    found: list[str] = []

    def is_found() -> bool:
        found.append(harness.load_id("found"))
        harness.ask(reader, prompt, found[-1])
        return reader.wait_found(found[-1])

    wait_until(is_found, lambda: f"nothing is found: {found}")
    return found[-1]


def start_reading(harness: Harness, reader: Reader, prompt: Prompt, block_ids: tuple[int, ...]) -> str:
    """A load after its first block has landed; more of it is to come where the connector waits for that."""
    harness.offer(prompt, prompt.num_blocks // 2 if harness.waits_for_the_rest else None)
    load_id = begin_found(harness, reader, prompt)
    reader.read(load_id, block_ids)
    reader.wait_landed(prompt, 0, block_ids[0])
    return load_id


def test_every_bit_arrives_in_other_blocks(harness: Harness, reader: Reader) -> None:
    prompt, blocks = harness.prompt(5 * SIZE), (30, 7, 19, 3, 63)
    harness.offer(prompt)
    assert harness.fetch(reader, prompt, harness.load_id("whole"), blocks) == End(5 * SIZE)
    assert all(reader.has(prompt, index, block_id) for index, block_id in enumerate(blocks))


def test_a_prompt_that_never_comes(harness: Harness, reader: Reader) -> None:
    """No node has it, or a node promised it and does not compute it: that is known within the deadline."""
    prompt, load_id = harness.prompt(3 * SIZE), harness.load_id("never")
    harness.ask(reader, prompt, load_id, deadline_s=0.5)
    assert not reader.wait_found(load_id)
    assert reader.wait_end(load_id) == End(0, LoadFailure.DEADLINE if harness.waits_for_the_rest else None)
    reader.check(prompt, End(0), ())


def test_what_the_reader_has_is_never_moved(harness: Harness, reader: Reader) -> None:
    prompt = harness.prompt(4 * SIZE)
    harness.offer(prompt)
    before = harness.bytes_read(reader)
    assert harness.fetch(reader, prompt, harness.load_id("rest"), (8, 9), first_block=2) == End(4 * SIZE)
    assert reader.has(prompt, 2, 8)
    assert reader.has(prompt, 3, 9)
    assert harness.bytes_read(reader) - before == 2 * reader.node.cache.layout.block_bytes


def test_a_part(harness: Harness, reader: Reader) -> None:
    """It is read while the rest is computed; or it is all there is, and a shorter prefix."""
    prompt, load_id, blocks = harness.prompt(6 * SIZE), harness.load_id("part"), (11, 12, 13, 14, 15, 16)
    harness.offer(prompt, 3)
    harness.ask(reader, prompt, load_id)
    assert reader.wait_found(load_id)
    reader.read(load_id, blocks)
    for index in range(3):
        reader.wait_landed(prompt, index, blocks[index])
    if harness.waits_for_the_rest:
        harness.offer(prompt)
        assert reader.wait_end(load_id) == End(6 * SIZE)
        reader.check(prompt, End(6 * SIZE), blocks)
    else:
        assert reader.wait_end(load_id) == End(3 * SIZE)
        reader.check(prompt, End(3 * SIZE), blocks[:3])


def test_several_readers_at_once(harness: Harness, reader: Reader) -> None:
    """Two nodes, each with several loads of one prompt and of another."""
    same, other = harness.prompt(6 * SIZE), harness.prompt(6 * SIZE)
    harness.offer(same)
    harness.offer(other)
    second = harness.reader("D2")
    try:
        loads = [
            (one, prompt, harness.load_id("together"), tuple(range(6 * index, 6 * index + 6)))
            for one in (reader, second)
            for index, prompt in enumerate((same, other, same, other, same))
        ]
        for one, prompt, load_id, _ in loads:
            harness.ask(one, prompt, load_id)
        for one, _, load_id, blocks in loads:
            assert one.wait_found(load_id)
            one.read(load_id, blocks)
        for one, prompt, load_id, blocks in loads:
            assert one.wait_end(load_id) == End(6 * SIZE)
            assert all(one.has(prompt, index, block_id) for index, block_id in enumerate(blocks))
        second.check_events()
    finally:
        second.node.close()


@pytest.mark.parametrize("when", ["asking", "found", "reading"])
def test_given_up(harness: Harness, reader: Reader, when: str) -> None:
    """It ends soon, at most with what had arrived, and then nothing lands, whatever the source goes on to do."""
    prompt, load_id, blocks = harness.prompt(20 * SIZE), harness.load_id(when), tuple(range(20))
    if when == "reading":
        load_id = start_reading(harness, reader, prompt, blocks)
    else:
        harness.offer(prompt, 10)
        harness.ask(reader, prompt, load_id)
        assert when == "asking" or reader.wait_found(load_id)
    harness.cancel(reader, load_id)
    end = reader.wait_end(load_id)
    assert end.reason in (None, LoadFailure.CANCELLED)
    reader.check(prompt, end, blocks)
    harness.offer(prompt)
    harness.wait_working(reader)
    harness.cancel(reader, load_id)  # of no consequence


def test_taken_back_while_it_is_read(harness: Harness, reader: Reader) -> None:
    """Whatever is said to be there is the prompt's: what overwrote it never is."""
    for round_number in range(5):
        prompt, blocks = harness.prompt(40 * SIZE), tuple(range(40))
        reader.wipe()
        load_id = start_reading(harness, reader, prompt, blocks)
        harness.evict(prompt)
        end = reader.wait_end(load_id)
        reader.check(prompt, end, blocks)
        assert end.num_tokens < prompt.num_tokens or not harness.waits_for_the_rest, round_number
    harness.wait_working(reader)


def test_taken_back_after_it_was_found(harness: Harness, reader: Reader) -> None:
    prompt, load_id, blocks = harness.prompt(4 * SIZE), harness.load_id("found-lost"), (20, 21, 22, 23)
    harness.offer(prompt, 2 if harness.waits_for_the_rest else None)
    harness.ask(reader, prompt, load_id)
    assert reader.wait_found(load_id)
    harness.evict(prompt)
    reader.read(load_id, blocks)
    assert reader.wait_end(load_id).num_tokens == 0
    reader.check(prompt, End(0), blocks)
    harness.wait_working(reader)


def test_the_source_dies_while_it_is_read(harness: Harness, quick_reader: Reader) -> None:
    reader = quick_reader
    for part in harness.parts:
        prompt, blocks = harness.prompt(20 * SIZE), tuple(range(20))
        reader.wipe()
        load_id = start_reading(harness, reader, prompt, blocks)
        harness.kill(part)
        end = reader.wait_end(load_id)
        reader.check(prompt, end, blocks)
        assert end.num_tokens == 0 or not harness.waits_for_the_rest
        harness.restart(part)
        harness.wait_working(reader)


@pytest.mark.parametrize("when", ["asking", "found"])
def test_a_source_that_falls_silent_costs_a_deadline(harness: Harness, quick_reader: Reader, when: str) -> None:
    """No load hangs with it; once it goes on, so does everything."""
    reader = quick_reader
    for part in harness.parts:
        prompt, load_id, blocks = harness.prompt(4 * SIZE), harness.load_id(f"silent-{part}"), (40, 41, 42, 43)
        reader.wipe()
        harness.offer(prompt, 2)
        if when == "found":
            load_id = begin_found(harness, reader, prompt)
        else:
            harness.ask(reader, prompt, load_id)
        harness.stop(part)
        try:
            if reader.wait_found(load_id):
                reader.read(load_id, blocks)
            end = reader.wait_end(load_id)
        finally:
            harness.resume(part)
        reader.check(prompt, end, blocks)
        harness.wait_working(reader)


def closed(harness: Harness, stopped: str) -> Reader:
    """One that closed with loads open. With a part that is stopped it would wait for ever, by its own deadlines."""
    reader, prompt = harness.reader("D-closes"), harness.prompt(20 * SIZE)
    try:
        harness.wait_working(reader)
        reader.wipe()
        start_reading(harness, reader, prompt, tuple(range(20)))
        harness.ask(reader, harness.prompt(SIZE), harness.load_id("asked"))
        if stopped:
            harness.stop(stopped)
    finally:
        reader.node.close()
    reader.node.close()
    return reader


def contents(reader: Reader) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in reader.node.cache.tensors]


def test_closing_ends_every_load(harness: Harness, reader: Reader) -> None:
    one = closed(harness, "")
    before = contents(one)
    harness.wait_working(reader)
    assert all(map(torch.equal, contents(one), before)), "something landed in a cache that may be freed"


def test_closing_does_not_wait_for_a_source_that_stands_still(harness: Harness, reader: Reader) -> None:
    for part in harness.parts:
        try:
            one = closed(harness, part)
            before = contents(one)
        finally:
            harness.resume(part)
        harness.wait_working(reader)
        assert all(map(torch.equal, contents(one), before)), "something landed in a cache that may be freed"


def test_an_idle_node_sleeps(harness: Harness, reader: Reader) -> None:
    """Threads that poll would burn a core of each node: NIXL's own Python API does."""
    ourselves = psutil.Process()
    before, began_s = ourselves.cpu_times(), time.monotonic()
    time.sleep(0.5)
    after, wall_s = ourselves.cpu_times(), time.monotonic() - began_s
    assert (after.user + after.system - before.user - before.system) / wall_s < 0.2
