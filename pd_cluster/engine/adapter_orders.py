"""Takes the orders to load and unload adapters, and reads again what host memory had no room for."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pd_cluster.errors import BadAdapter
from pd_cluster.protocol.messages import AdapterLoaded, AdapterUnloaded, AddRequest, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import LoraConfig
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.worker.executor import Executor


class AdapterOrders:
    """What the engine knows of adapters. `fail`: ends all requests that have an adapter, for this reason."""

    def __init__(
        self,
        config: LoraConfig,
        places: AdapterPlaces,
        executor: Executor,
        mailbox: Mailbox,
        fail: Callable[[str, BadAdapter], None],
    ) -> None:
        self._config, self._places, self._executor, self._mailbox, self._fail = config, places, executor, mailbox, fail
        self._paths: dict[str, str] = {}  # of the known ones, and of those that are read for an order
        self._num_bytes: dict[str, int] = {}  # of each in host memory
        self._reading: dict[str, list[tuple[str, int]]] = {}  # errors and bytes that ranks have told so far
        self._leaving: set[str] = set()  # they are refused, and forgotten when no request has them
        self._told: deque[tuple[str, str, int]] = deque()  # digest, error, bytes of a rank: filled by other threads

    def check(self, request: AddRequest) -> None:
        """Raises BadAdapter for a request with an adapter that is not loaded."""
        digest = request.adapter
        if digest and (digest not in self._places.in_host or digest in self._leaving):
            raise BadAdapter(f"the adapter {digest} is not loaded")

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
        elif digest in self._leaving or (digest in self._reading and digest not in self._paths):
            self._mailbox.send(AdapterLoaded(digest, "it is being unloaded: load it when that is done"))
        elif is_known:
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
            self._drop(digest)
            del self._paths[digest]
            self._mailbox.send(AdapterUnloaded(digest))

    def read_wanted(self) -> None:
        """Read what a sequence waits for. Call it after each plan."""
        if self._places.wanted:
            self._read(self._places.wanted)

    def _read(self, digest: str) -> None:
        """On a thread of each rank, unless that is under way."""
        if digest in self._reading:
            return
        self._reading[digest] = []

        def done(error: str, num_bytes: int) -> None:
            self._told.append((digest, error, num_bytes))
            self._mailbox.wake()

        self._executor.read_adapter(digest, self._paths[digest], done)

    def _take_read(self, digest: str, error: str, num_bytes: int) -> None:
        """All ranks have read an adapter, of so many bytes on one, or some could not."""
        places = self._places
        is_known, most = digest in places.in_host, int(self._config.lora_host_gb * 1e9)
        if not error and not is_known and digest not in self._paths:
            error = "it was unloaded while it was read"
        if not error and num_bytes > most:
            error = f"it has {num_bytes} bytes, and --lora-host-gb allows {most}"
        if error:
            self._drop(digest)
            if is_known:
                self._fail(digest, BadAdapter(error))
            else:
                self._paths.pop(digest, None)
                self._mailbox.send(AdapterLoaded(digest, error))
            return
        for other in places.droppable:
            if sum(self._num_bytes.values()) + num_bytes <= most:
                break
            self._drop(other)
            places.in_host[other] = False
        places.in_host[digest] = sum(self._num_bytes.values()) + num_bytes <= most
        if places.in_host[digest]:
            self._num_bytes[digest] = num_bytes
        else:
            self._drop(digest)
        if not is_known:
            self._mailbox.send(AdapterLoaded(digest))

    def _drop(self, digest: str) -> None:
        self._num_bytes.pop(digest, None)
        self._executor.drop_adapter(digest)
