"""A server that leaves: what it tells its clients, what it still answers, and in which order its sockets close."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from pd_http import leaving
from pd_http.leaving import LeavingServer
from pd_http.limits import HttpLimits
from pd_http.metrics import HttpMetrics
from pd_http.protocol import BoundedProtocol
from pd_http.server import server_config
from pd_http.sockets import bound
from tests.certificates import Authority
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

pytestmark = pytest.mark.anyio
WAIT_S = HANG_S
LONG_S = 1000.0
LARGE_BYTES = 32 << 20  # more than the kernel holds of a connection


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class Clock:
    """Of the bounds of connections. It stands still; when it runs, each look at it takes a second."""

    def __init__(self) -> None:
        self.runs = False
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += self.runs
        return self._now_s


class Server(LeavingServer):
    """Without uvicorn's look every 0.1 s."""

    def __init__(self, config: Any, linger_s: float, drain_s: float) -> None:
        super().__init__(config, linger_s, drain_s)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()


@dataclass
class Served:
    """A server in the test's own loop, and an app that waits where it is told to."""

    server: Server
    listener: socket.socket
    port: int
    go_on: asyncio.Event
    ended: asyncio.Task[None]
    tls: ssl.SSLContext | None

    async def connect(self) -> Client:
        name = None if self.tls is None else "127.0.0.1"
        return Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=self.tls, server_hostname=name))

    def stop(self) -> None:
        """As a signal does."""
        self.server.leave()
        self.server.stop.set()


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, *paths: str) -> None:
        self.writer.write(b"".join(request(path) for path in paths))

    async def head(self) -> dict[str, str]:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().strip().split("\r\n")
        return dict(one.split(": ", 1) for one in lines[1:]) | {"status": lines[0].split()[1]}

    async def answer(self) -> tuple[str, bytes, bool]:
        """(status, body, whether the connection shall end)."""
        head, body = await self.head(), b""
        if "content-length" in head:
            body = await self.reader.readexactly(int(head["content-length"]))
        else:
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        return head["status"], body, head.get("connection") == "close"

    async def ends(self) -> None:
        """The server's end comes, and no reset."""
        assert await self.reader.read() == b""
        self.writer.close()


def request(path: str, body: bytes = b"") -> bytes:
    return f"POST /{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def serving(
    *,
    linger_s: float = LONG_S,
    drain_s: float = LONG_S,
    folder: Path | None = None,
    clock: Clock | None = None,
    **limits: Any,
) -> AsyncIterator[Served]:
    go_on = asyncio.Event()

    async def echo(request: Request) -> Response:
        return PlainTextResponse(await request.body() or request.url.path)

    async def held(_: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            await go_on.wait()
            yield b"b"

        return StreamingResponse(parts())

    async def late(_: Request) -> Response:
        await go_on.wait()
        return PlainTextResponse("late")

    async def large(_: Request) -> Response:
        return PlainTextResponse(bytes(LARGE_BYTES))

    routes = {"/held": held, "/late": late, "/large": large, "/{path}": echo}
    app = Starlette(routes=[Route(path, handler, methods=["POST"]) for path, handler in routes.items()])
    tls = None
    if folder is not None:
        files = Authority(folder).issue("server")
        limits |= {"tls_cert": str(files.cert), "tls_key": str(files.key)}
        tls = ssl.create_default_context(cafile=str(files.ca))
    if clock is not None:
        limits["head_timeout_s"] = 0.02  # a quarter of it is between two looks at the clock
    settings = server_config(app, HttpLimits(**limits), HttpMetrics(CollectorRegistry(), "t"), 2)
    settings.http.gate.clock = clock or time.monotonic  # type: ignore[union-attr]
    server, listener = Server(settings, linger_s, drain_s), bound("127.0.0.1", 0)
    async with asyncio.timeout(WAIT_S):
        ended = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
            await asyncio.sleep(0.001)
        try:
            yield Served(server, listener, listener.getsockname()[1], go_on, ended, tls)
        finally:
            go_on.set()
            server.force_exit = True
            server.stop.set()
            await ended


@pytest.fixture(autouse=True)
def no_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "QUIET_S", 0.0)


@pytest.fixture(params=[False, pytest.param(True, id="tls")])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param else None


async def test_the_answer_after_the_signal_is_the_last_one(folder: Path | None) -> None:
    async with serving(folder=folder) as served:
        client = await served.connect()
        client.send("before")
        assert await client.answer() == ("200", b"/before", False)
        served.stop()
        another = await served.connect()
        for one in (client, another):
            one.send("behind")
            assert await one.answer() == ("200", b"/behind", True)
            await one.ends()
        await served.ended


async def test_an_answer_that_had_begun_leaves_its_connection_open_for_one_more(folder: Path | None) -> None:
    async with serving(folder=folder) as served:
        client, waiting = await served.connect(), await served.connect()
        client.send("held")
        waiting.send("late")
        assert (await client.head())["status"] == "200"
        while len(served.server.server_state.tasks) < 2:  # noqa: ASYNC110  # the head is on its way
            await asyncio.sleep(0)
        served.stop()
        served.go_on.set()
        assert await client.reader.readuntil(b"0\r\n\r\n") == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
        assert await waiting.answer() == ("200", b"late", True), "it had not begun"
        client.send("more")
        assert await client.answer() == ("200", b"/more", True)
        for one in (client, waiting):
            await one.ends()
        await served.ended


async def test_a_body_that_still_comes_is_taken() -> None:
    async with serving() as served:
        client = await served.connect()
        whole = request("echo", b"12345678")
        client.writer.write(whole[:-4])
        while not served.server.server_state.tasks:  # noqa: ASYNC110  # the head is on its way
            await asyncio.sleep(0)
        served.stop()
        client.writer.write(whole[-4:])
        assert await client.answer() == ("200", b"12345678", True)
        await client.ends()
        await served.ended


async def test_what_is_sent_after_the_last_answer_causes_no_reset() -> None:
    """Unread bytes would make the kernel answer with one, which may destroy the answer on its way."""
    async with serving() as served:
        client = await served.connect()
        served.stop()
        client.send("one")
        assert (await client.answer())[2]
        assert await client.reader.read() == b""
        client.send("two", "three")
        sock = socket.socket(fileno=client.writer.get_extra_info("socket").dup().detach())
        with sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        client.writer.close()
        await served.ended


async def test_a_request_that_waits_behind_another_one_is_answered() -> None:
    async with serving() as served:
        client = await served.connect()
        client.send("late", "one", "two")
        [connection] = served.server.server_state.connections
        assert isinstance(connection, BoundedProtocol)
        while not connection.pipeline:  # noqa: ASYNC110  # the bytes are on their way
            await asyncio.sleep(0)
        served.stop()
        served.go_on.set()
        assert [await client.answer() for _ in range(3)] == [
            ("200", b"late", False), ("200", b"/one", False), ("200", b"/two", True),
        ]  # fmt: skip
        await client.ends()
        await served.ended


async def in_a_row(served: Served, chance: random.Random) -> None:
    """One client that does not wait for answers. What it sends is cut at random; one server leaves meanwhile."""
    client = await served.connect()
    num_requests, leaves_at = chance.randint(1, 6), chance.randint(0, 12)
    wire = b"".join(request(f"r{number}", bytes(chance.randint(0, 3))) for number in range(num_requests))
    cuts = sorted(chance.sample(range(1, len(wire)), chance.randint(0, 6)))
    for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(wire)], strict=True)):
        if number == leaves_at:
            served.stop()
        client.writer.write(wire[start:end])
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
    is_whole = served.server._left_s is None
    served.stop()
    answers: list[tuple[str, bytes, bool]] = []
    while not answers or not answers[-1][2]:
        if len(answers) == num_requests:  # all answers had begun before the server left
            client.send("end")
        answers.append(await client.answer())
    assert {status for status, *_ in answers} == {"200"}
    if is_whole and not cuts:
        assert len(answers) >= num_requests, "they came before a closing answer began"
    await client.ends()


@pytest.mark.long_cases
@pytest.mark.parametrize("seed", range(8))
async def test_of_requests_in_a_row_the_last_that_came_is_the_last_that_is_answered(seed: int) -> None:
    """However they are cut, and whenever the server leaves: no answer is lost or cut, and the last one says so."""
    async with serving() as served:
        await asyncio.gather(*(in_a_row(served, random.Random(f"{seed} {number}")) for number in range(10)))
        await served.ended


async def test_idle_connections_end_when_no_request_came_in_time(folder: Path | None) -> None:
    clock = Clock()
    async with serving(folder=folder, linger_s=0.02, clock=clock) as served:
        used, fresh = await served.connect(), await served.connect()
        used.send("one")
        await used.answer()
        served.stop()
        clock.runs = True
        for one in (used, fresh):
            await one.ends()
        await served.ended


async def test_a_client_that_does_not_close_is_not_waited_for() -> None:
    clock = Clock()
    async with serving(linger_s=0.02, clock=clock) as served:
        with socket.create_connection(("127.0.0.1", served.port)):
            served.stop()
            clock.runs = True
            await served.ended


@pytest.mark.long
@pytest.mark.parametrize(("linger_s", "is_told"), [(0.1, True), (0.1, False), (0.0, False)])
async def test_a_slow_reader_gets_all_of_the_last_answer(
    linger_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the app had ended it before the server left."""
    clock, is_over, checks = Clock(), asyncio.Event(), list[float]()
    check = BoundedProtocol.check

    def counted(connection: BoundedProtocol, now_s: float) -> None:
        """The time to hang up is over with the fifth look. Then no time passes: reading is a matter of the machine."""
        checks.extend([now_s] * clock.runs)
        if len(checks) == 5:
            clock.runs = False
            is_over.set()
        check(connection, now_s)

    monkeypatch.setattr(BoundedProtocol, "check", counted)
    async with serving(linger_s=linger_s, clock=clock) as served:
        client = await served.connect()
        if is_told:
            served.stop()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send("large")
        while served.server.server_state.total_requests < 1:  # noqa: ASYNC110  # until the app has ended
            await asyncio.sleep(0.001)
        [connection] = served.server.server_state.connections
        assert isinstance(connection, BoundedProtocol)
        assert connection.transport.get_write_buffer_size()
        served.stop()
        clock.runs = True
        await is_over.wait()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert await client.answer() == ("200", bytes(LARGE_BYTES), is_told)
        await client.ends()
        await served.ended


@pytest.mark.long
async def test_connections_in_the_queue_are_accepted_before_it_is_closed(folder: Path | None) -> None:
    """The event loop has not seen them yet when the server's time is over: to close the socket would reset them."""
    async with serving(folder=folder, linger_s=0.0) as served:
        waiting = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(20)]
        if folder is None:
            for one in waiting:
                one.sendall(request("queued"))
        await served.server._empty([served.listener])
        served.server.is_succeeded = True  # the rest of the shutdown has no queue
        served.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port))
        for one in waiting:
            name = None if served.tls is None else "127.0.0.1"
            client = Client(*await asyncio.open_connection(sock=one, ssl=served.tls, server_hostname=name))
            if folder is not None:
                client.send("queued")
            assert (await client.answer())[:2] == ("200", b"/queued")
            client.writer.close()
        await served.ended


@pytest.mark.long
async def test_clients_that_keep_no_connection_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of theirs there is none. A balancer may send them here until it has asked /health again."""
    monkeypatch.setattr(leaving, "QUIET_S", LONG_S)
    async with serving(linger_s=0.3) as served:
        num_served = 0
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                client = await served.connect()
                client.send("one")
                assert (await client.answer())[2] == (num_served > 0)
                served.stop()
                client.writer.close()
                num_served += 1
        assert num_served > 2
        await served.ended


async def test_a_server_without_connections_leaves_at_once() -> None:
    async with serving() as served:
        served.stop()
        await served.ended
        with pytest.raises(ConnectionRefusedError):
            await served.connect()


async def test_the_closing_answers_can_be_cut_short() -> None:
    clock = Clock()
    async with serving(clock=clock) as served:
        client = await served.connect()
        client.send("one")
        await client.answer()
        served.stop()
        served.server.leave(0.0)
        clock.runs = True
        await client.ends()
        await served.ended


@pytest.mark.long
async def test_what_outlasts_the_drain_is_cut() -> None:
    async with serving(drain_s=0.0) as served:
        client = await served.connect()
        client.send("late")
        while not served.server.server_state.tasks:  # noqa: ASYNC110  # the head is on its way
            await asyncio.sleep(0)
        served.stop()
        await served.ended
        client.writer.close()


async def test_after_the_cut_no_request_begins() -> None:
    """The app has ended: each request of a client that sends without a pause was a traceback in the log."""
    async with serving() as served:
        client, idle = await served.connect(), await served.connect()
        idle.send("first")
        await idle.answer()
        client.send("late", "late", "late")
        while not served.server.server_state.tasks:  # noqa: ASYNC110  # the head is on its way
            await asyncio.sleep(0)
        served.server.leave()
        served.server._gate.cut()
        await idle.ends()
        served.go_on.set()
        assert (await client.answer())[1] == b"late", "what ran gets its last words"
        while tasks := served.server.server_state.tasks:
            await asyncio.wait(tasks)
        assert served.server.server_state.total_requests == 2
        client.writer.close()


async def test_closing_answers_that_were_given_more_time_keep_it() -> None:
    """When a successor serves, idle connections have a second, also with --linger-s 0."""
    async with serving(linger_s=0.0) as served:
        client = await served.connect()
        client.send("first")
        assert not (await client.answer())[2]
        served.server.leave(LONG_S)
        served.server.stop.set()
        other = await served.connect()  # so that the end has begun
        for one in (other, client):
            one.send("last")
            assert (await one.answer())[2]
            await one.ends()
