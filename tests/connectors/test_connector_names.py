"""The registry, the connector `none`, the connector `loopback`, and what the API may import."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import pytest

from pd_connectors.base import LoadDone, LoadDrained, LoadFailed, LoadReady, LoadSpec, PublishSpec
from pd_connectors.loopback import LoopbackNetwork
from pd_connectors.protocol.clock import PatientClock
from pd_connectors.protocol.errors import ConnectorUnavailable, LoadFailure
from pd_connectors.protocol.messages import LeaseRef, SampledToken
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.registry import create_connector
from tests.cluster import READY_DEADLINE_S
from tests.connectors.remote_node import LAYOUT, PATIENT, Node, context, is_stamped, runs, stamp
from tests.connectors.simulation import VirtualClock
from tests.deadlines import HANG_S


def hand_over(prefill: Node, decode: Node, load_id: str) -> None:
    """Blocks 1, 2 of one become blocks 5, 6 of the other."""
    stamp(prefill.cache, 1, 3)
    stamp(prefill.cache, 2, 3)
    ticket = prefill.connector.open_lease("r", list(range(20)), "", 1, hold=False)
    decode.connector.begin_load(load_id, ticket, HANG_S)
    prefill.connector.send_after([PublishSpec(ticket.lease.lease_id, runs(0, (1, 2)), 20, 0)])
    prefill.connector.finish_lease(ticket.lease.lease_id, (SampledToken(4),))
    decode.wait_for(LoadReady, load_id)
    decode.connector.recv_before([LoadSpec(load_id, runs(0, (5, 6)), 20)])
    done = decode.wait_for(LoadDone, load_id)
    assert done.group_bytes == tuple(2 * group.block_bytes for group in LAYOUT.groups)
    assert is_stamped(decode.cache, 6, like=2, version=3)


def test_loopback_reads_its_own_leases() -> None:
    node = Node.start("loopback", context("mixed", **PATIENT), 8)
    try:
        hand_over(node, node, "self")
    finally:
        node.connector.close()


def test_loopback_nodes_share_a_network() -> None:
    network = LoopbackNetwork()
    prefill = Node.start("loopback", context("P", options=(("network", network),), **PATIENT), 8)
    decode = Node.start("loopback", context("D", options=(("network", network),), **PATIENT), 8)
    try:
        hand_over(prefill, decode, "shared")
        prefill.connector.close()
        prefill.connector.close()
    finally:
        decode.connector.close()


@pytest.mark.integration
def test_nixl_reads_its_own_leases() -> None:
    pytest.importorskip("nixl_cu13")
    node = Node.start("nixl", context("mixed", **PATIENT), 8)
    try:
        hand_over(node, node, "self")
    finally:
        node.connector.close()


def test_the_engine_is_woken_for_events() -> None:
    node = Node.start("loopback", context("mixed"), 8)
    try:
        woken: list[float] = []
        node.connector.set_waker(lambda: woken.append(time.monotonic()))
        ticket = node.connector.open_lease("r", [1, 2], "", 1, hold=False)
        node.connector.begin_load("wake", replace_fingerprint(ticket), HANG_S)
        node.wait_for(LoadFailed, "wake")
        assert woken
    finally:
        node.connector.close()


def replace_fingerprint(ticket: Ticket) -> Ticket:
    return msgspec.structs.replace(ticket, fingerprint="other weights")


def test_a_failed_control_thread_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node.start("loopback", context("mixed"), 8)
    try:
        ticket = node.connector.open_lease("r", [1, 2], "", 1, hold=False)
        node.connector.recv_before([LoadSpec("never-begun", runs(0, (1,)), 2)])  # ignored
        monkeypatch.setattr("pd_connectors.reader.Reader.begin", lambda *args: 1 / 0)
        node.connector.begin_load("boom", ticket, HANG_S)
        with pytest.raises(ConnectorUnavailable, match="ZeroDivisionError"):
            node.wait_for(LoadDone, "boom")
    finally:
        node.connector.close()


def test_none_hands_nothing_out_and_takes_nothing_over() -> None:
    connector = create_connector("none", context("lonely"))
    assert connector.control_port == 0
    with pytest.raises(ConnectorUnavailable, match="none"):
        connector.open_lease("r", [1], "", 1, hold=False)
    ticket = Ticket("r", LeaseRef("P", 1, "l"), 0, 0.0, "f", LAYOUT, b"", 1, 1, "h", 1)
    connector.begin_load("load", ticket, 1.0)
    failed, drained = connector.poll()
    assert isinstance(failed, LoadFailed)
    assert failed.reason is LoadFailure.REJECTED
    assert drained == LoadDrained("load")
    connector.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nixle", "no connector is called 'nixle'; known: nixl, lmcache, mooncake, loopback, none"),
        ("no.such.module:Class", "cannot import"),
        ("pd_connectors.null:Missing", "cannot import"),
        ("collections:OrderedDict", "no subclass of"),
    ],
)
def test_unknown_connectors_are_explained(name: str, message: str) -> None:
    with pytest.raises(ConnectorUnavailable, match=message):
        create_connector(name, replace(context("x")))


def test_a_connector_by_import_path() -> None:
    assert create_connector("pd_connectors.null:NullConnector", context("x")).name == "none"


@pytest.mark.long
def test_the_connector_api_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pd_connectors.base, pd_connectors.lease, pd_connectors.pull"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=READY_DEADLINE_S).returncode == 0


@pytest.mark.long
def test_a_missing_backend_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['nixl_cu13'] = None\n"
        "from pd_connectors.nixl.agent import _bindings\n"
        "from pd_connectors.protocol.errors import ConnectorUnavailable\n"
        "try:\n    _bindings()\n"
        "except ConnectorUnavailable as error:\n    sys.exit('pd-cluster[nixl]' not in str(error))\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=READY_DEADLINE_S).returncode == 0


def test_a_patient_clock_does_not_count_what_it_slept_through() -> None:
    clock = VirtualClock()
    patient = PatientClock(clock, 1.0)
    start = patient()
    patient.sleep(5.0)
    clock.now += 5.5
    patient.resume()
    assert patient() - start == 5.5, "half a second late is ordinary"
    patient.sleep(1.0)
    clock.now += 61.0
    patient.resume()
    assert patient() - start == 6.5, "a minute late is a stop"
