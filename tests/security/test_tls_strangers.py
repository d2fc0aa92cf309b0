"""Connections to a TLS server that never end their handshake have bounds, and the others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from pd_http.gate import SLOW_HANDSHAKE_S
from tests.certificates import Authority, CertificateFiles
from tests.cluster import CLI, Launcher
from tests.deadlines import HANG_S, POLL_S, until, until_equal
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving
from tests.security.stranger import MB, Target, router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

NUM_PLACES = 24
NUM_ADDRESSES = 8  # of strangers: one has three quarters of the places
MAX_GROWTH = 150 * MB


@pytest.fixture
def anyio_backend() -> str:
    """Without uvloop: its TLS connections end after the loop that a test closes."""
    return "asyncio"


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return Authority(tmp_path).issue()


def trusting(files: CertificateFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.ca)


def hello(context: ssl.SSLContext) -> bytes:
    """A ClientHello in its record."""
    written = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), written, server_hostname="localhost").do_handshake()
    return written.read()


def crowd(address: tuple[str, int], count: int, begin: bytes) -> list[socket.socket]:
    """So many connections that have sent `begin`."""
    strangers = []
    for number in range(count):
        source = f"127.0.0.{2 + number % NUM_ADDRESSES}", 0
        strangers.append(socket.create_connection(address, timeout=HANG_S, source_address=source))
        with contextlib.suppress(ConnectionError):  # the server may have ended it
            strangers[-1].sendall(begin)
    return strangers


def shake_hands(target: Target, context: ssl.SSLContext) -> None:
    """Unlike asyncio's, a client that tells the server why it fails."""
    with socket.create_connection(target.address, timeout=HANG_S) as connection:
        context.wrap_socket(connection, server_hostname="localhost")


def gauge(target: Target) -> str:
    return "pd_http_connections" if target.node is None else "pd_router_http_connections"


async def test_unfinished_handshakes_do_not_lock_others_out(files: CertificateFiles) -> None:
    """40 of each kind that a stranger can stop at, at a router with 24 places."""
    tls = trusting(files)
    whole = hello(tls)
    limits = (f"--max-connections={NUM_PLACES}", f"--head-timeout-s={HANG_S:g}")
    async with router(*limits, *files.flags[:2], tls=tls) as target:
        assert await target.ask() == 200
        idle = target.num_files()
        strangers = []
        for begin in (b"", whole[: len(whole) // 2], whole):
            strangers += await asyncio.to_thread(crowd, target.address, 40, begin)
            assert await target.ask() == 200
        counted = await target.count("pd_router_http_connections")
        assert NUM_PLACES // 2 < counted <= NUM_PLACES

        async def is_counted_right() -> bool:  # the system counts the same
            return abs(await target.count(gauge(target)) - (target.num_files() - idle)) <= 2

        await until(is_counted_right)
        assert await target.refusals("place_needed") >= 120 - NUM_PLACES
        await until(lambda: "new connection needed the place" in target.process.output)

        strangers += await asyncio.to_thread(crowd, target.address, 1, b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.to_thread(shake_hands, target, ssl.create_default_context())
        await until_equal(lambda: target.refusals("tls_http_request"), 1)
        await until_equal(lambda: target.refusals("tls_tlsv1_alert_unknown_ca"), 1)
        await until(lambda: "the TLS handshake failed: " in target.process.output)
        assert "Traceback" not in target.process.output
        for stranger in strangers:
            stranger.close()


async def test_unfinished_handshakes_have_a_deadline(files: CertificateFiles) -> None:
    """Of each kind: without a byte, with a part of a hello, with a whole one."""
    whole, node = hello(trusting(files)), FakeNode("mixed", fakes.decode)
    tls: dict[str, Any] = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    async with running(node), serving(mixed=[node], head_timeout_s=0.5, **tls) as router:
        host, _, port = router.url.partition("://")[2].partition(":")
        strangers = []
        for begin in (b"", whole[: len(whole) // 2], whole):
            strangers += await asyncio.to_thread(crowd, (host, int(port)), 4, begin)
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                while await asyncio.to_thread(stranger.recv, 4096):
                    pass
            stranger.close()
        await until_equal(lambda: router.count("pd_router_http_refusals_total", reason="slow_handshake"), 12)
        await until_equal(lambda: router.count("pd_router_http_connections"), 0)


async def test_failed_handshakes_are_told_once_in_a_while(
    files: CertificateFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pd_http.gate.LOG_EVERY_S", 3600.0)
    node = FakeNode("mixed", fakes.decode)
    tls: dict[str, Any] = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    async with running(node), serving(mixed=[node], **tls) as router:
        host, _, port = router.url.partition("://")[2].partition(":")
        strangers = await asyncio.to_thread(crowd, (host, int(port)), 5, b"GET / HTTP/1.1\r\n\r\n")
        await until_equal(lambda: router.count("pd_router_http_refusals_total", reason="tls_http_request"), 5)
        for stranger in strangers:
            stranger.close()
    assert caplog.text.count("the TLS handshake failed: http_request") == 1


@contextlib.asynccontextmanager
async def node(files: CertificateFiles, num_files: int) -> AsyncIterator[Target]:
    with Launcher() as launcher:
        limit = ("sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh")
        flags = ("--port=0", "--num-threads=1", "--device=cpu", "--max-num-seqs=16", *files.flags[:2])
        process = launcher.start("node", [*limit, *CLI, "mixed", *flags])
        await asyncio.to_thread(process.wait_line, "ready: ")
        yield Target(process, process.url, tls=trusting(files))
        await asyncio.to_thread(launcher.close)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("num_files", "count"), [(1024, 1100), (20_000, 15_500)])
@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["router", "node"])
async def test_thousands_of_unfinished_handshakes(
    kind: str, part: float, num_files: int, count: int, files: CertificateFiles
) -> None:
    tls = trusting(files)
    whole = hello(tls)
    server = router(*files.flags[:2], num_files=num_files, tls=tls) if kind == "router" else node(files, num_files)
    async with server as target:
        assert await target.ask() == 200
        idle, before = target.num_files(), target.resident_bytes()
        strangers = await asyncio.to_thread(crowd, target.address, count, whole[: int(part * len(whole))])
        for _ in range(5):
            assert await target.ask() == 200  # while all of them are there
        counted = await target.count(gauge(target))
        assert counted > num_files / 4
        assert abs(target.num_files() - idle - counted) <= 4  # the node's own and the client's that has just asked
        assert target.resident_bytes() - before < MAX_GROWTH
        for stranger in strangers:
            stranger.close()


async def note_delays(late: list[float]) -> None:
    """Note by how much this process' event loop was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + POLL_S
        await asyncio.sleep(POLL_S)
        late.append(loop.time() - due_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_strangers", [0, 8000])
async def test_many_clients_at_once_are_all_served(num_strangers: int, files: CertificateFiles) -> None:
    """3,000 handshakes at once; 300 beside strangers that have sent a whole hello each.

    All clients share one event loop. Where the machine leaves it so little that it answers later than a handshake may
    stand while others wait, those that gave way come again, fewer at once.
    """
    tls = trusting(files)

    async def ask(target: Target) -> None:
        reader, writer = await asyncio.open_connection(*target.address, ssl=tls, ssl_handshake_timeout=100)
        writer.write(b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 404")
        writer.close()

    late: list[float] = []
    async with router(f"--head-timeout-s={HANG_S:g}", *files.flags[:2], num_files=20_000, tls=tls) as target:
        before = target.resident_bytes()
        strangers = await asyncio.to_thread(crowd, target.address, num_strangers, hello(tls))
        watch = asyncio.create_task(note_delays(late))
        asked = (ask(target) for _ in range(300 if num_strangers else 3000))
        ends = await asyncio.gather(*asked, return_exceptions=True)
        watch.cancel()
        gave_way = [end for end in ends if end is not None]
        assert not gave_way or max(late) > SLOW_HANDSHAKE_S / 2, gave_way[0]  # it answers twice
        for _ in range(0, len(gave_way), 100):
            await asyncio.gather(*(ask(target) for _ in range(100)))
        assert target.resident_bytes() - before < MAX_GROWTH
        for stranger in strangers:
            stranger.close()
