"""Connections over TLS that the bounds end: the client gets the answer, and the deadlines of others still run."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from pd_http.connection_limits import ConnectionLimits
from tests.certificates import Authority
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import WAIT_S, FakeNode, running
from tests.router.router_process import serving

if TYPE_CHECKING:
    from pathlib import Path

    from pd_http.refusal import Refusal

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Without uvloop: its TLS connections end after the loop that a test closes."""
    return "asyncio"


async def test_a_refusal_over_tls_reaches_the_client(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Authority(tmp_path).issue()
    context = ssl.create_default_context(cafile=files.ca)
    tls: dict[str, Any] = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    node = FakeNode("mixed", fakes.decode)
    cases = {
        b"no request\r\n\r\n": b"400",
        b"GET / HTTP/1.1\r\n": b"408",  # its end never comes
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{": b"408",
    }
    now_s, is_heard = 0.0, asyncio.Event()
    take = ConnectionLimits.take

    def noted(self: ConnectionLimits, data: bytes, start: int, at_s: float) -> tuple[int, bool] | Refusal:
        is_heard.set()
        return take(self, data, start, at_s)

    monkeypatch.setattr(ConnectionLimits, "take", noted)
    settings: dict[str, Any] = {"head_timeout_s": 0.02, "clock": lambda: now_s}  # it is looked at four times as often
    async with running(node), serving(mixed=[node], **settings, **tls) as router:
        host, port = router.url.removeprefix("https://").split(":")
        for sent, status in cases.items():
            async with asyncio.timeout(WAIT_S):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                writer.write(sent)
                await is_heard.wait()
                is_heard.clear()
                now_s += 1000.0
                assert status in await reader.readuntil(b"\r\n")
                writer.close()
                with contextlib.suppress(OSError):  # the router may have ended the connection first
                    await writer.wait_closed()
    assert "Fatal error" not in caplog.text
    assert "Exception" not in caplog.text
