"""Answers in frames: what a router needs to continue a stream, and the bytes of the client."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import FinishReason, RequestFailed
from pd_connectors.protocol.stream_codec import StreamParser
from pd_http.frames import FRAMES_TYPE, AnyFrame, Frame, StreamEnd, StreamFailed, StreamHead
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import Node, demo_tokenizer, running
from tests.server.sse import parse_events

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

HI = {"messages": [{"role": "user", "content": "hi"}]}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def ids_of(text: str) -> list[int]:
    tokenizer = demo_tokenizer()
    try:
        return await tokenizer.encode(text, max_tokens=4096)
    finally:
        tokenizer.close()


async def ask(node: Node, path: str, body: dict[str, Any], *, frames: bool) -> tuple[str, bytes]:
    """(content type, body) of an answer with status 200. The request id is given, so that answers can be compared."""
    headers = {"x-request-id": "one"} | ({"x-pd-frames": "1"} if frames else {})
    async with node.session.post(node.url + path, json=body | {"stream": True}, headers=headers) as response:
        content = await response.read()
        assert response.status == 200, content
        return response.content_type, content


async def frames_of(node: Node, path: str, body: dict[str, Any]) -> list[AnyFrame]:
    kind, content = await ask(node, path, body, frames=True)
    assert kind == FRAMES_TYPE
    parser = StreamParser[AnyFrame](AnyFrame)
    messages = parser.feed(content)
    assert not parser.num_pending_bytes
    return messages


def data_of(messages: Sequence[AnyFrame]) -> bytes:
    return b"".join(one.data for one in messages if not isinstance(one, StreamHead))


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, HI | {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (CHAT, HI | {"logprobs": True, "top_logprobs": 2, "stop": ["e.", "th!"]}),
        (COMPLETIONS, {"prompt": "hi", "logprobs": 1, "echo": False, "return_token_ids": True, "stop": "here"}),
        (COMPLETIONS, {"prompt": ["hi", "you"], "n": 2, "echo": True, "stream_options": {"include_usage": True}}),
    ],
)
async def test_the_data_of_frames_is_the_answer_without_frames(
    path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)
    ids = await ids_of("Où est 🙂? Hello there.")
    async with running(FakeEngine(says(ids))) as node:
        kind, plain = await ask(node, path, more, frames=False)
        messages = await frames_of(node, path, more)
        health = await (await node.session.get(f"{node.url}/health")).json()
    assert kind == "text/event-stream"
    assert data_of(messages) == plain
    head, *frames, end = messages
    assert isinstance(head, StreamHead)
    assert isinstance(end, StreamEnd)
    assert end.data.endswith(b"data: [DONE]\n\n")
    requests = node.engine.requests[len(node.engine.requests) // 2 :]
    assert head.response_id == "one"
    assert f'"created":{head.created}'.encode() in plain
    assert head.seed == requests[0].drawn_seed
    assert head.num_prompt_tokens == sum(len(one.prompt_token_ids) for one in requests)
    assert head.stream_version == health["stream_version"]
    digests = [blake2b(array("I", one.prompt_token_ids).tobytes(), digest_size=16).digest() for one in requests]
    both = blake2b(b"".join(digests), digest_size=16).digest()
    assert head.prompt_digest == (digests[0] if len(digests) == 1 else both)
    said: dict[int, list[int]] = {}
    num_chars: dict[int, int] = {}
    for frame in frames:
        assert isinstance(frame, Frame)
        for choice in frame.choices:
            assert choice.token_ids
            said.setdefault(choice.index, []).extend(choice.token_ids)
            num_chars[choice.index] = num_chars.get(choice.index, 0) + choice.num_chars
    num_choices = len(requests) * int(more.get("n", 1))
    assert set(said) == set(range(num_choices))
    stopped = "stop" in more
    assert all(one == (ids[: len(one)] if stopped else ids) for one in said.values())
    for index in range(num_choices):
        choices = [
            choice for _, event in parse_events(plain.decode()) if event != "[DONE]" for choice in event["choices"]
        ]
        mine = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in mine)
        num_echoed = len(("hi", "you")[index // 2]) if more.get("echo") else 0
        assert num_chars[index] == len(text) - num_echoed


async def test_a_token_of_held_text_is_framed_at_once() -> None:
    """A half of a character, and a text that may become a stop string."""
    ids = await ids_of("🙂 there")

    async def script(line: Line) -> None:
        for token_id in ids:
            line.tokens([token_id])
            await line.engine.released.wait()
        line.tokens([5], finish=FinishReason.LENGTH)

    async with running(FakeEngine(script)) as node:
        body = HI | {"stream": True, "stop": ["there!"]}
        parser = StreamParser[AnyFrame](AnyFrame)
        async with node.session.post(node.url + CHAT, json=body, headers={"x-pd-frames": "1"}) as response:
            head, first = parser.feed(await response.content.readany())
            node.engine.released.set()
            rest = parser.feed(await response.content.read())
    assert isinstance(head, StreamHead)
    assert isinstance(first, Frame)
    assert [(one.token_ids, one.num_chars) for one in first.choices] == [((ids[0],), 0)]
    assert b'"role"' in first.data
    assert sum(one.num_chars for frame in rest if isinstance(frame, Frame) for one in frame.choices) >= len("🙂 there")


@pytest.mark.parametrize("frames", [True, False])
async def test_an_error_after_the_head_is_a_frame(frames: bool) -> None:
    async def script(line: Line) -> None:
        line.tokens([5])
        await line.engine.released.wait()
        line.push(RequestFailed(line.request.request_id, "EngineLost", "the engine is gone"))

    async with running(FakeEngine(script)) as node:
        headers = {"x-pd-frames": "1"} if frames else {}
        body = HI | {"stream": True}
        async with node.session.post(node.url + CHAT, json=body, headers=headers) as response:
            content = await response.content.readany()
            node.engine.released.set()
            content += await response.content.read()
    if not frames:
        assert content.endswith(b'"code":"engine_died"}}\n\ndata: [DONE]\n\n')
        return
    *_, last = StreamParser[AnyFrame](AnyFrame).feed(content)
    assert isinstance(last, StreamFailed)
    assert (last.status, last.code) == (503, "engine_died")
    assert last.data.endswith(b'"code":"engine_died"}}\n\ndata: [DONE]\n\n')


async def test_whole_answers_refusals_and_prefill_legs_have_no_frames() -> None:
    headers = {"x-pd-frames": "1"}
    leg = HI | {"stream": True, "kv_transfer_params": {"do_remote_decode": True}}
    async with running(FakeEngine(says([5]))) as node:
        for body, status in ((HI, 200), (HI | {"stream": True, "n": 0}, 400), (leg, 200)):
            async with node.session.post(node.url + CHAT, json=body, headers=headers) as response:
                assert (response.status, response.content_type) == (status, "application/json")
