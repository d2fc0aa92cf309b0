"""Takes the orders to load and unload adapters, and reads again what host memory had no room for."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from pd_cluster.errors import AdapterAbsent
from pd_cluster.protocol.orders import AdapterLoaded, AdapterUnloaded, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.config import LoraConfig
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.worker.executor import Executor

logger = logging.getLogger("pd_cluster.engine")


class AdapterOrders:
    """What the engine knows of adapters. `fail`: ends all requests that have an adapter, for this reason."""

    def __init__(
        self,
        config: LoraConfig,
        places: AdapterPlaces,
        executor: Executor,
        mailbox: Mailbox,
        fail: Callable[[str, AdapterAbsent], None],
        clock: Callable[[], float],
    ) -> None:
        self._clock, self._begun_s = clock, dict[str, float]()
        self._config, self._places, self._executor, self._mailbox, self._fail = config, places, executor, mailbox, fail
        self._paths: dict[str, str] = {}  # of the known ones, and of those that are read for an order
        self._most = int(config.lora_host_gb * 1e9)
        self._num_bytes: dict[str, int] = {}  # of each known one, on the rank that has the most
        self._reading: dict[str, list[tuple[str, int]]] = {}  # errors and bytes that ranks have told so far
        # They are refused, and forgotten when no request has them, unless they are loaded before
        self._leaving: set[str] = set()
        self._told: deque[tuple[str, str, int]] = deque()  # digest, error, bytes of a rank: filled by other threads

    def check(self, request: AddRequest) -> None:
        """Raises AdapterAbsent for a request with an adapter that is not loaded."""
        digest = request.adapter
        if digest and (digest not in self._places.in_host or digest in self._leaving):
            raise AdapterAbsent("the adapter was unloaded while the request was read")

    def take(self, order: LoadAdapter | UnloadAdapter) -> None:
        """Begin what an order asks for; `turn` ends it."""
        digest, is_known = order.digest, order.digest in self._places.in_host
        if isinstance(order, UnloadAdapter):
            if is_known:
                self._leaving.add(digest)
                return
            self._paths.pop(digest, None)  # one that is still read is then dropped
            self._mailbox.send(AdapterUnloaded(digest))
        elif not self._config.lora_slots:
            self._mailbox.send(AdapterLoaded(digest, "this node serves no adapters: --lora-slots is 0"))
        elif is_known:  # with these bytes, wherever they were read
            self._leaving.discard(digest)
            self._mailbox.send(AdapterLoaded(digest))
        else:
            self._paths[digest] = order.path
            self._read(digest)

    def turn(self) -> None:
        """Take what threads have read, forget what no request has any more."""
        while self._told:
            digest, error, num_bytes = self._told.popleft()
            self._reading[digest].append((error, num_bytes))
            if len(self._reading[digest]) == self._executor.layout.tp_size:
                errors, sizes = zip(*self._reading.pop(digest), strict=True)
                self._take_read(digest, next(filter(None, errors), ""), max(sizes))
        places = self._places
        for digest in [digest for digest in self._leaving if not places.num_live[digest]]:
            self._leaving.discard(digest)
            places.forget(digest)
            self._executor.adapters.drop(digest)
            del self._paths[digest], self._num_bytes[digest]
            self._mailbox.send(AdapterUnloaded(digest))

    def read_wanted(self) -> None:
        """Read what a sequence waits for, if there will be room for it. Call it after each plan.

        One at a time: each takes its files' bytes and its own, whatever requests come and end meanwhile.
        """
        places, wanted = self._places, self._places.wanted
        if wanted and not self._reading and self._num_held() - self._num_held(places.droppable) <= self._room(wanted):
            self._read(wanted)

    def _read(self, digest: str) -> None:
        """On a thread of each rank, unless that is under way."""
        if digest in self._reading:
            return
        self._reading[digest], self._begun_s[digest] = [], self._clock()

        def done(error: str, num_bytes: int) -> None:
            self._told.append((digest, error, num_bytes))
            self._mailbox.wake()

        self._executor.adapters.read(digest, self._paths[digest], done)

    def _take_read(self, digest: str, error: str, num_bytes: int) -> None:
        """All ranks have read an adapter, of so many bytes on one, or some could not."""
        places, took_s = self._places, self._clock() - self._begun_s.pop(digest)
        if not error:
            places.read_s = (places.read_s + took_s) / 2 if places.read_s else took_s
        is_known = digest in places.in_host
        if not error and not is_known and digest not in self._paths:
            error = "it was unloaded while it was read"
        if not error and num_bytes > self._most:
            error = f"it has {num_bytes} bytes, and --lora-host-gb allows {self._most}"
        if error:
            self._executor.adapters.drop(digest)
            if is_known:
                logger.warning("an adapter cannot be read again: %s", error)
                self._fail(digest, AdapterAbsent("this node could not read the adapter's files again"))
            else:
                self._paths.pop(digest, None)
                self._mailbox.send(AdapterLoaded(digest, error))
            return
        self._num_bytes[digest] = num_bytes
        for other in places.droppable:
            if self._num_held() <= self._room(digest):
                break
            self._executor.adapters.drop(other)
            places.in_host[other] = False
        places.in_host[digest] = self._num_held() <= self._room(digest)
        if not places.in_host[digest]:
            self._executor.adapters.drop(digest)
        if not is_known:
            self._mailbox.send(AdapterLoaded(digest))

    def _num_held(self, adapters: Iterable[str] | None = None) -> int:
        """Bytes of these, or of all in host memory."""
        held = self._places.in_host
        return sum(self._num_bytes[one] for one in (held if adapters is None else adapters) if held[one])

    def _room(self, digest: str) -> int:
        """Bytes that others may take beside this one."""
        return self._most - self._num_bytes[digest]
