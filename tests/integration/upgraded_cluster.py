"""A cluster of real processes of two releases: nodes and the router are replaced one after the other.

The old release is the code of a commit. Its processes are executed, with its packages in front of this tree's.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import psutil

from tests.cluster import ROOT, Launched, Launcher
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import fetch, parse_metrics, until
from tests.patient_node import PATIENT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PACKAGES = ("pd_cluster", "router", "connectors", "kernels")
START_S = 240.0
NODE_FLAGS = ("--max-num-batched-tokens=64", "--max-num-seqs=16", "--min-remote-tokens=1", "--kv-cache-gb=0.05")
ROUTER_FLAGS = ("--port=0", "--health-interval-s=0.2", f"--health-timeout-s={HANG_S:g}")
NEW_METRIC = "pd_router_source_age_seconds"  # of routers; the old release has none of this name
FALLBACKS = "pd_handoff_fallbacks_total"
COUNTERS = ("pd_handoffs_total", FALLBACKS, "pd_protocol_mismatches_total", "pd_kv_transfer_bytes_total")


def extract(commit: str, folder: Path) -> str:
    """Write the packages of a commit into `folder`. Returns why the clone has no such commit, else ""."""
    made = subprocess.run(["git", "archive", commit, *PACKAGES], cwd=ROOT, capture_output=True, check=False)
    if made.returncode:
        return made.stderr.decode().strip() or f"git archive ends with status {made.returncode}"
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return ""


def importing(tree: Path) -> dict[str, str]:
    """The environment of a process that runs the packages of `tree`, and not those of its working directory."""
    path = os.pathsep.join(str(tree / part) for part in (".", *PACKAGES[1:]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def version(node: str) -> str:
    """By a node's name: "old" or "new"."""
    return node.partition("-")[0]


async def samples(url: str, *beginnings: str) -> dict[str, float]:
    """The metrics of a node or router with such names that are not zero."""
    told = parse_metrics((await fetch(f"{url}/metrics")).text)
    return {name: value for name, value in told.items() if name.startswith(beginnings) and value}


@dataclass(frozen=True)
class Replaceable:
    """A node process of one of the releases."""

    name: str
    role: str
    process: Launched

    @property
    def url(self) -> str:
        return self.process.url

    async def wait_ready(self) -> None:
        await asyncio.to_thread(self.process.wait_line, "ready: ", START_S)
        told = (await fetch(f"{self.url}/health")).json()
        assert told["kv_protocol"] == (2 if version(self.name) == "old" else 3), told
        assert told["connector"] == "nixl"

    async def counts(self) -> dict[str, float]:
        """Of its handoffs: what is not zero."""
        return await samples(self.url, *COUNTERS)

    async def wait_clean(self) -> None:
        """Until it holds no lease and loads nothing."""

        async def is_clean() -> bool:
            return not await samples(self.url, "pd_leases_open", "pd_loads_open", "pd_orphaned_loads")

        await until(is_clean, f"{self.name} holds nothing")


class Upgraded:
    """The cluster: prefill nodes are those of a nodes file, decode nodes are posted by orders of this tree.

    Names of nodes begin with their release, "old-" or "new-", and go on with "p" or "d".
    """

    def __init__(self, launcher: Launcher, old_tree: Path, folder: Path) -> None:
        self._launcher = launcher
        self._old_environment = importing(old_tree)
        self._file = folder / "nodes.json"
        self._installed = folder / "installed"  # what the router's command runs
        self.nodes: dict[str, Replaceable] = {}
        self.counts: dict[str, dict[str, float]] = {}  # of nodes that have ended
        self._successor: psutil.Process | None = None

    def __enter__(self) -> Upgraded:
        return self

    def __exit__(self, *_: object) -> None:
        """End the router's successor, which no Launcher has started."""
        if self._successor is not None:
            self._successor.terminate()
            self._successor.wait(HANG_S)

    async def start(self, *names: str) -> None:
        """All at once. The router does not know them yet."""
        for name in names:
            is_old, role = version(name) == "old", "prefill" if "-p" in name else "decode"
            environment: Mapping[str, str] = self._old_environment if is_old else PATIENT
            flags = (f"--node-id={name}", *NODE_FLAGS)
            process = self._launcher.node(role, *flags, environment=environment, wait=False, real=is_old)
            self.nodes[name] = Replaceable(name, role, process)
        for name in names:
            await self.nodes[name].wait_ready()

    async def start_router(self, old_tree: Path) -> str:
        """An old one. Returns its address, which its successor will have."""
        self._installed.symlink_to(old_tree)
        self._write_file()
        self._router = self._launcher.command(
            "router", *ROUTER_FLAGS, f"--nodes-file={self._file}", environment=importing(self._installed), real=True
        )
        self.router_url = self._router.url
        for node in self.nodes.values():
            await self._join(node)
        assert not await samples(self.router_url, NEW_METRIC), "the router is of the old release"
        return self.router_url

    async def upgrade_router(self) -> None:
        """Install this tree and hang the router up. Its successor serves when this returns; the old one has ended."""
        another = self._installed.with_name("another")
        another.symlink_to(ROOT)
        another.replace(self._installed)
        self._router.send(signal.SIGHUP)
        line = await asyncio.to_thread(self._router.wait_line, " serves now; this router drains")
        self._successor = psutil.Process(int(line.rpartition("process ")[2].split()[0]))

        async def has_ended() -> bool:
            return self._router.returncode is not None

        await until(has_ended, "the old router ends", explain=lambda: self._router.output)
        assert self._router.returncode == 0, self._router.output
        assert {row["node_id"] for row in await self.rows() if row["healthy"]} == set(self.nodes)
        assert await samples(self.router_url, NEW_METRIC), "the successor is of this tree"

    async def replace(self, name: str, successor: str) -> None:
        """Drain a node, let it end, and start another one at another port, until the router knows it for healthy."""
        node = self.nodes[name]
        await self._order("drain", node.url, f"--wait-s={HANG_S:g}")
        await node.wait_clean()
        self.counts[name] = await node.counts()
        assert await asyncio.to_thread(node.process.stop) == 0, node.process.output
        del self.nodes[name]
        if node.role == "decode":
            await self._order("remove", node.url)
        await self.start(successor)
        await self._join(self.nodes[successor])

    async def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = (await fetch(f"{self.router_url}/nodes")).json()["nodes"]
        return rows

    async def wait_bytes(self, name: str) -> None:
        """Until a decode node has read KV of others. Its engine tells its counters a moment after an answer."""

        async def has_read() -> bool:
            return (await self.nodes[name].counts()).get("pd_kv_transfer_bytes_total", 0.0) > 0

        await until(has_read, f"{name} has read KV")

    async def all_counts(self) -> dict[str, dict[str, float]]:
        """Of all nodes that have ever run."""
        return self.counts | {name: await node.counts() for name, node in self.nodes.items()}

    async def _join(self, node: Replaceable) -> None:
        """Tell the router of a node, and wait until it is healthy there."""
        if node.role == "decode":
            await self._order("add", node.url, "--role=decode")
        else:
            self._write_file()

        async def is_healthy() -> bool:
            return {row["node_id"] for row in await self.rows() if row["healthy"]} >= {node.name}

        await until(is_healthy, f"the router knows {node.name}")

    def _write_file(self) -> None:
        """Never half a file."""
        prefills = [{"url": node.url, "role": "prefill"} for node in self.nodes.values() if node.role == "prefill"]
        written = self._file.with_suffix(".written")
        written.write_bytes(orjson.dumps(prefills))
        written.replace(self._file)

    async def _order(self, action: str, node: str, *flags: str) -> None:
        """`pd-cluster nodes` of this tree: also the old router gets its orders."""
        command = self._launcher.command("nodes", action, node, *flags, f"--router={self.router_url}")
        assert await asyncio.to_thread(command.wait, 2 * HANG_S) == 0, command.output
