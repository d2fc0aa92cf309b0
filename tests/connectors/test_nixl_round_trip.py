"""NIXL between two processes: what is read is what was published, bit for bit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from pd_connectors.base import FirstTokens, LeaseEnded, LoadDone, LoadReady, LoadSpec
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import SampledToken
from tests.connectors.remote_node import Node, RemoteNode, context, remote_node, stamped

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def prefill() -> Iterator[RemoteNode]:
    with remote_node("nixl", context("P")) as node:
        yield node


@pytest.fixture(scope="module")
def decode() -> Iterator[Node]:
    node = Node.start("nixl", context("D"), 64)
    yield node
    node.connector.close()


def assert_equal(decode: Node, ours: tuple[int, ...], theirs: tuple[int, ...], version: int = 0) -> None:
    for mine, original in zip(ours, theirs, strict=True):
        assert torch.equal(decode.cache.tensor[mine], stamped(decode.cache, original, version))


def test_whole_prompt_with_partial_tail(prefill: RemoteNode, decode: Node) -> None:
    ticket = prefill.open(40)
    lease_id = ticket.lease.lease_id
    decode.connector.begin_load("whole", ticket, 20.0)
    prefill.publish(lease_id, (5, 6, 9), 40)
    assert decode.wait_for(LoadReady, "whole").num_tokens == 40
    decode.connector.recv_before([LoadSpec("whole", 0, (30, 31, 33), 40)])
    prefill.finish(lease_id, 123)
    done = decode.wait_for(LoadDone, "whole")
    assert done.num_bytes == 3 * decode.cache.block_bytes
    assert decode.wait_for(FirstTokens, "whole").tokens == (SampledToken(123, -0.5),)
    assert_equal(decode, (30, 31, 33), (5, 6, 9))
    deadline = time.monotonic() + 5
    while LeaseEnded(lease_id, LeaseEnd.RELEASED) not in prefill.call("events"):
        assert time.monotonic() < deadline
    assert decode.kinds("whole").count("FirstTokens") == 1


def test_chunks_are_read_as_they_are_announced(prefill: RemoteNode, decode: Node) -> None:
    ticket = prefill.open(70)
    lease_id = ticket.lease.lease_id
    decode.connector.begin_load("chunks", ticket, 20.0)
    prefill.publish(lease_id, (1, 2), 32)
    decode.wait_for(LoadReady, "chunks")
    decode.connector.recv_before([LoadSpec("chunks", 0, (40, 41, 42, 43, 44), 70)])
    deadline = time.monotonic() + 10
    while not torch.equal(decode.cache.tensor[41], stamped(decode.cache, 2, 0)):
        assert time.monotonic() < deadline, "the first chunk is read before the last is announced"
    prefill.publish(lease_id, (1, 2, 3, 4), 64)
    prefill.publish(lease_id, (1, 2, 3, 4, 8), 70)
    prefill.finish(lease_id)
    decode.wait_for(LoadDone, "chunks")
    assert_equal(decode, (40, 41, 42, 43, 44), (1, 2, 3, 4, 8))


def test_prefix_hit_is_never_read(prefill: RemoteNode, decode: Node) -> None:
    ticket = prefill.open(48)
    decode.cache.tensor[50:53] = -1.0
    decode.connector.begin_load("prefix", ticket, 20.0)
    prefill.publish(ticket.lease.lease_id, (11, 12, 13), 48)
    decode.wait_for(LoadReady, "prefix")
    decode.connector.recv_before([LoadSpec("prefix", 2, (52,), 48)])
    prefill.finish(ticket.lease.lease_id)
    assert decode.wait_for(LoadDone, "prefix").num_bytes == decode.cache.block_bytes
    assert_equal(decode, (52,), (13,))
    assert bool((decode.cache.tensor[50:52] == -1.0).all())


def test_nothing_to_read_still_brings_the_first_token(prefill: RemoteNode, decode: Node) -> None:
    ticket = prefill.open(32)
    decode.connector.begin_load("full-hit", ticket, 20.0)
    prefill.publish(ticket.lease.lease_id, (11, 12), 32)
    decode.wait_for(LoadReady, "full-hit")
    decode.connector.recv_before([LoadSpec("full-hit", 2, (), 32)])
    prefill.finish(ticket.lease.lease_id, 5)
    assert decode.wait_for(LoadDone, "full-hit").num_bytes == 0
    assert decode.kinds("full-hit") == ["LoadReady", "FirstTokens", "LoadDone"]


def test_held_lease_is_read_after_it_is_finished(prefill: RemoteNode, decode: Node) -> None:
    ticket = prefill.open(20, hold=True)
    prefill.publish(ticket.lease.lease_id, (20, 21), 20)
    prefill.finish(ticket.lease.lease_id)
    decode.connector.begin_load("held", ticket, 20.0)
    decode.wait_for(LoadReady, "held")
    decode.connector.recv_before([LoadSpec("held", 0, (3, 4), 20)])
    decode.wait_for(LoadDone, "held")
    assert_equal(decode, (3, 4), (20, 21))


def test_idle_nodes_sleep(prefill: RemoteNode, decode: Node) -> None:
    """An idle pair must not burn cores: NIXL's own Python API busy-spins its progress thread."""
    ours = psutil.Process()
    before, theirs_before = ours.cpu_times(), prefill.call("cpu_s")
    started = time.monotonic()
    time.sleep(1.5)
    after, theirs_after = ours.cpu_times(), prefill.call("cpu_s")
    wall_s = time.monotonic() - started
    assert (after.user + after.system - before.user - before.system) / wall_s < 0.2
    assert (theirs_after - theirs_before) / wall_s < 0.2
