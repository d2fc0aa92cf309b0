"""SECURITY.md names every listening socket of a cluster: none is missing there, and none is there without being open."""

from __future__ import annotations

import re
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.cluster import ROOT, Launcher
from tests.security.sockets import Listener, Row, listeners, read_table

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
UP_DEADLINE_S = 90.0
FLAGS = ("--port=0", "--device=cpu", "--num-threads=1", "--max-model-len=512", "--kv-cache-gb=0.05")
TABLE = read_table((ROOT / "SECURITY.md").read_text())


class Cluster:
    """What `pd-cluster up` runs: a prefill node, a decode node, a router; one request has gone from P to D."""

    def __init__(self, launcher: Launcher) -> None:
        up = launcher.command("up", *FLAGS)
        up.wait_line("Ctrl-C stops everything", UP_DEADLINE_S)
        self.processes = {process.pid: process for process in up.family()}
        (url,) = re.findall(r"^ready: (http://\S+) serves", up.output, re.MULTILINE)
        body = {"prompt": list(range(5, 205)), "max_tokens": 2, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=UP_DEADLINE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-pd-prefill"] == "prefill-0", "UCX and control connections are there now"
        nodes = httpx.get(f"{url}/nodes", trust_env=False).json()["nodes"]
        self.control_ports = {self._control_port(node["url"]) for node in nodes}
        self.listeners = listeners([psutil.Process(up.pid), *self.processes.values()])

    @staticmethod
    def _control_port(node_url: str) -> int:
        """A ticket tells it."""
        body = {"prompt": [5], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = httpx.post(f"{node_url}/v1/completions", json=body, timeout=UP_DEADLINE_S, trust_env=False)
        params = answer.json()["kv_transfer_params"]
        released = httpx.post(f"{node_url}/pd/release", json={"ticket": params["ticket"]}, trust_env=False)
        released.raise_for_status()
        return int(params["remote_port"])

    def process_of(self, listener: Listener) -> str:
        """Its process as SECURITY.md calls it. A supervisor that holds a child's socket too does not count."""
        kinds = {kind for pid in listener.pids if pid in self.processes for kind in [self._kind(self.processes[pid])]}
        (kind,) = kinds - {"supervisor"} or {"supervisor"}
        return kind

    def row_of(self, listener: Listener) -> str:
        """The name of the row that explains it; "" when none does."""
        match self.process_of(listener), listener.family:
            case "router", "tcp":
                return "router HTTP"
            case "API process", "tcp":
                return "node HTTP"
            case "engine process", "tcp":
                return "control" if listener.port in self.control_ports else "KV (UCX)"
            case "engine process", "unix":
                return "UCX wake-up" if listener.place == "unix abstract" else ""
            case "API process", "unix":
                return "engine ipc" if listener.place == "unix file" else ""
            case _:
                return ""

    @staticmethod
    def _kind(process: psutil.Process) -> str:
        command = process.cmdline()
        if "pd_cluster.engine.process" in command:
            return "engine process"
        if "router" in command:
            return "router"
        return "API process" if {"prefill", "decode", "mixed"} & set(command) else "supervisor"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Launcher() as launcher:
        yield Cluster(launcher)


@pytest.mark.integration
def test_every_listening_socket_is_in_the_table(cluster: Cluster) -> None:
    known = {(row.name, row.process) for row in TABLE if row.place != "-"}
    unknown = [one for one in cluster.listeners if (cluster.row_of(one), cluster.process_of(one)) not in known]
    assert unknown == []


@pytest.mark.integration
@pytest.mark.parametrize("row", [row for row in TABLE if row.place != "-"], ids=lambda row: row.name)
def test_every_row_is_seen_where_it_says(cluster: Cluster, row: Row) -> None:
    """For "KV (UCX)": on loopback alone, since a loopback cluster has nothing to do elsewhere."""
    seen = [one for one in cluster.listeners if cluster.row_of(one) == row.name]
    assert seen, f"{row.name} is open nowhere"
    assert {one.place for one in seen} == {row.place}, seen


@pytest.mark.integration
def test_nobody_but_the_user_reaches_the_engines_sockets(cluster: Cluster) -> None:
    files = [Path(one.address) for one in cluster.listeners if one.place == "unix file"]
    assert len(files) == 4, "two for each engine"
    for directory in {file.parent for file in files}:
        found = directory.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, psutil.Process().uids().effective)


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
