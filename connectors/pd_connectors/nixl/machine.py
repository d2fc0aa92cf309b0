"""This machine's network, as the kernel tells it: interfaces, RDMA ports, names, listening sockets."""

from __future__ import annotations

import os
import socket
import struct
from collections import defaultdict
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from pd_connectors.nixl.network import Interface, KvNetwork, Machine, PortRange, RdmaPort, choose_network
from pd_connectors.protocol.errors import ConnectorUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

# rtnetlink(7), netlink(7)
_RTM_GETADDR, _RTM_NEWADDR = 22, 20
_NLM_F_REQUEST, _NLM_F_DUMP = 0x1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface index
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_TABLES = ("tcp", "tcp6")  # the second is absent where IPv6 is off
_LISTEN = "0A"  # TCP_LISTEN, as /proc/net/tcp writes it


def local_network(host: str, ports: PortRange | None) -> KvNetwork:
    """The KV network of a node that is advertised as `host`. Raises ConnectorUnavailable, see `choose_network`."""
    return choose_network(host, resolve(host), read_machine(), ports, os.environ)


def resolve(host: str) -> tuple[str, ...]:
    """The IP addresses of a host name or address, IPv4 first as UCX does. Empty when the name is unknown."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(sorted({str(address[0]) for *_, address in found}, key=lambda address: (":" in address, address)))


def read_machine(sys_class: Path = Path("/sys/class")) -> Machine:
    """Interfaces with their addresses, and RDMA ports."""
    addresses = _addresses()
    interfaces = [
        Interface(name, tuple(addresses[index]), _lower(sys_class / "net" / name))
        for index, name in socket.if_nameindex()
    ]
    return Machine(tuple(interfaces), tuple(_rdma_ports(sys_class / "infiniband")))


def check_free_port(network: KvNetwork) -> None:
    """Raises ConnectorUnavailable when every port of the range is taken: UCX tries them for ever (seen in 1.5.1)."""
    if network.ports is None or not network.address:
        return
    low, high = network.ports
    family = socket.AF_INET6 if ":" in network.address else socket.AF_INET
    for port in range(low, high + 1):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((network.address, port))
                probe.listen()
            except OSError:
                continue
            return
    raise ConnectorUnavailable(
        f"no port of {low}-{high} is free for KV on {network.address}: --kv-ports needs one for each engine of a host"
    )


def listening_sockets() -> list[tuple[str, int]]:
    """Address and port of every TCP socket on which this process listens."""
    own = set(_socket_inodes())
    found = []
    for table in filter(Path.exists, map(Path("/proc/self/net").joinpath, _TABLES)):
        for fields in map(str.split, table.read_text(encoding="utf-8").splitlines()[1:]):
            if fields[3] == _LISTEN and fields[9] in own:
                address, _, port = fields[1].partition(":")
                found.append((_from_hex(address), int(port, 16)))
    return found


def _addresses() -> dict[int, list[str]]:
    """Interface index -> its IP addresses, in the kernel's order."""
    found: dict[int, list[str]] = defaultdict(list)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        flags = _NLM_F_REQUEST | _NLM_F_DUMP
        netlink.sendto(_HEADER.pack(_HEADER.size + len(body), _RTM_GETADDR, flags, 1, 0) + body, (0, 0))
        while True:
            for kind, message in _messages(netlink.recv(1 << 16)):
                if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                    return found
                if kind == _RTM_NEWADDR:
                    _add_address(found, message)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _HEADER.size:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[_align(max(length, _HEADER.size)) :]


def _add_address(found: dict[int, list[str]], message: bytes) -> None:
    family, _, _, _, index = _ADDRESS.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return
    attributes, rest = {}, message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        attributes[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[_align(max(length, _ATTRIBUTE.size)) :]
    packed = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))  # of a tunnel, ADDRESS is the other end
    if packed is not None:
        found[index].append(socket.inet_ntop(family, packed))


def _align(length: int) -> int:
    return -(-length // 4) * 4


def _lower(net: Path) -> tuple[str, ...]:
    return tuple(sorted(link.name.removeprefix("lower_") for link in net.glob("lower_*")))


def _rdma_ports(infiniband: Path) -> Iterator[RdmaPort]:
    """RoCE names its interfaces in the port's GID table, InfiniBand beside the PCI device."""
    for port in sorted(infiniband.glob("*/ports/*")):
        device = port.parents[1]
        names = {_text(entry) for entry in (port / "gid_attrs" / "ndevs").glob("*")} - {""}
        names = names or {entry.name for entry in (device / "device" / "net").glob("*")}
        yield RdmaPort(f"{device.name}:{port.name}", tuple(sorted(names)))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # an empty entry of the table cannot be read


def _socket_inodes() -> Iterator[str]:
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[len("socket:[") : -1]


def _from_hex(text: str) -> str:
    """/proc/net/tcp writes 32-bit words in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return str(ip_address(struct.pack(f"={len(words)}I", *words)))
