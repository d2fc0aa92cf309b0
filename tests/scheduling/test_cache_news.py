"""What a router is told of cached blocks, against the cache itself, after any sequence of events."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.cache_news import block_id
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.kv_groups import FULL, WINDOW, GroupSet, full_manager

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_connectors.protocol.feed import StoredBlock

SIZE = 16


def steps_of(tokens: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((end, 1000 + end) for end in range(SIZE, len(tokens) + 1, SIZE))


class Holders:
    """Tables over one block manager, and the blocks that a router knows of."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = full_manager(num_blocks, SIZE)
        self.blocks.news.switch(is_on=True)
        self.open: list[BlockTable] = []
        self.known: dict[int, StoredBlock] = {}
        self.named: set[bytes] = set()  # of the cached ones

    def compute(self, tokens: list[int], *, named: bool) -> None:
        """A prompt is computed, cached and named, as far as there is room."""
        hashes = extend_hashes(root_hash(), tokens, SIZE)
        table = self.blocks.open_table()
        num_cached = self.blocks.match(table, hashes) * SIZE
        if not self.blocks.can_grow(table, num_cached, len(tokens)):
            self.blocks.close(table)
            return
        self.blocks.grow(table, num_cached, len(tokens))
        self.named &= self.blocks.pools[0].cache._by_hash.keys()  # what was evicted comes back without a name
        self.blocks.publish(table, hashes)
        steps = steps_of(tokens) if named else ()
        assert self.blocks.name(steps, 0, hashes) == len(steps)
        self.named |= set(hashes) if named else set()
        self.open.append(table)

    def reset(self) -> None:
        """The last router leaves, and another comes."""
        self.blocks.news.switch(is_on=True)
        self.known, self.named = {}, set()

    def read(self) -> None:
        """A message arrives: the router knows the named blocks that are cached."""
        evicted, stored = self.blocks.news.take()
        for block in evicted:
            del self.known[block]
        for one in stored:
            assert one.block not in self.known, "stored twice without an eviction between"
            self.known[one.block] = one
        cached = self.blocks.pools[0].cache._by_hash.keys()
        assert self.known.keys() == {block_id(one) for one in self.named & cached}


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(30))
def test_a_router_knows_the_named_blocks_that_are_cached(seed: int) -> None:
    rng = random.Random(seed)
    holders = Holders(rng.randrange(4, 24))
    for _ in range(300):
        match rng.randrange(12):
            case 0:
                holders.blocks.forget_unused()
                holders.named &= holders.blocks.pools[0].cache._by_hash.keys()
            case 1 if rng.random() < 0.1:
                holders.reset()
            case 2 | 3 | 4 | 5 if holders.open:
                holders.blocks.close(holders.open.pop(rng.randrange(len(holders.open))))
            case _:
                tokens = [rng.randrange(2)] * SIZE * rng.randrange(1, 5) + [rng.randrange(3)] * rng.randrange(3 * SIZE)
                holders.compute(tokens, named=rng.random() < 0.7)
        if rng.random() < 0.5:
            holders.read()
    holders.read()
    assert holders.blocks.num_evicted


def test_nothing_is_named_while_no_router_reads() -> None:
    holders = Holders(8)
    holders.blocks.news.switch(is_on=False)
    holders.compute([1] * 64, named=True)
    assert holders.blocks.news.take() == ((), ())


def test_blocks_of_an_answer_are_named_by_the_prompt_that_repeats_them() -> None:
    holders = Holders(8)
    holders.compute([1] * 48, named=False)
    assert holders.blocks.news.take() == ((), ())
    holders.compute([1] * 64, named=True)
    _, stored = holders.blocks.news.take()
    assert [(one.num_tokens, one.step) for one in stored] == [(16, 1016), (32, 1032), (48, 1048), (64, 1064)]


def test_a_boundary_that_was_evicted_is_forgotten_also_where_a_block_that_it_needed_stays() -> None:
    """All prompts begin with the same text, so the window's blocks of that text are never evicted."""
    kv = GroupSet(((FULL, 0), (WINDOW, 4)), (2, 2))
    blocks = BlockManager(kv.groups(SIZE), kv.slabs(32))
    news = blocks.news
    news.switch(is_on=True)
    known: set[int] = set()
    for user in range(100):
        tokens = [1] * SIZE * 6 + [2 + user] * SIZE * 2
        hashes = extend_hashes(root_hash(), tokens, SIZE)
        table = blocks.open_table()
        blocks.grow(table, blocks.match(table, hashes[:-1]) * SIZE, len(tokens))
        blocks.publish(table, hashes)
        blocks.name(steps_of(tokens), 0, hashes)
        blocks.let_go(table, len(tokens))
        blocks.close(table)
        evicted, stored = news.take()
        known = (known - set(evicted)) | {one.block for one in stored}
        assert known == {block_id(boundary) for boundary in news._named}
    assert blocks.num_evicted > 100
    pairs = {(block, boundary) for block, boundaries in news._needing.items() for boundary in boundaries}
    assert 0 < len(pairs) <= 4 * len(news._named), "the window's blocks of each named boundary"
    assert pairs == {(block, boundary) for boundary, needed in news._named.items() for block in needed}
    blocks.forget_unused()
    assert not news._needing
    assert set(news.take()[0]) == known
