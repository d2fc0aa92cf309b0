"""Prefixes from a pool, against a worker that knows which history every cell holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product, takewhile
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.engine.kv_transfers import KvTransfers
from pd_cluster.engine.pool_search import PoolSearches
from pd_cluster.protocol.messages import FinishReason, FromEngine, NeedsPrefill, Work
from pd_connectors.base import CachedBlock, LoadSpec, Pool, PrefixFound, PrefixLoaded
from pd_connectors.null import NullConnector
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from tests.scheduling.side_stream import GARBAGE
from tests.scheduling.simulated_client import Client
from tests.scheduling.simulation import BLOCK_SIZE, history, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.scheduler import Update
    from pd_cluster.scheduling.sequence import Request


ACTIONS = ("submit", "abort", "found", "found", "over", "over", "forget", "lease", "step", "step", "step")


@dataclass
class Search:
    hashes: list[bytes]
    first_block: int
    is_found: bool = False
    load: LoadSpec | None = None
    is_cancelled: bool = False


@dataclass
class FakePool(Pool):
    """Holds what each block's cells held. The test says when a search moves on, and how far."""

    cells: dict[bytes, list[int]] = field(default_factory=dict)
    searches: dict[str, Search] = field(default_factory=dict)
    num_found: int = 0
    num_loaded_blocks: int = 0

    def find(self, load_id: str, block_hashes: Sequence[bytes], first_blocks: Sequence[int]) -> None:
        assert load_id not in self.searches
        [first_block] = first_blocks  # of the one group
        assert first_block < len(block_hashes)
        self.searches[load_id] = Search(list(block_hashes), first_block)

    def cancel(self, load_id: str) -> None:
        if load_id in self.searches:
            self.searches[load_id].is_cancelled = True

    def store(self, blocks: Sequence[CachedBlock]) -> None:
        raise AssertionError("the world stores for itself")

    def know(self, tokens: Sequence[int], salt: str) -> None:
        """As if some other engine had computed this prompt."""
        cells = history(tokens)
        for index, block_hash in enumerate(extend_hashes(root_hash(salt), tokens, BLOCK_SIZE)):
            self.cells[block_hash] = cells[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]

    def num_there(self, search: Search) -> int:
        """Blocks from the prompt's start on, as the search would find them."""
        number = search.first_block
        while number < len(search.hashes) and search.hashes[number] in self.cells:
            number += 1
        return number


class PooledWorld(World):
    """A world in which requests look into a pool first; all that it computes goes into the pool."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool = FakePool()
        self.searches = PoolSearches(self.pool, self.scheduler)
        self.reserve_found = self.searches.reserve  # called before each step

    def submit(self, message: AddRequest) -> Request:
        self.admission.validate(message)
        request = self.request(message)
        self.searches.admit(request)
        if request.lease_id is not None:
            self.leases[request.lease_id] = request
        self.clients[request.request_id] = Client(request, [[] for _ in request.sequences], [None] * message.sampling.n)
        return request

    def take(self, *updates: Update | None) -> None:
        super().take(*updates)
        for update in updates:
            if update is not None and update.finished:
                self.searches.forget(update.request)

    def start_step(self) -> Batch:
        self.reserve_found()
        batch = super().start_step()
        for load in batch.loads:
            # as every connector asserts
            assert load.runs[0].span.stop == self.blocks.pools[0].blocks_for(load.num_tokens), load
            if load.load_id in self.pool.searches:
                self.pool.searches[load.load_id].load = load
        return batch

    def _retire(self) -> None:
        super()._retire()
        for block in self.scheduler.take_news():
            cells = [self.worker.device[0, block.block_id, slot] for slot in range(BLOCK_SIZE)]
            assert self.pool.cells.setdefault(block.hash, cells) == cells, "two contents under one name"

    # the pool's answers

    def found(self, load_id: str) -> None:
        """The search moves on: to PrefixFound, or to its end when there is nothing."""
        search = self.pool.searches[load_id]
        number = self.pool.num_there(search)
        if number == search.first_block or search.is_cancelled:
            self.over(load_id, 0)
        else:
            search.is_found = True
            self.pool.num_found += 1
            self.searches.take(PrefixFound(load_id, number * BLOCK_SIZE))

    def over(self, load_id: str, num_blocks: int) -> None:
        """The search ends; of its load's blocks `num_blocks` are good, and the next one may be half written."""
        load = self.pool.searches.pop(load_id)
        num_tokens = 0
        if load.load is not None:
            names = load.hashes[load.load.runs[0].first_block : load.load.runs[0].first_block + num_blocks]
            there = list(takewhile(lambda name: name in self.pool.cells, names))
            for index, block_id in enumerate(load.load.runs[0].block_ids[: len(there) + 1]):
                cells = self.pool.cells[there[index]] if index < len(there) else [GARBAGE] * BLOCK_SIZE
                for slot in range(BLOCK_SIZE):
                    self.worker.device[0, block_id, slot] = cells[slot]
            num_tokens = (load.load.runs[0].first_block + len(there)) * BLOCK_SIZE
            self.pool.num_loaded_blocks += len(there)
        self.searches.take(PrefixLoaded(load_id, num_tokens))

    def answer_all(self) -> None:
        """Everything that is stored comes, everything that is not is missing."""
        for load_id, search in list(self.pool.searches.items()):
            if search.load is not None:
                self.over(load_id, len(search.load.runs[0].block_ids))
            elif not search.is_found:
                self.found(load_id)
            elif search.is_cancelled:
                self.over(load_id, 0)

    def finish(self, limit: int = 3000) -> None:
        """Until no request is left."""
        for _ in range(limit):
            self.answer_all()
            self.reserve_found()
            if self.scheduler.has_work:
                self.start_step()
            else:
                self.settle()
                if self.scheduler.idle and not self.pool.searches:
                    return
            self.check()
        raise AssertionError(f"not idle after {limit} steps")


def fill(world: PooledWorld, num_tokens: int, family: int = 0) -> None:
    """Have the pool know a prompt, and this engine's own cache forget it."""
    world.submit(message(f"fill-{num_tokens}-{family}", prompt(num_tokens, family), max_tokens=1))
    world.finish()
    for index in range(3):  # other prompts push it out
        world.submit(message(f"push-{family}-{index}", prompt(140, family + 1 + index), max_tokens=1))
        world.finish()


@pytest.mark.parametrize("work", [Work.GENERATE, Work.PREFILL])
@pytest.mark.parametrize("n", [1, 3])
def test_only_what_the_pool_lacks_is_computed(work: Work, n: int) -> None:
    world = PooledWorld(num_blocks=16)
    fill(world, 70)
    before = world.worker.num_tokens_computed
    request = world.submit(message("r", prompt(100), work=work, max_tokens=1, n=n))
    assert world.scheduler.num_waiting_for_remote_kv == 1
    world.finish()
    assert world.worker.num_tokens_computed - before == 100 - 64
    assert request.num_cached_tokens == 64
    if work is Work.PREFILL:
        world.end_lease("lease-r")
    world.check_empty()


def test_a_prompt_that_is_cached_or_short_is_not_searched_for() -> None:
    world = PooledWorld()
    world.submit(message("short", prompt(BLOCK_SIZE)))
    world.finish()
    world.submit(message("long", prompt(40, 1)))
    world.finish()
    assert world.pool.num_found == 0
    world.submit(message("again", prompt(40, 1)))
    assert not world.pool.searches
    world.finish()
    world.check_empty()


def test_a_prefix_that_breaks_off_is_completed_here() -> None:
    world = PooledWorld(num_blocks=16)
    fill(world, 90)
    before = world.worker.num_tokens_computed
    world.submit(message("r", prompt(90), max_tokens=1))
    (load_id,) = world.pool.searches
    world.found(load_id)
    world.start_step()
    world.over(load_id, 2)
    world.finish()
    assert world.worker.num_tokens_computed - before == 90 - 32
    world.check_empty()


def test_an_abort_during_a_load_quarantines_its_blocks_until_it_is_over() -> None:
    world = PooledWorld(num_blocks=16)
    fill(world, 90)
    request = world.submit(message("r", prompt(90)))
    (load_id,) = world.pool.searches
    world.found(load_id)
    world.start_step()
    world.take(world.scheduler.abort(request, None, FinishReason.ABORT))
    assert world.blocks.stats().quarantined == 5
    assert world.searches.num_orphans == 1
    world.over(load_id, 3)
    assert world.searches.num_orphans == 0
    world.check_empty()


def test_the_last_tokens_block_is_left_alone() -> None:
    """It is computed for its logits."""
    world = PooledWorld(num_blocks=16)
    fill(world, 64)
    world.submit(message("r", prompt(64), max_tokens=1))
    assert [len(search.hashes) for search in world.pool.searches.values()] == [3]
    world.finish()
    world.check_empty()


def test_a_prefix_that_was_computed_here_while_it_was_searched_for_is_not_loaded() -> None:
    """The search found three blocks; by the time that blocks are reserved the cache has six."""
    world = PooledWorld(num_blocks=32)
    world.pool.know(prompt(48), "")
    world.submit(message("searches", prompt(100), max_tokens=1))
    (load_id,) = world.pool.searches
    world.scheduler.add(first := world.request(message("computes", prompt(100), max_tokens=1)))
    world.clients["computes"] = Client(first, [[]], [None])
    while not first.finished:
        world.start_step()
    world.searches.take(PrefixFound(load_id, 48))
    (load,) = world.start_step().loads
    assert (load.runs[0].first_block, load.runs[0].block_ids, load.num_tokens) == (6, (), 96)
    world.over(load_id, 0)
    world.finish()
    world.check_empty()


class DecodeNode:
    """A world behind `KvTransfers`: TAKE_OVER requests without a ticket, as D-first sends them."""

    def __init__(self, num_blocks: int) -> None:
        self.world = PooledWorld(num_blocks=num_blocks)
        self.replies: list[FromEngine] = []
        connector = NullConnector.__new__(NullConnector)  # nothing of a context's is needed
        self.transfers = KvTransfers(
            connector, self.world.scheduler, self.replies.append, self.world.take, self.world.pool
        )
        self.world.searches, self.world.reserve_found = self.transfers._searches, self.transfers.reserve

    def take_over(self, name: str, tokens: Sequence[int], min_remote_tokens: int = 1) -> Request:
        added = msgspec.structs.replace(message(name, tokens, work=Work.TAKE_OVER), min_remote_tokens=min_remote_tokens)
        request = self.world.request(added)
        self.transfers.admit(request)
        self.world.clients[name] = Client(request, [[] for _ in request.sequences], [None])
        return request

    def fill_memory(self) -> None:
        """Start a request that leaves no memory for another prompt until it ends."""
        world = self.world
        world.searches.admit(runner := world.request(message("runner", prompt(100), max_tokens=40)))
        world.clients["runner"] = Client(runner, [[]], [None])
        while not runner.is_parted:
            world.answer_all()
            world.start_step()


def test_d_asks_its_pool_before_it_asks_a_prefill_node() -> None:
    node = DecodeNode(16)
    node.world.pool.know(prompt(70), "")
    node.take_over("r", prompt(100))
    assert node.replies == []
    (load_id,) = node.world.pool.searches
    node.world.found(load_id)
    node.world.start_step()
    node.world.over(load_id, 4)
    assert node.replies == [NeedsPrefill("r", 64)]
    node.transfers.prefill_locally("r")
    assert not node.world.pool.searches, "it was asked already"
    node.world.finish()
    assert node.world.worker.num_tokens_computed == 100 - 64 + 3
    node.world.check_empty()


def test_a_request_that_ends_gives_its_search_up() -> None:
    node = DecodeNode(16)
    node.world.pool.know(prompt(70), "")
    request = node.take_over("r", prompt(100))
    ((load_id, search),) = node.world.pool.searches.items()
    node.world.scheduler.abort(request)
    node.transfers.forget(request)
    assert search.is_cancelled
    assert node.transfers.num_orphans == 1
    node.world.found(load_id)
    assert node.transfers.num_orphans == 0
    assert node.world.blocks.stats().in_use == 0


def test_d_prefills_what_is_left_when_that_is_little() -> None:
    node = DecodeNode(16)
    node.world.pool.know(prompt(100), "")
    node.take_over("r", prompt(100), min_remote_tokens=20)
    node.world.finish()
    assert node.replies == []
    assert node.world.worker.num_tokens_computed == 100 - 96 + 3
    node.world.check_empty()


def test_after_half_a_prefix_the_rest_can_still_be_loaded_from_a_prefill_node() -> None:
    node = DecodeNode(16)
    world = node.world
    world.pool.know(prompt(100), "")
    request = node.take_over("r", prompt(100))
    (load_id,) = world.pool.searches
    world.found(load_id)
    world.start_step()
    world.over(load_id, 2)
    assert node.replies == [NeedsPrefill("r", 32)]
    world.check()
    load = world.reserve(request)
    assert load is not None
    assert (load.runs[0].first_block, len(load.runs[0].block_ids), load.num_tokens) == (2, 5, 100)
    world.give_first_tokens(request)
    world.finish_load(load)
    world.finish()
    world.check_empty()


def test_a_search_that_ends_before_it_got_memory_blocks_no_later_request() -> None:
    node = DecodeNode(10)
    world = node.world
    world.pool.know(prompt(120, 1), "")
    node.fill_memory()
    node.take_over("r", prompt(120, 1))
    (load_id,) = world.pool.searches
    world.found(load_id)
    world.start_step()
    assert world.pool.searches[load_id].load is None, "there is memory for the runner alone"
    world.over(load_id, 0)
    assert node.replies == [NeedsPrefill("r", 0)]
    small = world.submit(message("small", prompt(10, 2), max_tokens=1))
    world.start_step()
    assert small.finished
    node.transfers.prefill_locally("r")
    world.finish()
    world.check_empty()


def test_a_search_that_finds_no_memory_gets_some_later() -> None:
    node = DecodeNode(10)
    world = node.world
    world.pool.know(prompt(120, 1), "")
    node.fill_memory()
    node.take_over("r", prompt(120, 1), min_remote_tokens=20)
    (load_id,) = world.pool.searches
    world.found(load_id)
    world.start_step()
    assert world.pool.searches[load_id].load is None, "there is memory for the runner alone"
    world.finish(100)
    assert world.pool.num_loaded_blocks == 7
    world.check_empty()


def test_without_prefix_caching_nothing_is_searched_for() -> None:
    world = PooledWorld(prefix_caching=False)
    world.submit(message("r", prompt(60)))
    assert not world.pool.searches
    world.finish()
    world.check_empty()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 32), depth=st.sampled_from([1, 2]), num_host_blocks=st.sampled_from([0, 9]))
def test_whatever_the_pool_does_every_request_gets_its_own_tokens(seed: int, depth: int, num_host_blocks: int) -> None:
    draw = random.Random(seed)
    world = PooledWorld(num_blocks=14, num_host_blocks=num_host_blocks, max_num_batched_tokens=40, depth=depth)
    for family, salt in product(range(4), ("", "x", "y")):
        world.pool.know(prompt(120, family), salt)
    requests: list[Request] = []
    for number in range(80):
        match draw.choice(ACTIONS):
            case "submit":
                work = draw.choice((Work.GENERATE, Work.GENERATE, Work.PREFILL))
                tokens = prompt(draw.randint(1, 120), draw.randrange(4))
                salt, n, most = draw.choice(("", "x", "y")), draw.choice((1, 1, 2)), draw.randint(1, 20)
                requests.append(world.submit(message(f"r{number}", tokens, work=work, n=n, max_tokens=most, salt=salt)))
            case "abort" if requests:
                request = draw.choice(requests)
                if request.lease_id in world.leases and not request.finished:
                    world.end_lease(request.lease_id)
                else:
                    world.take(world.scheduler.abort(request, None, FinishReason.ABORT))
            case "found" if waiting := [i for i, search in world.pool.searches.items() if not search.is_found]:
                world.found(draw.choice(waiting))
            case "over" if loading := [i for i, search in world.pool.searches.items() if search.load is not None]:
                load_id = draw.choice(loading)
                load = world.pool.searches[load_id].load
                assert load is not None
                world.over(load_id, draw.randint(0, len(load.runs[0].block_ids)))
            case "forget" if world.pool.cells and not world.pool.searches:
                del world.pool.cells[draw.choice(list(world.pool.cells))]
            case "lease" if ended := [i for i, request in world.leases.items() if request.finished]:
                world.end_lease(draw.choice(ended))
            case "step":
                world.start_step()
        world.check()
    for lease_id in list(world.leases):
        world.end_lease(lease_id)
    world.finish()
    world.check_empty()
