"""A prefill node in a process of its own, driven through a pipe. Its blocks hold recognisable bytes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pd_connectors.base import CachedBlock, CacheDescription, Connector, ConnectorContext, Event, PublishSpec
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.registry import create_connector, rank_reader
from tests.connectors import layouts
from tests.connectors.forked import start_process
from tests.connectors.layouts import make_cache, two_groups
from tests.connectors.rank_wires import PortPair
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from pd_connectors.base import Closes
    from pd_connectors.protocol.layout import BlockRun

LAYOUT = two_groups()
KEY = b"k" * 32
PATIENCE_S = HANG_S
# Of `context`, for what must succeed: a busy machine may keep a healthy process waiting for seconds
PATIENT: dict[str, Any] = dict.fromkeys(
    ("lease_ttl_s", "silence_s", "connect_deadline_s", "confirm_deadline_s"), HANG_S
)


def context(engine_id: str, epoch: int = 1, **changes: Any) -> ConnectorContext:
    """Short deadlines, so that failure tests are quick."""
    plain = ConnectorContext(
        engine_id=engine_id,
        epoch=epoch,
        fingerprint="weights-a",
        layout=LAYOUT,
        cluster_key=KEY,
        host="127.0.0.1",
        port=0,
        lease_ttl_s=2.0,
        connect_deadline_s=2.0,
        confirm_deadline_s=2.0,
        drain_deadline_s=1.0,
    )
    return replace(plain, **changes)


def runs(first_block: int, block_ids: Sequence[int]) -> tuple[BlockRun, ...]:
    """The same blocks in each group of LAYOUT."""
    return layouts.runs(first_block, block_ids, len(LAYOUT.groups))


def stamp(cache: CacheDescription, block_id: int, version: int, like: int | None = None) -> None:
    """Fill a block with numbers that only (group, block id, version) has. like: another block's id in its place."""
    for part, expected in _parts(cache, block_id if like is None else like, version):
        part[block_id].copy_(expected)


def is_stamped(cache: CacheDescription, block_id: int, like: int, version: int) -> bool:
    """Whether a block holds, in every group, what `stamp` writes into block `like`."""
    return all(torch.equal(part[block_id], expected) for part, expected in _parts(cache, like, version))


def _parts(cache: CacheDescription, block_id: int, version: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a node's cache, with what a block of it holds."""
    layout, tensors = cache.layout, iter(cache.tensors)
    for rank in range(layout.tp_size):
        for index, group in enumerate(layout.groups):
            heads = group.heads_of(rank, layout.tp_size)
            values = torch.arange(prod(group.shape)) + 1000.0 * block_id + 1e6 * version + 0.5 * index
            yield next(tensors), values.view(group.shape)[heads.start : heads.stop]


@dataclass
class Node:
    """A connector with its cache, and every event that came out of it. All its ranks are in this process."""

    connector: Connector
    cache: CacheDescription  # with the tensors of all ranks, rank after rank
    readers: list[Closes | None] = field(default_factory=list)  # of the further ranks
    ports: list[PortPair] = field(default_factory=list)  # to them
    events: list[Event] = field(default_factory=list)

    @classmethod
    def start(cls, connector_name: str, settings: ConnectorContext, num_blocks: int) -> Node:
        caches = [make_cache(settings.layout, num_blocks) for _ in range(settings.layout.tp_size)]
        pairs = [PortPair() for _ in caches[1:]]
        connector = create_connector(connector_name, replace(settings, rank_ports=tuple(pair.zero for pair in pairs)))
        readers: list[Closes | None] = []
        try:
            for rank, pair in enumerate(pairs, start=1):
                readers.append(rank_reader(connector_name, replace(settings, rank=rank), caches[rank], pair.rank))
            connector.register_kv_cache(caches[0])
        except BaseException:
            connector.close()
            raise
        tensors = tuple(tensor for cache in caches for tensor in cache.tensors)
        return cls(connector, replace(caches[0], tensors=tensors), readers, pairs)

    def close(self) -> None:
        """As an engine ends: rank 0's connector, then what the other ranks run. Then no cache changes. Idempotent."""
        self.connector.close()
        for reader in self.readers:
            if reader is not None:
                reader.close()
        while self.ports:
            self.ports.pop().close()

    def wait_for(self, kind: type[Event], load_or_lease: str, patience_s: float = PATIENCE_S) -> Any:
        """The event of that kind; fails the test when it does not come."""
        deadline = time.monotonic() + patience_s
        while True:
            self.events += self.connector.poll()
            for event in self.events:
                name = getattr(event, "load_id", None) or getattr(event, "lease_id", None)
                if isinstance(event, kind) and name == load_or_lease:
                    return event
            assert time.monotonic() < deadline, f"no {kind.__name__} of {load_or_lease} but {self.events}"
            time.sleep(0.002)

    def kinds(self, load_id: str) -> list[str]:
        """Names of the load's events so far, in order."""
        self.events += self.connector.poll()
        return [type(event).__name__ for event in self.events if getattr(event, "load_id", None) == load_id]


class DrivenNode(ABC):
    """A prefill node that does what a test says, wherever it lives."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> Any:
        """Run one of COMMANDS there."""

    def open(self, num_tokens: int, *, hold: bool = False) -> Ticket:
        ticket = self.call("open", num_tokens, hold)
        assert isinstance(ticket, Ticket)
        return ticket

    def publish(
        self, lease_id: str, block_ids: tuple[int, ...], num_tokens: int, generation: int = 0, token_id: int = -1
    ) -> None:
        """token_id: the first token, in the same announcement; -1: it is not known yet."""
        tokens = (SampledToken(token_id, -0.5),) if token_id >= 0 else ()
        self.call("publish", PublishSpec(lease_id, runs(0, block_ids), num_tokens, generation, tokens))

    def finish(self, lease_id: str, token_id: int = 7) -> None:
        self.call("finish", lease_id, (SampledToken(token_id, -0.5),))

    @abstractmethod
    def kill(self) -> None:
        """End it at once, without a message to any peer."""


@dataclass
class RemoteNode(DrivenNode):
    """The test's end of the pipe."""

    process: BaseProcess
    pipe: Connection
    port: int

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def call(self, name: str, *args: Any) -> Any:
        self.pipe.send((name, args))
        assert self.pipe.poll(PATIENCE_S), f"{name} did not return"
        return self.pipe.recv()

    def kill(self) -> None:
        """SIGKILL, whatever it is doing (or if it is stopped)."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.join(PATIENCE_S)


@contextmanager
def remote_node(connector_name: str, settings: ConnectorContext, num_blocks: int = 64) -> Iterator[RemoteNode]:
    """A prefill node in another process; killed at the end."""
    ours, theirs = multiprocessing.Pipe()
    process = start_process(_serve, theirs, connector_name, settings, num_blocks)
    theirs.close()
    try:
        assert ours.poll(PATIENCE_S), "the remote node did not start"
        node = RemoteNode(process, ours, ours.recv())
        yield node
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(PATIENCE_S)
        ours.close()


def _serve(pipe: Connection, connector_name: str, settings: ConnectorContext, num_blocks: int) -> None:
    torch.set_num_threads(1)
    node = Node.start(connector_name, settings, num_blocks)
    for block_id in range(num_blocks):
        stamp(node.cache, block_id, 0)
    pipe.send(node.connector.control_port)
    try:
        while True:
            name, args = pipe.recv()
            pipe.send(COMMANDS[name](node, *args))
    except EOFError:
        node.close()


def _open(node: Node, num_tokens: int, hold: bool) -> Ticket:
    return node.connector.open_lease("r", list(range(num_tokens)), "", 1, hold=hold)


def _events(node: Node) -> list[Event]:
    node.events += node.connector.poll()
    return node.events


def _store(node: Node, blocks: tuple[CachedBlock, ...]) -> None:
    """Offer them to the pool, and wait until they were sent or dropped."""
    assert node.connector.pool is not None
    node.connector.pool.store(blocks)
    deadline = time.monotonic() + PATIENCE_S
    while node.connector.stats()["pool_backlog_bytes"]:
        assert time.monotonic() < deadline, "the backlog was not sent"
        time.sleep(0.002)


def _cpu_s(node: Node) -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


COMMANDS: dict[str, Callable[..., Any]] = {
    "open": _open,
    "publish": lambda node, publish: node.connector.send_after([publish]),
    "finish": lambda node, lease_id, tokens: node.connector.finish_lease(lease_id, tokens),
    "retract": lambda node, lease_id: node.connector.retract(lease_id),
    "end": lambda node, lease_id: node.connector.end_lease(lease_id, LeaseEnd.REVOKED),
    "stamp": lambda node, block_id, version: stamp(node.cache, block_id, version),
    "events": _events,
    "stats": lambda node: node.connector.stats(),
    "cpu_s": _cpu_s,
    "store": _store,
    "close": lambda node: node.close(),
}
