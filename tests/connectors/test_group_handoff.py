"""Handoffs of caches with groups of every kind, which share one memory: each group has blocks and a first block of its
own, and an engine that lacks an optional group still gets the others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch

from pd_connectors.base import LoadDone, LoadReady, LoadSpec, PublishSpec
from pd_connectors.loopback import LoopbackNetwork
from pd_connectors.nixl import agent as agent_module
from pd_connectors.nixl.agent import NixlAgent, Region
from pd_connectors.nixl.network import KvNetwork
from pd_connectors.protocol.layout import BlockRun
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.registry import create_connector
from tests.connectors.fake_nixl import FakeNixl, bindings
from tests.connectors.layouts import LAYOUTS, make_cache, own_ids, shared_cache
from tests.connectors.remote_node import PATIENT, Node, context
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.protocol.layout import BlockLayout

NUM_TOKENS, NUM_BLOCKS = 72, 5
CONNECTORS = ["loopback", pytest.param("nixl", marks=pytest.mark.integration)]


def runs(layout: BlockLayout, ids: Sequence[Sequence[int]], computed: int, first: Sequence[int] = ()) -> list[BlockRun]:
    """What is handed over. first: blocks before these, by group, are not."""
    found = []
    for index, group in enumerate(layout.groups):
        span = group.handed_over(NUM_TOKENS, computed)
        start = min(span.stop, max([span.start, *first[index : index + 1]]))
        found.append(BlockRun(start, tuple(ids[index][start : span.stop])))
    return found


def hand_over(connector: str, theirs: BlockLayout, ours: BlockLayout, first: Sequence[int] = ()) -> None:
    """One prompt, in two steps, into zeros. first: the blocks that the reader has, by group."""
    if connector == "nixl":
        pytest.importorskip("nixl_cu13")
    network = LoopbackNetwork()
    with ExitStack() as stack:
        nodes = []
        for name, layout in (("P", theirs), ("D", ours)):
            options = (("network", network),) if connector == "loopback" else ()
            made = create_connector(connector, context(name, layout=layout, options=options, **PATIENT))
            stack.callback(made.close)
            nodes.append(Node(made, shared_cache(layout, NUM_BLOCKS)))
            made.register_kv_cache(nodes[-1].cache)
        prefill, decode = nodes
        sources = own_ids(theirs, NUM_BLOCKS)
        targets = [ids[::-1] for ids in own_ids(ours, NUM_BLOCKS)]
        for tensor, ids in zip(prefill.cache.tensors, sources, strict=True):
            tensor[ids] = torch.randn(NUM_BLOCKS, *tensor.shape[1:])
        ticket = prefill.connector.open_lease("r", list(range(NUM_TOKENS)), "", 1, hold=False)
        decode.connector.begin_load("load", ticket, HANG_S)
        for computed, tokens in ((32, ()), (NUM_TOKENS, (SampledToken(7),))):
            readable = tuple(runs(theirs, sources, computed))
            prefill.connector.send_after([PublishSpec(ticket.lease.lease_id, readable, computed, 0, tokens)])
            if computed == 32:
                decode.wait_for(LoadReady, "load")
                wanted = runs(ours, targets, NUM_TOKENS, first)
                decode.connector.recv_before([LoadSpec("load", tuple(wanted), NUM_TOKENS)])
        done = decode.wait_for(LoadDone, "load")
        num_common = ours.num_common(theirs)
        num_bytes = []
        for index, (group, run) in enumerate(zip(ours.groups, wanted, strict=True)):
            span = run.span if index < num_common else range(0)
            num_bytes.append(len(span) * group.block_bytes)
            for block, target in enumerate(targets[index]):
                landed = decode.cache.tensors[index][target]
                if block in span:
                    assert torch.equal(landed, prefill.cache.tensors[index][sources[index][block]]), (index, block)
                else:
                    assert not landed.any(), "it was not asked for"
        assert done.group_bytes == tuple(num_bytes)
        stats = decode.connector.stats()
        assert [stats[f"kv_group_transfer_bytes_total|group={i}"] for i in range(len(num_bytes))] == num_bytes
        assert stats["kv_transfer_bytes_total"] == sum(num_bytes)


@pytest.mark.long_cases
@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_group_moves_the_blocks_that_later_tokens_read(connector: str, name: str) -> None:
    hand_over(connector, LAYOUTS[name], LAYOUTS[name])


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_reader_that_has_more_of_one_group_reads_less_of_it(connector: str) -> None:
    hand_over(connector, LAYOUTS["windowed"], LAYOUTS["windowed"], first=(1, 4))


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("names", [("windowed", "drafts"), ("drafts", "windowed")], ids="-".join)
def test_an_optional_group_that_one_side_lacks_is_not_handed_over(connector: str, names: tuple[str, str]) -> None:
    hand_over(connector, LAYOUTS[names[0]], LAYOUTS[names[1]])


class RegisteringNixl(FakeNixl):
    """Keeps what is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[tuple[int, int]] = []

    def registerMem(self, regions: object, backends: object) -> None:
        assert isinstance(regions, list)
        self.registered += [(base, num_bytes) for base, num_bytes, *_ in regions]


def test_memory_that_groups_share_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for make, num_memories in ((shared_cache, 1), (make_cache, 3)):
        nixl, tensors = RegisteringNixl(), make(LAYOUTS["latent"], NUM_BLOCKS).tensors
        monkeypatch.setattr(agent_module, "_bindings", bindings(nixl))
        agent = NixlAgent("us", tensors, KvNetwork((), "", None))
        *memories, _ = nixl.registered  # the last one is the agent's own
        assert len(memories) == num_memories
        for region, tensor in zip(agent.regions, tensors, strict=True):
            assert region == Region.of(tensor)
            for block in (0, tensor.shape[0] - 1):
                start = tensor[block].data_ptr()
                assert start == region.base + block * region.stride
                assert any(base <= start and start + region.block_bytes <= base + size for base, size in memories)
