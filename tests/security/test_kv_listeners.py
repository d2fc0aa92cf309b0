"""Where UCX listens, on real agents, and that nothing from outside reaches a loopback cluster."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from ipaddress import ip_address

import pytest

from pd_connectors.nixl.machine import listening_sockets, read_machine
from pd_connectors.protocol.errors import ConnectorUnavailable
from tests.connectors.remote_node import Node, context, remote_node
from tests.deadlines import COMMAND_S, HANG_S
from tests.ports import free_port
from tests.security.handover import NUM_BLOCKS, hand_over, listeners

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.integration


def outside_addresses() -> list[str]:
    """This machine's IPv4 addresses that are not loopback."""
    found = [address for each in read_machine().interfaces for address in each.addresses]
    return [each for each in found if ip_address(each).version == 4 and not ip_address(each).is_loopback]


def can_unshare() -> bool:
    """Whether this process may make network namespaces, and has the tools."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    make = "mount -t sysfs sys /sys && ip link add v0 type veth peer name v1"
    return subprocess.run(["unshare", "-rnm", "sh", "-c", make], capture_output=True).returncode == 0


def test_a_loopback_node_listens_on_loopback_alone_and_hands_over() -> None:
    """The control port, and one port of UCX, of those that it was given."""
    low = free_port(21)
    high = low + 20
    with remote_node("nixl", context("P", kv_ports=(low, high), lease_ttl_s=HANG_S), NUM_BLOCKS) as prefill:
        places = listeners(prefill.pid)
        assert {address for address, _ in places} == {"127.0.0.1"}
        ports = {port for _, port in places}
        assert prefill.port in ports
        (ucx,) = ports - {prefill.port}
        assert low <= ucx <= high
        for address in outside_addresses():
            for port in ports:
                with pytest.raises(OSError), socket.create_connection((address, port), 5.0):
                    pass
        decode = Node.start("nixl", context("D", connect_deadline_s=HANG_S, confirm_deadline_s=HANG_S), NUM_BLOCKS)
        with closing(decode.connector):
            hand_over(prefill, decode)


def test_a_node_that_is_advertised_elsewhere_listens_there_alone() -> None:
    for host in outside_addresses()[:1]:
        low = free_port(21)
        high = low + 20
        before = set(listening_sockets())
        node = Node.start("nixl", context("P", host=host, kv_ports=(low, high)), 4)
        with closing(node.connector) as connector:
            new = set(listening_sockets()) - before
            assert {address for address, _ in new} == {host}, "the control port too"
            ((_, port),) = {place for place in new if place[1] != connector.control_port}
            assert low <= port <= high


def test_an_address_of_no_interface_is_refused() -> None:
    with pytest.raises(ConnectorUnavailable, match="UCX_NET_DEVICES"):
        Node.start("nixl", context("P", host="192.0.2.77"), 4)


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="this process may not make network namespaces")
def test_a_stranger_in_another_network_namespace_reaches_nothing() -> None:
    command = ["unshare", "-rnm", sys.executable, "-m", "tests.security.netns_attack"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["places"]) == 4, "two nodes, each with a control port and one of UCX"
    assert {address for address, _ in result["places"]} == {"127.0.0.1"}
    assert result["reached"] == []
