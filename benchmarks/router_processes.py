"""The processes of a measurement of routers: fake nodes on one core, a router on the other, its CPU and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES_CORE, ROUTER_CORE = 0, 1
START_DEADLINE_S = 60.0


@dataclass(slots=True)
class MeasuredRouter:
    """A router under test. `pid` 0: none, the client asks the decode node itself."""

    name: str
    url: str
    pid: int = 0
    cpu_us: dict[str, list[float]] = field(default_factory=dict)  # by kind of request, one figure a round
    p50_ms: dict[str, list[float]] = field(default_factory=dict)  # at concurrency 1
    rss_mb: list[float] = field(default_factory=list)


@contextlib.contextmanager
def running_nodes(
    num_each: int = 1, *, chunk_s: float = 0.0, news_s: float = 0.0
) -> Iterator[tuple[list[str], list[str]]]:
    """The URLs of so many fake prefill nodes and as many decode nodes, all in one process. See `router_nodes`."""
    flags = [str(chunk_s), str(num_each), str(news_s)]
    command = ["taskset", "-c", str(NODES_CORE), sys.executable, "-m", "benchmarks.router_nodes", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            os.sched_setaffinity(0, {NODES_CORE})
            urls = process.stdout.readline().split()
            yield urls[:num_each], urls[num_each:]
        finally:
            process.kill()


@contextlib.contextmanager
def running_router(name: str, command: list[str]) -> Iterator[MeasuredRouter]:
    environment = dict(os.environ)
    port = free_port()
    if command[-1].startswith("@"):
        tree = command.pop()[1:]
        environment["PYTHONPATH"] = ":".join(str(Path(tree) / part) for part in ("", "router", "connectors", "kernels"))
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(ROUTER_CORE), *command, "--port", str(port)], stdout=log, stderr=log, env=environment
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await_ready(process, url)
            yield MeasuredRouter(name, url, process.pid)
        finally:
            process.kill()
            process.wait()


def await_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Raises SystemExit if the router does not answer /health in time."""
    ends_at = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends_at and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=1.0):
            return
        time.sleep(0.1)
    raise SystemExit(f"{process.args!r} did not start within {START_DEADLINE_S:g} s")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def cpu_ns(pid: int) -> int:
    """CPU of the process and its children, from the scheduler's own count."""
    if not pid:
        return 0
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
            total += sum(cpu_ns(int(child)) for child in (task / "children").read_text().split())
    return total


def resident_mb(pid: int) -> float:
    if not pid:
        return 0.0
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
