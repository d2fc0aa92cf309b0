"""Probes, Prometheus and routers find a place where all others are in use, and nothing else takes it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.certificates import Authority
from tests.deadlines import HANG_S
from tests.few_files import no_files
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until
from tests.security.stranger import Connection, error_in, post

if TYPE_CHECKING:
    from pathlib import Path

    from tests.router.router_process import Router

pytestmark = pytest.mark.anyio
NUM_PLACES = 4


@pytest.fixture
def anyio_backend() -> str:
    """Without uvloop: its TLS connections end after the loop that a test closes."""
    return "asyncio"


@pytest.mark.parametrize("is_secure", [False, True])
async def test_health_and_metrics_have_places_of_their_own(is_secure: bool, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    tls: dict[str, Any] = {"tls_cert": str(files.cert), "tls_key": str(files.key)} if is_secure else {}
    context = trusting(files.ca) if is_secure else None
    node = FakeNode("mixed", fakes.decode_until_told)
    limits: dict[str, Any] = {"max_connections": NUM_PLACES, "max_connections_per_address": NUM_PLACES}
    async with running(node), serving(mixed=[node], **limits, **tls) as router:
        host, port = router.url.partition("://")[2].split(":")

        async def connect() -> Connection:
            return Connection(*await asyncio.open_connection(host, int(port), ssl=context))

        asking = [await connect() for _ in range(NUM_PLACES)]
        for connection in asking:
            await connection.send(post(prompt="x"))
        await node.wait_seen(NUM_PLACES)

        strangers = []
        for _ in range(10):  # more than the reserved places, which they push each other out of
            with contextlib.suppress(OSError):
                strangers.append(await connect())
        for path in ("/health", "/metrics", "/health?x=y", "/pd/feed"):
            assert await status_of(router, path, context) in (200, 404)
        late = await connect()
        await late.send(post(prompt="x"))
        assert error_in(await late.end()) == (503, "connections_of_address")
        assert len(node.seen) == NUM_PLACES

        waiting = await connect()  # in a reserved place, until one of the others is free
        node.go_on.set()
        await until(lambda: not router.count("pd_router_requests_in_flight"))
        await waiting.send(post(prompt="x"))
        await node.wait_seen(NUM_PLACES + 1)
        for connection in (*asking, *strangers, late, waiting):
            connection.close()
        await until(lambda: not router.count("pd_router_http_connections"))


async def test_descriptors_that_run_out_are_counted() -> None:
    node = FakeNode("mixed", fakes.decode)
    async with running(node), serving(mixed=[node], write_timeout_s=0.2) as router:
        assert await status_of(router, "/health", None) == 200
        host, port = router.url.partition("://")[2].split(":")
        client = Connection(*await asyncio.open_connection(host, int(port)))
        with no_files():
            await until(lambda: bool(router.count("pd_router_http_refusals_total", reason="no_files")))
        assert await status_of(router, "/health", None) == 200
        client.close()


def trusting(ca: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca)


async def status_of(router: Router, path: str, context: ssl.SSLContext | None) -> int:
    async with (
        asyncio.timeout(HANG_S),
        aiohttp.ClientSession() as session,
        session.get(router.url + path, ssl=context or True) as answer,
    ):
        await answer.read()
        return answer.status
