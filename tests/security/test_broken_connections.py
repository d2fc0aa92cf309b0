"""Connections that break off leave no memory behind: OpenSSL holds 50 kB for each, which no collector counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.certificates import Authority
from tests.deadlines import HANG_S, until
from tests.security.stranger import MB, POST, Target, router
from tests.security.test_tls_strangers import hello, trusting

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

logger = logging.getLogger(__name__)


def meet(target: Target, begin: bytes) -> None:
    """Send `begin` in place of a handshake, and what follows where it is a ClientHello, and leave."""
    with socket.create_connection(target.address, timeout=HANG_S) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(begin)
        stranger.recv(4096)


def break_off(target: Target, context: ssl.SSLContext, request: bytes) -> None:
    """Send `request` over TLS, and reset the connection when the answer begins, if there is to be one."""
    with (
        socket.create_connection(target.address, timeout=HANG_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as client,
    ):
        client.sendall(request)
        if request.endswith(b"\n"):
            client.recv(4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def has_at_most(target: Target, num_bytes: int) -> bool:
    return target.resident_bytes() < num_bytes


async def test_a_connection_that_breaks_leaves_no_memory(tmp_path: Path) -> None:
    """It went with a collection of all generations, or after the keep-alive time."""
    files = Authority(tmp_path).issue()
    tls = trusting(files)
    health, body = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b'{"prompt":"hi","max_tokens":400,"stream":true}\n'
    head = POST + b"content-length: %d\r\n\r\n" % len(body)
    requests = {"idle": health, "pipelined": health * 5, "arriving": head + body[:9], "streamed": head + body}
    kinds = {name: partial(break_off, context=tls, request=request) for name, request in requests.items()}
    kinds |= {"no TLS": partial(meet, begin=health), "no hello": partial(meet, begin=b"\x16\x03\x01\x00\x05hello")}
    kinds |= {"half a handshake": partial(meet, begin=hello(tls))}

    def repeat(kind: partial[None], count: int) -> None:
        for _ in range(count):
            kind(target)

    async with router(*files.flags[:2], tls=tls) as target:
        for kind in kinds.values():
            await asyncio.to_thread(repeat, kind, 10)
        for name, kind in kinds.items():
            before = target.resident_bytes()
            await asyncio.to_thread(repeat, kind, 80)
            logger.info("%s: %d bytes", name, target.resident_bytes() - before)
            await until(partial(has_at_most, target, before + 1 * MB))  # 3 to 4 MB were kept
        assert "Traceback" not in target.process.output
