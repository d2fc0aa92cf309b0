"""Prompt prefixes on their way from the pool into this engine's prefix cache, before the rest is computed.

A request whose prompt the pool may know is parked, and its search, as a table:

    state      event                  becomes
    searching  PrefixFound            wanting blocks (`reserve`)
    wanting    blocks are reserved    loading
    any        PrefixLoaded           over: what came is cached, and the request goes on as if it had just been admitted
    any        the request ends       an orphan: its search is cancelled, its blocks quarantined until PrefixLoaded

The blocks reach the request through the prefix cache: a prefix that came too late, or only in part, differs in nothing
from one that was not cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from pd_connectors.base import PrefixFound, PrefixLoaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.sequence import Request
    from pd_connectors.base import Pool


@dataclass(slots=True, eq=False)
class Recall:
    """One search. `go_on` is called once, when it is over, with its request still parked."""

    request: Request
    load_id: str
    go_on: Callable[[Request], None]
    num_wanted: int = 0  # tokens found and not reserved yet; 0: none


class PoolSearches:
    """All searches of one engine. With no pool every request goes its way at once."""

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._serials = count(1)
        self._by_load: dict[str, Recall | None] = {}  # None: an orphan
        self._by_request: dict[Request, Recall] = {}

    @property
    def num_orphans(self) -> int:
        """Searches whose request is gone."""
        return len(self._by_load) - len(self._by_request)

    def admit(self, request: Request, scheduler: Scheduler) -> None:
        """Queue a request whose prompt is computed here, after a look into the pool. Raises Overloaded."""
        if self._pool is None:
            scheduler.add(request)
            return
        scheduler.park(request)
        if not self.start(request, scheduler, scheduler.fall_back_to_local):
            scheduler.fall_back_to_local(request)

    def start(self, request: Request, scheduler: Scheduler, go_on: Callable[[Request], None]) -> bool:
        """Search for a parked prompt. False when there is nothing to search, or nowhere: `go_on` is not called then."""
        if self._pool is None:
            return False
        hashes, num_here = scheduler.missing(request)
        if not hashes:
            return False
        recall = Recall(request, f"{request.request_id}@{next(self._serials)}", go_on)
        self._by_load[recall.load_id] = self._by_request[request] = recall
        self._pool.find(recall.load_id, hashes, num_here)
        return True

    def reserve(self, scheduler: Scheduler) -> None:
        """Blocks for what was found, best claim first. Called before each step."""
        wanting = [recall for recall in self._by_request.values() if recall.num_wanted]
        for recall in sorted(wanting, key=lambda recall: recall.request.claim):
            recall.request.load_id = recall.load_id
            if scheduler.reserve(recall.request, recall.num_wanted) is not None:
                recall.num_wanted = 0

    def take(self, event: PrefixFound | PrefixLoaded, scheduler: Scheduler) -> None:
        """Carry out what the pool has to say."""
        recall = self._by_load.get(event.load_id)
        if isinstance(event, PrefixFound):
            if recall is not None:
                recall.num_wanted = event.num_tokens
            return
        self._by_load.pop(event.load_id, None)
        if recall is None:
            scheduler.drain(event.load_id)
            return
        del self._by_request[recall.request]
        scheduler.admit_prefix(recall.request, event.num_tokens)
        recall.go_on(recall.request)

    def forget(self, request: Request) -> None:
        """The request has ended. Idempotent."""
        recall = self._by_request.pop(request, None)
        if recall is not None:
            assert self._pool is not None
            self._by_load[recall.load_id] = None
            self._pool.cancel(recall.load_id)
