"""Log-probabilities of prompts that P computes and D shows: the answer is that of one node, whatever P tells."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from aiohttp import web

from pd_cluster.protocol.messages import (
    Abort,
    FinishReason,
    NeedsPrefill,
    PromptLogprobs,
    RequestFailed,
    TicketOpened,
    Work,
)
from pd_cluster.protocol.prompt_outputs import PromptOutputs, PromptToken
from pd_cluster.server.prompt_scores import PromptScores
from pd_http import node_answers
from pd_http.sse import Event, SseParser
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import running
from tests.server.merged_nodes import (
    ASKED,
    CHAT,
    COMPLETIONS,
    PROMPT,
    SAID,
    STEP_TOKENS,
    alone,
    asked,
    computes,
    entries_of,
    pair,
    rests,
    tell,
    works,
)
from tests.server.prefill_patience import impatient
from tests.server.test_decode_leg import decode_node, fallbacks, make_offer
from tests.server.test_silent_peers import raw_node, url_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.server.live_server import Node

pytestmark = pytest.mark.anyio


MESSAGES = [{"role": "user", "content": "Hello there."}]


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 3}),
        (COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 0, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": PROMPT, "echo": True, "logprobs": 2, "return_tokens_as_token_ids": True}),
        (COMPLETIONS, ASKED),
        (COMPLETIONS, ASKED | {"n": 2}),
        (COMPLETIONS, ASKED | {"prompt": "Hello there, Où."}),
        (COMPLETIONS, ASKED | {"prompt": [7]}),
        (COMPLETIONS, ASKED | {"prompt": [PROMPT, PROMPT[3:], [7, 8]], "n": 2}),
        (COMPLETIONS, ASKED | {"n": 2, "use_beam_search": True, "logprobs": None, "echo": False, "stream": False}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 2, "max_tokens": 3}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1, "logprobs": True, "n": 2, "return_token_ids": True}),
    ],
)
@pytest.mark.usefixtures("small_events")
async def test_the_answer_is_that_of_one_node(path: str, body: dict[str, Any], stream: bool) -> None:
    body = {"stream": stream} | body
    expected = await alone(path, body)
    async with pair() as (p, d):
        found = await asked(d, path, body, p.url)
        num_tokens = sum(len(request.prompt_token_ids) for request in p.engine.requests)
        num_prompts = len(d.engine.requests)
        told = [request.outputs for request in p.engine.requests if len(request.prompt_token_ids) > 1]
        for node in (p, d):
            await rests(node)
        assert p.metric('pd_prompt_tokens_total{work="prefill"}') == num_tokens
        assert d.metric('pd_prompt_tokens_total{work="take_over"}') == num_tokens
        assert d.metric('pd_prompt_tokens_total{work="read"}') == 0
        assert fallbacks(d, "no_prompt_logprobs") == 0
    if num_prompts == 1:
        assert found == expected
    else:  # their chunks come in any order
        assert sorted(map(orjson.dumps, found)) == sorted(map(orjson.dumps, expected))
    assert works(p) == [Work.PREFILL] * num_prompts
    assert works(d) == [Work.TAKE_OVER] * num_prompts
    num_top = max(body.get("prompt_logprobs") or 0, body["logprobs"] if body.get("echo") else 0)
    assert told == [PromptOutputs(logprobs=num_top)] * len(told)
    for request in d.engine.requests:
        assert request.outputs is None
        assert request.ticket is not None


class CuttingNode:
    """Passes P's answer to a prefill leg on as far as the test says, then ends it in a way."""

    def __init__(self, p: Node, num_events: int, end: str, are_heard: asyncio.Event) -> None:
        """`are_heard`: these events, by D."""
        self._p, self._num_events, self._end = p, num_events, end
        self._are_heard = are_heard
        self.num_told = 0  # events that P had for it

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.json_response({"status": "ok"})
        headers = {"x-pd-ticket": "stream"}
        async with self._p.session.post(self._p.url + request.path, data=await request.read(), headers=headers) as one:
            events = [event + b"\n\n" for event in (await one.read()).split(b"\n\n")[:-1]]
        self.num_told = len(events)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(events[: self._num_events]))
        assert request.transport is not None
        if self._end == "breaks":
            await self._are_heard.wait()
            request.transport.close()
        elif self._end == "error":
            await response.write(b'event: error\ndata: {"error": {"code": "engine_unavailable"}, "status": 503}\n\n')
        elif self._end == "silent":
            await asyncio.Event().wait()
        return response


def hearing(num_events: int, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when D has read so many events."""
    are_heard, num_heard = asyncio.Event(), itertools.count(1)

    class Noting(SseParser):
        def feed(self, chunk: bytes) -> list[Event]:
            events = super().feed(chunk)
            if any(next(num_heard) == num_events for _ in events):
                are_heard.set()
            return events

    monkeypatch.setattr(node_answers, "SseParser", Noting)
    return are_heard


NUM_EVENTS = 6  # of PROMPT: the ticket, 3 and 2 entries of two steps and 1 of the last, and the end


@pytest.mark.long
@pytest.mark.parametrize("end", ["ends", "breaks", "error", "silent"])
@pytest.mark.parametrize("num_events", range(1, NUM_EVENTS + 2))
@pytest.mark.usefixtures("small_events")
async def test_a_leg_that_is_cut_behind_any_event(num_events: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await alone(COMPLETIONS, ASKED)
    are_heard = hearing(num_events, monkeypatch)
    if end == "silent":
        impatient(monkeypatch, lambda _: are_heard.is_set())
    async with pair() as (p, d):
        cutting = CuttingNode(p, num_events, end, are_heard)
        runner = await raw_node(cutting.answer)
        try:
            assert await asked(d, COMPLETIONS, ASKED, url_of(runner)) == expected
        finally:
            await runner.cleanup()
        is_read = num_events < NUM_EVENTS
        assert cutting.num_told == NUM_EVENTS + 1
        assert works(d) == [Work.TAKE_OVER, *([Work.READ] if is_read else [])]
        assert fallbacks(d, "no_prompt_logprobs") == is_read
        assert d.state.read_window.num_prompts == 0
        if is_read:
            assert d.engine.requests[1].outputs == PromptOutputs(logprobs=2)
            assert d.metric('pd_prompt_tokens_total{work="read"}') == len(PROMPT)


async def test_a_node_that_does_not_know_the_question() -> None:
    """P of an older version ignores the field."""

    async def older(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with pair(older) as (p, d):
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        assert works(d) == [Work.TAKE_OVER, Work.READ]


# where P does not answer, or its KV does not come


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_prefill_node_one_step_computes_both(stream: bool) -> None:
    body = ASKED | {"stream": stream}
    async with pair() as (_, d):
        assert await asked(d, COMPLETIONS, body, "http://127.0.0.1:9") == await alone(COMPLETIONS, body)
        assert works(d) == [Work.GENERATE]
        assert d.engine.requests[0].outputs == PromptOutputs(logprobs=2)
        assert fallbacks(d, "peer_unreachable") == 1


async def test_a_short_prompt_is_computed_here_and_no_node_is_asked() -> None:
    async with pair() as (p, _), decode_node(computes, min_remote_tokens=len(PROMPT) + 1) as d:
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        assert (works(d), works(p)) == ([Work.GENERATE], [])


@pytest.mark.parametrize("policy", ["remote", "fail"])
async def test_a_policy_that_forbids_local_prefills_is_kept(policy: str) -> None:
    async with pair(on_load_failure=policy) as (_, d):
        params = {"do_remote_prefill": True, "offer": make_offer("http://127.0.0.1:9")}
        body = ASKED | {"kv_transfer_params": params}
        async with d.session.post(d.url + COMPLETIONS, json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "prefill_unavailable")
        assert d.engine.requests == []
        await rests(d)
        assert d.metric('pd_prompt_tokens_total{work="take_over"}') == 0, "the engine never had it"
        assert d.metric('pd_requests_total{endpoint="completions",outcome="server_error"}') == 1


@pytest.mark.long
async def test_a_load_that_fails_moves_on_with_the_scores() -> None:
    """The first P opens a lease and never computes; the next one tells all."""

    async def opens_only(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        tell_half = entries_of(line.request.prompt_token_ids, 2)[:STEP_TOKENS]
        line.push(PromptLogprobs(line.request.request_id, 1, tell_half))

    loses = partial(computes, failures=["lease_ended: p says so"])
    async with pair(opens_only, loses) as (first, d), running(FakeEngine(computes), node_id="q") as second:
        assert await asked(d, COMPLETIONS, ASKED, first.url, second.url) == await alone(COMPLETIONS, ASKED)
        assert (works(d), works(second)) == ([Work.TAKE_OVER], [Work.PREFILL])
        async with asyncio.timeout(WAIT_S):
            assert (await first.engine.aborts.get()).request_id == first.engine.requests[0].request_id


@pytest.mark.long
async def test_scores_that_are_complete_are_not_asked_for_again() -> None:
    """The load fails behind the last part: the next P computes the KV alone, and uses what it has cached."""
    told = asyncio.Event()

    async def opens_and_tells(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        tell(line)

    async def loses(line: Line) -> None:
        line.push(NeedsPrefill(line.request.request_id, 0, "lease_ended: p says so")) if told.is_set() else None
        await told.wait()
        await computes(line, ["lease_ended: p says so"])

    class Noting(PromptScores):
        def take(self, start: int, entries: Sequence[PromptToken]) -> None:
            super().take(start, entries)
            if self.is_complete:
                told.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.server.generation_stream.PromptScores", Noting)
        async with pair(opens_and_tells, loses) as (first, d), running(FakeEngine(computes), node_id="q") as second:
            found = await asked(d, COMPLETIONS, ASKED, first.url, second.url)
            assert [request.outputs for request in second.engine.requests] == [None]
            assert works(d) == [Work.TAKE_OVER]
    assert found == await alone(COMPLETIONS, ASKED)


# clients that leave


async def left(d: Node, url: str, is_under_way: Callable[[], Any]) -> None:
    """A client that leaves when this has come."""
    body = ASKED | {"kv_transfer_params": {"do_remote_prefill": True, "offer": make_offer(url)}}
    post = asyncio.create_task(d.session.post(d.url + COMPLETIONS, json=body).__aenter__())
    async with asyncio.timeout(WAIT_S):
        await is_under_way()
    post.cancel()
    await asyncio.gather(post, return_exceptions=True)


async def test_a_client_that_leaves_while_p_computes_makes_p_abort() -> None:
    taken = asyncio.Event()

    async def begins(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        line.push(PromptLogprobs(line.request.request_id, 1, entries_of(PROMPT, 2)[:3]))

    async def says_first(line: Line) -> None:
        line.tokens(SAID[:1])
        await line.taken()
        taken.set()

    async with pair(begins, says_first) as (p, d):
        await left(d, p.url, taken.wait)
        async with asyncio.timeout(WAIT_S):
            aborts: list[Abort] = [await node.engine.aborts.get() for node in (p, d)]
        assert [abort.request_id for abort in aborts] == [one.engine.requests[0].request_id for one in (p, d)]
        await rests(d)


async def test_a_client_that_leaves_before_the_ticket_leaves_nothing() -> None:
    asked_p = asyncio.Event()

    async def queues(line: Line) -> None:
        asked_p.set()

    async with pair(queues) as (p, d):
        await left(d, p.url, asked_p.wait)
        async with asyncio.timeout(WAIT_S):
            assert (await p.engine.aborts.get()).request_id == p.engine.requests[0].request_id
        await rests(d)
        assert d.engine.requests == []


@pytest.mark.long
async def test_a_client_that_leaves_while_d_reads_ends_the_read() -> None:
    reading = asyncio.Event()

    async def silent_p(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async def reads_for_ever(line: Line) -> None:
        if line.request.work is Work.READ:
            reading.set()
        else:
            line.tokens(SAID[:1])

    async with pair(silent_p, reads_for_ever) as (p, d):
        await left(d, p.url, reading.wait)
        async with asyncio.timeout(WAIT_S):
            ended = {(await d.engine.aborts.get()).request_id for _ in range(2)}
        assert ended == {request.request_id for request in d.engine.requests}
        await rests(d)


async def test_all_prompts_are_admitted_before_the_first_byte() -> None:
    """A prompt that no node takes is a status, also if the first one has tokens already."""
    has_tokens = asyncio.Event()

    async def refuses_the_last(line: Line) -> None:
        if line.request.prompt_token_ids != [7, 8]:
            await computes(line)
            return
        await has_tokens.wait()
        line.push(RequestFailed(line.request.request_id, "Overloaded", "it is full"))

    async def notes(line: Line) -> None:
        await computes(line)
        has_tokens.set()

    body = ASKED | {"prompt": [PROMPT, [7, 8]], "stream": True}
    async with pair(refuses_the_last, notes, on_load_failure="remote") as (p, d):
        body["kv_transfer_params"] = {"do_remote_prefill": True, "offer": make_offer(p.url)}
        async with asyncio.timeout(WAIT_S), d.session.post(d.url + COMPLETIONS, json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (502, "prefill_unavailable")
        await rests(d)
        await rests(p)


async def test_the_turn_of_a_prompt_that_is_read_again_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.server.prompt_reads.SCORES_TURN_S", 0.05)

    async def tells_nothing(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with pair(tells_nothing) as (p, d):
        window = d.state.read_window
        await window.take(1 << 30)  # another request's prompt
        body = ASKED | {"kv_transfer_params": {"do_remote_prefill": True, "offer": make_offer(p.url)}}
        async with asyncio.timeout(WAIT_S), d.session.post(d.url + COMPLETIONS, json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["code"]) == (503, "overloaded")
        assert "had no turn within 0.05 s" in answer["error"]["message"]
        window.give(1 << 30)
        await rests(d)
