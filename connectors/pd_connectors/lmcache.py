"""The connector `lmcache`: a pool on LMCache's server, spoken to in its own protocol (`lm://`, LMCache 0.5.6).

Not through LMCache's engine: that hashes tokens itself (with Python's `hash` unless told otherwise), never reconnects,
and reports a failed store in its log alone. The messages are LMCache's classes, so they follow the installed version.

    message   server's answer
    PUT       none: a later question on the same connection tells which objects were stored
    GET       a header, then the object
    EXIST     a header

Answers come in the order of the messages, so many may be under way at once.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import warnings
from typing import TYPE_CHECKING, Any

from pd_connectors.head_parts import head_parts
from pd_connectors.pool_url import DEFAULT_URLS
from pd_connectors.pooled import PooledConnector, pool_address
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.store import HEADER_BYTES, KVStore, ObjectName, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from pd_connectors.base import ConnectorContext

DEFAULT_URL = DEFAULT_URLS["lmcache"]
WINDOW = 32  # messages under way at most: enough to hide the network's latency
MAX_OBJECT_BYTES = 1 << 30


class LMCacheProtocol:
    """Messages to and from the server, as bytes. Raises ConnectorUnavailable when LMCache is not installed."""

    def __init__(self) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # it logs to standard error from its import on
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        try:
            with warnings.catch_warnings(category=DeprecationWarning):
                warnings.simplefilter("ignore", DeprecationWarning)  # of what LMCache itself imports
                import torch
                from lmcache.utils import CacheEngineKey
                from lmcache.v1 import protocol
                from lmcache.v1.memory_management import MemoryFormat
        except ImportError as error:
            raise ConnectorUnavailable(
                f"connector 'lmcache' needs LMCache: pip install 'pd-cluster[lmcache]' ({error})"
            ) from error
        self._wire = protocol
        self._key = CacheEngineKey
        self._format = MemoryFormat.BINARY
        self._torch = torch
        self.answer_bytes: int = protocol.ServerMetaMessage.packlength()

    def put(self, name: ObjectName, num_bytes: int) -> bytes:
        """The header before an object."""
        return self._ask(self._wire.ClientCommand.PUT, name, num_bytes)

    def get(self, name: ObjectName) -> bytes:
        return self._ask(self._wire.ClientCommand.GET, name, 0)

    def exists(self, name: ObjectName) -> bytes:
        return self._ask(self._wire.ClientCommand.EXIST, name, 0)

    def read_answer(self, header: bytearray) -> int | None:
        """The number of bytes that follow; None if there is no such object. Raises ValueError or struct.error."""
        answer = self._wire.ServerMetaMessage.deserialize(header)
        if answer.code != self._wire.ServerReturnCode.SUCCESS:
            return None
        length: int = answer.length
        if not 0 <= length <= MAX_OBJECT_BYTES:
            raise ValueError(f"an object of {length} bytes")
        return length

    def _ask(self, command: Any, name: ObjectName, num_bytes: int) -> bytes:
        chunk_hash = int.from_bytes(name.hash, "big")  # ours, cryptographic; LMCache's own hashing is not involved
        key = self._key(name.space, 1, 0, chunk_hash, self._torch.uint8)
        shape = self._torch.Size((num_bytes, 0, 0, 0))
        message = self._wire.ClientMetaMessage(command, key, num_bytes, self._format, self._torch.uint8, shape)
        packed: bytes = message.serialize()
        return packed


class LMCacheStore(KVStore):
    """A client of LMCache's server.

    connect_deadline_s: for connecting.  io_deadline_s: longest time in which no byte is sent or received.
    receive_deadline_s: for an answer or an object.  max_object_bytes: a longer one is none of this cluster's, and is
    not read.
    """

    def __init__(
        self,
        address: tuple[str, int],
        protocol: LMCacheProtocol,
        *,
        connect_deadline_s: float = 1.0,
        io_deadline_s: float = 2.0,
        receive_deadline_s: float = 10.0,
        max_object_bytes: int = MAX_OBJECT_BYTES,
    ) -> None:
        self._address = address
        self._protocol = protocol
        self._connect_deadline_s = connect_deadline_s
        self._io_deadline_s, self._receive_deadline_s = io_deadline_s, receive_deadline_s
        self._max_object_bytes = max_object_bytes
        self._socket: socket.socket | None = None

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        was_open = self._socket is not None
        try:
            return self._contains(names)
        except StoreUnavailable as error:
            if not was_open or not isinstance(error.__cause__, ConnectionError):
                raise
            return self._contains(names)  # the server was restarted since we last spoke

    def _contains(self, names: Sequence[ObjectName]) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), WINDOW):
            window = names[start : start + WINDOW]
            self._send(self._protocol.exists(name) for name in window)
            found += [self._answer() is not None for _ in window]
        return found

    def get(self, names: Sequence[ObjectName]) -> Generator[bytearray | None, None, None]:
        num_sent = num_answered = 0
        try:
            while num_answered < len(names):
                ahead = names[num_sent : num_answered + WINDOW]
                if ahead:
                    self._send(self._protocol.get(name) for name in ahead)
                    num_sent += len(ahead)
                num_bytes = self._answer()
                if (num_bytes or 0) > self._max_object_bytes:
                    yield bytearray()  # damaged
                    return
                sealed = None if num_bytes is None else self._receive(num_bytes)
                num_answered += 1
                yield sealed
        finally:
            if num_answered < num_sent:  # answers that will not be read are on their way
                self.close()

    def put(self, objects: Sequence[tuple[ObjectName, bytes]]) -> int:
        for name, sealed in objects:
            self._send((self._protocol.put(name, len(sealed)), sealed))
        return sum(self.contains([name for name, _ in objects]))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, parts: Iterable[bytes]) -> None:
        data = memoryview(b"".join(parts))
        try:
            if self._socket is None:
                self._socket = socket.create_connection(self._address, self._connect_deadline_s)
                self._socket.settimeout(self._io_deadline_s)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data:  # `sendall` has one deadline for all of it, too short for a big object to a busy server
                data = data[self._socket.send(data) :]
        except OSError as error:
            raise self._failed(error) from error

    def _answer(self) -> int | None:
        """Read the next answer's header. Returns the number of bytes that follow; None if there is no such object."""
        header = self._receive(self._protocol.answer_bytes)
        try:
            return self._protocol.read_answer(header)
        except (ValueError, KeyError, struct.error) as error:
            raise self._failed(error) from error

    def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, end_s = memoryview(data), time.monotonic() + self._receive_deadline_s
        try:
            while view:
                if time.monotonic() > end_s:
                    raise TimeoutError("the server sends too slowly")
                if self._socket is None:
                    raise ConnectionResetError("not connected")
                num_received = self._socket.recv_into(view)
                if not num_received:
                    raise ConnectionResetError("the server closed the connection")
                view = view[num_received:]
        except OSError as error:
            raise self._failed(error) from error
        return data

    def _failed(self, error: Exception) -> StoreUnavailable:
        self.close()
        host, port = self._address
        return StoreUnavailable(f"LMCache server {host}:{port}: {error or type(error).__name__}")


class LMCacheConnector(PooledConnector):
    """options: `pool_url` (lm://127.0.0.1:6500), and PooledConnector's.

    Raises ConnectorUnavailable when LMCache is not installed or the URL is none. A server that is down is no error.
    """

    name = "lmcache"

    def __init__(self, context: ConnectorContext) -> None:
        address = pool_address(context, DEFAULT_URL)
        protocol = LMCacheProtocol()
        most = HEADER_BYTES + max(parts[0].num_bytes for parts in head_parts(context.layout, context.rank))
        super().__init__(context, lambda: LMCacheStore(address, protocol, max_object_bytes=most))
