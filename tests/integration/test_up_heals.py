"""`pd-cluster up` under load while its processes are killed, one after the other: each is back, and what had shown the
client no byte is answered. Only a killed router takes requests with it: those on connections that it had accepted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.integration.fault_cluster import fetch, make_prompt, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.cluster import Launched, Launcher

pytestmark = [pytest.mark.integration, pytest.mark.anyio]
logger = logging.getLogger(__name__)

FLAGS = ("--port=0", "--device=cpu", "--num-threads=1", "--max-model-len=512", "--kv-cache-gb=0.05")
START_DEADLINE_S = 240.0  # four nodes load at once on few cores
BACK_DEADLINE_S = 120.0
REQUEST_DEADLINE_S = 60.0
NUM_WORKERS = 6
LENGTHS = (40, 150, 300)  # prompt tokens
NUM_TOKENS = 48
STILL_S = 0.5  # a stopped router's clients have read all that it had sent after this long without a byte


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(eq=False)
class Request:
    """One request on a connection of its own."""

    number: int
    length: int
    stream: bool
    port: int = 0  # the client's
    num_bytes: int = 0
    text: str = ""
    error: str = ""
    done: bool = False

    @property
    def has_failed(self) -> bool:
        return self.done and bool(self.error)

    async def run(self, host: str, port: int) -> None:
        """Never raises: `error` says what went wrong."""
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    self.port = writer.get_extra_info("sockname")[1]
                    writer.write(self._head_and_body(host))
                    received = b""
                    while part := await reader.read(1 << 16):
                        received += part
                        self.num_bytes = len(received)
                finally:
                    writer.close()
            self._read(received)
        except (OSError, TimeoutError, ValueError, KeyError, IndexError) as error:
            self.error = f"{type(error).__name__}: {error}"
        self.done = True

    def _head_and_body(self, host: str) -> bytes:
        body = json.dumps(
            {
                "prompt": make_prompt(self.length), "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
                "stream": self.stream, "cache_salt": str(self.number),
            }
        ).encode()  # fmt: skip
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _read(self, received: bytes) -> None:
        head, _, body = received.partition(b"\r\n\r\n")
        status = head.partition(b"\r\n")[0].decode()
        if " 200 " not in f"{status} ":
            raise ValueError(f"{status or 'no answer'} {body[:200].decode(errors='replace')}")
        if b"transfer-encoding: chunked" in head.lower():
            body = _unchunk(body)
        if not self.stream:
            self.text = json.loads(body)["choices"][0]["text"]
            return
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            raise ValueError("the stream broke off")
        told: list[dict[str, Any]] = [json.loads(event) for event in events[:-1]]
        if any("error" in event for event in told):
            raise ValueError(f"the stream ended in an error: {told[-1]}")
        self.text = "".join(choice["text"] for event in told for choice in event.get("choices", ()))


def _unchunk(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return whole
        if len(body) < length + 2:
            break
        whole, body = whole + body[:length], body[length + 2 :]
    raise ValueError("the answer broke off")


@dataclass
class Load:
    """Workers that send one request after the other, each second one streamed. `requests`: all so far."""

    host: str
    port: int
    requests: list[Request] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()

        async def work() -> None:
            while not stop.is_set():
                await self.send()

        workers = [asyncio.create_task(work()) for _ in range(NUM_WORKERS)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*workers)

    async def send(self) -> Request:
        number = next(self._numbers)
        request = Request(number, LENGTHS[number % len(LENGTHS)], number % 2 == 1)
        self.requests.append(request)
        await request.run(self.host, self.port)
        return request

    @property
    def open(self) -> list[Request]:
        return [request for request in self.requests if not request.done]

    async def more(self, count: int) -> None:
        """Until so many more have ended."""
        target = len([request for request in self.requests if request.done]) + count

        async def enough() -> bool:
            return len([request for request in self.requests if request.done]) >= target

        await until(enough, f"{count} more requests have ended", REQUEST_DEADLINE_S)

    async def still(self) -> None:
        """Until no request has moved for STILL_S."""
        last, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < STILL_S:
            moved = sum(request.num_bytes + request.done for request in self.requests)
            if moved != last:
                last, since_s = moved, time.monotonic()
            await asyncio.sleep(0.02)


class Up:
    """A running `up`, found through the children of the process that the test started."""

    def __init__(self, launched: Launched) -> None:
        self.launched = launched
        self.url = launched.wait_line("ready: http://", START_DEADLINE_S).split()[1]
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        self.load = Load(host, int(port))

    def process(self, name: str, *, engine: bool = False) -> psutil.Process:
        for child in psutil.Process(self.launched.pid).children():
            words = child.cmdline()
            if (name == "router" and "router" in words) or f"--node-id={name}" in words:
                return child.children()[0] if engine else child
        raise AssertionError(f"{name} does not run")

    def accepted(self) -> set[int]:
        """The clients' ports of the connections that the router has accepted."""
        connections = self.process("router").net_connections("tcp")
        return {one.raddr.port for one in connections if one.raddr and one.laddr.port == self.load.port}

    def count(self, text: str) -> int:
        return sum(text in line for line in self.launched.output.splitlines())

    async def nodes(self) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = (await fetch(f"{self.url}/nodes")).json()["nodes"]
        return told

    async def wait_back(self, name: str, times: int) -> None:
        """Until `name` has been started again that often, and the router uses all nodes."""

        async def is_back() -> bool:
            return self.count(f"{name} is back") == times and all(node["healthy"] for node in await self.nodes())

        await until(is_back, f"{name} is back", BACK_DEADLINE_S, lambda: self.launched.output[-4000:])


async def expect(load: Load) -> dict[int, str]:
    """The right answers, by prompt length."""
    answers = [await load.send() for _ in range(2 * len(LENGTHS))]
    assert not [request for request in answers if request.error], answers
    expected = {request.length: request.text for request in answers}
    assert all(request.text == expected[request.length] for request in answers)
    return expected


async def kill_router(up: Up) -> list[Request]:
    """Kill it while it has requests and others wait in its queue. Returns those that must fail."""
    router = up.process("router")
    router.suspend()
    waiting = [asyncio.create_task(up.load.send()) for _ in range(5)]
    await up.load.still()
    accepted = up.accepted()
    lost = [request for request in up.load.open if request.port in accepted]
    queued = [request for request in up.load.open if request.port not in accepted]
    assert len(queued) >= len(waiting)
    router.kill()
    await asyncio.gather(*waiting)
    return lost


def check(requests: Sequence[Request], expected: dict[int, str], lost: Sequence[Request], decode: bool) -> int:
    """All are right but `lost`, which all failed, and (`decode`) streams that had begun. Returns how many of these."""
    failed = {request for request in requests if request.has_failed}
    assert not [request for request in lost if not request.has_failed], "open on the killed router and yet answered"
    broken = failed.difference(lost)
    wrong = [request for request in broken if not (decode and request.stream and request.num_bytes)]
    assert not wrong, wrong
    assert all(request.text == expected[request.length] for request in requests if not request.error)
    return len(broken)


async def kill(up: Up, name: str, engine: bool, expected: dict[int, str], times: int) -> None:
    """Kill one process under load; wait until it is back."""
    first = len(up.load.requests)
    async with up.load.running():
        await up.load.more(6)
        lost: list[Request] = []
        if name == "router":
            lost = await kill_router(up)
        else:
            up.process(name, engine=engine).kill()
        await up.wait_back(name, times)
        await up.load.more(12)
    requests = up.load.requests[first:]
    broken = check(requests, expected, lost, decode=name.startswith("decode"))
    logger.info(
        "%s%s killed: %d requests, %d lost with the router, %d streams broken",
        name, " (engine)" if engine else "", len(requests), len(lost), broken,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_any_process_may_be_killed(launcher: Launcher) -> None:
    launched = launcher.command("up", "--prefill=2", "--decode=2", *FLAGS, real=True)
    launched.wait_line("Ctrl-C stops everything", START_DEADLINE_S)
    up = Up(launched)
    expected = await expect(up.load)
    nodes = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    for engine in (False, True):
        for name in nodes:
            await kill(up, name, engine, expected, 1 + engine)
    assert {node["node_id"]: node["restarts"] for node in await up.nodes()} == dict.fromkeys(nodes, 2)
    await kill(up, "router", False, expected, 1)
    await kill(up, "decode-0", False, expected, 3)
    assert launched.stop(signal.SIGINT, 60.0) == 0
    assert launched.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_router_that_is_hung_up_loses_nothing(launcher: Launcher) -> None:
    """It drains while new connections wait, ends, and `up` starts the next one."""
    # The drain is longer than any request, on a busy machine too
    launched = launcher.command("up", "--drain-s=60", *FLAGS, real=True)
    launched.wait_line("Ctrl-C stops everything", START_DEADLINE_S)
    up = Up(launched)
    expected = await expect(up.load)
    async with up.load.running():
        await up.load.more(6)
        up.process("router").send_signal(signal.SIGHUP)
        await up.wait_back("router", 1)
        await up.load.more(12)
    assert check(up.load.requests, expected, [], decode=False) == 0
    assert up.count("router exited with status 0: restarting it") == 1
    assert launched.stop(signal.SIGINT, 60.0) == 0
    assert launched.leftovers() == []
