"""The pool of an engine of several ranks: a StorePool on each, which reads and stores that rank's heads.

Rank 0's RankedPool asks all ranks alike. A prefix is found, and loaded, as far as every rank has it: a rank that found
more may lack what it needs at the smaller boundary, and then loads less. A search ends when it has ended on the last
rank, because until then something may land in its blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.base import CachedBlock, Event, LoadSpec, Pool, PrefixFound, PrefixLoaded
from pd_connectors.protocol.layout import BlockRun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.base import CacheDescription
    from pd_connectors.pool import StorePool
    from pd_connectors.rank_port import RankPort


class _Find(msgspec.Struct, frozen=True, tag=True):
    load_id: str
    block_hashes: tuple[bytes, ...]
    first_blocks: tuple[int, ...]


class _Load(msgspec.Struct, frozen=True, tag=True):
    load_id: str
    runs: tuple[BlockRun, ...]
    num_tokens: int


class _Cancel(msgspec.Struct, frozen=True, tag=True):
    load_id: str


class _Store(msgspec.Struct, frozen=True, tag=True):
    blocks: tuple[CachedBlock, ...]


class _Report(msgspec.Struct, frozen=True):
    """A PrefixFound or PrefixLoaded of a further rank."""

    load_id: str
    num_tokens: int
    is_end: bool


_Order = _Find | _Load | _Cancel | _Store
_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(_Order).decode
_decode_report = msgspec.msgpack.Decoder(_Report).decode


def _carry_out(order: _Order, pool: StorePool) -> None:
    match order:
        case _Find(load_id, block_hashes, first_blocks):
            pool.find(load_id, block_hashes, first_blocks)
        case _Load(load_id, runs, num_tokens):
            pool.load(LoadSpec(load_id, runs, num_tokens))
        case _Cancel(load_id):
            pool.cancel(load_id)
        case _Store(blocks):
            pool.store(blocks)


@dataclass(slots=True)
class _Search:
    found: dict[int, int] = field(default_factory=dict)  # rank -> tokens
    ended: dict[int, int] = field(default_factory=dict)
    is_cancelled: bool = False


class RankedPool(Pool):
    """pool: rank 0's. ports: index i leads to the RankPool of rank i + 1. With no port it only passes on."""

    def __init__(self, pool: StorePool, ports: Sequence[RankPort]) -> None:
        self._pool = pool
        self._ports = ports
        self._searches: dict[str, _Search] = {}
        self._reports: deque[tuple[int, _Report]] = deque()
        self._wake: Callable[[], None] = _no_waker
        for rank, port in enumerate(ports, start=1):
            port.set_handler(partial(self._receive, rank))

    def open(self, cache: CacheDescription) -> None:
        """Start rank 0's pool. Raises what it raises."""
        self._pool.open(cache)

    def find(self, load_id: str, block_hashes: Sequence[bytes], first_blocks: Sequence[int]) -> None:
        self._searches[load_id] = _Search()
        self._give(_Find(load_id, tuple(block_hashes), tuple(first_blocks)))

    def load(self, spec: LoadSpec) -> bool:
        """See StorePool.load."""
        is_known = spec.load_id in self._searches
        if is_known:
            self._give(_Load(spec.load_id, spec.runs, spec.num_tokens))
        return is_known

    def cancel(self, load_id: str) -> None:
        if load_id in self._searches:
            self._give(_Cancel(load_id))

    def store(self, blocks: Sequence[CachedBlock]) -> None:
        self._give(_Store(tuple(blocks)))

    def settle(self) -> None:
        """See StorePool.settle. A further rank settles by itself before it takes orders that write blocks."""
        self._pool.settle()

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events: list[Event] = []
        for event in self._pool.take_events():
            assert isinstance(event, PrefixFound | PrefixLoaded)
            events += self._on_report(0, _report(event))
        while self._reports:
            events += self._on_report(*self._reports.popleft())
        return events

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See SchedulerHalf.set_waker."""
        self._wake = wake
        self._pool.set_waker(wake)

    def stats(self) -> dict[str, float]:
        """Rank 0's, which asks for the same blocks as the others."""
        return self._pool.stats()

    def close(self) -> None:
        """Close rank 0's pool. The other ranks' processes close theirs. Idempotent."""
        self._pool.close()

    def _give(self, order: _Order) -> None:
        for port in self._ports:
            port.send(_encode(order))
        _carry_out(order, self._pool)

    def _receive(self, rank: int, message: bytes) -> None:
        self._reports.append((rank, _decode_report(message)))
        self._wake()

    def _on_report(self, rank: int, report: _Report) -> list[Event]:
        search = self._searches.get(report.load_id)
        if search is None:
            return []
        (search.ended if report.is_end else search.found)[rank] = report.num_tokens
        num_ranks = len(self._ports) + 1
        if len(search.ended) == num_ranks:
            del self._searches[report.load_id]
            return [PrefixLoaded(report.load_id, min(search.ended.values()))]
        if not report.is_end and len(search.found) == num_ranks and not search.ended:
            return [PrefixFound(report.load_id, min(search.found.values()))]
        if report.is_end and len(search.found) < num_ranks and not search.is_cancelled:
            search.is_cancelled = True  # one rank has nothing, so nothing is found
            self._give(_Cancel(report.load_id))
        return []


class RankPool:
    """Has rank 0 drive a further rank's open pool through a port.

    Orders come on the thread that launches steps, so a copy of blocks is queued after the steps that wrote them.
    """

    def __init__(self, pool: StorePool, port: RankPort) -> None:
        self._pool = pool
        self._port = port
        self._reporting = threading.Lock()
        pool.set_waker(self._report)
        port.set_handler(self._take)

    def _take(self, message: bytes) -> None:
        order = _decode_order(message)
        if isinstance(order, _Load):
            self._pool.settle()
        _carry_out(order, self._pool)

    def _report(self) -> None:
        """Called by all threads of the pool, of which one at a time may take events."""
        with self._reporting:
            for event in self._pool.take_events():
                assert isinstance(event, PrefixFound | PrefixLoaded)
                self._port.send(_encode(_report(event)))


def _report(event: PrefixFound | PrefixLoaded) -> _Report:
    return _Report(event.load_id, event.num_tokens, isinstance(event, PrefixLoaded))


def _no_waker() -> None:
    """The waker until the engine sets its own: its step loop does not sleep yet."""
