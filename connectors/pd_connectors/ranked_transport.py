"""The transport of an engine: one transport on each rank, driven from rank 0. Pure fan-out; no state of loads.

Each of our ranks reads its own heads from the peer's ranks that hold them (`protocol.slices`). A *link* leads from one
of our ranks to one of the peer's; it is an endpoint of our rank's transport. To the reader they are one endpoint:

    Connected       once every link is up
    ConnectFailed   at the first link that fails; the others are given up
    ReadEnded       once the read is terminal on every link, with the first error. While one rank's part may still
                    land, the load must not drain, whatever the other ranks report

A peer's rank that dies fails the reads over its links. A rank of ours that dies ends this engine, so nothing waits here
for a rank that is gone. The peer's lease is one, on its rank 0, and so is the confirmation after the last read.
"""

from __future__ import annotations

import itertools
import queue
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.errors import ConnectorUnavailable, LayoutMismatch
from pd_connectors.protocol.slices import plan_peer
from pd_connectors.rank_messages import (
    Call,
    Close,
    Connect,
    Describe,
    Described,
    Died,
    Disconnect,
    Read,
    Report,
    ToRank,
    carry_out,
    decode_from_rank,
    encode,
)
from pd_connectors.transport import Completion, Connected, ConnectFailed, PeerKey, ReadEnded, ReadId, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.base import CacheDescription
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.rank_port import RankPort
    from pd_connectors.transport import GroupIds

START_DEADLINE_S = 120.0  # registering a GPU's whole memory takes seconds
ASK_EVERY_S = 0.5  # until every rank has described its transport


@dataclass(frozen=True, slots=True)
class _Link:
    rank: int  # ours
    source: PeerKey  # with the peer's rank
    groups: frozenset[int]  # of the layout, that are read over it


@dataclass(slots=True)
class _Endpoint:
    links: list[_Link]
    waiting: set[tuple[int, PeerKey]]  # links that are not up, as our rank and the source


@dataclass(slots=True)
class _WholeRead:
    """A read of the engine; its parts, one a link, have numbers that never repeat."""

    read_id: ReadId
    open_parts: set[int] = field(default_factory=set)
    error: str = ""  # the first
    endpoint_broken: bool = False
    post_s: float = 0.0  # of the slowest part


class RankedTransport(Transport):
    """local: rank 0's transport.  ports: index i leads to the RankReader of rank i + 1.

    Raises ConnectorUnavailable unless there is a port for each further rank of the layout.
    """

    def __init__(self, local: Transport, layout: BlockLayout, ports: Sequence[RankPort] = ()) -> None:
        if len(ports) != layout.tp_size - 1:
            raise ConnectorUnavailable(f"{layout.tp_size} ranks, and {len(ports)} ports to further ranks")
        self._local = local
        self._layout = layout
        self._ports = ports
        self._descriptions: dict[int, bytes] = {}  # by rank
        self._inbox: queue.Queue[tuple[int, bytes]] = queue.Queue()  # a SimpleQueue's `get` may wait for ever
        self._completions: list[Completion] = []
        self._endpoints: dict[PeerKey, _Endpoint] = {}
        self._parts: dict[int, _WholeRead] = {}  # in flight, by the part's number
        self._numbers = itertools.count()
        self._wake: Callable[[], None] = _no_waker
        for rank, port in enumerate(ports, start=1):
            port.set_handler(partial(self._receive, rank))

    def register(self, cache: CacheDescription) -> None:
        """Registers rank 0's cache, and waits until every further rank has registered its own."""
        self._local.register(cache)
        self._descriptions[0] = self._local.describe()
        deadline = time.monotonic() + START_DEADLINE_S
        while missing := [rank for rank in range(self._layout.tp_size) if rank not in self._descriptions]:
            if time.monotonic() >= deadline:
                raise ConnectorUnavailable(f"ranks {missing} did not start a transport within {START_DEADLINE_S:g} s")
            for rank in missing:
                self._send(rank, Describe())
            try:
                self._on_message(*self._inbox.get(timeout=ASK_EVERY_S))
            except queue.Empty:
                continue

    def describe(self) -> bytes:
        """With one rank its own description, which engines of any version understand; else a list by rank."""
        descriptions = [self._descriptions[rank] for rank in range(self._layout.tp_size)]
        return msgspec.msgpack.encode(descriptions) if len(descriptions) > 1 else descriptions[0]

    def connect(self, peer: PeerKey, description: bytes) -> None:
        try:
            descriptions = _by_rank(description, peer.num_ranks)
            links = self._plan(peer)
        except (msgspec.MsgspecError, LayoutMismatch) as error:
            self._tell(ConnectFailed(peer, str(error)))
            return
        self._endpoints[peer] = _Endpoint(links, {(link.rank, link.source) for link in links})
        for link in links:
            self._call(link.rank, Connect(link.source, descriptions[link.source.rank]))

    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        endpoint = self._endpoints.get(peer)
        links = endpoint.links if endpoint is not None else []
        parts = {
            next(self._numbers): link for link in links if any(ids for i, ids in enumerate(remote) if i in link.groups)
        }
        if not parts:
            self._tell(ReadEnded(read_id, "the endpoint was torn down" if endpoint is None else "no blocks"))
            return
        self._parts |= dict.fromkeys(parts, _WholeRead(read_id, set(parts)))
        for number, link in parts.items():
            self._call(link.rank, Read(link.source, (read_id[0], number), remote, local))

    def disconnect(self, peer: PeerKey) -> None:
        endpoint = self._endpoints.pop(peer, None)
        for link in endpoint.links if endpoint is not None else ():
            self._call(link.rank, Disconnect(link.source))

    def poll(self) -> list[Completion]:
        """Raises RuntimeError when a rank's transport failed (our own bug)."""
        for completion in self._local.poll():
            self._on_completion(0, completion)
        while not self._inbox.empty():
            self._on_message(*self._inbox.get())
        completions, self._completions = self._completions, []
        return completions

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._local.set_waker(wake)

    def close(self, deadline_s: float) -> None:
        for rank in range(1, self._layout.tp_size):
            self._send(rank, Close(deadline_s))
        self._local.close(deadline_s)

    # links

    def _plan(self, peer: PeerKey) -> list[_Link]:
        groups: dict[tuple[int, int], set[int]] = {}
        for part in plan_peer(peer.num_ranks, peer.num_groups, self._layout):
            groups.setdefault((part.local_rank, part.remote_rank), set()).add(part.group)
        return [_Link(rank, replace(peer, rank=there), frozenset(of)) for (rank, there), of in groups.items()]

    def _on_completion(self, rank: int, completion: Completion) -> None:
        match completion:
            case Connected(source):
                endpoint = self._endpoints.get(replace(source, rank=0))
                if endpoint is not None and endpoint.waiting:
                    endpoint.waiting.discard((rank, source))
                    if not endpoint.waiting:
                        self._tell(Connected(replace(source, rank=0)))
            case ConnectFailed(source, detail):
                peer = replace(source, rank=0)
                if peer in self._endpoints:
                    self.disconnect(peer)
                    self._tell(ConnectFailed(peer, self._between(rank, source) + detail))
            case ReadEnded():
                self._on_read_ended(completion)

    def _on_read_ended(self, ended: ReadEnded) -> None:
        number = ended.read_id[1]
        whole = self._parts.pop(number, None)
        if whole is None:
            return
        whole.open_parts.remove(number)
        whole.error = whole.error or ended.error
        whole.endpoint_broken |= ended.endpoint_broken
        whole.post_s = max(whole.post_s, ended.post_s)
        if not whole.open_parts:
            self._tell(ReadEnded(whole.read_id, whole.error, whole.endpoint_broken, whole.post_s))

    def _between(self, rank: int, source: PeerKey) -> str:
        is_plain = self._layout.tp_size == source.num_ranks == 1
        return "" if is_plain else f"our rank {rank} from the peer's rank {source.rank}: "

    # ranks

    def _call(self, rank: int, call: Call) -> None:
        if rank == 0:
            carry_out(call, self._local)
        else:
            self._send(rank, call)

    def _send(self, rank: int, message: ToRank) -> None:
        self._ports[rank - 1].send(encode(message))

    def _receive(self, rank: int, message: bytes) -> None:
        """Called on the port's thread."""
        self._inbox.put((rank, message))
        self._wake()

    def _on_message(self, rank: int, message: bytes) -> None:
        match decode_from_rank(message):
            case Described(description):
                self._descriptions[rank] = description
            case Report(connected, failed, ended):
                completions: tuple[Completion, ...] = (*connected, *failed, *ended)
                for completion in completions:
                    self._on_completion(rank, completion)
            case Died(detail):
                raise RuntimeError(f"the transport of rank {rank} failed: {detail}")

    def _tell(self, completion: Completion) -> None:
        self._completions.append(completion)
        self._wake()


def _by_rank(description: bytes, num_ranks: int) -> tuple[bytes, ...]:
    """A peer's description, taken apart. Raises msgspec.MsgspecError, or LayoutMismatch for another number of ranks."""
    if num_ranks == 1:
        return (description,)
    descriptions = msgspec.msgpack.decode(description, type=tuple[bytes, ...])
    if len(descriptions) != num_ranks:
        raise LayoutMismatch(f"the peer has {num_ranks} ranks and describes {len(descriptions)}")
    return descriptions


def _no_waker() -> None:
    """The waker until the channel sets its own: the control thread does not wait yet."""
