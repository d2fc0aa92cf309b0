"""Nodes that tests kill, stop and start again under their old address, and requests that are left on the way.

Every test drives one request into a phase that it can see in the nodes' own words (`/metrics`, `/kv`), then acts.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.deadlines import HANG_S
from tests.integration.calls import COMPLETIONS
from tests.patient_node import IMPATIENT

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from tests.cluster import Launched, Launcher

logger = logging.getLogger(__name__)

LEASE_TTL_S = 2.0  # for tests that wait for its end
LOAD_DEADLINE_S = 8.0
START_DEADLINE_S = 400.0  # four nodes at once took 145 s at a load of 8
POLL_S = 0.1  # as often as a node tells; a look takes 10 ms of CPU
VOCABULARY = range(3, 3072)  # the demo model's, without special tokens
DECODE_FLAGS = ("--max-num-seqs=32", "--max-num-batched-tokens=512", "--min-remote-tokens=1")
COMMON_FLAGS = ("--kv-cache-gb=0.15", f"--lease-ttl-s={LEASE_TTL_S:g}", f"--load-deadline-s={LOAD_DEADLINE_S:g}")


class Part(StrEnum):
    """One of a node's two processes."""

    API = "api"
    ENGINE = "engine"


class Member:
    """A node with a name and, from its first start on, an address that it keeps."""

    def __init__(
        self, launcher: Launcher, name: str, role: str, *flags: str, environment: Mapping[str, str] = IMPATIENT
    ) -> None:
        """It judges silence as the product does, unless `environment` says otherwise."""
        self.name = name
        self._environment = environment
        self.url = ""
        self._launcher = launcher
        self._role = role
        self._flags = (f"--node-id={name}", *COMMON_FLAGS, *flags)
        self._ports: tuple[str, ...] = ()
        self._process: Launched | None = None

    @property
    def process(self) -> Launched:
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def add_flags(self, *more: str) -> None:
        """Add flags from its next start on. The last one of a name counts."""
        self._flags += more

    def begin(self, *more: str) -> None:
        """Start it, under its old address when it had one. `more`: flags from now on. `wait_ready` follows."""
        assert not self.is_running, f"{self.name} runs already"
        self.add_flags(*more)
        self._process = self._launcher.node(
            self._role, *self._flags, *self._ports, environment=self._environment, wait=False
        )

    def wait_ready(self) -> None:
        """Until it serves. The first time this also fixes its ports."""
        self.process.wait_line("ready: ", START_DEADLINE_S)
        if not self.url:
            self.url = self.process.url
            self._ports = (f"--port={self.url.rpartition(':')[2]}", f"--control-port={self._control_port()}")

    def _control_port(self) -> int:
        """A ticket tells it."""
        body = {"prompt": [5], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=HANG_S) as client:
            answer = client.post(COMPLETIONS, json=body).json()["kv_transfer_params"]
            client.post("/pd/release", json={"ticket": answer["ticket"]}).raise_for_status()
        return int(answer["remote_port"])

    # faults

    async def kill(self, part: Part) -> None:
        """SIGKILL to one process. Asserts that the other one then ends by itself, as it must."""
        psutil.Process(self._pid(part)).kill()
        await asyncio.to_thread(self._wait_killed, part)

    async def kill_rank(self) -> None:
        """SIGKILL to a further rank of a node of several. Asserts that all of the node then ends by itself."""
        psutil.Process(self._pid_of("pd_cluster.worker.rank")).kill()
        await asyncio.to_thread(self._wait_killed, Part.ENGINE)

    def _wait_killed(self, part: Part) -> None:
        status = self.process.wait()
        assert status == (-signal.SIGKILL if part is Part.API else 1), self.process.output
        assert self.process.leftovers() == []

    def stop(self, *parts: Part) -> None:
        """SIGSTOP to these of its processes; to both, the engine first, where none is named."""
        for part in parts or (Part.ENGINE, Part.API):
            psutil.Process(self._pid(part)).suspend()

    def go_on(self) -> None:
        """SIGCONT to both. Harmless when they run."""
        for part in (Part.API, Part.ENGINE):
            psutil.Process(self._pid(part)).resume()

    def _pid(self, part: Part) -> int:
        self.process.family()  # seen while it lives, or its leftovers could not be found
        return self.process.pid if part is Part.API else self._pid_of("pd_cluster.engine.process")

    def _pid_of(self, module: str) -> int:
        live = [p for p in self.process.family() if p.is_running()]  # the command line of a dead one cannot be read
        found = [int(p.pid) for p in live if module in " ".join(p.cmdline())]
        if not found:
            raise psutil.NoSuchProcess(self.process.pid, self.name, f"it has no {module}")
        return found[0]

    # what it says

    async def kv(self) -> dict[str, int]:
        """GET /kv."""
        return dict((await fetch(f"{self.url}/kv")).json())

    async def metrics(self) -> dict[str, float]:
        """GET /metrics: sample with its labels, as it is written -> value."""
        return parse_metrics((await fetch(f"{self.url}/metrics")).text)

    async def metric(self, name: str) -> float:
        """One sample; 0 before it is first counted."""
        return (await self.metrics()).get(name, 0.0)

    async def wait_more(self, name: str, before: float) -> None:
        """Until a sample, which is counted a moment after what it counts, is more than `before`."""

        async def is_more() -> bool:
            return await self.metric(name) > before

        await until(is_more, f"{name} of {self.name} is more than {before:g}")

    async def is_reading(self) -> bool:
        """A load has read some of its blocks and is not done."""
        return await self.metric("pd_loads_reading") > 0

    async def has_reserved(self) -> bool:
        """Blocks are in use while a load is not done."""
        told = await self.metrics()
        return told["pd_num_waiting_for_remote_kv"] > 0 and told['pd_kv_blocks{state="in_use"}'] > 0

    async def is_busy(self) -> bool:
        """A sequence runs."""
        return await self.metric("pd_num_running") > 0

    async def held(self) -> dict[str, float]:
        """All that is not zero of what an idle node must not have."""
        told, kv = await self.metrics(), await self.kv()
        names = ("num_running", "num_waiting", "num_waiting_for_remote_kv", "requests_in_flight", "orphaned_loads",
                 "loads_open", "leases_open")  # fmt: skip
        found = {name: told[f"pd_{name}"] for name in names}
        found |= {name: float(kv[name]) for name in ("in_use", "leased", "quarantined")}
        assert kv["num_blocks"] == kv["free"] + kv["cached"] + kv["in_use"], kv
        return {name: value for name, value in found.items() if value}


class RouterMember:
    """A router that can be started again on its port.

    It takes no node for silent, unless its flags say otherwise: a busy machine keeps healthy ones silent for seconds.
    """

    def __init__(self, launcher: Launcher, prefill: Iterable[Member], decode: Iterable[Member], *flags: str) -> None:
        self._launcher = launcher
        urls = [f"--prefill={node.url}" for node in prefill] + [f"--decode={node.url}" for node in decode]
        self._arguments = ("router", *urls, "--health-interval-s=0.2", f"--health-timeout-s={HANG_S:g}", *flags)
        self.process = self._start("--port=0")
        self.url = self.process.url

    def start_again(self) -> None:
        """On the same port, once its process has ended."""
        assert self.process.returncode is not None, "the router still runs"
        self.process = self._start(f"--port={self.url.rpartition(':')[2]}")

    def _start(self, port: str) -> Launched:
        process = self._launcher.command(*self._arguments, port)
        process.wait_line("router ready on ")
        return process

    async def is_draining(self) -> bool:
        """Whether it takes no more requests, and tells so."""
        async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
            return bool((await client.get(f"{self.url}/health")).json()["status"] == "draining")

    async def wait_healthy(self, node: Member, healthy: bool = True) -> None:
        """Until it thinks so of `node`."""

        async def agrees() -> bool:
            nodes = (await fetch(f"{self.url}/nodes")).json()["nodes"]
            return any(one["url"] == node.url and one["healthy"] is healthy for one in nodes)

        await until(agrees, f"the router thinks that {node.name} is {'' if healthy else 'not '}healthy")


def start(members: Sequence[Member]) -> None:
    """All at once; they are ready when this returns."""
    for member in members:
        member.begin()
    for member in members:
        member.wait_ready()


async def wait_clean(member: Member) -> float:
    """Until `member` is idle and holds nothing. Returns the seconds that took, for logs."""
    found: dict[str, float] = {}

    async def is_clean() -> bool:
        found.clear()
        found.update(await member.held())
        return not found

    return await until(is_clean, f"{member.name} holds nothing", explain=lambda: str(found))


async def until(
    probe: Callable[[], Awaitable[bool]],
    what: str,
    deadline_s: float = HANG_S,
    explain: Callable[[], str] = str,
) -> float:
    """Poll until `probe` is true. Returns the seconds that took, for logs; AssertionError after the deadline."""
    started_s = time.monotonic()
    while not await probe():
        assert time.monotonic() < started_s + deadline_s, f"not within {deadline_s:g} s: {what}; {explain()}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started_s


async def fetch(url: str, body: dict[str, Any] | None = None, *, deadline_s: float = HANG_S) -> httpx.Response:
    """GET, or POST a body. Asserts that it is a 200."""
    async with httpx.AsyncClient(timeout=deadline_s, trust_env=False) as client:
        response = await (client.get(url) if body is None else client.post(url, json=body))
    assert response.status_code == 200, response.text
    return response


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format."""
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def make_prompt(length: int) -> list[int]:
    """Any tokens, the same ones for the same length."""
    rng = random.Random(length)
    return [rng.choice(VOCABULARY) for _ in range(length)]
