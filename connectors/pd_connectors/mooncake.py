"""The connector `mooncake`: a pool in the nodes' own memory, kept by Mooncake Store (0.3.13) over TCP.

Every node lends a segment; `mooncake_master` knows what lies where, evicts, and sees to it that an object is visible
only when it is whole. Nodes find each other by handshake, without a metadata server: one that dies uncleanly leaves no
address behind. With a node die the objects in its segment; reading one of them is a miss.

Mooncake's client waits for seconds when the master has gone, and for a minute and a half (measured) when it never was
there: so before it is set up, and after a failure, the master's port is tried first.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_connectors.bundled import BundledLibraries
from pd_connectors.pool_url import DEFAULT_URLS
from pd_connectors.pooled import PooledConnector, pool_address
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.store import KVStore, ObjectName, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from pd_connectors.base import ConnectorContext

DEFAULT_URL = DEFAULT_URLS["mooncake"]
LOCAL_BUFFER_BYTES = 64 << 20  # Mooncake's own buffer for objects in transfer
PORT_DEADLINE_S = 0.5
CLOSE_DEADLINE_S = 1.0
RPC_DEADLINE_MS = 2000  # Mooncake's own: 30 s, for which a master that stands still would hold a request
READ_DEADLINE_S = 2  # without a byte, of a node that stands still. Mooncake's own: 30 s, in which its client polls

logger = logging.getLogger(__name__)


class MooncakeClient:
    """One node's client and segment, shared by its threads. Set up when it is first used, and again after a failure."""

    def __init__(self, master: tuple[str, int], host: str, segment_bytes: int) -> None:
        """Raises ConnectorUnavailable when Mooncake is not installed, or cannot be loaded."""
        self._make = _load_mooncake()
        self._master = master
        self._address = f"[{master[0]}]:{master[1]}" if ":" in master[0] else f"{master[0]}:{master[1]}"
        self._host = host
        self._segment_bytes = segment_bytes
        self._lock = threading.Lock()  # held while it is set up
        self._store: Any = None
        self._failed = False
        self._idle = threading.Condition()
        self._num_calls = 0
        self._is_closed = False

    @contextmanager
    def call(self) -> Iterator[Any]:
        """A context with Mooncake's store, for one call of it. Raises StoreUnavailable."""
        with self._idle:
            if self._is_closed:
                raise StoreUnavailable("this node's client is closed")
            self._num_calls += 1
        try:
            yield self._connected()
        finally:
            with self._idle:
                self._num_calls -= 1
                self._idle.notify_all()

    def _connected(self) -> Any:
        with self._lock:
            if self._failed or self._store is None:
                self._try_port()
            if self._store is None:
                store = self._make()
                status = store.setup(
                    self._host, "P2PHANDSHAKE", self._segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", self._address
                )
                if status != 0:
                    store.close()
                    self._failed = True
                    raise StoreUnavailable(f"mooncake_master {self._address}: setup failed with {status}")
                self._store = store
            self._failed = False
            return self._store

    def failed(self, status: int) -> StoreUnavailable:
        """Note that a call returned this negative status. The segment stays: other nodes use its objects too."""
        self._failed = True
        return StoreUnavailable(f"mooncake_master {self._address}: status {status}")

    def close(self) -> None:
        """Take the segment back. Idempotent. Waits for calls under way: Mooncake does not survive a close under one."""
        with self._idle:
            self._is_closed = True
            is_idle = self._idle.wait_for(lambda: self._num_calls == 0, CLOSE_DEADLINE_S)
        if not is_idle:
            logger.error("a call of Mooncake hangs: its segment stays until the master notices that this node is gone")
        elif self._store is not None:
            self._store.close()
            self._store = None

    def _try_port(self) -> None:
        try:
            socket.create_connection(self._master, PORT_DEADLINE_S).close()
        except OSError as error:
            raise StoreUnavailable(f"mooncake_master {self._address}: {error}") from error


class MooncakeStore(KVStore):
    """The store of one thread, over the shared client."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        with self._client.call() as store:
            found: list[int] = store.batch_is_exist([str(name) for name in names])
        for status in found:
            if status < 0:
                raise self._client.failed(status)
        return [status == 1 for status in found]

    def get(self, names: Sequence[ObjectName]) -> Generator[bytearray | None, None, None]:
        for name in names:
            with self._client.call() as store:
                sealed = store.get(str(name))  # empty: gone, or its owner is
            yield bytearray(sealed) if sealed else None

    def put(self, objects: Sequence[tuple[ObjectName, bytes]]) -> int:
        num_stored = 0
        for name, sealed in objects:
            with self._client.call() as store:
                num_stored += store.upsert(str(name), sealed) == 0  # not 0: no room, for example
        return num_stored

    def close(self) -> None:
        """Does nothing: the connector closes the client."""


class MooncakeConnector(PooledConnector):
    """options: `pool_url` (mooncake://127.0.0.1:50051), `pool_segment_gb` (1, over all ranks), and PooledConnector's.

    Raises ConnectorUnavailable when Mooncake cannot be loaded or the URL is none. A master that is down is no error.
    """

    name = "mooncake"

    def __init__(self, context: ConnectorContext) -> None:
        options = dict(context.options)
        master = pool_address(context, DEFAULT_URL)
        segment_bytes = int(float(options.get("pool_segment_gb", 1.0)) * 1e9) // context.layout.tp_size
        self._client = MooncakeClient(master, context.host, segment_bytes)
        super().__init__(context, lambda: MooncakeStore(self._client))

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._client.close()


def _load_mooncake() -> Any:
    """The class of Mooncake's client.

    The wheel "without CUDA" links to CUDA's runtime all the same; the one beside it (`[mooncake]`) is loaded first, and
    what else the system may lack.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(RPC_DEADLINE_MS))
    os.environ.setdefault("MC_RPC_CONNECT_TIMEOUT_MS", str(RPC_DEADLINE_MS))
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(READ_DEADLINE_S))
    try:
        runtime = find_spec("nvidia.cuda_runtime") if find_spec("nvidia") is not None else None
        for folder in runtime.submodule_search_locations or () if runtime is not None else ():
            library = Path(folder) / "lib" / "libcudart.so.12"
            if library.exists():
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        with BundledLibraries() as libraries:
            libraries.load()
        from mooncake.store import MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise ConnectorUnavailable(
            "connector 'mooncake' needs Mooncake Store: pip install 'pd-cluster[mooncake]', and libibverbs, NIXL's or "
            f"the system's (Debian: libibverbs1) ({error})"
        ) from error
    return MooncakeDistributedStore
