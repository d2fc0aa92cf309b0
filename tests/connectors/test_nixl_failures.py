"""What only NIXL between two processes can do wrong. The rest is in `tests/conformance`."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from pd_connectors.base import LeaseEnded, LoadDone, LoadDrained, LoadFailed, LoadReady, LoadSpec
from pd_connectors.protocol.errors import LeaseEnd, LoadFailure
from tests.connectors.layouts import two_groups
from tests.connectors.remote_node import PATIENT, Node, RemoteNode, context, is_stamped, remote_node, runs
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_connectors.nixl.agent import NixlAgent
    from pd_connectors.transport import PeerKey


pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration

NUM_BLOCKS = 64
NUM_TOKENS = 40 * 16


@pytest.fixture(scope="module")
def decode() -> Iterator[Node]:
    """One node for all tests: every failure must leave it able to work with the next peer.

    Its deadline to connect is what fails two loads here. All others are long, and healthy peers have as long.
    """
    node = Node.start("nixl", context("D", **PATIENT | {"connect_deadline_s": 5.0}), NUM_BLOCKS)
    yield node
    assert node.connector.stats()["quarantined_blocks"] == 0
    assert node.connector.stats()["loads_open"] == 0
    node.connector.close()


def start_reading(prefill: RemoteNode, decode: Node, load_id: str, num_blocks_announced: int) -> None:
    """A load that has read its first chunk and waits for the rest."""
    ticket = prefill.open(NUM_TOKENS)
    decode.connector.begin_load(load_id, ticket, HANG_S)
    blocks = tuple(range(num_blocks_announced))
    prefill.publish(ticket.lease.lease_id, blocks, num_blocks_announced * 16)
    decode.wait_for(LoadReady, load_id)
    decode.cache.tensors[0][:40] = 0.0
    decode.cache.tensors[1][:40] = 0.0
    decode.connector.recv_before([LoadSpec(load_id, runs(0, tuple(range(40))), NUM_TOKENS)])
    wait_until(lambda: is_stamped(decode.cache, 0, like=0, version=0), lambda: "the first chunk did not come", 0.002)


def load_whole(prefill: RemoteNode, decode: Node, load_id: str) -> None:
    """A load that must succeed."""
    ticket = prefill.open(32)
    decode.connector.begin_load(load_id, ticket, HANG_S)
    prefill.publish(ticket.lease.lease_id, (3, 4), 32)
    prefill.finish(ticket.lease.lease_id)
    decode.wait_for(LoadReady, load_id)
    decode.connector.recv_before([LoadSpec(load_id, runs(0, (60, 61)), 32)])
    decode.wait_for(LoadDone, load_id)
    assert is_stamped(decode.cache, 61, like=4, version=0)


def test_killed_while_it_is_read() -> None:
    """A broken connection is noticed: the silence would be only after these deadlines, and tell another reason."""
    patient: dict[str, Any] = {"connect_deadline_s": HANG_S, "lease_ttl_s": HANG_S}
    decode = Node.start("nixl", context("D-patient", **patient), NUM_BLOCKS)
    try:
        with remote_node("nixl", context("P-killed", **patient)) as prefill:
            start_reading(prefill, decode, "killed", 10)
            prefill.kill()
            failed = decode.wait_for(LoadFailed, "killed")
            assert failed.reason in (LoadFailure.UNREACHABLE, LoadFailure.READ_FAILED)
            decode.wait_for(LoadDrained, "killed")
            decode.cache.tensors[0][:40] = -3.0  # they are ours now
    finally:
        decode.connector.close()
    assert bool((decode.cache.tensors[0][:40] == -3.0).all()), "bytes landed after LoadDrained"


def test_stopped_before_the_first_read_then_continued() -> None:
    """A peer stopped for less than every deadline costs only time."""
    patient: dict[str, Any] = {"silence_s": HANG_S, "connect_deadline_s": HANG_S, "confirm_deadline_s": HANG_S}
    decode = Node.start("nixl", context("D-waits", **patient), NUM_BLOCKS)
    with (
        closing(decode.connector),
        remote_node("nixl", context("P-paused", lease_ttl_s=HANG_S)) as prefill,
        remote_node("nixl", context("P-awake", **PATIENT)) as awake,
    ):
        load_whole(prefill, decode, "before-pause")
        ticket = prefill.open(16)
        prefill.publish(ticket.lease.lease_id, (7,), 16)
        prefill.finish(ticket.lease.lease_id)
        stopped = psutil.Process(prefill.pid)
        stopped.suspend()  # a busy machine may let it run on for a moment
        wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
        decode.connector.begin_load("paused", ticket, HANG_S)
        load_whole(awake, decode, "meanwhile")  # the question for `paused` has been sent before
        assert decode.kinds("paused") == []
        os.kill(prefill.pid, signal.SIGCONT)
        decode.wait_for(LoadReady, "paused")
        decode.connector.recv_before([LoadSpec("paused", runs(0, (62,)), 16)])
        decode.wait_for(LoadDone, "paused")
        assert is_stamped(decode.cache, 62, like=7, version=0)


def test_a_ticket_with_an_address_that_is_none(decode: Node) -> None:
    """The load fails; the node and its other loads work on."""
    with remote_node("nixl", context("P-misnamed", **PATIENT)) as prefill:
        ticket = msgspec.structs.replace(prefill.open(32), host="node 1")
        decode.connector.begin_load("misnamed", ticket, HANG_S)
        load_whole(prefill, decode, "well-named")
        assert decode.wait_for(LoadFailed, "misnamed").reason is LoadFailure.UNREACHABLE
        decode.wait_for(LoadDrained, "misnamed")
        assert decode.kinds("misnamed") == ["LoadFailed", "LoadDrained"]


def test_another_cluster_key(decode: Node) -> None:
    """The handshake fails, which both sides count; the load fails as if nothing listened there."""
    with remote_node("nixl", context("P-key", cluster_key=b"another" * 4)) as prefill:
        ticket = prefill.open(32)
        decode.connector.begin_load("key", ticket, HANG_S)
        assert decode.wait_for(LoadFailed, "key").reason is LoadFailure.UNREACHABLE
        assert prefill.call("stats")["handshakes_failed_total"] >= 1
        assert decode.connector.stats()["handshakes_failed_total"] >= 1
        assert LeaseEnded(ticket.lease.lease_id, LeaseEnd.RELEASED) not in prefill.call("events")


def stop_within_a_read(
    prefill: RemoteNode, decode: Node, num_blocks: int, transport: Any, patch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP when the first bytes of a long read have landed, by the thread that reads: it is over in milliseconds."""
    is_stopped, check = threading.Event(), transport._check_reads

    def stop_at_first_bytes(reads: Any, agent: NixlAgent, peer: Any) -> None:
        check(reads, agent, peer)
        if not is_stopped.is_set() and bool(decode.cache.tensors[0][0].any()):
            os.kill(prefill.pid, signal.SIGSTOP)
            is_stopped.set()

    patch.setattr(transport, "_check_reads", stop_at_first_bytes)
    ticket = prefill.open(num_blocks * 16)
    prefill.publish(ticket.lease.lease_id, tuple(range(num_blocks)), num_blocks * 16)
    decode.connector.begin_load("hung", ticket, HANG_S)
    decode.wait_for(LoadReady, "hung")
    decode.connector.recv_before([LoadSpec("hung", runs(0, tuple(range(num_blocks))), num_blocks * 16)])
    assert is_stopped.wait(HANG_S)


@pytest.mark.parametrize("then", [signal.SIGCONT, signal.SIGKILL])
def test_stopped_within_a_read_over_tcp(monkeypatch: pytest.MonkeyPatch, then: signal.Signals) -> None:
    """Over TCP such a read hangs, and goes on with the peer: its blocks stay quarantined until it is terminal."""
    from pd_connectors.nixl.transfer import NixlTransport  # needs NIXL

    monkeypatch.setenv("UCX_TLS", "tcp")
    is_retired, disconnect = threading.Event(), NixlTransport._disconnect

    def retire(transport: NixlTransport, agent: NixlAgent, key: PeerKey) -> None:
        disconnect(transport, agent, key)
        is_retired.set()

    monkeypatch.setattr(NixlTransport, "_disconnect", retire)
    layout = two_groups(num_kv_heads=8, head_dim=192)
    num_blocks = 192  # of 576 KiB
    settings = context("P-hung", layout=layout, **PATIENT)
    patient: dict[str, Any] = {"connect_deadline_s": HANG_S, "confirm_deadline_s": HANG_S}
    decode = Node.start("nixl", context("D-hung", layout=layout, drain_deadline_s=0.2, **patient), num_blocks)
    try:
        with remote_node("nixl", settings, num_blocks) as prefill:
            stop_within_a_read(prefill, decode, num_blocks, NixlTransport, monkeypatch)
            assert decode.wait_for(LoadFailed, "hung").reason is LoadFailure.PEER_FROZEN
            assert decode.connector.stats()["quarantined_blocks"] > 0
            assert is_retired.wait(HANG_S)
            assert "LoadDrained" not in decode.kinds("hung")
            os.kill(prefill.pid, then)
            decode.wait_for(LoadDrained, "hung")
            assert decode.connector.stats()["quarantined_blocks"] == 0
            decode.cache.tensors[0].fill_(-3.0)
            if then is signal.SIGCONT:
                load_whole(prefill, decode, "later")  # after all that it still sends
    finally:
        decode.connector.close()
    others = [block_id for block_id in range(num_blocks) if block_id not in (60, 61)]
    assert bool((decode.cache.tensors[0][others] == -3.0).all()), "bytes landed after LoadDrained"
