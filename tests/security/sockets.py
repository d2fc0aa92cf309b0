"""The listening sockets of processes, from /proc, and the table of SECURITY.md that explains them."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import psutil

TCP_LISTEN = "0A"
UNIX_ACCEPTS = 0x10000  # __SO_ACCEPTCON
UNIX_DATAGRAM = "0002"


@dataclass(frozen=True)
class Listener:
    """One listening socket. `address`: of IP, or the path of a Unix socket ("@..." when it is abstract).

    `port`: 0 for Unix. `pids`: all processes that have it open.
    """

    family: str  # tcp, udp, unix
    address: str
    port: int = 0
    pids: frozenset[int] = field(default=frozenset(), compare=False)

    @property
    def place(self) -> str:
        """As the third column of SECURITY.md says it: "tcp 127.0.0.1", "unix file", "unix abstract"."""
        if self.family == "unix":
            return "unix abstract" if self.address.startswith("@") else "unix file"
        return f"{self.family} {self.address}"


def listeners(processes: Iterable[psutil.Process]) -> list[Listener]:
    """All sockets on which these processes can be reached: TCP that listens, bound UDP, Unix with a name."""
    holders: dict[str, set[int]] = {}
    found: dict[str, Listener] = {}
    for process in processes:
        mine = set(_socket_inodes(process.pid))
        for inode in mine:
            holders.setdefault(inode, set()).add(process.pid)
        found |= {inode: listener for inode, listener in _named_sockets(process.pid) if inode in mine}
    return [
        Listener(one.family, one.address, one.port, frozenset(holders[inode])) for inode, one in sorted(found.items())
    ]


def _socket_inodes(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            yield target[8:-1]


def _named_sockets(pid: int) -> Iterator[tuple[str, Listener]]:
    """Inode and socket of each that listens in the network namespace of the process."""
    net = Path(f"/proc/{pid}/net")
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for row in (line.split() for line in (net / name).read_text().splitlines()[1:]):
            address, _, port = row[1].partition(":")
            family = name.rstrip("6")
            if family == "udp" or row[3] == TCP_LISTEN:
                yield row[9], Listener(family, _ip(address), int(port, 16))
    for line in (net / "unix").read_text().splitlines()[1:]:
        row = line.split(maxsplit=7)
        if len(row) > 7 and (int(row[3], 16) & UNIX_ACCEPTS or row[4] == UNIX_DATAGRAM):
            yield row[6], Listener("unix", row[7])


def _ip(text: str) -> str:
    """An address of /proc/net: its 32-bit words are in the machine's byte order."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    address: IPv4Address | IPv6Address = ip_address(
        socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))
    )
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


@dataclass(frozen=True)
class Row:
    """One row of the table: what it is, which processes have it, and where it listens in `pd-cluster up` ("-": not)."""

    name: str
    process: str
    place: str


def read_table(text: str) -> list[Row]:
    """The table under "Listening sockets". Asserts that it has six filled columns."""
    lines = text.partition("\n## Listening sockets\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    header, _, *rows = cells
    assert header[:3] == ["Socket", "Process", "In `pd-cluster up`"], header
    assert all(len(row) == len(header) == 6 and all(row) for row in rows), "a cell is missing"
    return [Row(*row[:3]) for row in rows]
