"""How a decode node's answer reaches the client, chunk by chunk, and what it gets when the answer breaks off."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from pd_http.body import ClientGone
from pd_http.node_answers import FailureKind
from pd_http.reply import Reply
from pd_router.node_table import Role
from pd_router.splice import send_answer
from pd_router.upstream import Answer, LegFailed
from tests.router.fake_legs import STUCK, FakeContent, VirtualTime, as_any, node

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio
IDLE_S = 10.0
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"n": 1}\n\n'
P, D = node("p-1", Role.PREFILL), node("d-1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # a test can move its clock


@dataclass
class FakeLeg:
    """A DecodeLeg after `open`."""

    content: FakeContent
    first_chunk: bytes = b""
    whole: Answer | None = None
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ((b"Content-Type", b"text/event-stream"),)
    node: Any = D

    async def read(self) -> bytes:
        return await self.content.readany()


@dataclass
class Client:
    """The other end of a Reply. `slow`: seconds that each chunk takes to be sent."""

    time: VirtualTime | None = None
    slow: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)

    async def send(self, message: Any) -> None:
        if self.slow and message["type"] == "http.response.body":
            assert self.time is not None
            await self.time.advance(self.slow)
        self.messages.append(dict(message))

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_whole(self) -> bool:
        return not self.messages[-1].get("more_body", True)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])


async def send(leg: FakeLeg, client: Client) -> None:
    await send_answer(as_any(leg), Reply(client.send), P, IDLE_S)


def stream(*parts: bytes | float | Exception, time: VirtualTime | None = None) -> FakeLeg:
    """The first part has come already."""
    first, *rest = parts
    assert isinstance(first, bytes)
    return FakeLeg(FakeContent(rest, time), first)


async def broken(leg: FakeLeg, client: Client) -> tuple[LegFailed, dict[str, Any]]:
    """The failure, and the error event that the client got instead of an end."""
    with pytest.raises(LegFailed) as caught:
        await send(leg, client)
    assert not client.is_whole, "an answer that broke off must not look complete"
    event = client.messages[-1]["body"]
    assert event.endswith(b"\n\n")
    error: dict[str, Any] = orjson.loads(event.strip().removeprefix(b"data: "))["error"]
    assert error["code"] == "stream_interrupted"
    return caught.value, error


async def test_a_whole_answer_is_passed_on_with_the_names_of_both_nodes() -> None:
    client = Client()
    headers = ((b"Content-Type", b"application/json"), (b"Connection", b"close"), (b"X-Extra", b"1"))
    await send(FakeLeg(FakeContent([]), whole=Answer(201, headers, b"{}")), client)
    assert client.messages[0]["status"] == 201
    assert client.headers == {
        b"content-type": b"application/json", b"x-extra": b"1", b"x-pd-prefill": b"p-1", b"x-pd-decode": b"d-1",
        b"content-length": b"2",
    }  # fmt: skip
    assert client.body == b"{}"
    assert client.is_whole


async def test_what_a_node_says_of_itself_stays() -> None:
    client = Client()
    leg = stream(DONE)
    leg.headers = ((b"x-pd-prefill", b"itself"),)
    leg.status = 206
    await send(leg, client)
    assert client.messages[0]["status"] == 206
    assert client.headers == {b"x-pd-prefill": b"itself", b"x-pd-decode": b"d-1"}


async def test_a_stream_is_passed_on_byte_for_byte_and_ended() -> None:
    client = Client()
    await send(stream(b"data: a\n", b"\n", CHUNK, DONE), client)
    assert [message.get("body") for message in client.messages[1:]] == [b"data: a\n", b"\n", CHUNK, DONE, b""]
    assert client.is_whole


@pytest.mark.parametrize(
    "parts",
    [
        (CHUNK + DONE,),
        (CHUNK, b"data: [DO", b"NE]\n\n"),
        (CHUNK, b"data: [DONE]", b"\r\n\r\n"),
        (CHUNK, b'data: {"error": {"message": "no"}}\n\n'),
        (CHUNK, b'data: {"err', b'or": {}}\n\n'),
    ],
)
async def test_the_end_is_seen_however_it_is_cut(parts: tuple[bytes, ...]) -> None:
    client = Client()
    await send(stream(*parts), client)
    assert client.body == b"".join(parts)
    assert client.is_whole


async def test_a_stream_that_just_stops_is_no_answer() -> None:
    client = Client()
    failure, error = await broken(stream(CHUNK, CHUNK), client)
    assert (failure.kind, failure.node) == (FailureKind.BROKEN, D)
    assert "without [DONE]" in error["message"]
    assert "d-1" in error["message"]
    assert client.body.startswith(CHUNK * 2 + b'data: {"error"')


@pytest.mark.parametrize(
    ("parts", "between"),
    [
        ((CHUNK, b"data: hal"), b"\n\n"),
        ((b"data: x\r\n", b"\r\n"), b""),
        ((b"data: x\n", b"\n"), b""),
        ((CHUNK, CHUNK[:-1]), b"\n\n"),
    ],
)
async def test_half_an_event_is_closed_off_before_the_error(parts: tuple[bytes, ...], between: bytes) -> None:
    client = Client()
    gone = LegFailed(D, FailureKind.BROKEN, "the connection was reset")
    failure, error = await broken(stream(*parts, gone), client)
    assert failure is gone
    assert "the connection was reset" in error["message"]
    body = b"".join(parts)
    assert client.body.startswith(body)
    assert client.body[len(body) :].startswith(between + b"data: ")


async def test_a_stream_may_last_as_long_as_it_moves() -> None:
    time = VirtualTime()
    client = Client(time)
    parts: list[bytes | float] = [CHUNK]
    for _ in range(8):
        parts += [IDLE_S * 0.75, CHUNK]
    await send(stream(*parts, DONE, time=time), client)
    assert client.body == CHUNK * 9 + DONE
    quick: list[bytes | float] = [CHUNK]
    for _ in range(200):  # the limit is moved seldom, and in time
        quick += [IDLE_S / 100, CHUNK]
    await send(stream(*quick, IDLE_S * 0.85, DONE, time=time), Client(time))


@pytest.mark.parametrize("parts", [(CHUNK, STUCK), (CHUNK, IDLE_S * 0.75, CHUNK, IDLE_S + 0.5, DONE)])
async def test_a_stream_that_stands_still_is_given_up(parts: tuple[Any, ...]) -> None:
    time = VirtualTime()
    client = Client(time)
    begun_s = time.now_s
    failure, error = await broken(stream(*parts, time=time), client)
    assert failure.kind is FailureKind.TIMEOUT
    assert "made no progress for 10 s" in error["message"]
    if parts[1] is not STUCK:
        assert time.now_s - begun_s == pytest.approx(IDLE_S * 1.75, abs=0.5)


@pytest.mark.parametrize("num_read", [0, 2])
async def test_a_client_that_does_not_read_is_gone_and_its_node_is_not_blamed(num_read: int) -> None:
    time = VirtualTime()
    client = Client(time)
    take: Callable[[Any], Any] = client.send

    async def stop_reading(message: Any) -> None:
        client.slow = STUCK if len(client.messages) > num_read else 0.0
        await take(message)

    with pytest.raises(ClientGone):
        await send_answer(as_any(stream(CHUNK, CHUNK, CHUNK, DONE, time=time)), Reply(stop_reading), P, IDLE_S)
    assert client.body == CHUNK * num_read, "and nothing more is written to it"


async def test_a_client_that_leaves_ends_it_there() -> None:
    client = Client()

    async def leave(message: Any) -> None:
        await client.send(message)
        if len(client.messages) == 2:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await send_answer(as_any(stream(CHUNK, CHUNK, DONE)), Reply(leave), P, IDLE_S)
    assert client.body == CHUNK
