"""Takes the orders to load and unload adapters, and reads again what host memory had no room for."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_cluster.errors import AdapterAbsent
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.config import LoraConfig
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.worker.executor import Executor

logger = logging.getLogger("pd_cluster.engine")
MAX_PLACES = 4  # from which equal files may be read again, one after another: each may take its whole deadline


@dataclass(frozen=True, slots=True)
class AdapterReading:
    """One that is under way on threads of the ranks."""

    path: str
    tried: dict[str, str]  # paths from which it could not be read, and why
    begun_s: float
    told: list[tuple[str, int]] = field(default_factory=list)  # errors and bytes, of the ranks that have ended


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
        self._config, self._places, self._executor, self._mailbox = config, places, executor, mailbox
        self._fail, self._clock = fail, clock
        # Of the known ones and those that are read for an order: the newest first, one of each place. Equal files may
        # have two names, and those of one of them may be removed after its unload, of which this is not told
        self._orders: dict[str, tuple[LoadAdapter, ...]] = {}
        self._most = int(config.lora_host_gb * 1e9)
        self._num_bytes: dict[str, int] = {}  # of each known one, on the rank that has the most
        self._reading: dict[str, AdapterReading] = {}
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
            else:
                self._orders.pop(digest, None)  # one that is still read is then dropped
        elif not self._config.lora_slots:
            self._answer(order, "this node serves no adapters: --lora-slots is 0")
        else:
            others = [one for one in self._orders.get(digest, ()) if one.path != order.path]
            self._orders[digest] = (order, *others)[:MAX_PLACES]
            self._leaving.discard(digest)
            if is_known:  # with these bytes, wherever they were read
                self._answer(order)
            elif digest not in self._reading:
                self._read(digest)

    def turn(self) -> None:
        """Take what threads have read, forget what no request has any more."""
        while self._told:
            digest, *told = self._told.popleft()
            self._reading[digest].told.append(tuple(told))  # type: ignore[arg-type]
            if len(self._reading[digest].told) == self._executor.layout.tp_size:
                self._take_read(digest, self._reading.pop(digest))
        for digest in [digest for digest in self._leaving if not self._places.num_live[digest]]:
            self._leaving.discard(digest)
            self._places.forget(digest)
            if digest not in self._reading:  # else at its end: for a new order the ranks that have it keep it
                self._executor.drop_adapter(digest)
            del self._orders[digest], self._num_bytes[digest]

    def read_wanted(self) -> None:
        """Read what a sequence waits for, if there will be room for it. Call it after each plan.

        One at a time: each takes its files' bytes and its own, whatever requests come and end meanwhile.
        """
        places, wanted = self._places, self._places.wanted
        if wanted and not self._reading and self._num_held() - self._num_held(places.droppable) <= self._room(wanted):
            self._read(wanted)

    def _read(self, digest: str, tried: dict[str, str] | None = None) -> None:
        tried = tried or {}
        path = next(order.path for order in self._orders[digest] if order.path not in tried)
        self._reading[digest] = AdapterReading(path, tried, self._clock())
        self._executor.read_adapter(digest, path, self._note_told)

    def _note_told(self, digest: str, error: str, num_bytes: int) -> None:
        self._told.append((digest, error, num_bytes))
        self._mailbox.wake()

    def _take_read(self, digest: str, read: AdapterReading) -> None:
        """All ranks have read an adapter, or some could not."""
        places, took_s = self._places, self._clock() - read.begun_s
        order = next(iter(self._orders.get(digest, ())), None)
        error, num_bytes = max(error for error, _ in read.told), max(num_bytes for _, num_bytes in read.told)
        if not error:
            places.read_s = (places.read_s + took_s) / 2 if places.read_s else took_s
            if num_bytes > self._most:
                error = f"it has {num_bytes} bytes, and --lora-host-gb allows {self._most}"
        if error or order is None:  # it was unloaded meanwhile
            self._executor.drop_adapter(digest)
            if order is not None:
                self._give_up(order, error, read)
            return
        self._num_bytes[digest] = num_bytes
        for other in places.droppable:
            if self._num_held() <= self._room(digest):
                break
            self._executor.drop_adapter(other)
            places.in_host[other] = False
        is_known = digest in places.in_host
        places.in_host[digest] = self._num_held() <= self._room(digest)
        if not places.in_host[digest]:
            self._executor.drop_adapter(digest)
        if not is_known:
            self._answer(order)

    def _give_up(self, order: LoadAdapter, error: str, read: AdapterReading) -> None:
        tried = {**read.tried, read.path: error}
        if any(one.path not in tried for one in self._orders[order.digest]):  # of a newer order, or an older one
            self._read(order.digest, tried)
        elif order.digest in self._places.in_host:
            logger.warning("an adapter cannot be read again: %s", tried[order.path])
            self._fail(order.digest, AdapterAbsent("this node could not read the adapter's files again"))
        else:
            del self._orders[order.digest]
            self._answer(order, tried[order.path])

    def _answer(self, order: LoadAdapter, error: str = "") -> None:
        self._mailbox.send(AdapterLoaded(order.digest, error, order.number))

    def _num_held(self, adapters: Iterable[str] | None = None) -> int:
        """Bytes of these, or of all in host memory."""
        held = self._places.in_host
        return sum(self._num_bytes[one] for one in (held if adapters is None else adapters) if held[one])

    def _room(self, digest: str) -> int:
        """Bytes that others may take beside this one."""
        return self._most - self._num_bytes[digest]
