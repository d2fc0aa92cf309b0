"""NIXL as a Transport: one thread makes every NIXL call, because any of them may block.

The thread sleeps on its queue while no read is in flight and polls every `POLL_S` while one is. An endpoint is torn
down by removing the remote agent; reads in flight then become terminal inside NIXL, and only then are reported.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pd_connectors.base import CacheDescription
from pd_connectors.nixl.agent import NixlAgent, NixlError, Region, Remote
from pd_connectors.transport import Completion, Connected, ConnectFailed, PeerKey, ReadEnded, ReadId, Transport

POLL_S = 0.0005

logger = logging.getLogger(__name__)


class _Description(msgspec.Struct, frozen=True):
    """What `describe` puts on the wire."""

    metadata: bytes
    region: Region


@dataclass(slots=True)
class _Peer:
    key: PeerKey
    remote: Remote
    warm_up: int | None  # NIXL's handle until the endpoint is ready
    reads: dict[ReadId, int] = field(default_factory=dict)  # -> NIXL's handle


class NixlTransport(Transport):
    """agent_name: unique for ever, so that a restarted peer is never taken for its predecessor."""

    def __init__(self, agent_name: str) -> None:
        self._agent_name = agent_name
        self._agent: NixlAgent | None = None
        self._description = b""
        self._calls: queue.SimpleQueue[Callable[[NixlAgent], None] | None] = queue.SimpleQueue()
        self._completions: deque[Completion] = deque()
        self._wake: Callable[[], None] = _nobody
        self._peers: dict[PeerKey, _Peer] = {}  # the thread's
        self._closing: list[_Peer] = []  # the thread's: torn down, with reads that are not terminal
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._thread: threading.Thread | None = None

    # the control thread's side

    def register(self, cache: CacheDescription) -> None:
        assert self._thread is None, "the cache is registered once"
        self._thread = threading.Thread(target=self._run, args=(cache,), name="pd-nixl", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            raise self._start_error

    def describe(self) -> bytes:
        return self._description

    def connect(self, peer: PeerKey, description: bytes) -> None:
        self._calls.put(lambda agent: self._connect(agent, peer, description))

    def read(self, peer: PeerKey, read_id: ReadId, remote: Sequence[int], local: Sequence[int]) -> None:
        self._calls.put(lambda agent: self._read(agent, peer, read_id, remote, local))

    def disconnect(self, peer: PeerKey) -> None:
        self._calls.put(lambda agent: self._disconnect(agent, peer))

    def poll(self) -> list[Completion]:
        completions = []
        while self._completions:
            completions.append(self._completions.popleft())
        return completions

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self, deadline_s: float) -> None:
        if self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            logger.error("a NIXL call hangs; its thread is left behind after %g s", deadline_s)

    # the thread

    def _run(self, cache: CacheDescription) -> None:
        try:
            agent = NixlAgent(self._agent_name, cache.tensor, cache.num_blocks, cache.block_bytes)
            self._description = msgspec.msgpack.encode(_Description(agent.metadata(), agent.region))
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        while True:
            busy = bool(self._closing) or any(peer.reads or peer.warm_up is not None for peer in self._peers.values())
            try:
                call = self._calls.get(timeout=POLL_S if busy else None)
            except queue.Empty:
                call = _nothing
            if call is None:
                break
            call(agent)
            self._check(agent)
        for key in list(self._peers):
            self._disconnect(agent, key)

    def _connect(self, agent: NixlAgent, key: PeerKey, description: bytes) -> None:
        try:
            there = msgspec.msgpack.decode(description, type=_Description)
            if there.region.block_bytes != agent.region.block_bytes:
                raise NixlError(f"its blocks have {there.region.block_bytes} bytes, ours {agent.region.block_bytes}")
            remote = agent.connect(there.metadata, there.region)
            self._peers[key] = _Peer(key, remote, agent.post_warm_up(remote))
        except (NixlError, msgspec.MsgspecError) as error:
            self._tell(ConnectFailed(key, str(error)))

    def _read(
        self, agent: NixlAgent, key: PeerKey, read_id: ReadId, remote: Sequence[int], local: Sequence[int]
    ) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._tell(ReadEnded(read_id, "the endpoint was torn down"))
            return
        try:
            peer.reads[read_id] = agent.post_read(peer.remote, remote, local)
        except NixlError as error:
            self._tell(ReadEnded(read_id, str(error), endpoint_broken=True))

    def _disconnect(self, agent: NixlAgent, key: PeerKey) -> None:
        peer = self._peers.pop(key, None)
        if peer is None:
            return
        _attempt(agent.disconnect, peer.remote.name)
        _attempt(agent.forget_blocks, peer.remote)
        if peer.warm_up is not None:
            _attempt(agent.release, peer.warm_up)
        if peer.reads:
            self._closing.append(peer)

    def _check(self, agent: NixlAgent) -> None:
        """Look at everything in flight once."""
        for peer in list(self._peers.values()):
            self._check_warm_up(agent, peer)
            self._check_reads(agent, peer)
        for peer in self._closing:
            self._check_reads(agent, peer)
        self._closing = [peer for peer in self._closing if peer.reads]

    def _check_warm_up(self, agent: NixlAgent, peer: _Peer) -> None:
        if peer.warm_up is None:
            return
        try:
            if not agent.is_done(peer.warm_up):
                return
        except NixlError as error:
            self._disconnect(agent, peer.key)
            self._tell(ConnectFailed(peer.key, str(error)))
            return
        _attempt(agent.release, peer.warm_up)
        peer.warm_up = None
        self._tell(Connected(peer.key))

    def _check_reads(self, agent: NixlAgent, peer: _Peer) -> None:
        for read_id, handle in list(peer.reads.items()):
            try:
                if not agent.is_done(handle):
                    continue
                ended = ReadEnded(read_id)
            except NixlError as error:
                ended = ReadEnded(read_id, str(error), endpoint_broken=True)
            del peer.reads[read_id]
            _attempt(agent.release, handle)
            self._tell(ended)

    def _tell(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._wake()


def _attempt(call: Callable[..., None], *args: object) -> None:
    """Clean-up that may fail because the peer is gone already."""
    try:
        call(*args)
    except NixlError as error:
        logger.info("clean-up: %s", error)


def _nobody() -> None:
    """Before the channel exists, nobody waits."""


def _nothing(agent: NixlAgent) -> None:
    """Only time has passed."""
