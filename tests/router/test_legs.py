"""The two legs over an upstream that the test plays: what each answer means, and what is given back when."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from multidict import CIMultiDict

from pd_http.node_answers import FailureKind
from pd_router.nodes.node import Role
from pd_router.nodes.node_connection import AnswerBroken
from pd_router.nodes.upstream import Answer, LegFailed, Refused
from pd_router.requests.legs import DecodeLeg, Handoff, PrefillLeg
from pd_router.requests.stream_record import StreamRecord
from tests.router.fake_legs import STUCK, FakeExchange, FakeUpstream, VirtualTime, answer, as_any, charge, node

if TYPE_CHECKING:
    from pd_router.nodes.node import Node

pytestmark = pytest.mark.anyio
TICKET_S, FIRST_S, BODY_S = 7.0, 8.0, 9.0
PARAMS = b'{"kv_transfer_params": {"ticket": "t1", "other": {"a": [1, 2]}}}'
TICKET = b"event: ticket\ndata: " + PARAMS + b"\n\n"
DONE = b"event: done\ndata: {}\n\n"
ERROR = b'event: error\ndata: {"error": "no memory"}\n\n'
OTHER = b"event: other\ndata: {}\n\n"
JSON = "application/json"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # a test can move its clock


class Prefill:
    """A P's leg with 100 bytes booked on its node."""

    def __init__(self, response: FakeExchange | Exception) -> None:
        self.node: Node = node("p-1", Role.PREFILL)
        self.upstream = FakeUpstream(response)
        self.leg = PrefillLeg(as_any(self.upstream), self.node, charge(self.node, prefill_bytes=100))

    async def open(self) -> Handoff:
        return await self.leg.open("/v1/completions", {"x": "y"}, b"body", TICKET_S)

    async def fails(self) -> LegFailed:
        with pytest.raises(LegFailed) as caught:
            await self.open()
        assert caught.value.node is self.node
        assert self.node.is_idle, "its charge is given back"
        return caught.value


class Decode:
    """A D's leg with 100 bytes and two sequences booked on its node."""

    def __init__(self, response: FakeExchange | Exception) -> None:
        self.node: Node = node("d-1")
        self.upstream = FakeUpstream(response)
        self.leg = DecodeLeg(as_any(self.upstream), self.node, charge(self.node, prefill_bytes=100, sequences=2))

    async def open(self) -> DecodeLeg:
        await self.leg.open("/v1/completions", {"x": "y"}, b"body", FIRST_S, BODY_S)
        return self.leg

    async def fails(self) -> LegFailed:
        with pytest.raises(LegFailed) as caught:
            await self.open()
        assert caught.value.node is self.node
        assert self.node.is_idle, "its charge is given back"
        return caught.value


async def drained(leg: PrefillLeg) -> LegFailed | None:
    """What failed, when the leg is closed."""
    failures: list[LegFailed] = []
    done = leg.drain(5.0, failures.append)
    await asyncio.wait([done])
    await asyncio.sleep(0)  # the leg's own callback is the first
    return failures[0] if failures else None


async def test_a_ticket_is_what_p_hands_out_and_the_rest_is_read_beside() -> None:
    response = answer(TICKET[:9], TICKET[9:], b": a comment\n\n", DONE)
    prefill = Prefill(response)
    handoff = await prefill.open()
    assert prefill.upstream.posted == [("p-1", "/v1/completions", b"body", TICKET_S)]
    assert (handoff.node, handoff.ticket) == (prefill.node, "t1")
    assert {name: bytes(value) for name, value in handoff.params.items()} == {
        "ticket": b'"t1"', "other": b'{"a": [1, 2]}',
    }  # fmt: skip
    assert prefill.node.prefill_bytes == 100
    assert not response.closed
    assert await drained(prefill.leg) is None
    assert prefill.node.is_idle
    assert prefill.node.speed.at(1.0) == pytest.approx(100.0), "bytes a second"
    assert response.closed


@pytest.mark.parametrize(
    "parts", [(TICKET + DONE,), (TICKET, DONE), (TICKET + DONE[:7], DONE[7:]), (TICKET, DONE, OTHER)]
)
async def test_the_end_of_a_prefill_is_seen_however_it_is_cut(parts: tuple[bytes, ...]) -> None:
    prefill = Prefill(answer(*parts))
    await prefill.open()
    assert await drained(prefill.leg) is None
    assert prefill.node.is_idle


@pytest.mark.parametrize(
    ("parts", "kind", "word"),
    [
        ((TICKET, ERROR, DONE), FailureKind.REFUSED, "no memory"),
        ((TICKET + ERROR + DONE,), FailureKind.REFUSED, "no memory"),
        ((TICKET,), FailureKind.BROKEN, "ended before the prefill did"),
        ((TICKET, b"event: don"), FailureKind.BROKEN, "ended before the prefill did"),
        ((TICKET, AnswerBroken("reset")), FailureKind.BROKEN, "AnswerBroken: reset"),
    ],
)
async def test_a_prefill_that_does_not_finish(parts: tuple[bytes, ...], kind: FailureKind, word: str) -> None:
    response = answer(*parts)
    prefill = Prefill(response)
    await prefill.open()
    failure = await drained(prefill.leg)
    assert failure is not None
    assert (failure.kind, failure.node) == (kind, prefill.node)
    assert word in str(failure)
    assert prefill.node.is_idle
    assert response.closed
    assert prefill.node.speed.at(1.0) is None, "it says nothing of how fast the node reads"


async def test_a_prefill_that_takes_too_long_is_closed() -> None:
    time = VirtualTime()
    response = answer(TICKET, STUCK, DONE, time=time)
    prefill = Prefill(response)
    await prefill.open()
    begun_s = time.now_s
    failure = await drained(prefill.leg)
    assert failure is not None
    assert failure.kind is FailureKind.TIMEOUT
    assert "prefill not done within 5 s" in str(failure)
    assert time.now_s - begun_s == pytest.approx(5.0, abs=STUCK / 500)
    assert response.closed
    assert prefill.node.is_idle


async def test_a_p_that_hands_out_nothing_in_time_is_given_up() -> None:
    time = VirtualTime()
    response = answer(b": wait\n\n", TICKET_S - 1.0, b": wait\n\n", 2.0, TICKET, time=time)
    prefill = Prefill(response)
    failure = await prefill.fails()
    assert failure.kind is FailureKind.TIMEOUT
    assert "no ticket within 7 s" in str(failure)
    assert response.closed


@pytest.mark.parametrize(
    ("parts", "kind", "word"),
    [
        ((ERROR, TICKET), FailureKind.REFUSED, "no memory"),
        ((DONE,), FailureKind.BROKEN, "ended without a ticket"),
        ((), FailureKind.BROKEN, "ended without a ticket"),
        ((AnswerBroken("reset"),), FailureKind.BROKEN, "AnswerBroken: reset"),
        ((b"event: ticket\ndata: nonsense\n\n",), FailureKind.BAD_ANSWER, "no ticket"),
        ((b"event: ticket\ndata: {}\n\n",), FailureKind.BAD_ANSWER, "has no kv_transfer_params"),
        ((b'event: ticket\ndata: {"kv_transfer_params": null}\n\n',), FailureKind.BAD_ANSWER, "no kv_transfer_params"),
        ((b'event: ticket\ndata: {"kv_transfer_params": {"ticket": 7}}\n\n',), FailureKind.BAD_ANSWER, "no ticket"),
        ((b'event: ticket\ndata: {"a":' + b"[" * 100_000 + b"\n\n",), FailureKind.BAD_ANSWER, "no ticket"),
    ],
)
async def test_a_p_without_a_ticket(parts: tuple[bytes, ...], kind: FailureKind, word: str) -> None:
    response = answer(*parts)
    failure = await Prefill(response).fails()
    assert failure.kind is kind
    assert word in str(failure)
    assert response.closed


async def test_an_engine_without_tickets_answers_whole_and_has_prefilled_by_then() -> None:
    response = answer(b'{"id": 1, "kv_transfer_params": ', b'{"remote": "here"}}', content_type=JSON)
    prefill = Prefill(response)
    handoff = await prefill.open()
    assert handoff.ticket is None
    assert {name: bytes(value) for name, value in handoff.params.items()} == {"remote": b'"here"'}
    assert await drained(prefill.leg) is None
    assert prefill.node.is_idle
    assert response.closed


@pytest.mark.parametrize("error", [LegFailed(node(), FailureKind.CONNECT, "no"), Refused(Answer(400, (), b""))])
async def test_what_the_upstream_says_goes_on_as_it_is(error: Exception) -> None:
    for side in (Prefill(error), Decode(error)):
        with pytest.raises(type(error)) as caught:
            await side.open()
        assert caught.value is error
        assert side.node.is_idle


async def test_closing_gives_the_charge_back_once() -> None:
    response = answer(TICKET, DONE)
    prefill = Prefill(response)
    await prefill.open()
    other = charge(prefill.node, prefill_bytes=30)
    for _ in range(2):
        prefill.leg.close()
    assert prefill.node.prefill_bytes == 30
    assert response.closed
    other.release()
    Prefill(response).leg.close()  # before it was opened


async def spliced(leg: DecodeLeg) -> list[bytes]:
    got: list[bytes] = []
    await leg.splice(got.append)
    return got


async def test_a_stream_is_open_with_its_first_bytes() -> None:
    response = answer(b"data: 1\n\n", b"data: 2\n\n", headers=((b"x-pd-prefill", b"p-9"), (b"x-n", b"1")), status=206)
    decode = Decode(response)
    leg = await decode.open()
    assert decode.upstream.posted == [("d-1", "/v1/completions", b"body", FIRST_S)]
    assert leg.whole is None
    assert (leg.head, leg.prefilled_by) == (response.answer, "p-9")
    assert (decode.node.prefill_bytes, decode.node.decode_sequences) == (0, 2), "the prompt was read; it goes on"
    assert decode.node.speed.at(1.0) == pytest.approx(100.0)
    assert await spliced(leg) == [b"data: 1\n\n", b"data: 2\n\n"]
    leg.pause()
    leg.resume()
    assert response.pauses == ["pause", "resume"]
    assert not response.closed
    for _ in range(2):
        leg.close()
    assert response.closed
    assert decode.node.is_idle


async def test_the_headers_of_a_framed_leg_are_those_of_the_client() -> None:
    """Some repeat: `x-forwarded-for`, `cookie`."""
    leg = Decode(answer(b"data: 1\n\n"))
    leg.node.stream_version = "version-1"
    framed = DecodeLeg(as_any(leg.upstream), leg.node, charge(leg.node), StreamRecord())
    given = CIMultiDict([("x-forwarded-for", "a"), ("x-forwarded-for", "b")])
    await framed.open("/v1/completions", given, b"body", FIRST_S, BODY_S)
    assert [*leg.upstream.headers[0].items()] == [*given.items(), ("x-pd-frames", "1")]
    assert len(given) == 2, "the next leg may not be framed"
    framed.close()


async def test_a_whole_answer_is_open_when_all_of_it_is_there() -> None:
    response = answer(b'{"a":', b" 1}", content_type=JSON, headers=((b"x-pd-prefill", b"p-9"),), status=201)
    decode = Decode(response)
    leg = await decode.open()
    assert leg.whole == Answer(201, response.answer.headers, b'{"a": 1}')
    assert leg.prefilled_by == "p-9"
    assert decode.node.speed.at(1.0) is None, "the prompt was read long ago"
    assert (decode.node.prefill_bytes, decode.node.decode_sequences) == (0, 2)
    leg.close()
    assert decode.node.is_idle


async def test_a_node_that_names_no_other_prefilled_nothing() -> None:
    assert (await Decode(answer(b"data: 1\n\n")).open()).prefilled_by == ""


@pytest.mark.parametrize(
    ("response", "word"),
    [
        (answer(), "ended before its first byte"),
        (answer(AnswerBroken("reset")), "AnswerBroken: reset"),
        (answer(b"{", AnswerBroken("reset"), content_type=JSON), "AnswerBroken: reset"),
    ],
)
async def test_a_d_that_breaks_off_before_it_has_shown_anything(response: FakeExchange, word: str) -> None:
    failure = await Decode(response).fails()
    assert failure.kind is FailureKind.BROKEN
    assert word in str(failure)
    assert response.closed


@pytest.mark.parametrize(("kind", "limit_s"), [("text/event-stream", FIRST_S), (JSON, BODY_S)])
async def test_a_d_has_a_limit_for_what_it_answers(kind: str, limit_s: float) -> None:
    time = VirtualTime()
    in_time = await Decode(answer(limit_s - 0.5, b"data: 1\n\n", content_type=kind, time=time)).open()
    assert in_time.whole or await spliced(in_time) == [b"data: 1\n\n"]
    response = answer(limit_s + 0.5, b"data: 1\n\n", content_type=kind, time=time)
    failure = await Decode(response).fails()
    assert failure.kind is FailureKind.TIMEOUT
    assert response.closed


async def test_a_stream_that_is_cut_off_fails_its_leg() -> None:
    decode = Decode(answer(b"data: 1\n\n", AnswerBroken("reset")))
    leg = await decode.open()
    with pytest.raises(AnswerBroken, match="reset"):
        await spliced(leg)
