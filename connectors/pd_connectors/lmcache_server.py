"""LMCache's server with what a shared pool needs and it does not bring: a bound, and whole objects only.

LMCache 0.5.6's `python -m lmcache.v1.server HOST PORT` works as well, but keeps everything for ever, stores an empty
object when a client dies in the middle of one, cannot take its port again for a minute after it was killed, sends
answers so that small ones wait for the client's delayed acknowledgements (a search that finds nothing: 48 ms, not 0.6),
keeps unfinished objects of any size (8 of 200 MB: 2.1 GB in a pool of 0.1), and ends when its descriptors have run out.
The protocol, the connections and the objects are LMCache's; its store is replaced by one that evicts.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT_PORT = 6500
ENTRY_BYTES = 600  # of an object beside its content: measured with 100,000 empty ones
ARRIVING_SHARE = 4  # 1 / ARRIVING_SHARE of the bound is what unfinished objects may hold, beside the whole ones
ARRIVING_S = 10.0  # without a byte of an unfinished object
ACCEPT_AGAIN_S = 0.5  # after the descriptors, or the threads, have run out
MESSAGE_BYTES = 1 << 10  # a message has less


def serve(host: str, port: int, max_bytes: int, on_ready: Callable[[str, int], None]) -> None:
    """Serve until the process ends. `port` 0: the OS chooses. `on_ready` gets the address.

    Raises ConnectorUnavailable when LMCache is not installed, OSError when the port is taken.
    """
    server_class, backend_class = import_lmcache()
    backend = _bounded(backend_class, max_bytes)

    class Server(server_class):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.host, self.port = host, port
            self.data_store = backend
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self.server_socket = socket.create_server((host, port), family=family)  # sets SO_REUSEADDR

        def handle_client(self, client_socket: socket.socket) -> None:
            try:
                client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # a machine that was lost does not close its connections
                client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                super().handle_client(client_socket)
            except (OSError, ValueError) as error:  # the client is gone, or sends what is no message; its thread ends
                sys.stderr.write(f"a client left: {error}\n")

        def receive_all(self, client_socket: socket.socket, n: int) -> Any:
            client_socket.settimeout(ARRIVING_S if n > MESSAGE_BYTES else None)
            with backend.arriving(n if n > MESSAGE_BYTES else 0):
                return super().receive_all(client_socket, n)

        def run(self) -> None:
            while True:
                try:
                    client, _ = self.server_socket.accept()
                    threading.Thread(target=self.handle_client, args=(client,), daemon=True).start()
                except (OSError, RuntimeError) as error:
                    sys.stderr.write(f"no client is accepted: {error}\n")
                    time.sleep(ACCEPT_AGAIN_S)

    server = Server()
    on_ready(*server.server_socket.getsockname()[:2])
    server.run()


def _bounded(backend_class: type, max_bytes: int) -> Any:
    """A backend in memory that holds at most `max_bytes` of objects."""

    class BoundedBackend(backend_class):  # type: ignore[misc]
        """Evicts the least recently used objects."""

        def __init__(self) -> None:
            super().__init__()
            self._puts = threading.Lock()
            self._num_bytes = 0
            self._num_arriving_bytes = 0

        @contextmanager
        def arriving(self, num_bytes: int) -> Iterator[None]:
            """A context in which an object arrives. Raises ValueError when there is no room for it."""
            with self._puts:
                if self._num_arriving_bytes + num_bytes > max_bytes // ARRIVING_SHARE:
                    raise ValueError(f"no room for an object of {num_bytes} bytes")
                self._num_arriving_bytes += num_bytes
            try:
                yield
            finally:
                with self._puts:
                    self._num_arriving_bytes -= num_bytes

        def put(self, client_meta: Any, kv_chunk_bytes: bytearray | None) -> None:
            if kv_chunk_bytes is None or len(kv_chunk_bytes) != client_meta.length:
                return  # its sender died
            with self._puts:
                with self.lock:
                    old = self.dict.pop(client_meta.key, None)
                super().put(client_meta, kv_chunk_bytes)
                self._num_bytes += len(kv_chunk_bytes) - (-ENTRY_BYTES if old is None else len(old.data))
                with self.lock:
                    while self._num_bytes > max_bytes:
                        _, oldest = self.dict.popitem(last=False)
                        self._num_bytes -= len(oldest.data) + ENTRY_BYTES

        def contains(self, key: Any) -> bool:
            with self.lock:
                return self._use(key)

        def get(self, key: Any) -> Any:
            with self.lock:
                return self.dict[key] if self._use(key) else None

        def _use(self, key: Any) -> bool:
            if key not in self.dict:
                return False
            self.dict.move_to_end(key)
            return True

    return BoundedBackend()


def import_lmcache() -> tuple[type, type]:
    """LMCache's server and its backend in memory. Raises ConnectorUnavailable when it is not installed."""
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    try:
        from lmcache.v1.server.__main__ import LMCacheServer
        from lmcache.v1.server.storage_backend.local_backend import LMSLocalBackend
    except ImportError as error:
        raise ConnectorUnavailable(f"the pool needs LMCache: pip install 'pd-cluster[lmcache]' ({error})") from error
    return LMCacheServer, LMSLocalBackend
