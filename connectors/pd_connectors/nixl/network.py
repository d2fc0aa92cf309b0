"""Which network UCX may use for KV. Pure: fed what the machine has, it answers with UCX's settings.

UCX's TCP transport has no authentication: what reaches its port can write into the engine's memory. Left alone it
listens on every interface. So a node that is advertised on loopback uses loopback only, any other one the interface
that has the advertised address, and the RDMA devices of that interface. UCX opens one listener per TCP interface and
agent; an engine has one agent. Shared memory, CMA and CUDA IPC are chosen by other settings and stay as they are.

The operator's `UCX_NET_DEVICES`, `UCX_TCP_PORT_RANGE` and `UCX_TCP_AF_PRIO` in the environment are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

DEVICES_ENV = "UCX_NET_DEVICES"
PORTS_ENV = "UCX_TCP_PORT_RANGE"
FAMILY_ENV = "UCX_TCP_AF_PRIO"
DEFAULT_PORTS = (45000, 45099)  # a hundred engines on a host

PortRange = tuple[int, int]  # the lowest and the highest port


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface: its name, its IP addresses, and the interfaces below it (of a bond, a VLAN, a bridge)."""

    name: str
    addresses: tuple[str, ...]
    lower: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device: its name for UCX ("mlx5_0:1"), and the network interfaces that it carries."""

    name: str
    interfaces: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """The network interfaces and devices of this machine."""

    interfaces: tuple[Interface, ...]
    rdma_ports: tuple[RdmaPort, ...] = ()


@dataclass(frozen=True, slots=True)
class KvNetwork:
    """The network chosen for KV. `settings`: for UCX's environment, without what the operator has set."""

    settings: tuple[tuple[str, str], ...]
    address: str  # UCX listens here; "": the operator's UCX_NET_DEVICES decides
    ports: PortRange | None  # one of these; None: the OS, or the operator's UCX_TCP_PORT_RANGE, decides
    idle_rdma: tuple[str, ...] = ()  # ports of RDMA devices that belong to other interfaces

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this machine reach the address."""
        return bool(self.address) and ip_address(self.address).is_loopback

    def notes(self) -> list[str]:
        """Warnings for the operator, one a line."""
        found = []
        if not self.is_loopback:
            found.append(f"{self}: close that network to everything but the cluster's nodes, UCX has no authentication")
        if self.idle_rdma:
            idle = ", ".join(self.idle_rdma)
            found.append(
                f"not used for KV: {idle}, of other interfaces than the advertised one; ${DEVICES_ENV} adds them"
            )
        return found

    def __str__(self) -> str:
        ports = "a port that the OS chooses" if self.ports is None else f"a port of {self.ports[0]}-{self.ports[1]}"
        where = f"on {self.address}" if self.address else f"where ${DEVICES_ENV} says"
        return f"UCX listens {where}, {ports}"


def choose_network(
    host: str, host_addresses: tuple[str, ...], machine: Machine, ports: PortRange | None, environ: Mapping[str, str]
) -> KvNetwork:
    """The network of a node that is advertised as `host`, which means `host_addresses`.

    ports: on which UCX may listen. None: the OS chooses on loopback, DEFAULT_PORTS otherwise.
    Raises ConnectorUnavailable when none of the addresses is this machine's and the operator names no device either:
    UCX would listen on every interface.
    """
    found = _find(host_addresses, machine)
    if environ.get(DEVICES_ENV):
        chosen = ports or (None if found is not None and _is_loopback(found[1]) else DEFAULT_PORTS)
        return _network([], "", chosen, (), environ)
    if found is None:
        raise ConnectorUnavailable(_advice(host, host_addresses, machine))
    interface, address = found
    if _is_loopback(address):
        return _network([(DEVICES_ENV, interface.name), _family(address)], address, ports, (), environ)
    rdma = _rdma_of(interface, machine)
    devices = ",".join([interface.name, *rdma])
    idle = tuple(port.name for port in machine.rdma_ports if port.name not in rdma)
    return _network([(DEVICES_ENV, devices), _family(address)], address, ports or DEFAULT_PORTS, idle, environ)


def _network(
    settings: list[tuple[str, str]],
    address: str,
    ports: PortRange | None,
    idle_rdma: tuple[str, ...],
    environ: Mapping[str, str],
) -> KvNetwork:
    if environ.get(PORTS_ENV):
        ports = None
    if ports is not None:
        settings = [*settings, (PORTS_ENV, f"{ports[0]}-{ports[1]}")]
    settings = [(name, value) for name, value in settings if not environ.get(name)]
    return KvNetwork(tuple(settings), address, ports, idle_rdma)


def _find(addresses: tuple[str, ...], machine: Machine) -> tuple[Interface, str] | None:
    """The interface that has one of the addresses, and the address of it on which UCX will listen.

    UCX takes the first address of the family that an interface has. All of 127.0.0.0/8 is loopback's.
    """
    for wanted in map(_parse, addresses):
        for interface in machine.interfaces:
            own = [_parse(address) for address in interface.addresses]
            alike = [address for address in own if address.version == wanted.version]
            if wanted in own or (wanted.is_loopback and any(address.is_loopback for address in alike)):
                return interface, str(alike[0])
    return None


def _rdma_of(interface: Interface, machine: Machine) -> list[str]:
    """The ports that carry an interface or one below it."""
    names, known = [interface.name], {each.name: each for each in machine.interfaces}
    for name in names:  # grows
        names += [lower for lower in (known[name].lower if name in known else ()) if lower not in names]
    return [port.name for port in machine.rdma_ports if not set(names).isdisjoint(port.interfaces)]


def _family(address: str) -> tuple[str, str]:
    return FAMILY_ENV, "inet6" if ":" in address else "inet"


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback


def _parse(address: str) -> IPv4Address | IPv6Address:
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return mapped or parsed


def _advice(host: str, addresses: tuple[str, ...], machine: Machine) -> str:
    means = "is no address and no known name" if not addresses else "is an address of no interface of this machine"
    if addresses and addresses != (host,):
        means = f"({', '.join(addresses)}) {means}"
    there = "; ".join(f"{each.name}: {', '.join(each.addresses)}" for each in machine.interfaces if each.addresses)
    return (
        f"the advertised host {host} {means} ({there}). UCX has no authentication and would listen on every interface: "
        f"advertise an address of this machine, or set {DEVICES_ENV} to the interfaces that the other nodes reach"
    )
