"""The node's half of the token path: what an answer may be, how it is read, and which connections are used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import pytest
import uvloop

from pd_router.nodes.connection_pool import ConnectionPool, NoConnection
from pd_router.nodes.node_connection import (
    MAX_HEAD_BYTES,
    UNREAD_BYTES,
    AnswerBroken,
    AnswerUnreadable,
    NodeExchange,
    Unanswered,
)
from tests.few_files import no_files
from tests.router.fake_nodes import WAIT_S
from tests.router.router_process import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

_RESET = struct.pack("ii", 1, 0)  # closing sends RST


class ScriptedNode(asyncio.Protocol):
    """Answers the n-th request with the n-th script: bytes as they are; None closes, and "abort" resets the connection.

    Requests have bodies by length. `writers`: every connection so far.
    """

    def __init__(self, *scripts: list[bytes | str | None]) -> None:
        self.scripts = list(scripts)
        self.requests: list[bytes] = []
        self.open: list[asyncio.StreamWriter] = []
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.open.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                for part in self.scripts.pop(0) if self.scripts else [OK]:
                    if isinstance(part, bytes):
                        writer.write(part)
                        await writer.drain()
                    elif part is None:
                        writer.close()
                    else:
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        writer.transport.abort()
        self.open.remove(writer)
        writer.close()


@contextlib.asynccontextmanager
async def scripted(*scripts: list[bytes | str | None]) -> AsyncIterator[tuple[ScriptedNode, ConnectionPool]]:
    node = ScriptedNode(*scripts)
    server = await asyncio.start_server(node.serve, "127.0.0.1", 0)
    node.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pool = ConnectionPool(connect_timeout_s=WAIT_S, keepalive_s=WAIT_S)
    try:
        async with asyncio.timeout(WAIT_S):
            yield node, pool
    finally:
        pool.close()
        await until(lambda: not len(pool))
        server.close()
        for writer in node.open:
            writer.close()


async def post(pool: ConnectionPool, node: ScriptedNode, body: bytes = b"{}") -> NodeExchange:
    return await pool.send(node.url, "POST", "/v1/completions", [("x-a", "1")], body)


async def answer_of(exchange: NodeExchange) -> tuple[int, bytes]:
    head = await exchange.head()
    return head.status, await exchange.whole()


async def test_a_request_is_sent_as_it_is_and_its_connection_used_again() -> None:
    async with scripted() as (node, pool):
        for _ in range(3):
            exchange = await post(pool, node)
            assert await answer_of(exchange) == (200, b"ok")
            exchange.close()
        get = await pool.send(node.url + "/base/", "GET", "/health", [])
        assert (await answer_of(get))[0] == 200
        host = node.url.removeprefix("http://").encode()
        post_head = b"POST /v1/completions HTTP/1.1\r\nhost: " + host + b"\r\nx-a: 1\r\ncontent-length: 2\r\n\r\n"
        assert node.requests == [post_head + b"{}"] * 3 + [b"GET /base/health HTTP/1.1\r\nhost: " + host + b"\r\n\r\n"]
        assert node.num_connections == 2, "each base URL has connections of its own"


WHOLE: list[tuple[list[bytes | str | None], tuple[int, bytes], bool]] = [
    ([OK], (200, b"ok"), True),
    ([OK[:1], OK[1:30], OK[30:]], (200, b"ok"), True),
    ([CHUNKED + b"1\r\na\r\n", b"2;x=y\r\nbc\r\n", b"0\r\nx-trailer: 1\r\n\r\n"], (200, b"abc"), True),
    ([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK], (200, b"ok"), True),
    ([b"HTTP/1.1 204 No Content\r\n\r\n"], (204, b""), True),
    ([b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n"], (503, b""), True),
    ([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"], (200, b"ok"), False),
    ([b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok"], (200, b"ok"), False),
    ([b"HTTP/1.1 200 OK\r\n\r\nup to", b" the end", None], (200, b"up to the end"), False),
    ([OK + OK], (200, b"ok"), False),  # bytes that nothing asked for
    ([OK + b"\r\nnoise"], (200, b"ok"), False),
]


@pytest.mark.parametrize(("script", "expected", "is_kept"), WHOLE)
async def test_answers_of_every_form(
    script: list[bytes | str | None], expected: tuple[int, bytes], is_kept: bool
) -> None:
    async with scripted(script) as (node, pool):
        exchange = await post(pool, node)
        assert await answer_of(exchange) == expected
        assert exchange.answer is not None
        assert all(name not in (b"link", b"x-trailer") for name, _ in exchange.answer.headers)
        assert await answer_of(await post(pool, node)) == (200, b"ok")
        assert node.num_connections == (1 if is_kept else 2)


BROKEN: list[tuple[list[bytes | str | None], type[AnswerBroken]]] = [
    ([None], Unanswered),
    (["abort"], Unanswered),
    ([b"HTTP", None], AnswerBroken),
    ([b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", None], AnswerBroken),
    ([CHUNKED + b"5\r\nabc", None], AnswerBroken),
    ([CHUNKED + b"3\r\nabc\r\n", "abort"], AnswerBroken),
    ([b"HTTP/1.1 200 OK\r\n\r\nup to", "abort"], AnswerBroken),
    ([b"hello\r\n\r\n"], AnswerUnreadable),
    ([b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], AnswerUnreadable),
    ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok"], AnswerUnreadable),
    ([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\nok"], AnswerUnreadable),
    ([b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n"], AnswerUnreadable),
    ([CHUNKED + b"zz\r\n"], AnswerUnreadable),
    ([b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * (MAX_HEAD_BYTES // 6)], AnswerUnreadable),
    ([b"HTTP/1.1 200 OK\r\nx: ", *[b"a" * 9000] * 8], AnswerUnreadable),
    ([b"HTTP/1.1 103 Early\r\n\r\n" * (MAX_HEAD_BYTES // 20)], AnswerUnreadable),
    ([CHUNKED + b"1\r\na\r\n1;", *[b"a" * 9000] * 60], AnswerUnreadable),
    ([CHUNKED + b"0\r\n" + b"x: 1\r\n" * (MAX_HEAD_BYTES // 6)], AnswerUnreadable),
]


@pytest.mark.parametrize(("script", "kind"), BROKEN)
async def test_answers_that_are_cut_off_or_are_none(script: list[bytes | str | None], kind: type[AnswerBroken]) -> None:
    async with scripted(script) as (node, pool):
        exchange = await post(pool, node)
        with pytest.raises(AnswerBroken) as caught:
            await answer_of(exchange)
        assert type(caught.value) is kind
        with pytest.raises(kind):
            await exchange.read()
        exchange.close()
        assert await answer_of(await post(pool, node)) == (200, b"ok")
        assert node.num_connections == 2


async def test_an_endless_whole_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_router.nodes.node_connection.MAX_WHOLE_BYTES", 1 << 20)
    async with scripted([CHUNKED, *[b"10000\r\n" + b"a" * 65536 + b"\r\n"] * 40]) as (node, pool):
        exchange = await post(pool, node)
        with pytest.raises(AnswerUnreadable, match="longer than"):
            await answer_of(exchange)
        exchange.close()


async def test_a_reader_gets_what_came_before_the_connection_broke() -> None:
    async with scripted([CHUNKED + b"3\r\nabc\r\n", None]) as (node, pool):
        exchange = await post(pool, node)
        await exchange.head()
        await until(lambda: not len(pool))
        assert await exchange.read() == b"abc"
        with pytest.raises(AnswerBroken, match="in the middle of an answer"):
            await exchange.read()


@pytest.mark.long
@pytest.mark.parametrize("how", ["read", "splice"])
async def test_what_nothing_takes_stays_with_the_node(how: str) -> None:
    """A node that floods fills the buffers of the kernel, and no more of the router's memory than one read of them."""
    size, count = 1 << 20, 64
    async with scripted([CHUNKED, *[b"%x\r\n%b\r\n" % (size, b"a" * size)] * count, b"0\r\n\r\n"]) as (node, pool):
        exchange = await post(pool, node)
        await exchange.head()
        got = 0

        def sink(data: bytes) -> None:
            nonlocal got
            got += len(data)
            exchange.pause()

        if how == "splice":
            done = exchange.splice(sink)
            await until(lambda: got)
        for _ in range(200):  # nothing moves any more
            await asyncio.sleep(0)
        held = got if how == "splice" else exchange._num_unread
        assert held <= UNREAD_BYTES + (1 << 20)
        if how == "read":
            while piece := await exchange.read():
                got += len(piece)
        else:
            while not done.done():
                exchange.resume()
                await asyncio.sleep(0)
            await done
        assert got == size * count
        assert await answer_of(await post(pool, node)) == (200, b"ok")
        assert node.num_connections == 1


async def test_a_splice_gives_every_byte_once_and_then_ends() -> None:
    async with scripted([CHUNKED + b"3\r\nabc\r\n", b"2\r\nde\r\n1\r\nf\r\n0\r\n\r\n"]) as (node, pool):
        exchange = await post(pool, node)
        await exchange.head()
        await until(lambda: exchange._unread)
        got: list[bytes] = []
        await exchange.splice(got.append)
        assert b"".join(got) == b"abcdef"
        assert exchange.has_ended
        again = await post(pool, node)
        exchange.close()  # late: the connection serves another request
        assert await answer_of(again) == (200, b"ok")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (lambda exchange: exchange.close(), AnswerBroken),
        (lambda exchange: exchange._connection._transport.abort(), AnswerBroken),
        (lambda exchange: exchange._spliced.set_exception(KeyError("from outside")), KeyError),
    ],
)
async def test_a_splice_that_is_ended(act: Callable[[NodeExchange], None], error: type[Exception]) -> None:
    async with scripted([CHUNKED + b"3\r\nabc\r\n"]) as (node, pool):
        exchange = await post(pool, node)
        got: list[bytes] = []
        done = exchange.splice(got.append)
        await until(lambda: got)
        act(exchange)
        with pytest.raises(error):
            await done
        for _ in range(2):
            exchange.close()
        await until(lambda: not node.open)
        assert got == [b"abc"]


async def test_a_sink_that_fails_ends_the_connection() -> None:
    def refuse(_: bytes) -> None:
        raise ValueError("no frame")

    async with scripted([CHUNKED + b"3\r\nabc\r\n"]) as (node, pool):
        exchange = await post(pool, node)
        with pytest.raises(ValueError, match="no frame"):
            await exchange.splice(refuse)
        await until(lambda: not node.open)


async def test_an_answer_that_is_not_awaited_any_more_closes_its_connection() -> None:
    async with scripted([b""]) as (node, pool):
        exchange = await post(pool, node)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await exchange.head()
        exchange.close()
        await until(lambda: not node.open)
        assert not len(pool)


@pytest.mark.parametrize("before_s", [WAIT_S, 0.01])
async def test_a_kept_connection_has_a_deadline_for_each_exchange(before_s: float) -> None:
    """The timer of the exchange before is still set: it must neither end the next one nor let it go on."""
    async with scripted([OK], [b""]) as (node, pool):
        before = await post(pool, node)
        await before.head()  # the body is there too
        before.limit(before_s)
        await answer_of(before)
        exchange = await post(pool, node)
        exchange.limit(0.05)
        with pytest.raises(TimeoutError):
            await exchange.head()
        assert asyncio.get_running_loop().time() >= exchange.expires_s
        assert node.num_connections == 1
        await until(lambda: not len(pool))


async def test_a_deadline_holds_while_an_answer_is_passed_on() -> None:
    async with scripted([CHUNKED]) as (node, pool):
        exchange = await post(pool, node)
        await exchange.head()
        done = exchange.splice(lambda data: None)
        exchange.limit(0.05)
        with pytest.raises(TimeoutError):
            await done


async def test_a_pool_that_closes_ends_what_waits() -> None:
    async with scripted([b""], [CHUNKED]) as (node, pool):
        waiting, passed_on = await post(pool, node), await post(pool, node)
        await passed_on.head()
        done = passed_on.splice(lambda data: None)
        pool.close()
        for wait in (waiting.head(), done):
            with pytest.raises(AnswerBroken, match="the router closed the connection"):
                await wait


def test_a_deadline_of_an_instant_under_uvloop() -> None:
    """Its timers of less than 0.5 ms cannot tell when they fire."""

    async def limit_twice() -> None:
        async with scripted([b""]) as (node, pool):
            exchange = await post(pool, node)
            exchange.limit(1e-4)
            exchange.limit(1e-4)
            with pytest.raises(TimeoutError):
                await exchange.head()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limit_twice())


async def test_a_connection_that_the_node_closed_is_not_used() -> None:
    async with scripted([OK, None]) as (node, pool):
        await answer_of(await post(pool, node))
        await until(lambda: not len(pool))
        assert await answer_of(await post(pool, node)) == (200, b"ok")
        assert node.num_connections == 2


async def test_idle_connections_are_closed_and_their_address_forgotten() -> None:
    async with scripted() as (node, _):
        pool = ConnectionPool(connect_timeout_s=WAIT_S, keepalive_s=0.02)
        await answer_of(await post(pool, node))
        await until(lambda: not len(pool) and not pool._origins)
        await until(lambda: not node.open)


async def test_an_early_answer_leaves_no_half_sent_request_on_a_kept_connection() -> None:
    writers: list[asyncio.StreamWriter] = []

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too large\r\ncontent-length: 0\r\n\r\n")
        writers.append(writer)

    server = await asyncio.start_server(early, "127.0.0.1", 0)
    pool = ConnectionPool(WAIT_S, WAIT_S)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(WAIT_S):
        exchange = await pool.send(url, "POST", "/", [], b"a" * (32 << 20))
        assert (await answer_of(exchange))[0] == 413
        await until(lambda: not len(pool))
    server.close()
    writers[0].transport.abort()


async def test_the_kernel_watches_the_path_to_a_node() -> None:
    async with scripted() as (node, pool):
        await answer_of(await post(pool, node))
        (connection,) = pool._open
        ours = connection._transport.get_extra_info("socket")
        assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_router_without_files_does_not_blame_the_node(host: str) -> None:
    pool = ConnectionPool(connect_timeout_s=WAIT_S, keepalive_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as server, no_files(), pytest.raises(NoConnection) as raised:
        await pool.send(f"http://{host}:{server.getsockname()[1]}", "GET", "/", [])
    assert raised.value.is_own


async def test_no_connection_in_time_or_at_all() -> None:
    pool = ConnectionPool(connect_timeout_s=0.05, keepalive_s=1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(NoConnection, match=r"within 0\.05 s"):  # TLS is never answered
            await pool.send(f"https://127.0.0.1:{port}", "GET", "/", [])
        accepted, _ = silent.accept()
        with accepted:
            await until(lambda: _is_closed(accepted))
    assert not len(pool)
    pool = ConnectionPool(connect_timeout_s=WAIT_S, keepalive_s=1.0)
    with pytest.raises(NoConnection, match=r"cannot connect to 127\.0\.0\.1") as refused:
        await pool.send(f"http://127.0.0.1:{port}", "GET", "/", [])
    assert not refused.value.is_own
    assert not len(pool)


def _is_closed(peer: socket.socket) -> bool:
    """Whether the other end of `peer` is closed."""
    peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while peer.recv(4096):
            pass
        return True
    return False
