"""Which network UCX may use: every case of the choice on described machines, and what this machine says of itself."""

from __future__ import annotations

import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest

from pd_connectors.nixl import machine
from pd_connectors.nixl.machine import check_free_port, listening_sockets, local_network, read_machine, resolve
from pd_connectors.nixl.network import Interface, KvNetwork, Machine, RdmaPort, choose_network
from pd_connectors.protocol.errors import ConnectorUnavailable
from tests.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

LO = Interface("lo", ("127.0.0.1", "::1"))
ETH = Interface("eth0", ("10.0.0.5", "10.0.0.6", "fd00::5"))
MACHINE = Machine(
    (LO, ETH, Interface("ens1", ()), Interface("bond0", ("10.1.0.5",), ("ens1",)), Interface("ib0", ("10.2.0.5",))),
    (
        RdmaPort("mlx5_0:1", ("eth0",)),
        RdmaPort("mlx5_1:1", ("ens1",)),
        RdmaPort("mlx5_2:1", ("ib0",)),
        RdmaPort("mlx5_9:2", ()),
    ),
)


def choose(
    *addresses: str, ports: tuple[int, int] | None = None, machine: Machine = MACHINE, **environ: str
) -> KvNetwork:
    return choose_network(addresses[0], addresses, machine, ports, environ)


@pytest.mark.parametrize(
    ("address", "settings", "listens"),
    [
        ("127.0.0.1", {"UCX_NET_DEVICES": "lo", "UCX_TCP_AF_PRIO": "inet"}, "127.0.0.1"),
        ("127.0.0.2", {"UCX_NET_DEVICES": "lo", "UCX_TCP_AF_PRIO": "inet"}, "127.0.0.1"),
        ("::1", {"UCX_NET_DEVICES": "lo", "UCX_TCP_AF_PRIO": "inet6"}, "::1"),
    ],
)
def test_a_loopback_address_means_loopback_and_ports_of_the_os(
    address: str, settings: dict[str, str], listens: str
) -> None:
    network = choose(address)
    assert dict(network.settings) == settings
    assert (network.address, network.ports, network.is_loopback) == (listens, None, True)
    assert network.notes() == []
    assert dict(choose(address, ports=(7, 9)).settings) == settings | {"UCX_TCP_PORT_RANGE": "7-9"}


@pytest.mark.parametrize(
    ("address", "devices", "family", "listens", "idle"),
    [
        ("10.0.0.5", "eth0,mlx5_0:1", "inet", "10.0.0.5", ("mlx5_1:1", "mlx5_2:1", "mlx5_9:2")),
        ("10.0.0.6", "eth0,mlx5_0:1", "inet", "10.0.0.5", ("mlx5_1:1", "mlx5_2:1", "mlx5_9:2")),
        ("fd00::5", "eth0,mlx5_0:1", "inet6", "fd00::5", ("mlx5_1:1", "mlx5_2:1", "mlx5_9:2")),
        ("::ffff:10.0.0.5", "eth0,mlx5_0:1", "inet", "10.0.0.5", ("mlx5_1:1", "mlx5_2:1", "mlx5_9:2")),
        ("10.1.0.5", "bond0,mlx5_1:1", "inet", "10.1.0.5", ("mlx5_0:1", "mlx5_2:1", "mlx5_9:2")),
        ("10.2.0.5", "ib0,mlx5_2:1", "inet", "10.2.0.5", ("mlx5_0:1", "mlx5_1:1", "mlx5_9:2")),
    ],
)
def test_any_other_address_means_its_interface_with_its_rdma_devices(
    address: str, devices: str, family: str, listens: str, idle: tuple[str, ...]
) -> None:
    network = choose(address)
    assert dict(network.settings) == {
        "UCX_NET_DEVICES": devices, "UCX_TCP_AF_PRIO": family, "UCX_TCP_PORT_RANGE": "45000-45099",
    }  # fmt: skip
    assert (network.address, network.ports, network.idle_rdma) == (listens, (45000, 45099), idle)
    open_network, unused = network.notes()
    assert "no authentication" in open_network
    assert all(name in unused for name in idle)


def test_what_the_operator_has_set_is_left_alone() -> None:
    assert choose("10.0.0.5", UCX_NET_DEVICES="mlx5_0:1").settings == (("UCX_TCP_PORT_RANGE", "45000-45099"),)
    assert choose("127.0.0.1", UCX_NET_DEVICES="eth0").settings == ()
    assert dict(choose("10.0.0.5", ports=(5, 6), UCX_TCP_PORT_RANGE="9-9").settings).keys() == {
        "UCX_NET_DEVICES", "UCX_TCP_AF_PRIO",
    }  # fmt: skip
    assert choose("10.0.0.5", ports=(5, 6), UCX_TCP_PORT_RANGE="9-9").ports is None, "they cannot be checked"
    assert dict(choose("127.0.0.1", UCX_TLS="tcp").settings)["UCX_NET_DEVICES"] == "lo"
    assert dict(choose("127.0.0.1", UCX_NET_DEVICES="").settings)["UCX_NET_DEVICES"] == "lo", "empty is not set"
    assert not choose("127.0.0.1", UCX_NET_DEVICES="eth0").is_loopback
    assert choose("127.0.0.1", UCX_NET_DEVICES="eth0").notes()


def test_an_address_of_no_interface_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConnectorUnavailable, match=r"203\.0\.113\.9 is an address of no interface.*UCX_NET_DEVICES"):
        choose("203.0.113.9")
    with pytest.raises(ConnectorUnavailable, match=r"no-such-name is no address and no known name"):
        choose_network("no-such-name", (), MACHINE, None, {})
    behind_nat = choose("203.0.113.9", UCX_NET_DEVICES="eth0")
    assert behind_nat.settings == (("UCX_TCP_PORT_RANGE", "45000-45099"),)
    assert behind_nat.address == ""


def test_of_a_name_the_address_that_is_here_counts() -> None:
    assert choose("203.0.113.9", "10.0.0.5").address == "10.0.0.5"
    assert resolve("localhost")[0] == "127.0.0.1", "IPv4 first, as UCX has it"
    assert resolve("[::1]") == ("::1",)
    assert resolve("no such name") == ()


def test_this_machine_has_loopback() -> None:
    lo = next(each for each in read_machine().interfaces if "127.0.0.1" in each.addresses)
    assert local_network("127.0.0.1", None).settings[0] == ("UCX_NET_DEVICES", lo.name)
    for each in read_machine().interfaces:
        assert all(str(ip_address(address)) == address for address in each.addresses)


def test_rdma_ports_are_read_with_their_interfaces(tmp_path: Path) -> None:
    roce = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "gid_attrs" / "ndevs"
    roce.mkdir(parents=True)
    (roce / "0").write_text("eth0\n")
    (roce / "1").write_text("eth0.7\n")
    ib = tmp_path / "infiniband" / "mlx5_1"
    (ib / "ports" / "1").mkdir(parents=True)
    (ib / "device" / "net" / "ib0").mkdir(parents=True)
    assert read_machine(tmp_path).rdma_ports == (
        RdmaPort("mlx5_0:1", ("eth0", "eth0.7")),
        RdmaPort("mlx5_1:1", ("ib0",)),
    )


@pytest.mark.parametrize(("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1")])
def test_own_listeners_are_found(host: str, address: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        assert (address, server.getsockname()[1]) in listening_sockets()
        port = server.getsockname()[1]
    assert (address, port) not in listening_sockets()


def test_own_listeners_are_found_where_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TABLES", ("tcp", "absent"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname() in listening_sockets()


def test_a_range_without_a_free_port_is_said_before_ucx_tries_for_ever() -> None:
    with socket.create_server(("127.0.0.1", port := free_port())):
        full = choose_network("127.0.0.1", ("127.0.0.1",), MACHINE, (port, port), {})
        with pytest.raises(ConnectorUnavailable, match=f"no port of {port}-{port} is free"):
            check_free_port(full)
    check_free_port(full)
    check_free_port(choose("127.0.0.1"))
