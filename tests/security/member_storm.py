"""Large bodies to a real cluster of 2P + 2D, and what the others see meanwhile: /health, streams, judgements.

    python -m tests.security.member_storm [--at-once 8] [--load 4] [--only fields]

One line of JSON for each body of REVIEW: those that froze nodes in turn when work was bounded by bytes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import aiohttp

from pd_http.dialects import dialect_of
from pd_http.errors import InvalidRequest
from pd_router.calls.body import RequestBody
from tests.cluster import Launched, Launcher
from tests.patient_node import IMPATIENT
from tests.security.smallest_members import Body, Place, places

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZE = 8_000_000  # of a body; 8 MiB and 64 bytes for each token of the context are read
FLAGS = ("--kv-cache-gb=0.1", "--num-threads=1")
NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LEAST_BYTES = 1 << 12
REVIEW = ("fields", "calls", "tools", "messages", "parts")
NUM_SLOWEST = 5
SERVED = {200, 400, 413, 429, 503}
LOOK_EVERY_S = 0.02
ANSWER_S = 120.0  # of any request
STREAM_TOKENS = 400
JUDGED = "/health did not answer within"  # in the router's log, once for each judgement
WARM = "The quick brown fox jumps over the lazy dog. " * 60  # so that nodes name blocks, and texts are looked up


class Sent(NamedTuple):
    """A request of the attack that has ended. `status` 0: without an answer."""

    seconds: float
    name: str
    status: int


def review() -> Iterator[Body]:
    """The bodies of the second review, worst first."""

    def chat(name: str, begin: bytes, member: bytes, end: bytes) -> Body:
        return Body(name, Place(CHAT, name, b'{"max_tokens":1,' + begin, end + b"}", (member,)), member, SIZE)

    field = b'"k%d":1'
    place = Place(COMPLETIONS, "fields", b'{"prompt":"a","max_tokens":1,', b"}", (field,))
    yield Body("fields", place, field, SIZE)
    call = b'{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":"{}"}}]}'
    yield chat("calls", b'"messages":[', call, b"]")
    yield chat("tools", b'"messages":[{"role":"user","content":"a"}],"tools":[', b"{}", b"]")
    yield chat("messages", b'"messages":[', b"{}", b"]")
    yield chat("parts", b'"messages":[{"role":"user","content":[', b"{}", b"]}]")


def drawn(turn: int) -> Iterator[Body]:
    """Of each place, SIZE bytes of one of its members: another one in each turn."""
    for number, place in enumerate(places()):
        yield _body_of(place, place.members[(number + turn) % len(place.members)], SIZE)


def largest(turn: int) -> Iterator[Body]:
    """Of a quarter of the places, another one in each turn, nearly as many members as a router lets pass."""
    for number, place in enumerate(places()[turn % 4 :: 4]):
        member = place.members[(number + turn) % len(place.members)]
        low, high = (SIZE, SIZE) if _is_let_pass(_body_of(place, member, SIZE)) else (LEAST_BYTES, SIZE)
        while high > low * 1.05:
            middle = math.isqrt(low * high)
            low, high = (middle, high) if _is_let_pass(_body_of(place, member, middle)) else (low, middle)
        yield _body_of(place, member, low)


def mixed(turn: int, count: int) -> Iterator[Body]:
    """Some of both, in an order of chance, and those of the review."""
    chance = random.Random(turn)
    for place in chance.sample(places(), count):
        yield _body_of(place, chance.choice(place.members), SIZE)
    yield from chance.sample(list(largest(turn)), count)
    yield from review()


def _body_of(place: Place, member: bytes, size: int) -> Body:
    return Body(f"{place.name} {member!r}", place, member, size)


def _is_let_pass(body: Body) -> bool:
    try:
        RequestBody(body.data(), dialect_of(body.path))
    except InvalidRequest:
        return False
    return True


def made(make: Callable[[], Iterable[Body]]) -> list[Body]:
    """All bodies, before the first is sent: to find the largest ones takes a minute and more.

    While one loop both sent and searched, the answers of the requests in flight waited for the search, and ANSWER_S
    was over before any was read.
    """
    os.nice(10)
    return list(make())


def attack(url: str, bodies: Sequence[Body], at_once: int) -> list[Sent]:
    """Send the bodies. In a process of its own: to build one takes up to 0.2 s."""

    async def send_all() -> list[Sent]:
        waiting, sent = iter(bodies), list[Sent]()
        timeout, connector = aiohttp.ClientTimeout(total=ANSWER_S), aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def send() -> None:
                for body in waiting:
                    data = body.data()
                    begun_s = time.monotonic()
                    status = await _post(session, url + body.path, data)
                    sent.append(Sent(round(time.monotonic() - begun_s, 3), f"{body.path} {body.name}", status))

            await asyncio.gather(*(send() for _ in range(at_once)))
        return sent

    return asyncio.run(send_all())


async def _post(session: aiohttp.ClientSession, url: str, data: bytes) -> int:
    """The status of the whole answer; 0 for none."""
    headers = {"content-type": "application/json"}
    try:
        async with session.post(url, data=io.BytesIO(data), headers=headers) as answer:
            await answer.read()
            return answer.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


def same(name: str, count: int) -> Iterator[Body]:
    """One body of the review, so many times."""
    (body,) = (one for one in review() if one.name == name)
    yield from [body] * count


@dataclass
class Seen:
    """What others saw."""

    health_s: dict[str, float] = field(default_factory=dict)  # longest, by process
    longest_gap_s: float = 0.0  # of a stream
    num_streams: int = 0
    broken: list[str] = field(default_factory=list)  # streams and requests of others that failed
    num_frozen: int = 0  # judgements
    statuses: Counter[int] = field(default_factory=Counter)  # of the attack's requests
    slowest: list[Sent] = field(default_factory=list)  # of the attack's requests
    odd: list[Sent] = field(default_factory=list)  # of the attack's requests, those with another status than SERVED
    seconds: float = 0.0  # of the attack

    @property
    def longest_health_s(self) -> float:
        return max(self.health_s.values())

    def line(self, name: str) -> str:
        """Of JSON."""
        told = {"attack": name, "seconds": round(self.seconds, 2), "statuses": dict(self.statuses)}
        told |= {"health_ms": {key: round(value * 1e3) for key, value in self.health_s.items()}}
        told |= {"longest_gap_ms": round(self.longest_gap_s * 1e3), "streams": self.num_streams}
        told |= {"slowest": self.slowest, "odd": self.odd[:20]}
        return json.dumps(told | {"frozen": self.num_frozen, "broken": self.broken[:5], "num_broken": len(self.broken)})


class StormedCluster:
    """2P + 2D and a router, which its launcher ends. Use it inside `async with`."""

    def __init__(self, launcher: Launcher, *flags: str) -> None:
        nodes = [
            launcher.node(
                name.partition("-")[0], f"--node-id={name}", *FLAGS, *flags, environment=IMPATIENT, wait=False
            )
            for name in NODES
        ]
        for node in nodes:
            node.wait_line("ready: ")
        self.router: Launched = launcher.router("--health-timeout-s=2.5", prefill=nodes[:2], decode=nodes[2:])
        self.urls = {"router": self.router.url} | dict(zip(NODES, (node.url for node in nodes), strict=True))

    async def __aenter__(self) -> StormedCluster:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20)
        for _ in range(2):
            body = json.dumps({"prompt": WARM, "max_tokens": 8}).encode()
            assert await _post(self._session, self.router.url + COMPLETIONS, body) == 200
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def seen(
        self, make: Callable[[], Iterable[Body]], at_once: int = 1, num_victims: int = 4, to: str = "router"
    ) -> Seen:
        """What others see while the bodies are sent to `to`, `at_once` at a time."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            bodies = await asyncio.wrap_future(pool.submit(made, make))
            async with self.watched(num_victims) as seen:
                begun_s = time.monotonic()
                sent = await asyncio.wrap_future(pool.submit(attack, self.urls[to], bodies, at_once))
                seen.seconds = time.monotonic() - begun_s
        seen.statuses = Counter(one.status for one in sent)
        hidden = "/pd/" if to == "router" else "-"  # paths that it refuses without reading the body
        seen.odd = [one for one in sent if one.status not in SERVED and not one.name.startswith(hidden)]
        seen.slowest = sorted(sent, reverse=True)[:NUM_SLOWEST]
        return seen

    @contextlib.asynccontextmanager
    async def watched(self, num_victims: int) -> AsyncIterator[Seen]:
        """Streams and looks at /health go on inside, and to their ends after it."""
        seen, is_over = Seen(), asyncio.Event()
        judged = self._num_judged()
        tasks = [asyncio.create_task(self._look(name, seen, is_over)) for name in self.urls]
        tasks += [asyncio.create_task(self._stream(number, seen, is_over)) for number in range(num_victims)]
        try:
            yield seen
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
            seen.num_frozen = self._num_judged() - judged

    def _num_judged(self) -> int:
        return self.router.output.count(JUDGED)

    async def _look(self, name: str, seen: Seen, is_over: asyncio.Event) -> None:
        seen.health_s[name] = 0.0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            while not is_over.is_set():
                begun_s = time.monotonic()
                async with session.get(self.urls[name] + "/health") as answer:
                    await answer.read()
                took_s = time.monotonic() - begun_s
                seen.health_s[name] = max(seen.health_s[name], took_s)
                await asyncio.sleep(max(0.0, LOOK_EVERY_S - took_s))

    async def _stream(self, number: int, seen: Seen, is_over: asyncio.Event) -> None:
        """One victim: a stream after the other."""
        while not is_over.is_set():
            body = {"prompt": f"{number} {time.monotonic_ns()}", "max_tokens": STREAM_TOKENS, "stream": True}
            seen.num_streams += 1
            try:
                await self._read(body | {"ignore_eos": True, "temperature": 0}, seen)
            except (aiohttp.ClientError, TimeoutError) as error:
                seen.broken.append(repr(error))

    async def _read(self, body: dict[str, object], seen: Seen) -> None:
        async with self._session.post(self.urls["router"] + COMPLETIONS, json=body) as answer:
            if answer.status != 200:
                seen.broken.append(f"{answer.status} {(await answer.text())[:200]}")
                return
            last_s, tail = 0.0, b""
            async for chunk in answer.content.iter_any():
                now_s = time.monotonic()
                seen.longest_gap_s = max(seen.longest_gap_s, now_s - last_s if last_s else 0.0)
                last_s, tail = now_s, (tail + chunk)[-2000:]
            if not tail.rstrip().endswith(b"[DONE]") or b'"error"' in tail:
                seen.broken.append(tail[-200:].decode(errors="replace"))


async def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--load", type=int, default=4, help="streams beside")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with Launcher() as launcher:
        async with StormedCluster(launcher) as cluster:
            async with cluster.watched(options.load) as seen:
                await asyncio.sleep(5)
            sys.stdout.write(seen.line("nothing") + "\n")
            for name in REVIEW:
                if options.only in name:
                    make = partial(same, name, options.at_once)
                    seen = await cluster.seen(make, options.at_once, options.load)
                    sys.stdout.write(seen.line(f"{options.at_once} x {name}") + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main())
