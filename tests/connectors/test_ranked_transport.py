"""One transport over several ranks: what is one to the reader, and when. The known bugs of other engines by name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest

from pd_connectors.base import LoadDone, LoadDrained, LoadFailed
from pd_connectors.loopback import LoopbackNetwork
from pd_connectors.nixl import agent as agent_module
from pd_connectors.nixl.agent import NixlAgent
from pd_connectors.nixl.network import KvNetwork
from pd_connectors.protocol.errors import ConnectorUnavailable, LayoutMismatch
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.slices import slices_between
from pd_connectors.rank_messages import (
    Connect,
    Describe,
    Described,
    Died,
    Disconnect,
    Read,
    Report,
    carry_out,
    decode_to_rank,
    encode,
)
from pd_connectors.ranked_transport import RankedTransport
from pd_connectors.transport import Completion, Connected, ConnectFailed, PeerKey, ReadEnded, Transport
from tests.connectors.fake_nixl import FakeNixl, bindings
from tests.connectors.layouts import full_layout, make_cache, mixed_heads, over
from tests.connectors.simulation import Engine, Simulation, VirtualClock, shifted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from pd_connectors.base import CacheDescription
    from pd_connectors.transport import GroupIds, ReadId

HEADS = full_layout(num_kv_heads=4)
IDS = ((0, 1),)


class ScriptedTransport(Transport):
    """One rank's: the test says what completes."""

    def __init__(self) -> None:
        self.connects: list[PeerKey] = []
        self.reads: list[tuple[PeerKey, ReadId]] = []
        self.disconnects: list[PeerKey] = []
        self.completions: list[Completion] = []

    def register(self, cache: CacheDescription) -> None: ...

    def describe(self) -> bytes:
        return b"rank"

    def connect(self, peer: PeerKey, description: bytes) -> None:
        self.connects.append(peer)

    def read(self, peer: PeerKey, read_id: ReadId, remote: GroupIds, local: GroupIds) -> None:
        self.reads.append((peer, read_id))

    def disconnect(self, peer: PeerKey) -> None:
        self.disconnects.append(peer)

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def set_waker(self, wake: Callable[[], None]) -> None: ...

    def close(self, deadline_s: float) -> None: ...


class ScriptedPort:
    """To a rank with a ScriptedTransport, at once."""

    def __init__(self) -> None:
        self.transport = ScriptedTransport()
        self.handle: Callable[[bytes], None] = lambda message: None

    def set_handler(self, handle: Callable[[bytes], None]) -> None:
        self.handle = handle

    def send(self, message: bytes) -> None:
        match decode_to_rank(message):
            case Describe():
                self.handle(encode(Described(b"rank")))
            case Connect() | Read() | Disconnect() as call:
                carry_out(call, self.transport)


class Bench:
    """Our ranks, and a peer of `num_ranks`."""

    def __init__(self, ours: BlockLayout, num_ranks: int) -> None:
        self.ports = [ScriptedPort() for _ in range(ours.tp_size - 1)]
        local = ScriptedTransport()
        self.ranks = [local, *(port.transport for port in self.ports)]
        self.transport = RankedTransport(local, ours, self.ports)
        self.transport.register(make_cache(ours, 2))
        self.peer = PeerKey(("there", 1), "P", 1, 1, num_ranks)
        self.description = msgspec.msgpack.encode([b"rank"] * num_ranks) if num_ranks > 1 else b"rank"

    def tell(self, rank: int, *completions: Completion) -> None:
        """What a rank reports, over its port if it has one."""
        if rank:
            self.ports[rank - 1].handle(encode(Report.of(list(completions))))
        else:
            self.ranks[0].completions += completions

    def links(self) -> Iterable[tuple[int, PeerKey]]:
        return [(rank, source) for rank, transport in enumerate(self.ranks) for source in transport.connects]

    def connected(self) -> Bench:
        self.transport.connect(self.peer, self.description)
        for rank, source in self.links():
            self.tell(rank, Connected(source))
        assert self.transport.poll() == [Connected(self.peer)]
        return self

    def read(self, number: int) -> list[tuple[int, ReadId]]:
        """Post a read; its parts by rank."""
        before = [len(transport.reads) for transport in self.ranks]
        self.transport.read(self.peer, ("load", number), IDS, IDS)
        return [
            (rank, read_id)
            for rank, transport in enumerate(self.ranks)
            for _, read_id in transport.reads[before[rank] :]
        ]


def test_a_peer_is_ready_when_every_link_is() -> None:
    bench = Bench(over(HEADS, 2), 4)
    bench.transport.connect(bench.peer, bench.description)
    links = list(bench.links())
    assert [(rank, source.rank) for rank, source in links] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for rank, source in links[:-1]:
        bench.tell(rank, Connected(source), Connected(source))
    assert bench.transport.poll() == []
    bench.tell(links[-1][0], Connected(links[-1][1]))
    assert bench.transport.poll() == [Connected(bench.peer)]
    bench.tell(links[0][0], Connected(links[0][1]))
    assert bench.transport.poll() == [], "once"


def test_a_peer_is_lost_when_one_link_is() -> None:
    bench = Bench(over(HEADS, 2), 2)
    bench.transport.connect(bench.peer, bench.description)
    (_, first), (_, second) = bench.links()
    bench.tell(1, ConnectFailed(second, "refused"))
    bench.tell(0, Connected(first))
    assert bench.transport.poll() == [
        ConnectFailed(bench.peer, "our rank 1 from the peer's rank 1: refused"),
    ]
    assert bench.ranks[0].disconnects == [first]


def test_a_read_ends_once_with_the_first_error_after_its_last_part() -> None:
    """vllm #40364: one rank had failed while reads of other ranks could still land."""
    bench = Bench(over(HEADS, 4), 1).connected()
    parts = bench.read(0)
    assert [rank for rank, _ in parts] == [0, 1, 2, 3]
    for rank, part in (parts[2], parts[0], parts[1]):
        bench.tell(
            rank, ReadEnded(part, f"error of {rank}" if rank else "", endpoint_broken=rank == 2, post_s=rank / 8)
        )
        assert bench.transport.poll() == []
    bench.tell(3, ReadEnded(parts[3][1]))
    (ended,) = bench.transport.poll()
    assert ended == ReadEnded(("load", 0), "error of 2", endpoint_broken=True)
    assert isinstance(ended, ReadEnded)
    assert ended.post_s == 0.25


def test_parts_of_different_reads_are_never_counted_as_one() -> None:
    """sglang #22145, #15027: one key for several ranks or chunks completed a transfer too early, or never."""
    bench = Bench(over(HEADS, 2), 4).connected()
    first, second = bench.read(0), bench.read(1)
    assert len({part for _, part in first + second}) == 8
    for rank, part in first[:3]:
        bench.tell(rank, ReadEnded(part), ReadEnded(part))
    for rank, part in second[1:]:
        bench.tell(rank, ReadEnded(part))
    assert bench.transport.poll() == []
    bench.tell(second[0][0], ReadEnded(second[0][1]))
    assert bench.transport.poll() == [ReadEnded(("load", 1))]
    bench.tell(first[3][0], ReadEnded(first[3][1]))
    assert bench.transport.poll() == [ReadEnded(("load", 0))]
    assert bench.transport._parts == {}


def test_a_read_goes_only_where_it_has_blocks() -> None:
    """P's second rank has the other half of the heads, and the group that every rank holds whole is read from one."""
    bench = Bench(mixed_heads(), 2).connected()
    bench.transport.read(bench.peer, ("latent", 0), ((), (), (3,)), ((), (), (4,)))
    ((source, part),) = bench.ranks[0].reads
    assert source.rank == 0
    bench.tell(0, ReadEnded(part))
    assert bench.transport.poll() == [ReadEnded(("latent", 0))]
    bench.transport.read(bench.peer, ("heads", 0), ((), (1,), ()), ((), (1,), ()))
    assert [source.rank for source, _ in bench.ranks[0].reads[1:]] == [0, 1]
    bench.transport.read(replace(bench.peer, attempt=9), ("gone", 0), IDS, IDS)
    assert bench.transport.poll() == [ReadEnded(("gone", 0), "the endpoint was torn down")]


@pytest.mark.parametrize(
    ("description", "num_ranks"),
    [(b"\xc1", 2), (msgspec.msgpack.encode([b"a"]), 2), (msgspec.msgpack.encode([b"a"] * 3), 3)],
)
def test_a_description_of_other_ranks_fails_the_connection(description: bytes, num_ranks: int) -> None:
    bench = Bench(over(HEADS, 2), num_ranks)
    bench.transport.connect(bench.peer, description)
    (failed,) = bench.transport.poll()
    assert isinstance(failed, ConnectFailed)
    assert failed.peer == bench.peer


def test_one_rank_describes_itself_as_in_every_version() -> None:
    assert Bench(HEADS, 1).transport.describe() == b"rank"
    assert msgspec.msgpack.decode(Bench(over(HEADS, 2), 1).transport.describe()) == [b"rank", b"rank"]


def test_ranks_that_fail_are_errors_of_ours() -> None:
    bench = Bench(over(HEADS, 2), 1)
    bench.ports[0].handle(encode(Died("a bug")))
    with pytest.raises(RuntimeError, match="the transport of rank 1 failed: a bug"):
        bench.transport.poll()
    with pytest.raises(ConnectorUnavailable, match="2 ranks, and 0 ports"):
        RankedTransport(ScriptedTransport(), over(HEADS, 2))


# whole engines


def engines(*layouts: BlockLayout) -> Simulation:
    clock = VirtualClock()
    network = LoopbackNetwork(clock=clock)
    simulation = Simulation(network, clock, 0)
    simulation.engines = [Engine(network, clock, port, 1, layout) for port, layout in enumerate(layouts, start=1)]
    return simulation


def reading(layout: BlockLayout, lag_s: float) -> Simulation:
    """The first engine's last rank is stopped for a while, when all others have read a prompt of 3 blocks."""
    simulation = engines(layout, mixed_heads())
    decode, prefill = simulation.engines
    simulation.request(1, [0], 40, 0, hold=False)
    for lag in (0.0, lag_s):
        if lag:
            simulation.pause_rank(0, layout.tp_size - 1, lag)
        prefill.compute(6, sample=True)
        prefill.next_turn = simulation.clock.now
        simulation.advance(0.2)
    blocks = decode.loads["load-1"].blocks
    assert len(blocks) == 3
    there = [
        bool((tensor[[shifted(block, group) for block in blocks]] > 0).all())
        for cache in decode.caches
        for group, tensor in enumerate(cache.tensors)
    ]
    assert there == [True] * (3 * layout.tp_size - 3) + [False] * 3
    return simulation


@pytest.mark.long
@pytest.mark.parametrize("degree", [2, 4])
def test_the_lease_outlives_the_last_rank_that_reads(degree: int) -> None:
    """vllm #18833: P freed its blocks after the first of several readers; it keeps a count for each ratio now."""
    simulation = reading(over(mixed_heads(), degree), 1.5)
    decode, prefill = simulation.engines
    simulation.advance(0.8)
    assert len(prefill.connector.leases) == 1
    assert not any(isinstance(event, LoadDone) for event in decode.loads["load-1"].events)
    simulation.settle()
    assert decode.num_done == 1


@pytest.mark.long
def test_nothing_drains_while_a_rank_that_lags_may_still_write() -> None:
    """vllm #40364 again, with memory: the load fails, and its blocks stay quarantined until the last rank is quiet."""
    simulation = reading(over(mixed_heads(), 2), 2.5)
    decode = simulation.engines[0]
    decode.cancel()
    simulation.advance(1.5)
    kinds = [type(event) for event in decode.loads["load-1"].events]
    assert LoadFailed in kinds
    assert LoadDrained not in kinds
    assert decode.connector.stats()["quarantined_blocks"] == 9, "three of each group"
    simulation.settle()
    assert [type(event) for event in decode.loads["load-1"].events][-1] is LoadDrained


def test_ranks_that_no_reader_needs_hold_nothing_back() -> None:
    """vllm #27274: ranks with replicated (MLA) blocks that were never read were never released."""
    latent = BlockLayout(mixed_heads().groups[2:])
    simulation = engines(over(latent, 4), latent)
    simulation.request(0, [1], 90, 0, hold=False)
    simulation.settle()  # no lease and no block is left
    assert simulation.engines[1].num_done == 1
    links = simulation.engines[1].connector._transport._endpoints  # type: ignore[attr-defined]
    assert [[link.source.rank for link in endpoint.links] for endpoint in links.values()] == [[0]]


@pytest.mark.long
def test_bytes_are_those_of_all_our_ranks() -> None:
    """sglang #33807: the size on one rank was taken for the whole."""
    groups = mixed_heads().groups
    for theirs, ours in ((1, 2), (2, 1), (4, 2), (1, 4)):
        simulation = engines(over(mixed_heads(), theirs), over(mixed_heads(), ours))
        simulation.request(0, [1], 48, 0, hold=False)
        simulation.settle()
        (done,) = (event for event in simulation.engines[1].loads["load-1"].events if isinstance(event, LoadDone))
        copies = [max(1, ours // 2), 1, ours]  # of each head, over our ranks
        assert done.group_bytes == tuple(
            3 * group.block_bytes * count for group, count in zip(groups, copies, strict=True)
        )
        memory = sum(tensor.nbytes for cache in simulation.engines[1].caches for tensor in cache.tensors)
        assert sum(done.group_bytes) * len(simulation.engines[1].memory) == 3 * memory


@pytest.mark.long
def test_one_reader_serves_peers_of_every_degree() -> None:
    """vllm #43523: the second degree was a KeyError."""
    simulation = engines(*(over(mixed_heads(), degree) for degree in (2, 1, 2, 4)))
    for prefill in (1, 2, 3, 0):
        simulation.request(prefill, [0], 40, 0, hold=False)
        simulation.settle()
    assert simulation.engines[0].num_done == 4


def test_heads_in_another_order_of_axes_are_refused() -> None:
    """TensorRT-LLM #6507: slices of another layout have the same sizes, and gave wrong answers without an error."""
    (group,) = full_layout(num_kv_heads=2, num_layers=2).groups
    layers_first = msgspec.structs.replace(group, shape=(2, 2, 16, 2, 1))
    assert layers_first.block_bytes == group.block_bytes
    with pytest.raises(LayoutMismatch, match="the peer's KV groups are"):
        BlockLayout((group,)).num_common(BlockLayout((layers_first,), tp_size=2))


class RecordingNixl(FakeNixl):
    """Keeps the rows (address, length, device) of every list."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, NDArray[np.uint64]]] = []

    def prepXferDlist(self, name: str, blocks: object, backends: object) -> int:
        self.rows.append((name, blocks))  # type: ignore[arg-type]
        return super().prepXferDlist(name, blocks, backends)


@pytest.mark.parametrize("sizes", [(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)])
def test_no_descriptor_reaches_beyond_its_region(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]) -> None:
    """sglang #31295, #31968: groups counted by ranks, not by distinct heads, were read past the region's end."""
    theirs, ours = (over(mixed_heads(), size) for size in sizes)
    for rank in range(ours.tp_size):
        nixl, cache = RecordingNixl(), make_cache(ours, 3)
        monkeypatch.setattr(agent_module, "_bindings", bindings(nixl))
        agent = NixlAgent("us", cache.tensors, KvNetwork((), "", None))
        covered = [0] * len(ours.groups)
        for source in range(theirs.tp_size):
            slices = slices_between(source, theirs.tp_size, ours, rank)
            if not slices:
                continue
            there = make_cache(theirs, 3)
            regions = NixlAgent("them", there.tensors, KvNetwork((), "", None)).regions
            nixl.rows.clear()
            agent.connect(b"them", regions, slices)
            for name, rows in nixl.rows:
                within = regions if name else agent.regions
                for index, part in enumerate(slices):
                    region, part_rows = within[part.group], rows[3 * index : 3 * index + 3]
                    ends = region.base + region.block_bytes * region.num_blocks
                    assert int(part_rows[:, 0].min()) >= region.base
                    assert int((part_rows[:, 0] + part_rows[:, 1]).max()) <= ends
            for part in slices:
                covered[part.group] += part.num_bytes
        assert covered == [group.rank_bytes(ours.tp_size) for group in ours.groups]
