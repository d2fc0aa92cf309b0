"""What the router costs: CPU time per request and added latency, with fake nodes in a process of their own.

    python tests/router/measure_router_cost.py [--requests 2000] [--streams 300] [--json OUT.json]

Prints a table. CPU is user + system time of the router process alone, so other load on the machine matters little.
Added latency is that of the first byte: the median difference to the same request sent straight to the decode node,
in pairs, one at a time. With P-first it holds the round trip to P, which a client has to wait for anyway.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import aiohttp
import psutil

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

NUM_CHUNKS = 64
STEP_MS = 4.0  # a decode step: every running stream gets its chunk at the same moment, as from a real engine
PROMPT = "word " * 200
READY_S = 20.0

_CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'
_ANSWER = json.dumps(
    {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "text": "token " * 64}]}
).encode()
_PARAMS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e", "remote_block_ids": [],
    "remote_host": "127.0.0.1", "remote_port": 1, "ticket": "t" * 400, "prompt_token_ids": list(range(1000, 1400)),
}  # fmt: skip
_TICKET = b"event: ticket\ndata: " + json.dumps({"kv_transfer_params": _PARAMS}).encode() + b"\n\n"
_DONE = b'event: done\ndata: {"usage": {"prompt_tokens": 400}}\n\n'


# --- fake nodes


class Steps:
    """Decode steps of one fake node: each writes one chunk to every running stream."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[FakeNodeProtocol, int] = {}

    def add(self, stream: FakeNodeProtocol) -> None:
        stream.send(_CHUNK)  # the first token comes when it is ready, not with a step
        self._running[stream] = NUM_CHUNKS - 1

    def step(self) -> None:
        asyncio.get_running_loop().call_later(self._step_s, self.step)
        for stream, left in list(self._running.items()):
            stream.send(_CHUNK)
            self._running[stream] = left - 1
            if left == 1:
                del self._running[stream]
                stream.end(b"data: [DONE]\n\n")


class FakeNodeProtocol(asyncio.Protocol):
    """Just enough HTTP/1.1 for one request at a time per connection; plays P or D as the request asks."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = next((int(v) for k, v in _fields(head) if k == b"content-length"), 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        if head.startswith(b"GET"):
            self._whole(b'{"status": "ok", "data": [{"id": "demo"}]}')
        elif b"x-pd-ticket" in head.lower():
            self._stream_head()
            self.send(_TICKET)
            asyncio.get_running_loop().call_later(STEP_MS / 1e3, self.end, _DONE)
        elif b'"stream":true' in rest or b'"stream": true' in rest:
            self._stream_head()
            self._steps.add(self)
        else:
            self._whole(_ANSWER)

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)

    def _stream_head(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def send(self, body: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def end(self, last: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


def _fields(head: bytes) -> Iterator[tuple[bytes, bytes]]:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        yield name.lower(), value.strip()


async def serve_fake_nodes(count: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    servers = []
    for steps in [Steps(step_s) for _ in range(count)]:
        steps.step()
        servers.append(await loop.create_server(functools.partial(FakeNodeProtocol, steps), "127.0.0.1", 0))
    sys.stdout.write("nodes " + " ".join(str(s.sockets[0].getsockname()[1]) for s in servers) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


# --- measuring


@dataclass(frozen=True)
class Row:
    legs: str
    kind: str
    concurrency: int
    requests: int
    cpu_us_per_request: float
    requests_per_s: float
    added_p50_ms: float


@contextlib.contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its first line."""
    env = os.environ | {"PD_CLUSTER_KEY": "measure"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(READY_S)


class Load:
    """Sends one kind of request to one address."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, stream: bool) -> None:
        self._session = session
        self._url = url + "/v1/completions"
        self._body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 64, "stream": stream}).encode()
        self._expected = NUM_CHUNKS * len(_CHUNK) + len(b"data: [DONE]\n\n") if stream else len(_ANSWER)

    async def one(self) -> float:
        """Seconds until the answer's first byte; raises RuntimeError unless the whole of it comes."""
        began = time.perf_counter()
        async with self._session.post(self._url, data=self._body) as answer:
            got = await answer.content.readany()
            took_s = time.perf_counter() - began
            got += await answer.read()
        if answer.status != 200 or len(got) != self._expected:
            raise RuntimeError(f"status {answer.status}, {len(got)} bytes instead of {self._expected}")
        return took_s

    async def many(self, count: int, concurrency: int) -> list[float]:
        """Times to first byte of `count` requests, `concurrency` at a time."""
        numbers = iter(range(count))

        async def worker() -> list[float]:
            return [await self.one() for _ in numbers]

        done = await asyncio.gather(*(worker() for _ in range(concurrency)))
        return [latency for latencies in done for latency in latencies]


@contextlib.asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session


async def measure(
    legs: str, router: tuple[int, str], node_url: str, *, stream: bool, count: int, concurrency: int
) -> Row:
    pid, url = router
    process = psutil.Process(pid)
    async with open_session() as session:
        load = Load(session, url, stream=stream)
        await load.many(concurrency * 4, concurrency)  # connections, caches
        before, began = process.cpu_times(), time.perf_counter()
        await load.many(count, concurrency)
        after, took_s = process.cpu_times(), time.perf_counter() - began
        alone = max(20, count // 20)
        straight = Load(session, node_url, stream=stream)
        await straight.one()
        # in pairs, so that what else happens on the machine hits both alike
        added = sorted([await load.one() - await straight.one() for _ in range(alone)])
    cpu_s = after.user + after.system - before.user - before.system
    kind = "SSE" if stream else "JSON"
    return Row(legs, kind, concurrency, count, cpu_s / count * 1e6, count / took_s, statistics.median(added) * 1e3)


def measure_all(num_json: int, num_streams: int, step_ms: float) -> list[Row]:
    rows = []
    with started(sys.executable, __file__, "--fake-nodes", "2", "--step-ms", str(step_ms)) as (_, line):
        p_url, d_url = (f"http://127.0.0.1:{port}" for port in line.split()[1:])
        layouts = {
            "one leg": ["--mixed", d_url],
            "P-first": ["--prefill", p_url, "--decode", d_url],
            "D-first": ["--prefill", p_url, "--decode", d_url, "--route", "d-first"],
        }
        for legs, flags in layouts.items():
            command = [sys.executable, "-m", "pd_router", "--port", "0", "--log-level", "warning", *flags]
            with started(*command) as (router, ready):
                address = (router.pid, ready.split()[-1])
                for stream, count in ((False, num_json), (True, num_streams)):
                    rows.append(asyncio.run(measure(legs, address, d_url, stream=stream, count=count, concurrency=32)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="unstreamed requests per case")
    parser.add_argument("--streams", type=int, default=300, help="streams per case")
    parser.add_argument(
        "--step-ms", type=float, default=STEP_MS, help="between chunks; 0: as fast as they can be written"
    )
    parser.add_argument("--json", default="", help="also write the figures to this file")
    parser.add_argument("--fake-nodes", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fake_nodes:
        asyncio.run(serve_fake_nodes(args.fake_nodes, args.step_ms / 1e3))
        return
    rows = measure_all(args.requests, args.streams, args.step_ms)
    sys.stdout.write("| legs | kind | c | CPU us/request | requests/s | added p50 ms (c=1) |\n")
    sys.stdout.write("|---|---|---|---|---|---|\n")
    for row in rows:
        sys.stdout.write(
            f"| {row.legs} | {row.kind} | {row.concurrency} | {row.cpu_us_per_request:.0f} | {row.requests_per_s:.0f} "
            f"| {row.added_p50_ms:.2f} |\n"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
