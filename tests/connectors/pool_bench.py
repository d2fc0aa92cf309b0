"""A StorePool with everything around it in plain reach: a cache, a store in memory with faults, a clock to set."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from pd_connectors.base import CachedBlock, CacheDescription, Event, LoadSpec, PrefixFound, PrefixLoaded
from pd_connectors.pool import PoolLimits, StorePool
from pd_connectors.protocol.hashing import extend_hashes, root_hash
from pd_connectors.store import KVStore, ObjectName, StoreUnavailable
from tests.connectors.layouts import full_layout, make_cache, prefix_runs
from tests.connectors.simulation import CONTEXT
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from pd_connectors.base import ConnectorContext
    from pd_connectors.protocol.layout import BlockLayout

LAYOUT = full_layout(num_kv_heads=2, num_layers=3, head_dim=4)
POOL_CONTEXT = replace(CONTEXT, layout=LAYOUT)
NUM_BLOCKS = 16
DEADLINE_S = HANG_S


def pool_layout(dtype: str) -> BlockLayout:
    """LAYOUT, of another dtype."""
    return full_layout(num_kv_heads=2, num_layers=3, head_dim=4, dtype=dtype)


@dataclass
class Shelf:
    """What a store in memory holds, and its faults."""

    objects: dict[ObjectName, bytearray] = field(default_factory=dict)
    is_up: bool = True
    num_calls: int = 0
    num_waiting: int = 0  # calls at the gate
    gate: threading.Event = field(default_factory=threading.Event)  # clear: every call waits

    def __post_init__(self) -> None:
        self.gate.set()

    def enter(self) -> None:
        self.num_calls += 1
        self.num_waiting += 1
        assert self.gate.wait(DEADLINE_S)
        self.num_waiting -= 1
        if not self.is_up:
            raise StoreUnavailable("switched off")


class MemoryStore(KVStore):
    """One client of a shelf."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        self._shelf.enter()
        return [name in self._shelf.objects for name in names]

    def get(self, names: Sequence[ObjectName]) -> Generator[bytearray | None, None, None]:
        for name in names:
            self._shelf.enter()
            yield self._shelf.objects.get(name)

    def put(self, objects: Sequence[tuple[ObjectName, bytes]]) -> int:
        self._shelf.enter()
        self._shelf.objects.update((name, bytearray(sealed)) for name, sealed in objects)
        return len(objects)

    def close(self) -> None: ...


class Node:
    """One engine's pool over a cache of random numbers."""

    def __init__(
        self,
        open_store: Callable[[], KVStore],
        seed: int,
        context: ConnectorContext = POOL_CONTEXT,
        limits: PoolLimits | None = None,
        device: str = "cpu",
    ) -> None:
        self.now_s = 100.0
        self.layout = context.layout
        random = torch.Generator().manual_seed(seed)
        empty = make_cache(context.layout, NUM_BLOCKS).tensors
        self.caches = tuple(torch.randn(like.shape, generator=random).to(device, like.dtype) for like in empty)
        self.cache = self.caches[0]
        self.pool = StorePool(context, open_store, limits or PoolLimits(), lambda: self.now_s)
        self._changed = threading.Event()
        self.pool.set_waker(self._changed.set)
        self.pool.open(CacheDescription(self.caches, context.layout))

    def store(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Offer blocks and wait until they were sent or dropped."""
        pairs = list(zip(hashes, block_ids, strict=True))
        self.pool.store([CachedBlock(*pair, group) for group in range(len(self.caches)) for pair in pairs])
        self.wait_sent()

    def wait_sent(self) -> None:
        poll = threading.Event()
        for _ in range(int(DEADLINE_S / 0.002)):
            if not self.stat("pool_backlog_bytes"):
                return
            poll.wait(0.002)
        raise AssertionError("the backlog was not sent")

    def event(self) -> Event:
        """The next one; there must be no more than one by then."""
        while not (events := self.pool.take_events()):
            assert self._changed.wait(DEADLINE_S), "no event came"
            self._changed.clear()
        assert len(events) == 1, events
        return events[0]

    def recall(self, hashes: Sequence[bytes], block_ids: Sequence[int], first_block: int = 0, name: str = "r") -> int:
        """Search, load what is found into `block_ids` (for blocks from `first_block` on). Returns the tokens loaded."""
        self.pool.find(name, hashes, (first_block,) * len(self.caches))
        event = self.event()
        if isinstance(event, PrefixFound):
            runs = prefix_runs(self.layout, first_block, event.num_tokens, block_ids)
            assert self.pool.load(LoadSpec(name, runs, event.num_tokens))
            event = self.event()
        assert isinstance(event, PrefixLoaded), event
        return event.num_tokens

    def stat(self, name: str) -> float:
        return self.pool.stats()[name]

    def misses(self) -> dict[str, float]:
        """Those that were counted."""
        prefix = "pool_misses_total|reason="
        found = {name.removeprefix(prefix): n for name, n in self.pool.stats().items() if name.startswith(prefix)}
        return {reason: number for reason, number in found.items() if number}


@contextmanager
def nodes(
    open_store: Callable[[], KVStore],
    *contexts: ConnectorContext,
    limits: PoolLimits | None = None,
    device: str = "cpu",
) -> Iterator[list[Node]]:
    """One for each context, closed at the end: each search has ended by then."""
    opened = [Node(open_store, seed, context, limits, device) for seed, context in enumerate(contexts)]
    try:
        yield opened
    finally:
        for node in opened:
            node.pool.close()
            assert node.stat("pool_searches") == 0


def hashes_of(num_blocks: int, salt: str = "", seed: int = 0) -> list[bytes]:
    """The chained hashes of some prompt."""
    size = LAYOUT.block_size
    return extend_hashes(root_hash(salt), [seed * 1000 + i for i in range(num_blocks * size)], size)
