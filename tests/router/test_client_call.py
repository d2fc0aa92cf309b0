"""The body of a generating request: how much of it waits unread, and what is kept when its client leaves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import orjson
import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from pd_http.body import ClientGone
from pd_router.calls.client_call import UNREAD_BYTES, ClientCall
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import serving, until
from tests.router.test_client_connection import connected, request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.anyio


class Transport:
    """What a call uses of a connection's transport."""

    is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def close(self) -> None: ...


def call_on(transport: Transport, serve: Callable[[ClientCall], Coroutine[Any, Any, None]]) -> ClientCall:
    wire = cast("asyncio.Transport", transport)
    return ClientCall(
        "/", [], serve, wire, FlowControl(wire), keep_alive=True, expects_continue=False, answer_headers=list,
        on_complete=lambda: None,
    )  # fmt: skip


async def test_reading_stops_until_the_body_that_came_is_seen() -> None:
    transport, bodies = Transport(), asyncio.Queue[bytes]()

    async def serve(call: ClientCall) -> None:
        bodies.put_nowait(await call.read_body(1 << 20))

    call = call_on(transport, serve)
    task = asyncio.create_task(call.run_asgi(None))
    await asyncio.sleep(0)
    for last in (False, True):
        for _ in range(UNREAD_BYTES // 1024):
            assert transport.is_reading
            call.body += b"a" * 1024
            call.set()
        call.body += b"b"
        call.set()
        assert not transport.is_reading
        if not last:
            await asyncio.sleep(0)
    call.more_body = False
    call.set()
    assert await bodies.get() == (b"a" * UNREAD_BYTES + b"b") * 2
    assert transport.is_reading, "or it would not be noticed that the client leaves"
    await task


async def test_a_body_is_freed_as_soon_as_its_client_is_gone() -> None:
    async def serve(call: ClientCall) -> None:
        with pytest.raises(ClientGone):
            await call.read_body(1 << 20)

    call = call_on(Transport(), serve)
    task = asyncio.create_task(call.run_asgi(None))
    await asyncio.sleep(0)
    call.body += b"a"
    call.set()
    call.disconnected = True
    call.set()
    assert (call._parts, call.body) == ([], bytearray()), "the task has not run yet"
    await task


async def test_a_client_that_leaves_after_a_long_body_is_noticed() -> None:
    d = FakeNode("mixed", fakes.decode_until_told)
    async with running(d), serving(mixed=[d]) as router, connected(router) as (_, writer):
        writer.write(request(messages=[{"role": "user", "content": "x" * 10 * UNREAD_BYTES}]))
        await d.wait_seen(1)
        assert len(orjson.loads(d.seen[0].raw)["messages"][0]["content"]) == 10 * UNREAD_BYTES
        writer.transport.abort()
        await until(lambda: router.count("pd_router_requests_in_flight") == 0)
        d.go_on.set()
        await router.idle()
