"""What a router is told of cached blocks, against the cache itself, after any sequence of events."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pd_cluster.engine.news_mirror import NewsMirror
from pd_cluster.protocol.messages import EngineNews
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.cache_news import block_id
from pd_connectors.protocol.feed import DEVICE, HOST, NodeLoad
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.kv_groups import FULL, WINDOW, GroupSet, full_manager

if TYPE_CHECKING:
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_connectors.protocol.feed import StoredBlock

SIZE = 16


def steps_of(tokens: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((end, 1000 + end) for end in range(SIZE, len(tokens) + 1, SIZE))


class Holders:
    """Tables over one block manager, a tier below it, and the blocks that a router knows of with their tiers."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.blocks = full_manager(num_blocks, SIZE)
        self.blocks.pools[0].on_evicted = self.evicted
        self.host: dict[bytes, None] = {}  # the least recently lowered first
        self.num_host_blocks = num_host_blocks
        self.mirror = NewsMirror()
        self.open: list[BlockTable] = []
        self.known: dict[int, StoredBlock] = {}
        self.named: set[bytes] = set()  # of the cached ones
        self.num_news = 0
        self.reset()

    @property
    def cached(self) -> set[bytes]:
        return {*self.blocks.pools[0].cache._by_hash, *self.host}

    def evicted(self, block_hash: bytes, _: int) -> None:
        """The device evicts a block. The tier below has a copy, as long as it has room."""
        if self.num_host_blocks:
            if len(self.host) == self.num_host_blocks:
                self.forget_in_host()
            self.host[block_hash] = None
            self.blocks.news.lowered(0, block_hash)
        else:
            self.blocks.news.evicted(0, block_hash)

    def forget_in_host(self) -> None:
        gone = next(iter(self.host))
        del self.host[gone]
        self.blocks.news.evicted(0, gone)

    def compute(self, tokens: list[int], *, named: bool) -> None:
        """A prompt is computed, cached and named, as far as there is room. What lies below is on the device again."""
        hashes = extend_hashes(root_hash(), tokens, SIZE)
        table = self.blocks.open_table()
        num_cached = self.blocks.match(table, hashes) * SIZE
        if not self.blocks.can_grow(table, num_cached, len(tokens)):
            self.blocks.close(table)
            return
        self.blocks.grow(table, num_cached, len(tokens))
        self.named &= self.cached  # what was evicted comes back without a name
        self.blocks.publish(table, hashes)
        for block_hash in hashes:
            self.host.pop(block_hash, None)
            self.blocks.news.raised(0, block_hash)
        steps = steps_of(tokens) if named else ()
        assert self.blocks.name(steps, 0, hashes) == len(steps)
        self.named |= set(hashes) if named else set()
        self.open.append(table)

    def reset(self) -> None:
        """The last router leaves, and another comes."""
        self.blocks.news.switch(is_on=self.mirror.switch(is_on=True).is_wanted)
        self.known, self.named = {}, set()

    def connect(self) -> None:
        """Another router comes, and reads a snapshot."""
        self.mirror.take_news()
        self.known = dict(self.mirror.stored)

    def send(self) -> None:
        """The engine tells its API process what is new."""
        evicted, stored, moved = self.blocks.news.take()
        assert not {one.block for one in stored} & {block for block, _ in moved}
        self.num_news = max(self.num_news, len(moved))
        assert len(moved) <= len(self.named), "a block is named once a message, however often it moved"
        self.mirror.take(EngineNews(0, NodeLoad(), evicted, stored, self.mirror._serial, moved))

    def read(self) -> None:
        """A message arrives: the router knows the named blocks that are cached, and where."""
        self.send()
        evicted, stored, moved = self.mirror.take_news()
        for block in evicted:
            del self.known[block]
        for one in stored:
            assert one.block not in self.known, "stored twice without an eviction between"
            self.known[one.block] = one
        for block, tier in moved:
            self.known[block] = replace(self.known[block], tier=tier)
        on_device = self.blocks.pools[0].cache._by_hash.keys()
        tiers = {block_id(one): DEVICE if one in on_device else HOST for one in self.named & self.cached}
        assert {block: one.tier for block, one in self.known.items()} == tiers
        assert self.known == self.mirror.stored


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(30))
def test_a_router_knows_the_named_blocks_that_are_cached_and_their_tiers(seed: int) -> None:
    rng = random.Random(seed)
    holders = Holders(rng.randrange(4, 24), rng.choice([0, 3, 12]))
    for _ in range(300):
        match rng.randrange(12):
            case 0:
                holders.blocks.forget_unused()
                while holders.host and rng.random() < 0.8:
                    holders.forget_in_host()
                holders.named &= holders.cached
            case 1 if rng.random() < 0.2:
                holders.reset()
            case 1 if rng.random() < 0.5:
                holders.send()
                holders.connect()
            case 2 | 3 | 4 | 5 if holders.open:
                holders.blocks.close(holders.open.pop(rng.randrange(len(holders.open))))
            case _:
                tokens = [rng.randrange(2)] * SIZE * rng.randrange(1, 5) + [rng.randrange(3)] * rng.randrange(3 * SIZE)
                holders.compute(tokens, named=rng.random() < 0.7)
        if rng.random() < 0.5:
            holders.read()
        elif rng.random() < 0.5:
            holders.send()
    holders.read()
    assert holders.blocks.num_evicted
    assert bool(holders.num_news) == bool(holders.num_host_blocks)


def test_a_boundary_lies_where_the_lowest_of_its_own_blocks_does() -> None:
    """Of a tree its own block, since those before it are other boundaries'; of a window all blocks that it needs."""
    kv = GroupSet(((FULL, 0), (WINDOW, 2)), (2, 2))
    blocks = BlockManager(kv.groups(SIZE), kv.slabs(32))
    news = blocks.news
    news.switch(is_on=True)
    tokens = list(range(SIZE * 4))
    hashes = extend_hashes(root_hash(), tokens, SIZE)
    table = blocks.open_table()
    blocks.grow(table, 0, len(tokens))
    blocks.publish(table, hashes)
    news.lowered(1, hashes[0])
    blocks.name(steps_of(tokens), 0, hashes)
    tiers = [one.tier for one in news.take()[1]]
    assert tiers == [HOST, HOST, DEVICE, DEVICE], "also of a block that was lowered before it had a name"
    news.raised(1, hashes[0])
    news.raised(1, hashes[1])
    news.lowered(0, hashes[1])
    assert dict(news.take()[2]) == {block_id(hashes[0]): DEVICE, block_id(hashes[1]): HOST}
    news.lowered(1, hashes[1])
    news.raised(0, hashes[1])
    assert dict(news.take()[2]) == {block_id(hashes[1]): HOST, block_id(hashes[2]): HOST}, "still without its window"
    news.evicted(1, hashes[1])
    assert set(news.take()[0]) == {block_id(hashes[1]), block_id(hashes[2])}
    assert not news._tiers


def test_nothing_is_named_while_no_router_reads() -> None:
    holders = Holders(8)
    holders.blocks.news.switch(is_on=False)
    holders.compute([1] * 64, named=True)
    assert holders.blocks.news.take() == ((), (), ())


def test_blocks_of_an_answer_are_named_by_the_prompt_that_repeats_them() -> None:
    holders = Holders(8)
    holders.compute([1] * 48, named=False)
    assert holders.blocks.news.take() == ((), (), ())
    holders.compute([1] * 64, named=True)
    _, stored, _ = holders.blocks.news.take()
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
        evicted, stored, _ = news.take()
        known = (known - set(evicted)) | {one.block for one in stored}
        assert known == {block_id(boundary) for boundary in news._named}
    assert blocks.num_evicted > 100
    pairs = {(block, boundary) for block, boundaries in news._needing.items() for boundary in boundaries}
    assert 0 < len(pairs) <= 4 * len(news._named), "the window's blocks of each named boundary"
    assert pairs == {(block, boundary) for boundary, needed in news._named.items() for block in needed}
    blocks.forget_unused()
    assert not news._needing
    assert set(news.take()[0]) == known
