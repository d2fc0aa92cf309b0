"""Reads between engines of every degree over real NIXL; all ranks are in this process, each with its own agent."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pd_connectors.base import LoadDone, LoadReady, LoadSpec, PublishSpec
from pd_connectors.protocol.messages import SampledToken
from tests.connectors.layouts import mixed_heads, over, runs
from tests.connectors.remote_node import PATIENT, Node, context, is_stamped, stamp
from tests.deadlines import HANG_S
from tests.integration.system import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration

LAYOUT = mixed_heads(head_dim=16)  # on 4 ranks, each head of the first group is there twice
NUM_BLOCKS = 32
NUM_READ = 12
DEGREES = (1, 2, 4)


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[int, Node]]:
    """One node of each degree. Every node reads from all, also from itself."""
    started: dict[int, Node] = {}
    try:
        for degree in DEGREES:
            settings = context(f"tp{degree}", layout=over(LAYOUT, degree), **PATIENT)
            started[degree] = Node.start("nixl", settings, NUM_BLOCKS)
        yield started
    finally:
        for node in started.values():
            node.close()
            for reader in node.readers:
                assert reader is not None
                reader.close()


@pytest.mark.parametrize("ours", DEGREES)
@pytest.mark.parametrize("theirs", DEGREES)
def test_every_byte_is_right_in_any_order_of_blocks(nodes: dict[int, Node], theirs: int, ours: int) -> None:
    prefill, decode = nodes[theirs], nodes[ours]
    rng = random.Random(10 * theirs + ours)
    version = 10 * theirs + ours
    sources = rng.sample(range(NUM_BLOCKS // 2), NUM_READ)
    targets = rng.sample(range(NUM_BLOCKS // 2, NUM_BLOCKS), NUM_READ)  # apart from the sources: nodes read themselves
    for tensor in decode.cache.tensors:
        tensor.zero_()
    for block in range(NUM_BLOCKS // 2):
        stamp(prefill.cache, block, version)
    before = [tensor.clone() for tensor in decode.cache.tensors]

    ticket = prefill.connector.open_lease("r", list(range(NUM_READ * 16)), "", 1, hold=False)
    load_id = f"{theirs}-to-{ours}"
    decode.connector.begin_load(load_id, ticket, HANG_S)
    for num_blocks in (5, NUM_READ):  # the second part while the first one is read
        readable = runs(0, sources[:num_blocks], len(LAYOUT.groups))
        token = (SampledToken(7),) if num_blocks == NUM_READ else ()
        prefill.connector.send_after([PublishSpec(ticket.lease.lease_id, readable, 16 * num_blocks, 0, token)])
        if num_blocks == 5:
            decode.wait_for(LoadReady, load_id)
            targets_of = runs(0, targets, len(LAYOUT.groups))
            decode.connector.recv_before([LoadSpec(load_id, targets_of, NUM_READ * 16)])
    done = decode.wait_for(LoadDone, load_id)

    for source, target in zip(sources, targets, strict=True):
        assert is_stamped(decode.cache, target, like=source, version=version)
    others = [block for block in range(NUM_BLOCKS) if block not in targets]
    for tensor, old in zip(decode.cache.tensors, before, strict=True):
        assert bool((tensor[others] == old[others]).all())
    held = sum(tensor[0].nbytes for tensor in decode.cache.tensors)
    assert sum(done.group_bytes) == NUM_READ * held
    wait_until(lambda: prefill.connector.stats()["leases_open"] == 0, lambda: "the lease is not released")
