"""One rank's pool over any KVStore. Searches and stores run on threads of their own: no step waits for a server.

The states of a search are in `search`. Two threads load. A third, the watch, ends searches at their deadline, because a
store may hang for much longer than a request should wait. While a search past its deadline holds each loading thread,
the pool counts as down.

A block of a group has one object for each part of its heads (`head_parts`). It counts as found, or as read, when all
its objects are. Which blocks a prefix needs, and which of them to ask for, is in `prefix_plan`.

Stores: what a step computed is copied at once (`block_staging`) and sent later by one thread. The backlog is bounded;
what does not fit is not stored, which costs a later request a prefill and nothing else.

After a failure the pool does not call the store for `retry_s`: every search is a miss at once, every block is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from pd_connectors.base import CachedBlock, Event, LoadSpec, Pool, PrefixFound, PrefixLoaded
from pd_connectors.block_staging import BlockStaging, Gathered, Inlet
from pd_connectors.prefix_plan import PrefixPlan
from pd_connectors.search import Miss, Search
from pd_connectors.store import HEADER_BYTES, KVStore, ObjectName, Sealer, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.base import CacheDescription, ConnectorContext
    from pd_connectors.prefix_plan import GroupBlock

logger = logging.getLogger(__name__)

NUM_LOADERS = 2  # searches at once: one waits for the network while the other checks digests
STORE_BATCH_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The limits of a pool's client.

    `deadline_s` bounds the time that the pool spends on one search, and so the time that a miss costs a request.
    """

    deadline_s: float = 5.0
    retry_s: float = 1.0
    backlog_bytes: int = 256 << 20
    close_s: float = 3.0


class _GivenUp(Exception):
    """A search ends now."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss)
        self.miss = miss


class _Offered(NamedTuple):
    """A block of one group, on its way from the cache to the store."""

    names: list[ObjectName]  # of its objects
    copy: Gathered
    place: int  # in the copy


class StorePool(Pool):
    """`open_store` is called once for each thread. Events are for the connector's `poll`."""

    def __init__(
        self,
        context: ConnectorContext,
        open_store: Callable[[], KVStore],
        limits: PoolLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._sealer = Sealer(context)
        self._plan = PrefixPlan(context.layout)
        self._block_bytes = [group.rank_bytes(context.layout.tp_size) for group in context.layout.groups]
        self._open_store = open_store
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for the watch
        self._searches: dict[str, Search] = {}  # not over
        self._jobs: SimpleQueue[Search | None] = SimpleQueue()
        self._offers: SimpleQueue[tuple[list[_Offered], int] | None] = SimpleQueue()  # of one `store`, and their bytes
        self._events: deque[Event] = deque()
        self._wake: Callable[[], None] = _no_waker
        self._retry_at_s = clock()
        self._held: list[Search | None] = [None] * NUM_LOADERS  # what each loading thread works on, over or not
        self._num_backlog_bytes = 0
        self._damaged: set[ObjectName] = set()  # found by loading threads; the storing thread replaces them
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._staging: list[BlockStaging] = []  # by group
        self._threads: list[threading.Thread] = []
        self._closing = threading.Event()

    def open(self, cache: CacheDescription) -> None:
        """Start the threads. Raises what `open_store` raises."""
        self._staging = [BlockStaging(tensor) for tensor in cache.tensors]
        for index in range(NUM_LOADERS):
            self._start_thread(
                f"pd-pool-load-{index}", partial(self._run_loader, index, self._open_store(), Inlet(cache))
            )
        self._start_thread("pd-pool-watch", self._run_watch)
        self._start_thread("pd-pool-store", partial(self._run_storer, self._open_store()))

    def close(self) -> None:
        """End every search, drop blocks that were not sent, join the threads. Idempotent."""
        if self._closing.is_set():
            return
        with self._changed:
            self._closing.set()
            self._changed.notify()
        for _ in range(NUM_LOADERS):
            self._jobs.put(None)
        self._offers.put(None)
        end_s = time.monotonic() + self._limits.close_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                logger.error("%s did not end within %g s", thread.name, self._limits.close_s)

    # the step loop's side

    def find(self, load_id: str, block_hashes: Sequence[bytes], first_blocks: Sequence[int]) -> None:
        search = Search(load_id, block_hashes, first_blocks, self._clock() + self._limits.deadline_s)
        with self._changed:
            self._searches[load_id] = search
            self._counts["pool_lookups_total"] += 1
            self._changed.notify()
        if self._is_down() or self._closing.is_set():
            self._end(search, Miss.UNAVAILABLE)
        else:
            self._jobs.put(search)

    def load(self, spec: LoadSpec) -> bool:
        """Read found blocks into reserved ones. False when the search is over, or is not one of this pool."""
        with self._changed:
            search = self._searches.get(spec.load_id)
            if search is None:
                return False
            assert search.spec is None, spec
            search.spec, search.order = spec, self._plan.in_order(spec.runs, spec.num_tokens)
            if not self._plan.partial:  # the engine's cache may have got more since `find`
                search.first_blocks = [run.first_block for run in spec.runs]
            search.due_s = self._clock() + self._limits.deadline_s
            search.is_found = False
            self._changed.notify()
        self._jobs.put(search)
        return True

    def cancel(self, load_id: str) -> None:
        with self._changed:
            search = self._searches.get(load_id)
            if search is not None:
                search.is_cancelled = True
                self._changed.notify()

    def store(self, blocks: Sequence[CachedBlock]) -> None:
        assert self._staging, "the cache was not registered"
        parts = self._sealer.parts
        blocks = [block for block in blocks if any(part.is_stored for part in parts[block.group])]
        if not blocks:
            return  # another rank has the same heads
        num_bytes = sum(self._block_bytes[block.group] + len(parts[block.group]) * HEADER_BYTES for block in blocks)
        with self._lock:
            reason = "unavailable" if self._is_down() else "backlog"
            if self._is_down() or self._num_backlog_bytes + num_bytes > self._limits.backlog_bytes:
                self._counts[f"pool_blocks_dropped_total|reason={reason}"] += len(blocks)
                return
            self._num_backlog_bytes += num_bytes
        offered = []
        for group, staging in enumerate(self._staging):
            if own := [block for block in blocks if block.group == group]:
                copy = staging.gather([block.block_id for block in own])
                names = [self._sealer.names(block.hash, group) for block in own]
                offered += [_Offered(each, copy, place) for place, each in enumerate(names)]
        self._offers.put((offered, num_bytes))

    def settle(self) -> None:
        """Wait until the copies of all earlier `store` calls are complete."""
        for staging in self._staging:
            staging.settle()

    def take_events(self) -> list[Event]:
        """Returns the events since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See SchedulerHalf.set_waker."""
        self._wake = wake

    def stats(self) -> dict[str, float]:
        """See Connector.stats."""
        with self._lock:
            gauges = {"pool_searches": float(len(self._searches)), "pool_backlog_bytes": float(self._num_backlog_bytes)}
            return {**_ZEROS, **self._counts, **gauges, "pool_up": float(not self._is_down())}

    # threads

    def _start_thread(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _is_down(self) -> bool:
        now_s = self._clock()
        return now_s < self._retry_at_s or all(held is not None and now_s >= held.due_s for held in self._held)

    def _went_down(self, error: StoreUnavailable) -> None:
        if not self._is_down():
            logger.warning("the pool is unavailable, trying again in %g s: %s", self._limits.retry_s, error)
        self._retry_at_s = self._clock() + self._limits.retry_s

    def _count(self, name: str, number: float) -> None:
        with self._lock:
            self._counts[name] += number

    def _run_watch(self) -> None:
        while True:
            with self._changed:
                now_s = self._clock()
                ends = [(search, why) for search in self._searches.values() if (why := self._why_end(search, now_s))]
                if not ends:
                    if self._closing.is_set():
                        return
                    dues_s = [search.due_s for search in self._searches.values() if not search.is_found]
                    self._changed.wait(min(dues_s) - now_s if dues_s else None)
            for search, why in ends:
                self._end(search, why)

    def _why_end(self, search: Search, now_s: float) -> Miss | None:
        return Miss.CANCELLED if self._closing.is_set() else search.why_end(now_s)

    def _run_loader(self, index: int, store: KVStore, inlet: Inlet) -> None:
        with closing(store):
            while (search := self._jobs.get()) is not None:
                if search.is_over:
                    continue
                self._held[index] = search
                try:
                    if search.spec is None:
                        self._probe(search, store)
                    else:
                        self._read(search, store, inlet)
                except _GivenUp as why:
                    self._end(search, why.miss)
                except StoreUnavailable as error:
                    self._went_down(error)
                    self._end(search, Miss.UNAVAILABLE)
                except Exception:  # a bug, ours or of the store's client, must not leave the request waiting
                    logger.exception("a search of the pool failed")
                    self._end(search, Miss.UNAVAILABLE)
                finally:
                    self._held[index] = None

    def _go_on(self, search: Search) -> None:
        """Raise _GivenUp when there is a reason to end the search now."""
        if miss := self._why_end(search, self._clock()) or (Miss.UNAVAILABLE if self._is_down() else None):
            raise _GivenUp(miss)

    def _names(self, search: Search, at: GroupBlock) -> list[ObjectName]:
        return self._sealer.names(self._plan.hash_of(at, search.hashes), at.group)

    def _probe(self, search: Search, store: KVStore) -> None:
        def are_there(blocks: list[GroupBlock]) -> list[bool]:
            self._go_on(search)
            return store.contains_all([self._names(search, at) for at in blocks])

        end = self._plan.end(len(search.hashes))
        found = self._plan.search(end, search.first_blocks, are_there)
        miss = Miss.ABSENT if found < end else None
        if found <= self._plan.begin(search.first_blocks):
            self._end(search, miss)
            return
        with self._lock:
            if search.is_over:
                return
            search.miss = miss
            search.is_found = True
            self._events.append(PrefixFound(search.load_id, found))
        self._wake()

    def _read(self, search: Search, store: KVStore, inlet: Inlet) -> None:
        started_s = self._clock()
        objects = [
            (name, part, block_id, part is self._sealer.parts[at.group][-1])
            for _, at, block_id in search.order
            for part, name in zip(self._sealer.parts[at.group], self._names(search, at), strict=True)
        ]
        try:
            self._go_on(search)
            with closing(store.get([name for name, *_ in objects])) as found:
                for (name, part, block_id, is_last), sealed in zip(objects, found, strict=True):
                    if sealed is None:
                        raise _GivenUp(Miss.LOST)
                    content = self._sealer.open(name, sealed)
                    if content is None:
                        self._damaged.add(name)
                        raise _GivenUp(Miss.DAMAGED)
                    self._go_on(search)
                    if not search.land(inlet, part, block_id, content, is_last=is_last):
                        break
        finally:
            self._count("pool_read_seconds_total", self._clock() - started_s)
        self._end(search, None)

    def _run_storer(self, store: KVStore) -> None:
        with closing(store):
            while (offer := self._offers.get()) is not None:
                blocks, num_bytes = offer
                try:
                    if not self._closing.is_set():
                        self._send(blocks, store)
                except StoreUnavailable as error:
                    self._went_down(error)
                    self._count("pool_blocks_dropped_total|reason=unavailable", len(blocks))
                except Exception:  # as in _run_loader
                    logger.exception("storing into the pool failed")
                    self._count("pool_blocks_dropped_total|reason=error", len(blocks))
                finally:
                    with self._lock:
                        self._num_backlog_bytes -= num_bytes

    def _send(self, blocks: list[_Offered], store: KVStore) -> None:
        """Send the blocks that the store lacks, and those that a loading thread found damaged: the same name always
        means the same content."""
        if self._is_down():
            self._count("pool_blocks_dropped_total|reason=unavailable", len(blocks))
            return
        pairs = zip(blocks, store.contains_all([block.names for block in blocks]), strict=True)
        new = [block for block, is_there in pairs if not (is_there and self._damaged.isdisjoint(block.names))]
        self._count("pool_blocks_known_total", len(blocks) - len(new))
        size = max(1, STORE_BATCH_BYTES // max(self._block_bytes))
        for batch in (new[start : start + size] for start in range(0, len(new), size)):
            for block in batch:
                block.copy.wait()
            objects = [
                (name, self._sealer.seal(name, block.copy.block(block.place, part.heads)))
                for block in batch
                for part, name in zip(self._sealer.parts[block.names[0].group], block.names, strict=True)
                if part.is_stored
            ]
            num_objects = store.put(objects)
            num_stored = num_objects * len(batch) // len(objects)
            if num_objects == len(objects):  # which ones were refused is not said: damaged ones stay known as damaged
                self._damaged.difference_update(name for name, _ in objects)
            self._count("pool_blocks_stored_total", num_stored)
            self._count("pool_blocks_dropped_total|reason=refused", len(batch) - num_stored)

    def _end(self, search: Search, miss: Miss | None) -> None:
        """End a search. Only the first call has an effect."""
        if not search.finish():
            return
        num_tokens, hit_tokens, num_bytes = 0, 0, 0
        if search.spec is not None:
            num_tokens = self._plan.loaded(search.order, search.num_read, search.spec.num_tokens)
            hit_tokens = max(0, num_tokens - self._plan.begin(search.first_blocks))
            num_bytes = sum(self._block_bytes[at.group] for _, at, _ in search.order[: search.num_read])
        with self._lock:
            del self._searches[search.load_id]
            if miss is not None or search.miss is not None:
                self._counts[f"pool_misses_total|reason={miss or search.miss}"] += 1
            self._counts["pool_hit_tokens_total"] += hit_tokens
            self._counts["pool_read_bytes_total"] += num_bytes * self._context.layout.tp_size
            self._events.append(PrefixLoaded(search.load_id, num_tokens))
        self._wake()


_ZEROS = {
    **{f"pool_misses_total|reason={miss}": 0.0 for miss in Miss},
    **{
        f"pool_{name}_total": 0.0
        for name in ("lookups", "hit_tokens", "read_bytes", "read_seconds", "blocks_stored", "blocks_known")
    },
    **{f"pool_blocks_dropped_total|reason={reason}": 0.0 for reason in ("backlog", "unavailable", "refused", "error")},
}


def _no_waker() -> None:
    """The waker until the engine sets its own: its step loop does not sleep yet."""
