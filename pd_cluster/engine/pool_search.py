"""Loads of prompt prefixes from the pool into this engine's prefix cache, before the rest is computed.

A request is parked while the pool is searched for its prompt. The search, as a table:

    state      event                  becomes
    searching  PrefixFound            wanting blocks (`reserve`)
    wanting    blocks are reserved    loading
    any        PrefixLoaded           over: the prefix is cached; the request goes on as if it had just been admitted
    any        the request ends       an orphan: its search is cancelled, its blocks quarantined until PrefixLoaded

The blocks reach the request through the prefix cache, so a prefix that came after its deadline, or in part, is like one
that was not cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from pd_connectors.base import PrefixFound, PrefixLoaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.engine.disk_tier import DiskTier
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request
    from pd_connectors.base import Pool


@dataclass(slots=True, eq=False)
class PoolSearch:
    """One search. `go_on` is called once, when the search is over; its request is still parked then."""

    request: Request
    load_id: str
    go_on: Callable[[Request], None]
    num_wanted: int = 0  # tokens found and not reserved yet; 0: none


class PoolSearches:
    """The searches of one engine. Without a pool there are none."""

    def __init__(self, pool: Pool | None, scheduler: Scheduler, disk: DiskTier | None = None) -> None:
        self._pool, self._disk = pool, disk
        self._scheduler = scheduler
        self._serials = count(1)
        self._by_load: dict[str, PoolSearch | None] = {}  # None: an orphan
        self._by_request: dict[Request, PoolSearch] = {}
        self.wants_blocks = False  # some search has found tokens and has no blocks for them: call `reserve`

    @property
    def num_orphans(self) -> int:
        """The number of searches without a request."""
        return len(self._by_load) - len(self._by_request)

    def admit(self, request: Request) -> None:
        """Queue a request for prefill here, after a read of the disk and a search of the pool. Raises Overloaded."""
        if self._pool is None and self._disk is None:
            self._scheduler.add(request)
            return
        self._scheduler.park(request)
        if self._disk is None or not self._disk.start(request, self._go_on):
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        if not self.start(request, self._scheduler.fall_back_to_local):
            self._scheduler.fall_back_to_local(request)

    def start(self, request: Request, go_on: Callable[[Request], None]) -> bool:
        """Search for a parked prompt. Returns False, and never calls `go_on`, without a pool or missing blocks."""
        if self._pool is None:
            return False
        hashes, first_blocks = self._scheduler.missing(request)
        if not hashes:
            return False
        search = PoolSearch(request, f"{request.request_id}@{next(self._serials)}", go_on)
        self._by_load[search.load_id] = self._by_request[request] = search
        self._pool.find(search.load_id, hashes, first_blocks)
        return True

    def reserve(self) -> None:
        """Reserve blocks for found tokens, best claim first. Called before each step in which `wants_blocks`."""
        self.wants_blocks = False
        wanting = [search for search in self._by_request.values() if search.num_wanted]
        for search in sorted(wanting, key=lambda search: search.request.claim):
            search.request.load_id = search.load_id
            if self._scheduler.reserve(search.request, search.num_wanted) is None:
                self.wants_blocks = True
            else:
                search.num_wanted = 0

    def take(self, event: PrefixFound | PrefixLoaded) -> None:
        """Handle the pool's events."""
        search = self._by_load.get(event.load_id)
        if isinstance(event, PrefixFound):
            if search is not None:
                search.num_wanted = event.num_tokens
                self.wants_blocks = True
            return
        self._by_load.pop(event.load_id, None)
        if search is None:
            self._scheduler.drain(event.load_id)
            return
        del self._by_request[search.request]
        self._scheduler.admit_prefix(search.request, event.num_tokens)
        search.go_on(search.request)

    def forget(self, request: Request) -> None:
        """Cancel the search of a request that has ended. Idempotent."""
        if self._disk is not None:
            self._disk.forget(request)
        search = self._by_request.pop(request, None)
        if search is not None:
            assert self._pool is not None
            self._by_load[search.load_id] = None
            self._pool.cancel(search.load_id)
