"""A pool over several ranks, and objects that engines of every degree share."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest
import torch

from pd_connectors.base import CachedBlock, CacheDescription, Event, LoadSpec, PrefixFound, PrefixLoaded
from pd_connectors.head_parts import head_parts, heads_per_object
from pd_connectors.pool import PoolLimits, StorePool
from pd_connectors.port_share import share_port
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.ranked_pool import RankedPool, RankPool
from pd_connectors.store import Sealer
from tests.connectors.layouts import full_layout, make_cache, mixed_heads, over, prefix_runs
from tests.connectors.pool_bench import DEADLINE_S, POOL_CONTEXT, MemoryStore, Shelf, hashes_of
from tests.connectors.rank_wires import PortPair
from tests.connectors.remote_node import is_stamped, stamp
from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pd_connectors.protocol.layout import BlockLayout

LAYOUT = mixed_heads()
SIZE = LAYOUT.block_size
NUM_BLOCKS = 16


class RankedNode:
    """One engine's pool; its ranks are threads."""

    def __init__(self, shelf: Shelf, layout: BlockLayout, shelves: Sequence[Shelf] = ()) -> None:
        """shelves: by rank, in place of `shelf`."""
        caches = [make_cache(layout, NUM_BLOCKS) for _ in range(layout.tp_size)]
        at = shelves or [shelf] * layout.tp_size
        pools = [
            StorePool(replace(POOL_CONTEXT, layout=layout, rank=rank), partial(MemoryStore, at[rank]), PoolLimits())
            for rank in range(layout.tp_size)
        ]
        self.pairs = [PortPair() for _ in pools[1:]]
        self.pool = RankedPool(pools[0], [share_port(pair.zero, 2)[1] for pair in self.pairs])
        for pool, cache, pair in zip(pools[1:], caches[1:], self.pairs, strict=True):
            pool.open(cache)
            RankPool(pool, share_port(pair.rank, 2)[1])
        self.pool.open(caches[0])
        self.pools = pools
        self.cache = CacheDescription(tuple(t for cache in caches for t in cache.tensors), layout)
        self.changed = threading.Event()
        self.pool.set_waker(self.changed.set)
        self.events: list[Event] = []

    def event(self) -> Event:
        deadline = time.monotonic() + DEADLINE_S
        while not self.events:
            self.events += self.pool.take_events()
            if not self.events:
                assert self.changed.wait(max(0.0, deadline - time.monotonic())), "nothing happened"
                self.changed.clear()
        return self.events.pop(0)

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        before = self._num_handled()
        groups, pairs = range(len(LAYOUT.groups)), list(zip(hashes, blocks, strict=True))
        self.pool.store([CachedBlock(*pair, group) for group in groups for pair in pairs])
        storing = sum(any(part.is_stored for part in parts) for pool in self.pools for parts in pool._sealer.parts)
        expected = before + len(blocks) * storing
        wait_until(lambda: self._num_handled() == expected, lambda: "the blocks were not handled")

    def _num_handled(self) -> float:
        stats = [pool.stats() for pool in self.pools]
        return sum(stat["pool_blocks_stored_total"] + stat["pool_blocks_known_total"] for stat in stats)

    def recall(self, hashes: Sequence[bytes], blocks: Sequence[int], name: str = "r") -> int:
        self.pool.find(name, hashes, (0,) * len(LAYOUT.groups))
        event = self.event()
        if isinstance(event, PrefixFound):
            spec = LoadSpec(name, prefix_runs(LAYOUT, 0, event.num_tokens, blocks), event.num_tokens)
            assert self.pool.load(spec)
            event = self.event()
        assert isinstance(event, PrefixLoaded)
        return event.num_tokens

    def close(self) -> None:
        self.pool.close()
        for pool in self.pools[1:]:
            pool.close()
        for pair in self.pairs:
            pair.close()


@contextmanager
def nodes(shelf: Shelf, *degrees: int) -> Iterator[list[RankedNode]]:
    with ExitStack() as stack:
        made = []
        for degree in degrees:
            made.append(RankedNode(shelf, over(LAYOUT, degree)))
            stack.callback(made[-1].close)
        yield made


@pytest.mark.long
def test_engines_of_every_degree_share_objects() -> None:
    shelf = Shelf()
    with nodes(shelf, 1, 2, 4) as made:
        for number, source in enumerate(made):
            hashes = hashes_of(3, seed=number)
            for block in (3, 9, 1):
                stamp(source.cache, block, number)
            source.store(hashes, [3, 9, 1])
            assert len(shelf.objects) == (number + 1) * 3 * 7, "2 heads, 4 heads and a whole group; no copies"
            for reader in made:
                for tensor in reader.cache.tensors:
                    tensor[10:].zero_()
                assert reader.recall(hashes, [12, 10, 15], name=f"{number}") == 3 * SIZE
                for block, like in ((12, 3), (10, 9), (15, 1)):
                    assert is_stamped(reader.cache, block, like=like, version=number)
                assert not any(bool(tensor[[11, 13, 14]].any()) for tensor in reader.cache.tensors)


def test_a_prefix_is_as_long_as_every_rank_has_it() -> None:
    shelf, hashes = Shelf(), hashes_of(4)
    with nodes(shelf, 2) as (node,):
        for block in range(4):
            stamp(node.cache, block, 1)
        node.store(hashes, [0, 1, 2, 3])
        last = Sealer(replace(POOL_CONTEXT, layout=over(LAYOUT, 2), rank=1))
        own = last.names(hashes[2])
        del shelf.objects[own[0]]
        assert node.recall(hashes, [8, 9, 10, 11], "short") == 2 * SIZE
        own = last.names(hashes[0])
        del shelf.objects[own[0]]
        assert node.recall(hashes, [8, 9, 10, 11], "nothing") == 0
        node.store(hashes[:1], [0])
        assert node.recall(hashes, [8, 9, 10, 11], "again") == 2 * SIZE


def test_a_search_ends_when_its_last_rank_has_ended() -> None:
    shelf, slow, hashes = Shelf(), Shelf(), hashes_of(2)
    layout = over(LAYOUT, 2)
    slow.objects = shelf.objects
    node = RankedNode(shelf, layout, [shelf, slow])
    try:
        node.store(hashes, [0, 1])
        slow.gate.clear()
        node.pool.find("r", hashes, (0,) * len(LAYOUT.groups))
        wait_until(lambda: slow.num_waiting == 1, lambda: "rank 1 does not search")
        assert node.pool.take_events() == []
        slow.gate.set()
        assert node.event() == PrefixFound("r", 2 * SIZE)
        slow.gate.clear()
        assert node.pool.load(LoadSpec("r", prefix_runs(layout, 0, 2 * SIZE, (8, 9)), 2 * SIZE))
        wait_until(lambda: node.pools[0].stats()["pool_searches"] == 0, lambda: "rank 0 does not end")
        assert node.pool.take_events() == []
        node.pool.cancel("r")
        assert node.event() == PrefixLoaded("r", 0)
        slow.gate.set()
        assert torch.equal(node.cache.tensors[0][8], node.cache.tensors[0][0])
    finally:
        slow.gate.set()
        node.close()


def test_a_rank_without_its_store_finds_nothing() -> None:
    shelf, down, hashes = Shelf(), Shelf(is_up=False), hashes_of(2)
    node = RankedNode(shelf, over(LAYOUT, 2), [shelf, down])
    with nodes(shelf, 1) as (source,):
        source.store(hashes, [0, 1])
    try:
        assert node.recall(hashes, [8, 9]) == 0
        assert node.pool.take_events() == []
        assert not node.pool.load(LoadSpec("r", prefix_runs(LAYOUT, 0, 2 * SIZE, (8, 9)), 2 * SIZE))
    finally:
        node.close()


@pytest.mark.parametrize(("heads", "size"), [(1, 1), (2, 1), (8, 1), (12, 1), (16, 2), (20, 2), (24, 3), (64, 8)])
def test_the_number_of_heads_in_an_object(heads: int, size: int) -> None:
    (group,) = full_layout(num_kv_heads=heads).groups
    assert heads_per_object(group) == size


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_objects_cover_every_head_once_and_are_stored_once(degree: int) -> None:
    for layout in (mixed_heads(), full_layout(num_kv_heads=8), full_layout(num_kv_heads=16)):
        plans = [head_parts(over(layout, degree), rank) for rank in range(degree)]
        for index, group in enumerate(layout.groups):
            stored = [part.number for plan in plans for part in plan[index] if part.is_stored]
            assert sorted(stored) == list(range(group.shape[0] // heads_per_object(group)))
            for plan in plans:
                assert {part.group for part in plan[index]} == {index}
                assert [head for part in plan[index] for head in range(part.heads.start, part.heads.stop)] == list(
                    range(len(group.heads_of(0, degree)))
                )
                assert sum(part.num_bytes for part in plan[index]) == group.rank_bytes(degree)


def test_a_rank_with_a_fraction_of_an_object_is_refused() -> None:
    with pytest.raises(ConnectorUnavailable, match="objects hold 2 KV heads, and one of 16 ranks 1: use another --tp"):
        head_parts(over(full_layout(num_kv_heads=16), 16), 0)


def test_one_thread_at_a_time_takes_a_further_ranks_events() -> None:
    """`StorePool.take_events` asks whether there is an event, then takes it; all threads of the pool report."""
    inside = threading.Lock()
    overlaps: list[str] = []
    has_overlapped = threading.Event()
    both = threading.Barrier(2)

    class Pool:
        report = staticmethod(lambda: None)

        def set_waker(self, wake: Callable[[], None]) -> None:
            self.report = wake

        def take_events(self) -> list[Event]:
            if not inside.acquire(blocking=False):
                overlaps.append(threading.current_thread().name)
                has_overlapped.set()
                return []
            assert not has_overlapped.wait(0.05), "the other thread runs now"
            inside.release()
            return []

    def run() -> None:
        both.wait()
        pool.report()

    pool, pair = Pool(), PortPair()
    RankPool(cast("StorePool", pool), pair.rank)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair.close()
    assert overlaps == []
