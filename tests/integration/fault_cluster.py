"""Nodes that tests kill, stop and start again under their old address, and requests that are left on the way.

Every test drives one request into a phase that it can see in the nodes' own words (`/metrics`, `/kv`), then acts.
P computes in steps of 16 tokens, so that a long prompt keeps it busy for seconds while D reads what is there already.
"""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.integration.calls import COMPLETIONS, Call, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from tests.cluster import Launched, Launcher

logger = logging.getLogger(__name__)

LEASE_TTL_S = 2.0
LOAD_DEADLINE_S = 8.0
SLACK_S = 2.0  # what a busy machine may add to a deadline
PHASE_DEADLINE_S = 15.0  # until a request is where a test wants it
CLEAN_DEADLINE_S = LEASE_TTL_S + 4.0  # until nothing of a request is left on any node
FETCH_DEADLINE_S = 15.0  # of one look at a process that runs, on a machine where others wait for the cores too
START_DEADLINE_S = 180.0  # four nodes at once
POLL_S = 0.05  # a look takes a node some milliseconds
VOCABULARY = range(3, 3072)  # the demo model's, without special tokens
SHORT, LONG = 200, 2008  # prompt tokens; p0 computes the long one for seconds
NUM_TOKENS = 12
P0_BLOCKS = 134  # one long prompt, and the next one overwrites it
BLOCK_SIZE = 16
D0_BLOCKS = 338  # a long prompt does not fit beside one of 3,400 tokens
DECODE_FLAGS = ("--max-num-seqs=32", "--max-num-batched-tokens=512", "--min-remote-tokens=1")
ROLES = {"p": "prefill", "d": "decode", "s": "decode"}
COMMON_FLAGS = ("--kv-cache-gb=0.15", f"--lease-ttl-s={LEASE_TTL_S:g}", f"--load-deadline-s={LOAD_DEADLINE_S:g}")
FLAGS = {
    "p0": ("--max-num-seqs=8", "--max-num-batched-tokens=16", f"--num-blocks={P0_BLOCKS}"),
    "p1": ("--max-num-batched-tokens=512",),
    "d0": (*DECODE_FLAGS, f"--num-blocks={D0_BLOCKS}"),
    "d1": DECODE_FLAGS,
    "strict": (*DECODE_FLAGS, "--on-load-failure=fail", "--load-deadline-s=30"),
}


class Part(StrEnum):
    """One of a node's two processes."""

    API = "api"
    ENGINE = "engine"


class Member:
    """A node with a name and, from its first start on, an address that it keeps."""

    def __init__(
        self, launcher: Launcher, name: str, role: str, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
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
        answer = httpx.post(self.url + COMPLETIONS, json=body, trust_env=False).json()["kv_transfer_params"]
        httpx.post(f"{self.url}/pd/release", json={"ticket": answer["ticket"]}, trust_env=False).raise_for_status()
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
        return next(int(p.pid) for p in live if module in " ".join(p.cmdline()))

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
    """A router that can be started again on its port."""

    def __init__(self, launcher: Launcher, prefill: Iterable[Member], decode: Iterable[Member], *flags: str) -> None:
        self._launcher = launcher
        urls = [f"--prefill={node.url}" for node in prefill] + [f"--decode={node.url}" for node in decode]
        self._arguments = ("router", *urls, "--health-interval-s=0.2", "--health-timeout-s=1", *flags)
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

    async def wait_healthy(self, node: Member, healthy: bool = True) -> None:
        """Until it thinks so of `node`."""

        async def agrees() -> bool:
            nodes = (await fetch(f"{self.url}/nodes")).json()["nodes"]
            return any(one["url"] == node.url and one["healthy"] is healthy for one in nodes)

        await until(agrees, f"the router thinks that {node.name} is {'' if healthy else 'not '}healthy")


class FaultCluster:
    """Nodes by name, see FLAGS; started together, ended by `launcher`. `router` knows only p0 and d0.

    p0 is slow. p1 is not, so that what falls back to it is done before the deadline. strict reports every failed load.
    """

    def __init__(
        self, launcher: Launcher, *names: str, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        """`flags`: of all nodes."""
        self.launcher = launcher
        self.nodes = {
            name: Member(launcher, name, ROLES[name[0]], *FLAGS[name], *flags, environment=environment)
            for name in names
        }
        start(list(self.nodes.values()))
        self._routers: list[RouterMember] = []
        self.router = self.new_router(["p0"], ["d0"])
        self._salts = count()
        self._expected: dict[int, Outcome] = {}

    @property
    def p0(self) -> Member:
        return self.nodes["p0"]

    @property
    def d0(self) -> Member:
        return self.nodes["d0"]

    @property
    def running(self) -> list[Member]:
        """The nodes that no test has ended, or that were started again."""
        return [node for node in self.nodes.values() if node.is_running]

    def stop(self) -> None:
        """End all processes at once. Asserts that nodes end well; what they leave behind is found by `launcher`."""
        with ThreadPoolExecutor() as pool:
            stopping = [pool.submit(router.process.stop) for router in self._routers]
            statuses = list(pool.map(lambda node: node.process.stop(), self.running))
        assert set(statuses) <= {0}
        assert {one.result() for one in stopping} <= {0, -signal.SIGKILL}

    def stop_new_routers(self) -> None:
        """End all routers but the first: each asks its nodes for their health five times a second."""
        first, *others = self._routers
        self._routers = [first]
        with ThreadPoolExecutor() as pool:
            assert set(pool.map(lambda router: router.process.stop(), others)) <= {0}

    def new_router(self, prefill: Sequence[str], decode: Sequence[str], *flags: str) -> RouterMember:
        """A router before these nodes. Its first request goes to the first node of each role."""
        prefills, decodes = ([self.nodes[name] for name in names] for names in (prefill, decode))
        router = RouterMember(self.launcher, prefills, decodes, *flags)
        self._routers.append(router)
        return router

    def body(self, length: int, *, num_tokens: int = NUM_TOKENS, stream: bool = False) -> dict[str, Any]:
        """A greedy request. Prompts of one length are equal, but under another salt each, so that nothing is cached."""
        return {
            "prompt": make_prompt(length),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "cache_salt": f"salt {next(self._salts)}",
        }

    async def expected(self, length: int) -> Outcome:
        """What d0 alone makes of the prompt of this length, with nothing going wrong."""
        if length not in self._expected:
            self._expected[length] = await Call(self.d0.url, self.body(length)).outcome()
            assert self._expected[length].error is None
        return self._expected[length]

    def call(
        self, length: int, route: str, *, stream: bool = False, num_tokens: int = NUM_TOKENS, url: str = ""
    ) -> Call:
        """A request to `url`, by default that of `router`."""
        return Call(url or self.router.url, self.body(length, num_tokens=num_tokens, stream=stream), route)

    async def check_transfer(self, length: int, route: str = "p-first") -> None:
        """A request through the router is right, and its KV came from p0 to d0."""
        before = await self.d0.metric("pd_kv_transfer_bytes_total")
        outcome = await self.call(length, route).outcome()
        outcome.check(await self.expected(length))
        assert (outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]) == ("p0", "d0")
        assert await self.d0.metric("pd_kv_transfer_bytes_total") > before

    async def check_clean(self, *members: Member) -> float:
        """Wait until no node of `members` (default: all) has anything left. Returns the seconds that took."""
        return max(await asyncio.gather(*(wait_clean(member) for member in members or self.nodes.values())))

    def go_on(self) -> None:
        """Let all nodes that stand still go on."""
        for node in self.running:
            node.go_on()

    async def restore(self) -> None:
        """Start what is dead, so that the next test finds the cluster whole. A test's own end comes first."""
        self.go_on()
        await asyncio.to_thread(start, [node for node in self.nodes.values() if not node.is_running])
        for node in (self.p0, self.d0):
            await self.router.wait_healthy(node)


def start(members: Sequence[Member]) -> None:
    """All at once; they are ready when this returns."""
    for member in members:
        member.begin()
    for member in members:
        member.wait_ready()


async def wait_clean(member: Member) -> float:
    """Until `member` is idle and holds nothing. Returns the seconds that took."""
    found: dict[str, float] = {}

    async def is_clean() -> bool:
        found.clear()
        found.update(await member.held())
        return not found

    return await until(is_clean, f"{member.name} holds nothing", CLEAN_DEADLINE_S, lambda: str(found))


async def wait_clean_but_for_reads(member: Member) -> None:
    """Until `member` holds at most the blocks of one long prompt, which a read from a stopped peer may still write."""
    found: dict[str, float] = {}

    async def is_clean() -> bool:
        found.clear()
        found.update(await member.held())
        others = found.keys() - {"orphaned_loads", "loads_open", "in_use", "quarantined"}
        num_loads = max(found.get("orphaned_loads", 0), found.get("loads_open", 0))
        in_use, quarantined = found.get("in_use", 0), found.get("quarantined", 0)
        return not others and num_loads <= 1 and in_use == quarantined <= num_loads * -(-LONG // BLOCK_SIZE)

    await until(is_clean, f"{member.name} holds only what is read", CLEAN_DEADLINE_S, lambda: str(found))


async def until(
    probe: Callable[[], Awaitable[bool]],
    what: str,
    deadline_s: float = PHASE_DEADLINE_S,
    explain: Callable[[], str] = str,
) -> float:
    """Poll until `probe` is true. Returns the seconds that took; AssertionError after the deadline."""
    started_s = time.monotonic()
    while not await probe():
        assert time.monotonic() < started_s + deadline_s, f"not within {deadline_s:g} s: {what}; {explain()}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - started_s


async def fetch(
    url: str, body: dict[str, Any] | None = None, *, deadline_s: float = FETCH_DEADLINE_S
) -> httpx.Response:
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
