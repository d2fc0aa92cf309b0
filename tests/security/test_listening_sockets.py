"""SECURITY.md names every listening socket of a cluster, and names none that is not open."""

from __future__ import annotations

import contextlib
import random
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.cluster import ROOT
from tests.security.sockets import Listener, Row, listeners, read_table

if TYPE_CHECKING:
    from tests.security.live_cluster import LiveCluster

LOOPBACK = "127.0.0.1"
NUM_DATAGRAMS = 200
TABLE = read_table((ROOT / "SECURITY.md").read_text())


class Listening:
    """What a cluster listens on, and which row of the table explains it."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._processes = cluster.processes
        tickets = {url: _ticket(cluster, url) for url in (cluster.prefill, cluster.decode)}
        self._control_ports = {int(params["remote_port"]) for params in tickets.values()}
        self.sockets = listeners([psutil.Process(cluster.up.pid), *self._processes.values()])

    def process_of(self, listener: Listener) -> str:
        """Its process as SECURITY.md calls it. A supervisor that holds a child's socket too does not count."""
        kinds = {_kind(self._processes[pid]) for pid in listener.pids if pid in self._processes}
        (kind,) = kinds - {"supervisor"} or {"supervisor"}
        return kind

    def row_of(self, listener: Listener) -> str:
        """The name of the row that explains it; "" when none does."""
        match self.process_of(listener), listener.place.partition(" ")[0], listener.place:
            case "router", "tcp", _:
                return "router HTTP"
            case "API process", "tcp", _:
                return "node HTTP"
            case "engine process", "tcp", _:
                return "control" if listener.port in self._control_ports else "KV (UCX)"
            case "engine process", _, "unix abstract":
                return "UCX wake-up"
            case "API process", _, "unix file":
                return "engine ipc"
            case _:
                return ""


def _ticket(cluster: LiveCluster, url: str) -> dict[str, Any]:
    """A node tells its control port in a ticket, which is given back."""
    answer = cluster.post(url, cluster.body(kv_transfer_params={"do_remote_decode": True}))
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    assert cluster.post(url, {"ticket": params["ticket"]}, "/pd/release").status_code == 200
    return params


def _kind(process: psutil.Process) -> str:
    command = process.cmdline()
    if "pd_cluster.engine.process" in command:
        return "engine process"
    if "router" in command:
        return "router"
    return "API process" if {"prefill", "decode", "mixed"} & set(command) else "supervisor"


@pytest.fixture(scope="module")
def listening(cluster: LiveCluster) -> Listening:
    return Listening(cluster)


@pytest.mark.integration
def test_every_listening_socket_is_in_the_table(listening: Listening) -> None:
    known = {(row.name, row.process) for row in TABLE if row.place != "-"}
    unknown = [one for one in listening.sockets if (listening.row_of(one), listening.process_of(one)) not in known]
    assert unknown == []


@pytest.mark.integration
@pytest.mark.parametrize("row", [row for row in TABLE if row.place != "-"], ids=lambda row: row.name)
def test_every_row_is_seen_where_it_says(listening: Listening, row: Row) -> None:
    """For "KV (UCX)": on loopback alone, since a loopback cluster has nothing to do elsewhere."""
    seen = [one for one in listening.sockets if listening.row_of(one) == row.name]
    assert seen, f"{row.name} is open nowhere"
    assert {one.place for one in seen} == {row.place}, seen


@pytest.mark.integration
def test_only_the_user_reaches_the_engines_sockets(listening: Listening) -> None:
    files = [Path(one.address) for one in listening.sockets if one.place == "unix file"]
    assert len(files) == 4, "two for each engine"
    for directory in {file.parent for file in files}:
        found = directory.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, psutil.Process().uids().effective)


@pytest.mark.integration
def test_datagrams_of_strangers_only_wake_ucx(cluster: LiveCluster, listening: Listening) -> None:
    """What they contain changes nothing. An empty one is not sent: it ends the engine, as SECURITY.md says."""
    names = [one.address for one in listening.sockets if listening.row_of(one) == "UCX wake-up"]
    assert names
    rng = random.Random(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        for name in names:
            for _ in range(NUM_DATAGRAMS):
                with contextlib.suppress(BlockingIOError):  # its queue is full
                    stranger.sendto(rng.randbytes(rng.choice((1, 2, 64, 5000))), f"\0{name[1:]}")
    cluster.check_unharmed()


# the test's own parts


def test_every_kind_of_socket_is_found(tmp_path: Path) -> None:
    """Those that listen, and no others: on all interfaces, one, IPv6, UDP, a file, an abstract name."""
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server((LOOPBACK, 0)) as inside,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        socket.create_connection(inside.getsockname()),
    ):
        udp.bind((LOOPBACK, 0))
        file.bind(str(tmp_path / "a socket"))
        file.listen()
        abstract.bind("\0pd-cluster-test-name")
        found = listeners([psutil.Process()])
        assert {
            Listener("tcp", "0.0.0.0", everywhere.getsockname()[1]),
            Listener("tcp", LOOPBACK, inside.getsockname()[1]),
            Listener("tcp", "::1", six.getsockname()[1]),
            Listener("udp", LOOPBACK, udp.getsockname()[1]),
            Listener("unix", str(tmp_path / "a socket")),
            Listener("unix", "@pd-cluster-test-name"),
        } <= set(found)
        assert [one.port for one in found].count(inside.getsockname()[1]) == 1, "its connections do not listen"
    assert "pd-cluster-test-name" not in str(listeners([psutil.Process()]))


def test_a_table_without_a_cell_is_refused() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    with pytest.raises(AssertionError, match="a cell is missing"):
        read_table(text.replace("| tcp 127.0.0.1 | clients", "| clients", 1))
    assert replace(TABLE[0], place="tcp 0.0.0.0") not in TABLE
