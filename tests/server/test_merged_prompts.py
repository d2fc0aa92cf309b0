"""Log-probabilities of prompts that P computes and D shows: the answer is that of one node, whatever P tells."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from base64 import b64decode, b64encode
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import pytest
from aiohttp import web

from pd_cluster.protocol.messages import (
    Abort,
    FinishReason,
    NeedsPrefill,
    PromptLogprobs,
    PromptRead,
    TicketOpened,
    UseTicket,
    Work,
)
from pd_cluster.protocol.prompt_outputs import PromptOutputs, PromptPart, PromptToken
from pd_cluster.server import prefill_client, prompt_events
from pd_cluster.server.prompt_events import PromptListener
from pd_cluster.server.prompt_scores import PromptAsk, PromptScores
from pd_connectors.protocol.messages import TopLogprob
from pd_connectors.protocol.ticket import sign
from pd_http import node_answers
from pd_http.sse import Event, SseParser
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import KEY, running
from tests.server.sse import next_event, parse_events, post_events
from tests.server.test_decode_leg import decode_node, fallbacks, make_offer
from tests.server.test_prefill_endpoint import FOREIGN, STREAM
from tests.server.test_silent_peers import raw_node, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tests.server.fake_engine import Script
    from tests.server.live_server import Node

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [300 + i for i in range(12)]
STEP_TOKENS = 5  # of a prompt in a step: three steps
SAID = [5, 6, 7]
QUICK_S = 0.3
ASKED: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 3}


def entries_of(prompt: Sequence[int], num_top: int) -> tuple[PromptToken, ...]:
    """The entry of each position but 0. One alternative of a position has no chance at all."""
    return tuple(
        PromptToken(
            token_id, -position / 7, position, tuple(TopLogprob(j + 3, -j / 3 if j else -inf) for j in range(num_top))
        )
        for position, token_id in enumerate(prompt[1:], 1)
    )


def tell(line: Line) -> None:
    """What the engine tells about the prompt, step by step, if it is asked."""
    request, outputs = line.request, line.request.outputs
    if outputs is None or outputs.logprobs is None:
        return
    entries = entries_of(request.prompt_token_ids, outputs.logprobs)
    for first in range(0, len(entries), STEP_TOKENS):
        line.push(PromptLogprobs(request.request_id, 1 + first, entries[first : first + STEP_TOKENS]))


async def computes(line: Line, failures: Sequence[str] = ()) -> None:
    """An engine of any role: loads fail so often, and then the n sequences say SAID."""
    request = line.request
    if request.work is Work.PREFILL:
        line.push(TicketOpened(request.request_id, line.ticket()))
    for reason in failures if request.work is Work.TAKE_OVER else ():
        line.push(NeedsPrefill(request.request_id, 0, reason))
        if not isinstance(await line.heard(), UseTicket):
            break
    tell(line)
    if request.work is Work.READ:
        line.push(PromptRead(request.request_id))
        return
    is_prefill, sampling = request.work is Work.PREFILL, request.sampling
    ids, n = (SAID[:1], sampling.num_first_tokens) if is_prefill else (SAID, sampling.n)
    for token_id in ids:
        for index in range(n):
            ends = token_id == ids[-1]
            last = ends and index == n - 1
            line.tokens([token_id], index=index, finish=FinishReason.LENGTH if ends else None, finished=last)


@contextlib.asynccontextmanager
async def pair(
    p_script: Script = computes, d_script: Script = computes, **settings: Any
) -> AsyncIterator[tuple[Node, Node]]:
    """P and D."""
    engine = FakeEngine(p_script, engine_id="engine-of-p")
    async with running(engine, node_id="p") as p, decode_node(d_script, min_remote_tokens=1, **settings) as d:
        yield p, d


async def asked(node: Node, path: str, body: dict[str, Any], *urls: str) -> Any:
    """The answer without what is of one answer only; of a stream its chunks. `urls`: of the offer."""
    body = body | {"request_id": "same"}
    if urls:
        body["kv_transfer_params"] = {"do_remote_prefill": True, "offer": make_offer(*urls)}
    async with node.session.post(f"{node.url}{path}", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    chunks = (
        [data for _, data in parse_events(text) if data != "[DONE]"] if body.get("stream") else [orjson.loads(text)]
    )
    return [chunk | {"created": 0} for chunk in chunks]


async def alone(path: str, body: dict[str, Any]) -> Any:
    """The answer of one node that computes everything."""
    async with running(FakeEngine(computes)) as node:
        return await asked(node, path, body)


def works(node: Node) -> list[Work]:
    return [request.work for request in node.engine.requests]


@pytest.fixture
def small_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_events, "EVENT_ENTRIES", 3)


MESSAGES = [{"role": "user", "content": "Hello there."}]


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


@pytest.mark.parametrize("end", ["ends", "breaks", "error", "silent"])
@pytest.mark.parametrize("num_events", range(1, NUM_EVENTS + 2))
@pytest.mark.usefixtures("small_events")
async def test_a_leg_that_is_cut_behind_any_event(num_events: int, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = await alone(COMPLETIONS, ASKED)
    if end == "silent":
        monkeypatch.setattr(prefill_client, "PEER_SILENCE_S", QUICK_S)
    async with pair() as (p, d):
        cutting = CuttingNode(p, num_events, end, hearing(num_events, monkeypatch))
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


# what P tells is checked

RIGHT = entries_of(PROMPT, 2)
WRONG: dict[str, list[tuple[int, tuple[PromptToken, ...]]]] = {
    "a position is missing": [(1, RIGHT[:4]), (6, RIGHT[5:])],
    "a position comes twice": [(1, RIGHT[:4]), (4, RIGHT[3:])],
    "the order is another": [(5, RIGHT[4:]), (1, RIGHT[:4])],
    "another prompt": [(1, entries_of([*PROMPT[:-1], 9], 2))],
    "an entry behind the last": [(1, (*RIGHT, RIGHT[-1]))],
    "it begins with the first token": [(0, (PromptToken(PROMPT[0], -1.0, 1, RIGHT[0].top), *RIGHT))],
    "fewer alternatives": [(1, RIGHT[:10]), (11, (msgspec.structs.replace(RIGHT[10], top=RIGHT[10].top[:1]),))],
    "no token of the vocabulary": [
        (1, (msgspec.structs.replace(RIGHT[0], top=(TopLogprob(-1, 0.0),) * 2), *RIGHT[1:]))
    ],
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_wrong_entries_are_not_shown(wrong: str) -> None:
    async def lies(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        for start, entries in WRONG[wrong]:
            line.push(PromptLogprobs(line.request.request_id, start, entries))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with pair(lies) as (p, d):
        assert await asked(d, COMPLETIONS, ASKED, p.url) == await alone(COMPLETIONS, ASKED)
        assert works(d) == [Work.TAKE_OVER, Work.READ]


class Letters:
    def token_bytes(self, token_id: int) -> bytes:
        return b"%c" % (97 + token_id % 26)

    def is_special(self, token_id: int) -> bool:
        return False


def part_data(raw: bytes) -> bytes:
    return orjson.dumps({"part": b64encode(raw).decode()})


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"{}", b'{"part": 3}', b'{"part": "%"}', part_data(b""), part_data(b"\xc1"),
        part_data(msgspec.msgpack.encode({"start": "1"})), part_data(msgspec.msgpack.encode({"entries": [[1]]})),
    ],
)  # fmt: skip
def test_events_that_cannot_be_read_end_the_listening(data: bytes) -> None:
    scores = PromptScores(PromptAsk(2, None), Letters(), PROMPT)
    listener = PromptListener(scores, 2, 3072)
    events = list(prompt_events.prompt_events(PromptLogprobs("r", 1, RIGHT)))
    good = [event.partition(b"data: ")[2] for event in events]
    listener.hear(data)
    assert listener.is_done
    for one in good:
        listener.hear(one)
    assert not scores.is_complete
    again = PromptListener(scores, 2, 3072)
    for one in good:
        again.hear(one)
    assert (scores.is_complete, again.is_done) == (True, True)


def test_a_part_keeps_every_value(small_events: None) -> None:
    events = list(prompt_events.prompt_events(PromptLogprobs("r", 1, RIGHT)))
    read = [orjson.loads(event.partition(b"data: ")[2])["part"] for event in events]
    parts = [msgspec.msgpack.decode(b64decode(one), type=PromptPart) for one in read]
    assert [part.start for part in parts] == [1, 4, 7, 10]
    assert tuple(entry for part in parts for entry in part.entries) == RIGHT


# where P does not answer, or its KV does not come


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


@pytest.mark.parametrize(("num_nodes", "num_reads"), [(1, 1), (2, 0)])
async def test_a_load_that_fails_moves_on_with_the_scores(num_nodes: int, num_reads: int) -> None:
    """The first P opens a lease and never computes; the next one tells all. Without one D prefills, and reads."""

    async def opens_only(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        tell_half = entries_of(line.request.prompt_token_ids, 2)[:STEP_TOKENS]
        line.push(PromptLogprobs(line.request.request_id, 1, tell_half))

    loses = partial(computes, failures=["lease_ended: p says so"])
    async with pair(opens_only, loses) as (first, d), running(FakeEngine(computes), node_id="q") as second:
        urls = [first.url, second.url][:num_nodes]
        assert await asked(d, COMPLETIONS, ASKED, *urls) == await alone(COMPLETIONS, ASKED)
        assert works(d) == [Work.TAKE_OVER] + [Work.READ] * num_reads
        assert works(second) == [Work.PREFILL] * (num_nodes - 1)
        async with asyncio.timeout(WAIT_S):
            assert (await first.engine.aborts.get()).request_id == first.engine.requests[0].request_id


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


async def rests(d: Node) -> None:
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*d.http_tasks())
    assert (d.state.num_in_flight, d.state.read_window.num_prompts, d.state.read_window.num_tokens) == (0, 0, 0)


async def test_a_client_that_leaves_while_p_computes_makes_p_abort() -> None:
    taken = asyncio.Event()

    async def begins(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        line.push(PromptLogprobs(line.request.request_id, 1, RIGHT[:3]))

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


# P's side


async def test_p_tells_each_step_before_the_next_has_ended() -> None:
    async def steps(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))
        await line.taken()
        line.push(PromptLogprobs(line.request.request_id, 1, RIGHT[:5]))
        await line.engine.released.wait()
        line.push(PromptLogprobs(line.request.request_id, 6, RIGHT[5:]))
        line.tokens(SAID[:1], finish=FinishReason.LENGTH)

    async with running(FakeEngine(steps)) as p:
        body = {"prompt": PROMPT, "kv_transfer_params": FOREIGN | {"prompt_logprobs": 2}}
        buffer = bytearray()
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            async with asyncio.timeout(WAIT_S):
                names = [(await next_event(response, buffer))[0] for _ in range(2)]
                p.engine.released.set()
                names += [(await next_event(response, buffer))[0] for _ in range(2)]
        assert names == ["ticket", "prompt", "prompt", "done"]


@pytest.mark.parametrize("num", [-1, 21])
async def test_p_refuses_what_d_would_refuse(num: int) -> None:
    async with running(FakeEngine(computes)) as p:
        body = {"prompt": PROMPT, "kv_transfer_params": FOREIGN | {"prompt_logprobs": num}}
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "prompt_logprobs")
        assert p.engine.requests == []


async def test_p_refuses_more_log_probabilities_than_an_answer_may_have() -> None:
    async with running(FakeEngine(computes)) as p:
        params = FOREIGN | {"prompt_logprobs": 20, "sampling": {"max_tokens": 3, "n": 128}}
        body = {"prompt": [7] * 1000, "kv_transfer_params": params}
        async with p.session.post(p.url + COMPLETIONS, json=body, headers=STREAM) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "prompt_logprobs"), error
        assert p.engine.requests == []


async def test_legs_of_other_routers_compute_no_log_probabilities() -> None:
    """They send the client's fields to both nodes. D shows the prompt's, and nothing else can be done with P's."""
    async with running(FakeEngine(computes)) as p:
        body: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}
        for headers, more in (({}, {}), (STREAM, {}), ({}, {"prompt_logprobs": 2})):
            body["kv_transfer_params"] = FOREIGN | more
            async with p.session.post(p.url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == 200
        assert [request.outputs for request in p.engine.requests] == [None] * 3
        body["kv_transfer_params"] = FOREIGN
        events = await post_events(p.session, p.url + COMPLETIONS, body, STREAM)
        assert [name for name, _ in events] == ["ticket", "done"]


async def test_a_ticket_beside_an_offer_is_left_for_one_with_scores() -> None:
    async with pair() as (p, d):
        ticket = sign(KEY, p.engine.make_ticket(PROMPT))
        params = {"do_remote_prefill": True, "ticket": ticket, "offer": make_offer(p.url)}
        async with d.session.post(d.url + COMPLETIONS, json=ASKED | {"kv_transfer_params": params}) as response:
            assert response.status == 200
        assert works(p) == [Work.PREFILL]
        assert d.engine.requests[0].ticket is not None
