"""How a decode node's answer reaches the client, chunk by chunk, and what it gets when the answer breaks off."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from pd_http.body import ClientGone
from pd_http.held_bytes import HeldBytes
from pd_http.node_answers import FailureKind
from pd_router.calls.reply import CallReply
from pd_router.nodes.node import Role
from pd_router.nodes.upstream import Answer, LegFailed
from pd_router.requests.legs import DecodeLeg
from pd_router.requests.splice import StreamSplice, send_answer
from tests.router.fake_legs import STUCK, FakeExchange, VirtualTime, answer, as_any, charge, node

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.nodes.node import Node

pytestmark = pytest.mark.anyio
IDLE_S = 10.0
DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"n": 1}\n\n'
P, D = node("p-1", Role.PREFILL), node("d-1")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # a test can move its clock


class FakeLeg(DecodeLeg):
    """After `open`."""

    def __init__(self, response: FakeExchange, whole: Answer | None = None) -> None:
        super().__init__(as_any(None), D, charge(D))
        self.response = response
        self._exchange = as_any(response)
        self.whole = whole


class Alone:
    """A ContinuedStream without another node."""

    def guard(self, node: Node) -> AbstractContextManager[None]:
        return nullcontext()

    async def go_on(self, leg: DecodeLeg, failure: LegFailed) -> None:
        """There is none."""


@dataclass
class Client:
    """The other end of a reply, a ClientCall to it. `slow`: seconds for which it takes nothing after each chunk."""

    time: VirtualTime | None = None
    slow: float = 0.0
    messages: list[dict[str, Any]] = field(default_factory=list)
    listener: Callable[[bool], None] | None = None
    reading: asyncio.Task[None] | None = None

    async def send(self, message: Any) -> None:
        self.messages.append(dict(message))

    def write(self, content: bytes) -> None:
        self.messages.append({"type": "http.response.body", "body": content, "more_body": True})
        if self.slow:
            assert self.listener is not None
            self.listener(True)
            self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.time is not None
        await self.time.advance(self.slow)
        if self.listener is not None:
            self.listener(False)

    def watch_flow(self, listener: Callable[[bool], None] | None) -> None:
        self.listener = listener

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_whole(self) -> bool:
        return not self.messages[-1].get("more_body", True)

    @property
    def headers(self) -> dict[bytes, bytes]:
        named = dict(self.messages[0]["headers"])
        assert named.pop(b"x-request-id") == b"id"
        return named


async def send(leg: FakeLeg, client: Client) -> None:
    await send_answer(
        as_any(leg),
        CallReply(as_any(client), "id", HeldBytes(1 << 30)),
        {"x-pd-prefill": P, "x-pd-decode": leg.node},
        IDLE_S,
        as_any(Alone()),
    )


def stream(*parts: bytes | float | Exception, time: VirtualTime | None = None) -> FakeLeg:
    return FakeLeg(answer(*parts, time=time))


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
    await send(FakeLeg(answer(), Answer(201, headers, b"{}")), client)
    assert client.messages[0]["status"] == 201
    assert client.headers == {
        b"content-type": b"application/json", b"x-extra": b"1", b"x-pd-prefill": b"p-1", b"x-pd-decode": b"d-1",
        b"content-length": b"2",
    }  # fmt: skip
    assert client.body == b"{}"
    assert client.is_whole


async def test_what_a_node_says_of_itself_stays() -> None:
    client = Client()
    await send(FakeLeg(answer(DONE, headers=((b"x-pd-prefill", b"itself"),), status=206)), client)
    assert client.messages[0]["status"] == 206
    assert {key: value for key, value in client.headers.items() if key != b"content-type"} == {
        b"x-pd-prefill": b"itself", b"x-pd-decode": b"d-1",
    }  # fmt: skip


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
        (CHUNK, b"data: [DONE]", b"\n", b"\n"),
        tuple(bytes([byte]) for byte in CHUNK * 9 + DONE),
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
    assert "without its last event" in error["message"]
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


@pytest.mark.parametrize("num_read", [1, 3])
async def test_a_client_that_does_not_read_is_gone_and_its_node_is_not_blamed(num_read: int) -> None:
    time = VirtualTime()
    client = Client(time)
    take = client.write

    def stop_reading(content: bytes) -> None:
        client.slow = STUCK if len(client.messages) >= num_read else 0.0
        take(content)

    client.write = stop_reading  # type: ignore[method-assign]
    leg = stream(*[CHUNK] * num_read, STUCK, time=time)
    with pytest.raises(ClientGone):
        await send(leg, client)
    assert leg.response.pauses == ["pause"], "and nothing more is read from the node"
    assert client.body == CHUNK * num_read


async def test_a_slow_client_is_no_stalled_node() -> None:
    """The node is silent for as long as the client reads nothing, and for nearly as long again."""
    time = VirtualTime()
    client = Client(time, slow=IDLE_S * 0.9)
    leg = stream(CHUNK, IDLE_S * 1.8, CHUNK, IDLE_S * 1.8, DONE, time=time)
    await send(leg, client)
    assert client.body == CHUNK * 2 + DONE
    assert leg.response.pauses == ["pause", "resume"] * 2 + ["pause"]


async def test_a_client_that_leaves_ends_it_there() -> None:
    client = Client()
    task = asyncio.create_task(send(stream(CHUNK, STUCK, DONE, time=VirtualTime()), client))
    while not client.body:  # noqa: ASYNC110 - what is waited for has no event of its own
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.body == CHUNK
    assert client.listener is None


async def test_a_sink_may_stand_between_and_its_failure_ends_the_stream() -> None:
    client = Client()
    reply = CallReply(as_any(client), "id", HeldBytes(1 << 30))
    splice = StreamSplice(reply, IDLE_S, lambda data: splice.pass_on(data.upper()))
    await splice.run(as_any(stream(b"a", b"b")))
    assert client.body == splice.tail == b"AB"

    def refuse(_: bytes) -> None:
        raise ValueError("not a frame")

    splice = StreamSplice(CallReply(as_any(client), "id", HeldBytes(1 << 30)), IDLE_S, refuse)
    with pytest.raises(ValueError, match="not a frame"):
        await splice.run(as_any(stream(b"a", b"b")))
