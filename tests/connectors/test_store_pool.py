"""What a pool does with a store that does what the test wants. Over real ones: `tests/conformance`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch

from pd_connectors.base import CachedBlock, Event, LoadSpec, PrefixFound, PrefixLoaded
from pd_connectors.head_parts import head_parts
from pd_connectors.null import NullConnector
from pd_connectors.pool import PoolLimits
from pd_connectors.pooled import PooledConnector, pool_address
from pd_connectors.protocol.messages import LeaseRef
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.search import Search
from pd_connectors.store import HEADER_BYTES, Sealer
from tests.connectors.layouts import full_layout, make_cache, runs, two_groups
from tests.connectors.pool_bench import (
    DEADLINE_S,
    LAYOUT,
    NUM_BLOCKS,
    POOL_CONTEXT,
    MemoryStore,
    Shelf,
    hashes_of,
    nodes,
    pool_layout,
)
from tests.deadlines import HANG_S
from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.block_staging import Inlet

SIZE = LAYOUT.block_size
TICKET = Ticket("r", LeaseRef("P", 1, "lease"), 0, 1e12, "f", LAYOUT, b"d", 5, 1, "127.0.0.1", 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_node_gets_every_bit_into_other_blocks(dtype: str) -> None:
    shelf = Shelf()
    context = replace(POOL_CONTEXT, layout=pool_layout(dtype))
    hashes = hashes_of(5, seed=1)
    with nodes(lambda: MemoryStore(shelf), context, context) as (p, d):
        before = d.cache.clone()
        p.store(hashes, [3, 9, 1, 0, 7])
        assert p.stat("pool_blocks_stored_total") == 5
        assert d.recall(hashes, [8, 2, 15, 4, 6]) == 5 * SIZE
        assert torch.equal(d.cache[[8, 2, 15, 4, 6]], p.cache[[3, 9, 1, 0, 7]])
        others = [i for i in range(16) if i not in (8, 2, 15, 4, 6)]
        assert torch.equal(d.cache[others], before[others])
        assert d.stat("pool_hit_tokens_total") == 5 * SIZE
        assert d.misses() == {}


def test_the_longest_stored_prefix_is_found() -> None:
    shelf = Shelf()
    hashes = hashes_of(6, seed=2)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT, POOL_CONTEXT) as (p, d):
        p.store(hashes[:3] + hashes[4:], [0, 1, 2, 4, 5])  # the fourth is missing
        assert d.recall(hashes, [8, 9, 10], name="whole") == 3 * SIZE
        assert d.recall(hashes, [11], first_block=2, name="rest") == 3 * SIZE
        assert torch.equal(d.cache[[8, 9, 10, 11]], p.cache[[0, 1, 2, 2]])
        assert d.recall(hashes, [], first_block=3, name="nothing") == 0
        assert d.misses() == {"absent": 3}


def test_a_store_that_is_down_is_asked_once_a_second() -> None:
    shelf = Shelf()
    hashes = hashes_of(1)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0])
        shelf.is_up = False
        assert node.recall(hashes, [8], name="a") == 0
        num_calls = shelf.num_calls
        assert node.recall(hashes, [8], name="b") == 0
        node.store(hashes, [0])
        assert shelf.num_calls == num_calls
        assert node.stat("pool_up") == 0
        assert node.stat("pool_blocks_dropped_total|reason=unavailable") == 1
        shelf.is_up = True
        node.now_s += 1.0
        assert node.recall(hashes, [8], name="c") == SIZE
        assert node.misses() == {"unavailable": 2}


def test_a_store_that_dies_between_two_blocks_leaves_the_first() -> None:
    shelf = Shelf()
    hashes = hashes_of(3)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0, 1, 2])
        shelf.gate.clear()
        node.pool.find("r", hashes, (0,))
        shelf.gate.set()
        assert node.event() == PrefixFound("r", 3 * SIZE)
        shelf.is_up = False
        assert node.pool.load(LoadSpec("r", runs(0, (8, 9, 10)), 3 * SIZE))
        assert node.event() == PrefixLoaded("r", 0)
        assert node.misses() == {"unavailable": 1}


def test_what_is_evicted_after_it_was_found_is_lost() -> None:
    shelf = Shelf()
    hashes = hashes_of(3)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0, 1, 2])
        node.pool.find("r", hashes, (0,))
        assert node.event() == PrefixFound("r", 3 * SIZE)
        del shelf.objects[Sealer(POOL_CONTEXT).names(hashes[1])[0]]
        assert node.pool.load(LoadSpec("r", runs(0, (8, 9, 10)), 3 * SIZE))
        assert node.event() == PrefixLoaded("r", SIZE)
        assert node.misses() == {"lost": 1}


def test_a_search_that_takes_too_long_is_over() -> None:
    shelf = Shelf()
    hashes = hashes_of(1)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT, limits=PoolLimits(deadline_s=3.0)) as (node,):
        node.store(hashes, [0])
        node.pool.find("r", hashes, (0,))
        assert node.event() == PrefixFound("r", SIZE)
        node.now_s += 10.0  # the engine's own time does not count
        shelf.gate.clear()
        assert node.pool.load(LoadSpec("r", runs(0, (8,)), SIZE))
        node.now_s += 3.0
        shelf.gate.set()
        assert node.event() == PrefixLoaded("r", 0)
        assert node.misses() == {"late": 1}


@pytest.mark.long
def test_a_store_that_stands_still_costs_a_deadline_and_is_left_alone() -> None:
    shelf = Shelf()
    hashes = hashes_of(2)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT, limits=PoolLimits(deadline_s=0.1)) as (node,):
        node.store(hashes, [0, 1])
        node.pool.find("reading", hashes, (0,))
        assert node.event() == PrefixFound("reading", 2 * SIZE)
        shelf.gate.clear()
        assert node.pool.load(LoadSpec("reading", runs(0, (8, 9)), 2 * SIZE))
        wait_until(lambda: shelf.num_waiting == 1, lambda: "no thread reads")
        node.now_s += 0.1
        assert node.event() == PrefixLoaded("reading", 0)
        assert node.stat("pool_up") == 1, "there is another thread"
        before = node.cache.clone()
        node.pool.find("probing", hashes, (0,))
        wait_until(lambda: shelf.num_waiting == 2, lambda: "no thread looks")
        node.now_s += 0.1
        assert node.event() == PrefixLoaded("probing", 0)
        assert node.stat("pool_up") == 0
        node.pool.find("at once", hashes, (0,))
        assert node.event() == PrefixLoaded("at once", 0)
        assert node.misses() == {"late": 2, "unavailable": 1}
        shelf.gate.set()
        wait_until(lambda: node.stat("pool_up") == 1, lambda: "the threads did not come back")
        assert torch.equal(node.cache, before), "what came too late was written"
        assert node.recall(hashes, [8, 9], name="again") == 2 * SIZE


def test_a_store_that_keeps_every_thread_is_left_alone_although_its_searches_were_cancelled() -> None:
    shelf = Shelf()
    hashes = hashes_of(1)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT, limits=PoolLimits(deadline_s=3.0)) as (node,):
        node.store(hashes, [0])
        shelf.gate.clear()
        node.pool.find("first", hashes, (0,))
        wait_until(lambda: shelf.num_waiting == 1, lambda: "no thread looks")
        node.pool.find("second", hashes, (0,))
        wait_until(lambda: shelf.num_waiting == 2, lambda: "the other does not look")
        for name in ("first", "second"):
            node.pool.cancel(name)
            assert node.event() == PrefixLoaded(name, 0)
        assert node.stat("pool_up") == 1, "they may be back at any moment"
        node.now_s += 3.0
        node.pool.find("at once", hashes, (0,))
        assert node.event() == PrefixLoaded("at once", 0)
        assert node.misses() == {"cancelled": 2, "unavailable": 1}
        shelf.gate.set()
        wait_until(lambda: node.stat("pool_up") == 1, lambda: "the threads did not come back")
        assert node.recall(hashes, [8], name="again") == SIZE


def test_a_search_is_cancelled_in_any_state() -> None:
    shelf = Shelf()
    hashes = hashes_of(2)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0, 1])
        shelf.gate.clear()
        node.pool.find("probing", hashes, (0,))
        node.pool.cancel("probing")
        shelf.gate.set()
        assert node.event() == PrefixLoaded("probing", 0)
        node.pool.find("found", hashes, (0,))
        assert isinstance(node.event(), PrefixFound)
        node.pool.cancel("found")
        assert node.event() == PrefixLoaded("found", 0)
        assert not node.pool.load(LoadSpec("found", runs(0, (8, 9)), 2 * SIZE))
        node.pool.find("reading", hashes, (0,))
        assert isinstance(node.event(), PrefixFound)
        shelf.gate.clear()
        assert node.pool.load(LoadSpec("reading", runs(0, (8, 9)), 2 * SIZE))
        node.pool.cancel("reading")
        shelf.gate.set()
        assert node.event() == PrefixLoaded("reading", 0)
        node.pool.cancel("reading")
        assert node.pool.take_events() == []
        assert node.misses() == {"cancelled": 3}


def test_an_object_opens_only_under_its_own_name() -> None:
    """Whatever a store mixes up or a stranger writes there is refused, though it is whole."""
    sealer = Sealer(POOL_CONTEXT)
    mine, other = (sealer.names(block_hash)[0] for block_hash in hashes_of(2))
    block = memoryview(bytes(range(256)) * (LAYOUT.block_bytes // 2 // 256))  # one of two heads
    sealed = bytearray(sealer.seal(mine, block))
    opened = sealer.open(mine, sealed)
    assert opened is not None
    assert bytes(opened) == bytes(block)
    assert sealer.open(other, sealed) is None
    for context in (replace(POOL_CONTEXT, cluster_key=b"x" * 32), replace(POOL_CONTEXT, fingerprint="another model")):
        stranger = Sealer(context)
        assert stranger.names(mine.hash) != [mine]
        assert stranger.open(stranger.names(mine.hash)[0], sealed) is None
    assert sealer.open(mine, bytearray(Sealer(replace(POOL_CONTEXT, cluster_key=b"x" * 32)).seal(mine, block))) is None
    for index in (0, HEADER_BYTES - 1, HEADER_BYTES, len(sealed) - 1):
        damaged = bytearray(sealed)
        damaged[index] ^= 1
        assert sealer.open(mine, damaged) is None
    assert sealer.open(mine, sealed[:-1]) is None
    assert sealer.open(mine, sealed + b"\0") is None


def test_another_blocks_object_under_a_name_is_damaged_and_mended() -> None:
    shelf = Shelf()
    hashes = hashes_of(2)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0, 1])
        first, second = (Sealer(POOL_CONTEXT).names(block_hash)[0] for block_hash in hashes)
        shelf.objects[second] = shelf.objects[first]
        before = node.cache.clone()
        assert node.recall(hashes, [8, 9], name="mixed up") == SIZE
        assert node.misses() == {"damaged": 1}
        assert torch.equal(node.cache[9], before[9])
        node.store(hashes, [0, 1])
        assert node.recall(hashes, [8, 9], name="mended") == 2 * SIZE
        assert torch.equal(node.cache[9], before[1])


def test_a_block_is_there_when_every_group_has_it() -> None:
    """Two groups of two heads: four objects a block; without one of them the prefix ends before the block."""
    shelf, context = Shelf(), replace(POOL_CONTEXT, layout=two_groups())
    hashes = hashes_of(3)
    with nodes(lambda: MemoryStore(shelf), context, context) as (p, d):
        p.store(hashes, [3, 9, 1])
        assert (len(shelf.objects), p.stat("pool_blocks_stored_total")) == (12, 6)
        assert d.recall(hashes, [8, 2, 5]) == 3 * SIZE
        assert all(
            torch.equal(theirs[[8, 2, 5]], ours[[3, 9, 1]]) for ours, theirs in zip(p.caches, d.caches, strict=True)
        )
        assert d.stat("pool_read_bytes_total") == 3 * context.layout.block_bytes
        first, second = (Sealer(context).names(hashes[1], group) for group in (0, 1))
        del shelf.objects[second[0]]
        assert d.recall(hashes, [8, 2, 5], name="gap") == SIZE
        assert d.misses() == {"absent": 1}
        before = [cache[[2, 5]] for cache in d.caches]
        shelf.objects[second[0]] = shelf.objects[first[0]]
        assert d.recall(hashes, [8, 2, 5], name="mixed up") == SIZE
        assert d.misses() == {"absent": 1, "damaged": 1}
        assert torch.equal(d.caches[1][[2, 5]], before[1]), "the damaged part was not written"
        d.store(hashes, [8, 2, 5])  # it saw the damage, so it writes both objects of the block anew
        assert d.recall(hashes, [4, 6, 7], name="mended") == 3 * SIZE


class GatedInlet:
    """A loading thread's side of the cache; its writes take as long as the test says."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.written: list[int] = []
        self.flushed: list[list[int]] = []

    def write(self, group: int, heads: slice, block_id: int, content: memoryview) -> None:
        self.begun.set()
        assert self.gate.wait(DEADLINE_S)
        self.written.append(block_id)

    def flush(self) -> None:
        self.flushed.append(self.written[:])


def test_a_search_is_over_only_when_the_block_that_is_being_written_has_landed() -> None:
    ((part,),) = head_parts(full_layout(), 0)
    inlet = GatedInlet()
    search = Search("r", [b""], (0,), 0.0)
    ends: list[bool] = []
    with ThreadPoolExecutor(2) as threads:
        landing = threads.submit(search.land, cast("Inlet", inlet), part, 8, memoryview(b""), is_last=True)
        assert inlet.begun.wait(DEADLINE_S)
        ending = threads.submit(lambda: ends.append(search.finish()))
        with pytest.raises(TimeoutError):
            ending.result(0.05)  # it waits for the write, and would be here long since
        assert not search.is_over
        inlet.gate.set()
        assert landing.result(DEADLINE_S)
        ending.result(DEADLINE_S)
    assert ends == [True]
    assert (inlet.written, inlet.flushed, search.num_read) == ([8], [[8]], 1)
    is_written = search.land(cast("Inlet", inlet), part, 9, memoryview(b""), is_last=True)
    assert not is_written, "nothing lands once it is over"
    assert not search.finish()
    assert (inlet.written, inlet.flushed, search.num_read) == ([8], [[8]], 1)


def test_a_load_of_nothing_ends() -> None:
    """Another request cached the prefix between the search and the reservation."""
    shelf = Shelf()
    hashes = hashes_of(2)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0, 1])
        node.pool.find("r", hashes, (0,))
        assert isinstance(node.event(), PrefixFound)
        assert node.pool.load(LoadSpec("r", runs(2, ()), 2 * SIZE))
        assert node.event() == PrefixLoaded("r", 2 * SIZE)


def test_a_block_may_be_overwritten_once_it_was_offered() -> None:
    shelf = Shelf()
    hashes = hashes_of(1)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        content = node.cache[0].clone()
        shelf.gate.clear()
        node.pool.store([CachedBlock(hashes[0], 0)])
        node.pool.settle()
        node.cache[0] = 7.0
        shelf.gate.set()
        node.wait_sent()
        assert node.recall(hashes, [8]) == SIZE
        assert torch.equal(node.cache[8], content)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_on_a_gpu_are_copied_in_order_with_its_steps(dtype: str) -> None:
    shelf = Shelf()
    context = replace(POOL_CONTEXT, layout=pool_layout(dtype))
    hashes = hashes_of(3)
    busy = torch.randn(4096, 4096, device="cuda")
    with nodes(lambda: MemoryStore(shelf), context, context, device="cuda") as (p, d):
        content = p.cache[[2, 0, 1]].cpu()
        for _ in range(20):
            busy = busy @ busy / 64  # a step that still runs when the blocks are offered
        p.pool.store([CachedBlock(block_hash, i) for block_hash, i in zip(hashes, (2, 0, 1), strict=True)])
        p.cache.zero_()  # the next step
        p.pool.settle()
        p.wait_sent()
        assert d.recall(hashes, [5, 6, 7]) == 3 * SIZE
        assert torch.equal(d.cache[[5, 6, 7]].cpu(), content)


def test_a_backlog_is_bounded() -> None:
    shelf = Shelf()
    one = LAYOUT.block_bytes + 2 * HEADER_BYTES
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT, limits=PoolLimits(backlog_bytes=2 * one)) as (node,):
        shelf.gate.clear()
        for block_hash in hashes_of(3):
            node.pool.store([CachedBlock(block_hash, 0)])
        assert node.stat("pool_backlog_bytes") == 2 * one
        shelf.gate.set()
        node.wait_sent()
        assert node.stat("pool_blocks_stored_total") == 2
        assert node.stat("pool_blocks_dropped_total|reason=backlog") == 1


def test_closing_ends_what_waits_for_the_engine() -> None:
    shelf = Shelf()
    hashes = hashes_of(1)
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (node,):
        node.store(hashes, [0])
        node.pool.find("r", hashes, (0,))
        assert isinstance(node.event(), PrefixFound)
        node.pool.close()
        assert node.event() == PrefixLoaded("r", 0)
        node.pool.find("after", hashes, (0,))
        assert node.event() == PrefixLoaded("after", 0)


class StrictHandoff(NullConnector):
    """A fake: takes loads that were begun with it, as a peer-to-peer connector asserts."""

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        self.begun = load_id

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        assert all(load.load_id == self.begun for load in loads), loads


def next_event(connector: PooledConnector) -> Event:
    """There must be no more than one by then."""
    events: list[Event] = []

    def has_come() -> bool:
        events.extend(connector.poll())
        return bool(events)

    wait_until(has_come, lambda: "no event came")
    (event,) = events
    return event


def test_a_search_that_ends_before_its_blocks_are_reserved_is_not_handed_to_the_handoff() -> None:
    """With overlapped steps a LoadSpec waits behind a running step; the client may hang up meanwhile."""
    shelf = Shelf()
    hashes = hashes_of(3)
    settings = replace(POOL_CONTEXT, options=(("handoff", f"{__name__}:StrictHandoff"),))
    with nodes(lambda: MemoryStore(shelf), POOL_CONTEXT) as (other,):
        other.store(hashes, [0, 1, 2])
    with closing(PooledConnector(settings, lambda: MemoryStore(shelf))) as connector:
        connector.register_kv_cache(make_cache(LAYOUT, NUM_BLOCKS))
        connector.begin_load("load", TICKET, HANG_S)
        connector.pool.find("search", hashes, (0,))
        assert next_event(connector) == PrefixFound("search", 3 * SIZE)
        connector.pool.cancel("search")
        assert next_event(connector) == PrefixLoaded("search", 0)
        connector.recv_before([LoadSpec("search", runs(0, (7, 8, 9)), 3 * SIZE), LoadSpec("load", runs(0, (1,)), 5)])


@pytest.mark.parametrize("default", ["lm://127.0.0.1:6500", "mooncake://127.0.0.1:50051"])
def test_urls_of_pools_are_read(default: str) -> None:
    scheme = default.partition(":")[0]
    assert pool_address(POOL_CONTEXT, default) == ("127.0.0.1", int(default.rpartition(":")[2]))
    for url, address in (
        (f"{scheme}://10.0.0.9:1", ("10.0.0.9", 1)),
        (f"{scheme}://[fd00::9]:65535", ("fd00::9", 65535)),
    ):
        assert pool_address(replace(POOL_CONTEXT, options=(("pool_url", url),)), default) == address
