"""The newest state of an answer that runs, beside states of prompts with the same content: these stay."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.checkpoints import kept
from tests.scheduling.kv_groups import FULL, FULL_FAR_STATE, FULL_STATE, STATE, GroupSet
from tests.scheduling.test_shared_kv_memory import SIZE, hashes_of

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_table import BlockTable

SMALL = GroupSet(((FULL, 0), (STATE, 0)), (6, 1))


@dataclass(eq=False)
class Stream:
    """A prompt of `num_prompt` tokens, and an answer that other prompts may have as their own text."""

    table: BlockTable
    family: int
    num_prompt: int
    computed: int


class Streams:
    """Streams over one cache. `stay`: the states of prompts, and those that one has gone on from; not the evicted."""

    def __init__(self, num_slabs: int, kv: GroupSet = SMALL) -> None:
        self.blocks = BlockManager(kv.groups(SIZE), kv.slabs(num_slabs))
        self.states = self.blocks.pools[1]
        self.stay: set[bytes] = set()
        self.states.on_evicted = lambda block_hash, _: self.stay.discard(block_hash)

    def begin(self, family: int, num_prompt: int) -> Stream:
        table = self.blocks.open_table()
        num_found = self.blocks.match(table, hashes_of(family, num_prompt - 1))
        return Stream(table, family, num_prompt, num_found * SIZE)

    def step(self, stream: Stream, num: int = 1) -> bool:
        """Compute so many tokens. False: there is no room."""
        table, start, end = stream.table, stream.computed, stream.computed + num
        steps = self.blocks.states
        assert steps is not None
        if not self.blocks.can_grow(table, start, end):
            return False
        self.blocks.grow(table, start, end)
        step = steps.plan(table, start, end, stream.num_prompt, draws=False)
        saved = {boundary for boundary, _ in step.saves}
        boundaries = kept(start, end, stream.num_prompt, table.branch, self.states.block_size)
        stay = {hashes_of(stream.family, one)[-1] for one in saved.intersection(boundaries)}
        stay |= {one for one in hashes_of(stream.family, start) if self.states.cache.find(one) == step.source}
        self.blocks.publish(table, hashes_of(stream.family, end))
        self.blocks.let_go(table, end)
        self.stay |= stay
        stream.computed = end
        return True

    def check(self) -> None:
        self.blocks.check()
        assert all(self.states.cache.find(one) is not None for one in self.stay), "a state of a prompt was dropped"


def test_the_end_of_a_prompt_stays_where_an_answer_has_passed() -> None:
    """Of two equal states the first is cached, which is the answer's."""
    streams = Streams(20)
    prompt = streams.begin(0, 3 * SIZE)
    answer = streams.begin(0, 2 * SIZE + 1)
    streams.step(answer, 2 * SIZE + 1)
    streams.step(answer, SIZE)  # passes the third block's end
    streams.step(prompt, 3 * SIZE)
    streams.step(answer, SIZE)
    streams.check()
    assert streams.blocks.num_cached(hashes_of(0, 3 * SIZE)) == 3 * SIZE


def test_a_state_stays_that_a_prompt_has_gone_on_from() -> None:
    """There the two part, so it is a branch: of the prompt no other one is kept there."""
    streams = Streams(20)
    answer = streams.begin(0, 2 * SIZE + 1)
    streams.step(answer, 2 * SIZE + 1)
    streams.step(answer, SIZE)
    prompt = streams.begin(0, 3 * SIZE + 2)
    assert prompt.computed == 3 * SIZE
    streams.step(prompt, 2)
    streams.step(answer, SIZE)
    streams.check()
    assert streams.blocks.num_cached(hashes_of(0, 3 * SIZE)) == 3 * SIZE


def test_an_answers_state_that_was_evicted_is_not_the_one_of_another_answer() -> None:
    streams = Streams(20)
    first, second = streams.begin(0, 2 * SIZE + 1), streams.begin(0, 2 * SIZE + 1)
    for answer in (first, second):
        streams.step(answer, 2 * SIZE + 1)
    [passing] = hashes_of(0, 3 * SIZE)[2:]
    streams.step(first, SIZE)
    slot = streams.states.cache.find(passing)
    assert slot is not None
    streams.states.evict_subtree(slot)  # type: ignore[attr-defined]
    streams.step(second, SIZE)
    assert streams.states.cache.find(passing) == slot, "in the same slot"
    streams.step(first, SIZE)
    assert streams.states.cache.find(passing) == slot, "the second answer's is forgotten by the first one"
    streams.step(second, SIZE)
    assert streams.states.cache.find(passing) is None
    streams.check()


def walk(seed: int, kv: GroupSet) -> int:
    """Streams of four families at random. Returns how many states were kept."""
    rng = random.Random(f"{seed}/{kv.per_slab}")
    streams, running, num_kept = Streams(rng.randint(8, 30), kv), list[Stream](), 0
    for _ in range(120):
        match rng.choices(range(3), [3, 12, 1])[0]:
            case 0:
                running.append(streams.begin(rng.randrange(4), rng.randint(2, 6 * SIZE)))
            case 1 if running:
                stream = rng.choice(running)
                is_prompt = stream.computed < stream.num_prompt
                num_left = stream.num_prompt - stream.computed
                streams.step(stream, min(num_left, rng.randint(1, 3 * SIZE)) if is_prompt else 1)
            case 2 if running:
                streams.blocks.close(running.pop(rng.randrange(len(running))).table)
        if len(running) > 4:
            streams.blocks.close(running.pop(0).table)
        streams.check()
        num_kept = max(num_kept, len(streams.stay))
    for stream in running:
        streams.blocks.close(stream.table)
    streams.blocks.check()
    assert streams.blocks.idle
    assert not streams.states.passing
    return num_kept


@pytest.mark.long
@pytest.mark.parametrize("kv", [SMALL, FULL_STATE, FULL_FAR_STATE])
def test_a_state_of_a_prompt_leaves_by_eviction_only(kv: GroupSet) -> None:
    assert min(walk(seed, kv) for seed in range(3)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("kv", [SMALL, FULL_STATE, FULL_FAR_STATE])
def test_a_state_of_a_prompt_leaves_by_eviction_only_in_many_walks(kv: GroupSet) -> None:
    for seed in range(3, 200):
        walk(seed, kv)
