"""What a node holds of bodies and answers: taken before the work, given back however it ends, and the same answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pd_cluster.protocol.messages import FinishReason, RequestFailed
from pd_cluster.server.requests import answer_extras, logprobs, prompt_scores
from pd_cluster.server.requests.prompt_scores import PromptAsk, PromptScores
from pd_cluster.server.shapes import completions
from pd_http import reply
from pd_http.held_bytes import HeldBytes
from pd_http.json_pieces import JsonList
from tests.http.answer import CHAT, COMPLETIONS, post
from tests.server.fake_engine import WAIT_S, FakeEngine, Line
from tests.server.live_server import demo_tokenizer, running
from tests.server.scored_nodes import ASKED, PROMPT, asked, computes, entries_of, rests, tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.live_server import Node

pytestmark = pytest.mark.anyio


class Letters:
    def token_bytes(self, token_id: int) -> bytes:
        return b"%c" % (97 + token_id % 26)

    def is_special(self, token_id: int) -> bool:
        return False


LONG = [300 + i % 900 for i in range(1000)]
READ: dict[str, Any] = {"prompt": LONG, "prompt_logprobs": 20, "echo": True, "logprobs": 20, "max_tokens": 0}
READ_BYTES = PromptAsk(20, 20).num_bytes([len(LONG)])
HI = [{"role": "user", "content": "hi"}]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what it looks at belongs to the product)
            await asyncio.sleep(0.002)


async def when_told(line: Line) -> None:
    await line.engine.released.wait()
    await computes(line)


def held_of(node: Node) -> tuple[int, int, int]:
    held = node.state.held
    return held.num_planned, held.num_come, held.num_waiting


# scores of prompts


@pytest.mark.long
async def test_what_can_never_have_room_is_refused_before_any_work() -> None:
    async with running(FakeEngine(computes)) as node:
        node.state.held = HeldBytes(2 * READ_BYTES)
        status, answer = (await post(node, COMPLETIONS, READ | {"prompt": [LONG, [5]]})).told
        assert (status, answer["error"]["param"], node.engine.requests) == (400, "prompt_logprobs", [])
        assert f"{READ_BYTES} are allowed (half of --max-held-mb)" in answer["error"]["message"]
        status, answer = (await post(node, COMPLETIONS, READ)).told
        assert (status, len(answer["choices"][0]["prompt_logprobs"])) == (200, len(LONG))
        status, answer = (await post(node, COMPLETIONS, READ | {"stream": True})).told
        assert (status, answer["error"]["code"]) == (400, "too_much_memory"), "an event is there three times"
        await rests(node)
        assert held_of(node) == (0, 0, 0)


@pytest.mark.long
async def test_answers_wait_for_room_until_their_client_leaves() -> None:
    async with running(FakeEngine(when_told)) as node:
        node.state.held = held = HeldBytes(4 * READ_BYTES - 2)
        node.state.metrics.http.export_held(held)
        first = asyncio.create_task(post(node, COMPLETIONS, READ))
        await until(lambda: len(node.engine.requests) == 1)
        second, third = (asyncio.create_task(post(node, COMPLETIONS, READ)) for _ in range(2))
        await until(lambda: held.num_waiting == 2)
        assert (held.num_planned, len(node.engine.requests)) == (READ_BYTES, 1)
        assert node.metric("pd_http_held_bytes") == READ_BYTES
        assert node.metric("pd_http_held_bytes_limit") == 4 * READ_BYTES - 2
        second.cancel()
        await until(lambda: held.num_waiting == 1)
        node.engine.released.set()
        assert [(await one).status for one in (first, third)] == [200, 200]
        await rests(node)
        assert held_of(node) == (0, 0, 0)


@pytest.mark.long
async def test_other_requests_come_to_their_place_between_scores_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, kept = 0, list[int]()

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    keep = PromptScores._keep

    def noted(*given: Any) -> None:
        kept.append(turns)
        keep(*given)

    monkeypatch.setattr(PromptScores, "_keep", noted)
    async with running(FakeEngine(computes)) as node:
        task = asyncio.create_task(others())
        assert (await post(node, COMPLETIONS, READ)).status == 200
        task.cancel()
    assert len(kept) > 3
    assert len(set(kept)) == len(kept)


async def test_other_requests_come_to_their_place_between_echoed_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(answer_extras, "TURN_TOKENS", 999)
    task = asyncio.create_task(others())
    tokenizer = demo_tokenizer()
    texts = await answer_extras.echo_texts(tokenizer, [("a", LONG), (None, LONG), ("b", LONG), (None, LONG[:1])])
    task.cancel()
    tokenizer.close()
    assert texts == ["a", tokenizer.text_of(LONG), "b", tokenizer.text_of(LONG[:1])]
    assert turns == 1


@pytest.mark.long
@pytest.mark.parametrize("how", ["fails", "leaves"])
async def test_room_comes_back_from_an_answer_that_fails(how: str) -> None:
    async def script(line: Line) -> None:
        tell(line)
        await line.engine.released.wait()
        line.push(RequestFailed(line.request.request_id, "PdError", "broken"))

    async with running(FakeEngine(script)) as node:
        task = asyncio.create_task(post(node, COMPLETIONS, READ))
        await until(lambda: node.state.held.num_planned == READ_BYTES)
        if how == "leaves":
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        node.engine.released.set()
        if how == "fails":
            assert (await task).status == 500
        await until(lambda: node.state.num_in_flight == 0)
        assert held_of(node) == (0, 0, 0)


@pytest.mark.long
async def test_scores_are_kept_as_json_in_both_forms() -> None:
    """As objects they take 4 to 8 times as much."""
    scores = PromptScores(PromptAsk(20, 20), Letters(), LONG)
    entries = entries_of(LONG, 20)
    for first in range(0, len(entries), 100):
        await scores.take(1 + first, entries[first : first + 100])
    with pytest.raises(ValueError, match="not those of the prompt after"):
        await scores.take(1, entries[:1])  # a second time
    told, _ = scores.echo("")
    kept = b"".join(scores.fields["prompt_logprobs"].pieces())
    assert all(isinstance(part, bytes) for parts in told.values() for part in parts)
    num_bytes = len(kept) + sum(map(len, (part for parts in told.values() for part in parts)))
    assert READ_BYTES / 2 < num_bytes < READ_BYTES, "the estimate"


# answers that grow


async def step_by_step(line: Line) -> None:
    """200 tokens of each sequence. Each is taken before the next one comes."""
    n = line.request.sampling.n
    for step in range(200):
        for index in range(n):
            last = FinishReason.LENGTH if step == 199 else None
            line.tokens([5], index=index, finish=last, finished=last is not None and index == n - 1)
            await line.taken()


@pytest.mark.long
async def test_a_whole_answer_that_grows_beyond_its_room_ends() -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 20, "max_tokens": 200, "n": 2}
    async with running(FakeEngine(step_by_step)) as node:
        status, answer = (await post(node, CHAT, body)).told
        assert (status, len(answer["choices"])) == (200, 2)
        node.state.held = HeldBytes(1_600_000)
        status, answer = (await post(node, CHAT, body)).told
        assert (status, answer["error"]["code"]) == (400, "too_much_memory")
        node.state.held = HeldBytes(3_000_000)
        node.state.held.num_come = 1_000_000  # of others
        got = await post(node, CHAT, body)
        assert (got.status, got.error["code"], int(got.headers["retry-after"]) > 0) == (503, "no_memory", True)
        assert (await post(node, CHAT, {"messages": HI, "max_tokens": 200})).status == 200, "a small one"
        await rests(node)
        assert node.state.held.num_come == 1_000_000


# bodies


async def test_a_body_counts_until_the_head_of_its_answer() -> None:
    async def script(line: Line) -> None:
        line.tokens([5])
        await line.engine.released.wait()
        line.tokens([5], finish=FinishReason.LENGTH)

    async with running(FakeEngine(script)) as node:
        node.state.held = held = HeldBytes(1_000_000)
        body = {"prompt": "hi", "max_tokens": 2, "user": "x" * 300_000}
        whole = asyncio.create_task(post(node, COMPLETIONS, body))
        await until(lambda: len(node.engine.requests) == 1)
        assert 300_000 < held.num_come < 301_000
        got = await post(node, COMPLETIONS, body)
        assert (got.status, got.error["code"], int(got.headers["retry-after"]) > 0) == (503, "no_memory", True)
        status, answer = (await post(node, COMPLETIONS, body | {"user": "x" * 600_000})).told
        assert (status, answer["error"]["code"]) == (400, "too_much_memory")
        whole.cancel()
        await until(lambda: held.num_come == 0)
        async with node.session.post(node.url + COMPLETIONS, json=body | {"stream": True}) as response:
            assert response.status == 200
            assert held.num_come == 0, "the answer has begun"
            node.engine.released.set()
            await response.read()
        await rests(node)


# the same answers


SAME: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, ASKED | {"n": 2}),
    (COMPLETIONS, ASKED | {"prompt": [PROMPT, PROMPT[:5]]}),
    (COMPLETIONS, ASKED | {"max_tokens": 0, "return_token_ids": True}),
    (COMPLETIONS, {"prompt": PROMPT, "logprobs": 2, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": PROMPT, "echo": True, "max_tokens": 3}),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 2, "n": 3, "max_tokens": 3}),
    (CHAT, {"messages": HI, "logprobs": True, "prompt_logprobs": 1, "max_tokens": 3}),
]


@pytest.mark.long
async def test_answers_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(path, body | {"stream": stream}) for path, body in SAME for stream in (False, True)]
    async with running(FakeEngine(computes)) as node:
        expected = [await asked(node, *case) for case in cases]
        monkeypatch.setattr(reply, "PIECE_BYTES", 100)
        for module in (completions, logprobs, prompt_scores):
            monkeypatch.setattr(module, "SHAPED_TOKENS", 2)
        for case, before in zip(cases, expected, strict=True):
            assert await asked(node, *case) == before


async def test_a_node_that_stops_in_the_middle_of_an_answer_gives_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "PIECE_BYTES", 1000)

    def breaks(*_: object) -> dict[str, Any]:
        raise RuntimeError("a bug after the head")

    async with running(FakeEngine(computes)) as node:
        shape = completions.CompletionShape.body

        def body(self: Any, choices: Any, usage: Any) -> dict[str, Any]:
            whole = shape(self, choices, usage)
            whole["choices"] = JsonList(
                one if number < 3 else breaks() for number, one in enumerate(whole["choices"]._items)
            )
            return whole

        monkeypatch.setattr(completions.CompletionShape, "body", body)
        async with node.session.post(node.url + COMPLETIONS, json=ASKED | {"prompt": [PROMPT] * 5}) as response:
            assert response.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_stream_that_is_not_read_ends_when_it_has_taken_its_room(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not wait for the client: without a bound the steps wait in the node, 170 bytes a score."""
    num_pushed, write, is_read = 0, reply.Reply.write, asyncio.Event()

    async def floods(line: Line) -> None:
        nonlocal num_pushed
        while not line.engine.aborts.qsize() and num_pushed < 4000:
            line.tokens([5])
            num_pushed += 1
            await asyncio.sleep(0)

    async def write_when_read(self: reply.Reply, content: bytes) -> None:
        await is_read.wait()
        await write(self, content)

    monkeypatch.setattr(reply.Reply, "write", write_when_read)
    async with running(FakeEngine(floods)) as node:
        node.state.held = HeldBytes(8_000_000)
        body = {"prompt": ["hi"] * num_prompts, "logprobs": 20, "stream": True, "max_tokens": 4000}
        async with node.session.post(node.url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            await until(lambda: node.engine.aborts.qsize() > 0)
            assert num_pushed < 1000, "550 steps of 22 scores are 4 MB"
            is_read.set()
            assert b"error" in await response.read()
        await rests(node)
        assert held_of(node) == (0, 0, 0)
