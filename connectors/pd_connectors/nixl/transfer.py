"""NIXL as a Transport: one thread makes every NIXL call, because any of them may block.

The thread sleeps on its queue while no read is in flight and polls every `POLL_S` while one is.

Only a terminal handle ends a read. Removing the remote agent, or releasing the handle, is *no fence*: with UCX over
TCP, and the peer stopped (SIGSTOP) in the middle of a read, both return at once, NIXL forgets the handle, and when the
peer goes on its bytes still land in our blocks (NIXL 1.5.1, measured: 496 of 512 blocks). So `disconnect` only retires
an endpoint; it is removed when its last read is terminal. Reads of a stopped peer stay in flight until it goes on or
dies, over TCP until its buffers were full for `resets.SILENT_S`. Over shared memory it does not hold a read up at all.

Nor is every error terminal (nixl/agent.py, MayStillLand). Such a read stays *doubtful*, its handle kept, until a fence
(a small read over the same endpoint, posted later) is done, or the endpoint has failed.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.nixl.agent import EndpointFailed, MayStillLand, NixlAgent, NixlError, Region, Remote
from pd_connectors.nixl.gpu_memory import open_driver, refuse_mapped
from pd_connectors.nixl.resets import Place, drop_resets, hear_resets
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.slices import slices_between
from pd_connectors.transport import Completion, Connected, ConnectFailed, PeerKey, ReadEnded, ReadId, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_connectors.base import CacheDescription
    from pd_connectors.nixl.network import KvNetwork
    from pd_connectors.transport import GroupIds

POLL_S = 0.0005
RETIRED_POLL_S = 0.02  # between polls of reads that only hold quarantined blocks: no load waits for them
FENCE_EVERY_S = 0.5  # until the next fence after a failed one
START_DEADLINE_S = 120.0  # registering a GPU's whole memory takes seconds

logger = logging.getLogger(__name__)


class _Description(msgspec.Struct, frozen=True):
    """What `describe` puts on the wire."""

    agent: str
    metadata: bytes
    regions: tuple[Region, ...]  # one a group
    listeners: tuple[Place, ...] = ()  # where UCX listens; an older node does not say


_decode = msgspec.msgpack.Decoder(_Description).decode


@dataclass(frozen=True, slots=True)
class _Read:
    handle: int
    post_s: float


@dataclass(frozen=True, slots=True)
class _Doubt:
    handle: int
    error: str


@dataclass(frozen=True, slots=True)
class _Fence:
    handle: int
    covers: tuple[ReadId, ...]


@dataclass(slots=True)
class _Peer:
    key: PeerKey
    remote: Remote
    listeners: tuple[Place, ...]
    warm_up: int | None = None  # NIXL's handle until the endpoint is ready
    reads: dict[ReadId, _Read] = field(default_factory=dict)  # a handle is never released before it is terminal
    doubtful: dict[ReadId, _Doubt] = field(default_factory=dict)  # failed, and yet they may land
    fence: _Fence | None = None
    fence_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        """True while bytes of the read may still land."""
        return self.is_polled or bool(self.doubtful)

    @property
    def is_polled(self) -> bool:
        """True if NIXL may soon report a change of the read."""
        return bool(self.reads) or self.warm_up is not None or self.fence is not None


class NixlTransport(Transport):
    """The transport of one rank.

    agent_name: unique for ever, so that a restarted peer is never taken for the process before it. network: where UCX
    may listen.
    """

    def __init__(self, agent_name: str, network: KvNetwork, rank: int = 0) -> None:
        self._agent_name = agent_name
        self._network = network
        self._rank = rank
        self._layout = BlockLayout(())  # the engine's, once its cache is registered
        self._left_behind: NixlAgent | None = None
        self._description = b""
        # Not a SimpleQueue: its `get` waits for ever if 0.5 ms pass between its two looks (CPython 3.11)
        self._calls: queue.Queue[Callable[[NixlAgent], None] | None] = queue.Queue()
        self._completions: deque[Completion] = deque()
        self._wake: Callable[[], None] = _no_waker
        self._peers: dict[PeerKey, _Peer] = {}  # the thread's
        self._retired: list[_Peer] = []  # the thread's: disconnected, with something in flight
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._death: Exception | None = None
        self._thread: threading.Thread | None = None

    # the control thread's side

    def register(self, cache: CacheDescription) -> None:
        assert self._thread is None, "the cache is registered once"
        refuse_mapped(cache.tensors, open_driver())  # here: the caller's thread has the device
        self._thread = threading.Thread(target=self._run, args=(cache,), name="pd-nixl", daemon=True)
        self._thread.start()
        if not self._started.wait(START_DEADLINE_S):
            raise ConnectorUnavailable(f"NIXL did not start within {START_DEADLINE_S:g} s")
        if self._start_error is not None:
            raise self._start_error

    def describe(self) -> bytes:
        return self._description

    def connect(self, peer: PeerKey, description: bytes) -> None:
        self._calls.put(lambda agent: self._connect(agent, peer, description))

    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        asked_s = time.monotonic()
        self._calls.put(lambda agent: self._read(agent, peer, read_id, remote, local, asked_s))

    def disconnect(self, peer: PeerKey) -> None:
        self._calls.put(lambda agent: self._disconnect(agent, peer))

    def poll(self) -> list[Completion]:
        if self._death is not None:
            raise RuntimeError("the NIXL thread failed") from self._death
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
            logger.error("a NIXL call hangs; its thread is left after %g s", deadline_s)

    # the thread

    def _run(self, cache: CacheDescription) -> None:
        try:
            self._layout = cache.layout
            agent = NixlAgent(self._agent_name, cache.tensors, self._network)
            description = _Description(agent.name, agent.metadata(), agent.regions, agent.listeners)
            self._description = msgspec.msgpack.encode(description)
        except Exception as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        try:
            self._serve(agent)
        except Exception as error:  # our own bug: the control thread must learn of it, or no load would ever drain
            self._death = error
            self._wake()
        else:
            self._leave(agent)

    def _serve(self, agent: NixlAgent) -> None:
        while True:
            peers = self._peers.values()
            is_slow = bool(self._retired) or any(peer.doubtful for peer in peers)
            pause_s = POLL_S if any(peer.is_polled for peer in peers) else RETIRED_POLL_S if is_slow else None
            try:
                call = self._calls.get(timeout=pause_s)
            except queue.Empty:
                call = _nothing
            if call is None:
                break
            call(agent)
            self._check(agent)

    def _connect(self, agent: NixlAgent, key: PeerKey, description: bytes) -> None:
        try:
            there = _decode(description)
            if any(there.agent == peer.remote.name for peer in self._retired):
                raise NixlError("reads over its previous endpoint are still in flight")
            theirs = [region.block_bytes for region in there.regions[: key.num_groups]]
            expected = [group.rank_bytes(key.num_ranks) for group in self._layout.groups[: key.num_groups]]
            if theirs != expected:  # a slice could reach beyond the region
                raise NixlError(f"its blocks have {theirs} bytes, not {expected}")
            slices = slices_between(key.rank, key.num_ranks, self._layout, self._rank, key.num_groups)
            peer = _Peer(key, agent.connect(there.metadata, there.regions, slices), there.listeners)
        except (NixlError, msgspec.MsgspecError) as error:
            self._tell(ConnectFailed(key, str(error)))
            return
        try:
            peer.warm_up = agent.post_warm_up(peer.remote)
            self._peers[key] = peer
        except NixlError as error:
            if isinstance(error, MayStillLand):  # in memory that nothing else uses
                _attempt(agent.release, error.handle)
            self._remove(agent, peer)
            self._tell(ConnectFailed(key, str(error)))

    def _read(
        self, agent: NixlAgent, key: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds, asked_s: float
    ) -> None:
        peer = self._peers.get(key)
        if peer is None:
            self._tell(ReadEnded(read_id, "the endpoint was torn down"))
            return
        try:
            handle = agent.post_read(peer.remote, remote, local)
            peer.reads[read_id] = _Read(handle, time.monotonic() - asked_s)
        except MayStillLand as error:
            peer.doubtful[read_id] = _Doubt(error.handle, str(error))
        except NixlError as error:
            self._tell(ReadEnded(read_id, str(error), endpoint_broken=True))

    def _disconnect(self, agent: NixlAgent, key: PeerKey) -> None:
        peer = self._peers.pop(key, None)
        if peer is not None and peer.is_busy:
            self._retired.append(peer)
            hear_resets(peer.listeners)
        elif peer is not None:
            self._remove(agent, peer)

    def _remove(self, agent: NixlAgent, peer: _Peer) -> None:
        """Forget a peer of which nothing is in flight; NIXL's agent of it, unless another endpoint leads there too."""
        others = [other for other in (*self._peers.values(), *self._retired) if other is not peer]
        if all(other.remote.name != peer.remote.name for other in others):
            _attempt(agent.disconnect, peer.remote.name)
        _attempt(agent.forget_blocks, peer.remote)

    def _check(self, agent: NixlAgent) -> None:
        """Ask NIXL once for the state of each read and warm-up in flight."""
        for peer in [*self._peers.values(), *self._retired]:
            self._check_warm_up(agent, peer)
            self._check_reads(agent, peer)
            self._check_fence(agent, peer)
        ended = [peer for peer in self._retired if not peer.is_busy]
        self._retired = [peer for peer in self._retired if peer.is_busy]
        for peer in ended:
            self._remove(agent, peer)

    def _check_warm_up(self, agent: NixlAgent, peer: _Peer) -> None:
        if peer.warm_up is None:
            return
        completion: Completion = Connected(peer.key)
        try:
            if not agent.is_done(peer.warm_up):
                return
        except NixlError as error:
            completion = ConnectFailed(peer.key, str(error))
        _attempt(agent.release, peer.warm_up)
        peer.warm_up = None
        if self._peers.get(peer.key) is peer:
            if isinstance(completion, ConnectFailed):
                self._disconnect(agent, peer.key)
            else:
                drop_resets(peer.listeners)  # over this connection the peer may read, too
            self._tell(completion)

    def _check_reads(self, agent: NixlAgent, peer: _Peer) -> None:
        for read_id, read in list(peer.reads.items()):
            try:
                if not agent.is_done(read.handle):
                    continue
                ended = ReadEnded(read_id, post_s=read.post_s)
            except MayStillLand as error:
                peer.doubtful[read_id] = _Doubt(peer.reads.pop(read_id).handle, str(error))
                continue
            except NixlError as error:
                ended = ReadEnded(read_id, str(error), endpoint_broken=True)
            del peer.reads[read_id]
            _attempt(agent.release, read.handle)
            self._tell(ended)

    def _check_fence(self, agent: NixlAgent, peer: _Peer) -> None:
        """Find out whether the doubtful reads have ended."""
        fence, peer.fence = peer.fence, None
        try:
            if fence is None and peer.doubtful and time.monotonic() >= peer.fence_at:
                peer.fence = _Fence(agent.post_warm_up(peer.remote), tuple(peer.doubtful))
            elif fence is not None and agent.is_done(fence.handle):
                self._settle(agent, peer, fence.covers)
            elif fence is not None:
                peer.fence = fence
                return
        except EndpointFailed:
            self._settle(agent, peer, tuple(peer.doubtful))
        except NixlError as error:
            peer.fence_at = time.monotonic() + FENCE_EVERY_S
            logger.info("a fence failed, %d reads stay in doubt: %s", len(peer.doubtful), error)
            if isinstance(error, MayStillLand) and fence is None:
                _attempt(agent.release, error.handle)
        if fence is not None:
            _attempt(agent.release, fence.handle)

    def _settle(self, agent: NixlAgent, peer: _Peer, read_ids: tuple[ReadId, ...]) -> None:
        """Report reads of which nothing can land any more."""
        for read_id in read_ids:
            doubt = peer.doubtful.pop(read_id)
            _attempt(agent.release, doubt.handle)
            self._tell(ReadEnded(read_id, doubt.error, endpoint_broken=True))

    def _leave(self, agent: NixlAgent) -> None:
        """Shutdown. With a read in flight the agent must outlive the thread: its destructor would wait, or worse."""
        for key in list(self._peers):
            self._disconnect(agent, key)
        self._left_behind = agent if self._retired else None

    def _tell(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._wake()


def _attempt(call: Callable[..., None], *args: object) -> None:
    """Run a clean-up that may fail because the peer is gone already."""
    try:
        call(*args)
    except NixlError as error:
        logger.info("clean-up: %s", error)


def _no_waker() -> None:
    """The waker until the channel sets its own: the control thread does not wait yet."""


def _nothing(agent: NixlAgent) -> None:
    """The command of a turn in which only time has passed."""
