"""What the NIXL transport makes of NIXL's errors: which end a read, which leave it in doubt, what is cleaned up."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_connectors.nixl import agent as agent_module
from pd_connectors.nixl import transfer
from pd_connectors.nixl.agent import Region
from pd_connectors.nixl.network import KvNetwork
from pd_connectors.nixl.transfer import NixlTransport
from pd_connectors.protocol.errors import ConnectorUnavailable
from pd_connectors.ranked_transport import RankedTransport
from pd_connectors.transport import Completion, Connected, ConnectFailed, PeerKey, ReadEnded
from tests.connectors.fake_nixl import BackendError, FakeNixl, NotFound, RemoteDisconnect, bindings
from tests.connectors.layouts import full_layout, make_cache
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAYOUT = full_layout(block_size=16, num_kv_heads=1, num_layers=1, head_dim=1, dtype="float32")
NUM_BLOCKS, SIZE = 4, LAYOUT.block_bytes
ANYWHERE = KvNetwork((), "", None)
PEER = PeerKey(("there", 1), "P", 1, 1)
OTHER_WAY = PeerKey(("also-there", 1), "P", 1, 2)
MARKER = PeerKey(("nowhere", 1), "", 0, 0)


class Bench:
    """A transport over a scripted NIXL."""

    def __init__(self) -> None:
        self.nixl = FakeNixl()
        self.transport = NixlTransport("us", ANYWHERE)
        self._told = threading.Event()
        self._completions: list[Completion] = []
        self.transport.set_waker(self._told.set)

    def start(self) -> None:
        cache = make_cache(LAYOUT, NUM_BLOCKS)
        self.transport.register(cache)

    def next(self) -> Completion:
        """The next completion."""
        self._await(lambda: bool(self._completions))
        return self._completions.pop(0)

    def settle(self) -> None:
        """Let the thread carry out what it was asked, and look at everything in flight."""
        for _ in range(2):  # between the answers to two calls it looks once
            self.transport.connect(MARKER, b"no description")
            self._await(lambda: any(isinstance(c, ConnectFailed) and c.peer == MARKER for c in self._completions))
            self._completions = [c for c in self._completions if not isinstance(c, ConnectFailed) or c.peer != MARKER]

    def _await(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not holds():
            assert self._told.wait(max(0.0, deadline - time.monotonic())), "nothing was completed"
            self._told.clear()
            self._completions += self.transport.poll()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not holds():
            assert time.monotonic() < deadline, "it never came true"
            self.settle()

    def is_silent(self) -> bool:
        self.settle()
        return not self._completions

    def connect(self, key: PeerKey = PEER) -> None:
        region = Region(base=0, num_blocks=NUM_BLOCKS, block_bytes=SIZE, stride=SIZE, segment="DRAM", device=0)
        there = {"agent": "peer", "metadata": b"peer", "regions": (region,), "listeners": (("192.0.2.1", 45001),)}
        self.transport.connect(key, msgspec.msgpack.encode(there))

    def connected(self, key: PeerKey = PEER) -> None:
        before = len(self.nixl.posted)
        self.connect(key)
        self.wait_until(lambda: len(self.nixl.posted) > before)
        self.nixl.status[self.nixl.posted[-1]] = self.nixl.NIXL_SUCCESS
        assert self.next() == Connected(key)

    def read(self, number: int = 0) -> int:
        """Post a read; its handle."""
        before = len(self.nixl.posted)
        self.transport.read(PEER, ("load", number), ((0, 1),), ((2, 3),))
        self.wait_until(lambda: len(self.nixl.posted) > before)
        return self.nixl.posted[before]

    def fence(self, after: int) -> int:
        """The handle of the fence that follows the post of `after`."""
        self.wait_until(lambda: self.nixl.posted[-1] > after)
        return self.nixl.posted[-1]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(transfer, "FENCE_EVERY_S", 0.01)
    bench = Bench()
    monkeypatch.setattr(agent_module, "_bindings", bindings(bench.nixl))
    bench.start()
    yield bench
    bench.transport.close(5.0)


def test_success_ends_a_read(bench: Bench) -> None:
    bench.connected()
    handle = bench.read()
    assert bench.is_silent()
    bench.nixl.status[handle] = bench.nixl.NIXL_SUCCESS
    assert bench.next() == ReadEnded(("load", 0))
    assert handle in bench.nixl.released


def test_the_end_of_the_endpoint_ends_all_its_reads(bench: Bench) -> None:
    """NIXL says so to one of them, forgets the peer, and does not find it when asked for the others."""
    bench.connected()
    first, second = bench.read(0), bench.read(1)
    bench.nixl.status |= {first: RemoteDisconnect("gone"), second: NotFound("gone")}
    ends = [bench.next(), bench.next()]
    assert [end.read_id for end in ends if isinstance(end, ReadEnded) and end.error and end.endpoint_broken] == [
        ("load", 0),
        ("load", 1),
    ]
    assert {first, second} <= set(bench.nixl.released)


@pytest.mark.parametrize("where", ["post", "read"])
def test_any_other_error_is_not_the_end(bench: Bench, where: str) -> None:
    """A part of it may be posted: its handle is kept, and its end told, only when a later fence is done."""
    bench.connected()
    if where == "post":
        bench.nixl.posts.append(BackendError("no memory"))
    handle = bench.read()
    if where == "read":
        bench.nixl.status[handle] = BackendError("no memory")
    fence = bench.fence(after=handle)
    assert bench.is_silent()
    assert handle not in bench.nixl.released
    bench.nixl.status[fence] = bench.nixl.NIXL_SUCCESS
    end = bench.next()
    assert isinstance(end, ReadEnded)
    assert (end.read_id, end.endpoint_broken) == (("load", 0), True)
    assert "BackendError: no memory" in end.error
    bench.settle()
    assert sorted(bench.nixl.released) == sorted(bench.nixl.posted)


def test_a_fence_vouches_only_for_reads_posted_before_it(bench: Bench) -> None:
    bench.connected()
    bench.nixl.posts.append(BackendError("no memory"))
    fence = bench.fence(after=bench.read(0))
    late = bench.read(1)
    bench.nixl.status[late] = BackendError("no memory")
    assert bench.is_silent()
    bench.nixl.status[fence] = bench.nixl.NIXL_SUCCESS
    end = bench.next()
    assert isinstance(end, ReadEnded)
    assert end.read_id == ("load", 0)
    second_fence = bench.fence(after=late)
    assert bench.is_silent()
    assert late not in bench.nixl.released
    bench.nixl.status[second_fence] = bench.nixl.NIXL_SUCCESS
    assert isinstance(bench.next(), ReadEnded)


def test_a_failed_fence_proves_nothing_and_is_repeated(bench: Bench) -> None:
    bench.connected()
    bench.nixl.posts += [BackendError("no memory"), BackendError("still none")]
    handle = bench.read()
    refused = bench.fence(after=handle)
    failed = bench.fence(after=refused)
    bench.nixl.status[failed] = BackendError("again")
    good = bench.fence(after=failed)
    assert bench.is_silent()
    assert handle not in bench.nixl.released
    bench.nixl.status[good] = bench.nixl.NIXL_SUCCESS
    assert isinstance(bench.next(), ReadEnded)


def test_doubtful_reads_outlive_their_endpoint(bench: Bench) -> None:
    bench.connected()
    bench.nixl.posts.append(BackendError("no memory"))
    handle = bench.read()
    fence = bench.fence(after=handle)
    bench.transport.disconnect(PEER)
    assert bench.is_silent()
    assert bench.nixl.forgotten == [], "forgetting the peer is no fence"
    bench.nixl.status[fence] = RemoteDisconnect("it died")
    assert isinstance(bench.next(), ReadEnded)
    bench.wait_until(lambda: bench.nixl.forgotten == ["peer"])
    assert len(bench.nixl.lists) == 1, "only our own blocks are left"


@pytest.mark.parametrize("error", [BackendError("refused"), NotFound("refused")])
def test_a_refused_warm_up_leaves_nothing_behind(bench: Bench, error: Exception) -> None:
    bench.nixl.posts.append(error)
    bench.connect()
    failed = bench.next()
    assert isinstance(failed, ConnectFailed)
    assert "refused" in failed.detail
    assert bench.nixl.released == bench.nixl.posted
    assert bench.nixl.forgotten == bench.nixl.loaded == ["peer"]
    assert len(bench.nixl.lists) == 1
    bench.connected()


def test_resets_of_a_peer_are_dropped_until_it_is_given_up_within_a_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read over the same connection; and a read of a peer that is gone must end."""
    calls: list[tuple[str, object]] = []
    for name in ("drop_resets", "hear_resets"):
        monkeypatch.setattr(transfer, name, lambda places, name=name: calls.append((name, places)))
    bench.connected()
    bench.read()
    listeners = (("192.0.2.1", 45001),)
    assert calls == [("drop_resets", listeners)]
    bench.transport.disconnect(PEER)
    bench.settle()
    assert calls[1:] == [("hear_resets", listeners)]


def inboxes() -> dict[str, queue.Queue[Any]]:
    """Of threads that wait for a time only: what each of them takes calls and messages from."""
    transport = NixlTransport("us", ANYWHERE)
    return {"nixl": transport._calls, "ranks": RankedTransport(transport, full_layout())._inbox}


@pytest.mark.long
@pytest.mark.parametrize("name", ["nixl", "ranks"])
def test_a_thread_that_is_late_looks_at_reads_again(name: str) -> None:
    """Its wait ends though its time is over before it begins. One for ever held a warm-up until the next call.

    A SimpleQueue waits for ever once in some 9,000 times here: when a microsecond passes between its two looks.
    """
    calls, looked = inboxes()[name], threading.Event()

    def look() -> None:
        for _ in range(60_000):
            calls.put(None)
            calls.get()
            with suppress(queue.Empty):
                calls.get(timeout=1e-9)
        looked.set()

    threading.Thread(target=look, daemon=True).start()
    assert looked.wait(HANG_S)


def test_a_refused_block_list_leaves_nothing_behind(bench: Bench) -> None:
    bench.nixl.list_error = BackendError("refused")
    bench.connect()
    assert isinstance(bench.next(), ConnectFailed)
    assert bench.nixl.forgotten == bench.nixl.loaded == ["peer"]


def test_an_agent_is_forgotten_with_the_last_endpoint_that_leads_to_it(bench: Bench) -> None:
    """One node under two addresses: giving one up must not end the reads over the other."""
    bench.connected()
    handle = bench.read()
    bench.connected(OTHER_WAY)
    bench.transport.disconnect(OTHER_WAY)
    bench.settle()
    assert bench.nixl.forgotten == []
    bench.nixl.status[handle] = bench.nixl.NIXL_SUCCESS
    assert bench.next() == ReadEnded(("load", 0))
    bench.transport.disconnect(PEER)
    bench.settle()
    assert bench.nixl.forgotten == ["peer"]


def test_a_bug_in_the_thread_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every load would end by its deadline only, and every quarantine never."""

    def broken(agent: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(bench.transport, "_check", broken)
    bench.transport.connect(MARKER, b"no description")
    with pytest.raises(RuntimeError, match="NIXL thread failed"):
        bench.wait_until(lambda: False)


def test_a_start_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that never answers must not keep a node starting for ever without a word."""
    released = threading.Event()
    monkeypatch.setattr(transfer, "START_DEADLINE_S", 0.05)
    monkeypatch.setattr(agent_module, "_bindings", released.wait)
    transport = NixlTransport("us", ANYWHERE)
    try:
        with pytest.raises(ConnectorUnavailable, match="did not start within"):
            transport.register(make_cache(LAYOUT, NUM_BLOCKS))
    finally:
        released.set()
        transport.close(5.0)
