"""/v1/chat/completions against a scripted engine, mostly through the OpenAI client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from pd_cluster.protocol.messages import Abort, FinishReason, RequestFailed
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import Node, demo_tokenizer, running
from tests.server.sse import post_events

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "hi"}]
IM_END = 2


async def ids_of(text: str) -> list[int]:
    tokenizer = demo_tokenizer()
    try:
        return await tokenizer.encode(text, max_tokens=4096)
    finally:
        tokenizer.close()


def client_of(node: Node) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)


def contents(events: Sequence[tuple[str, Any]], index: int = 0) -> list[str]:
    choices = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
    return [choice["delta"].get("content", "") for choice in choices if choice["index"] == index]


@pytest.mark.long
async def test_whole_answer_with_two_choices_counts_each_token_once() -> None:
    ids = await ids_of("Hello there.")
    async with running(FakeEngine(says([*ids, IM_END], FinishReason.STOP))) as node, client_of(node) as client:
        answer = await client.chat.completions.create(model="demo", messages=HI, n=2)
        rendered = await node.state.tokenizer.encode(
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", max_tokens=4096
        )
    assert [choice.message.content for choice in answer.choices] == ["Hello there."] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    prompt = node.engine.requests[0].prompt_token_ids
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 2 * (len(ids) + 1)
    assert answer.usage.total_tokens == len(prompt) + 2 * (len(ids) + 1)
    assert rendered == prompt


async def test_stream_has_role_content_finish_usage_and_done() -> None:
    ids = await ids_of("Hello there.")
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    async with running(FakeEngine(says(ids))) as node:
        events = await post_events(node.session, f"{node.url}/v1/chat/completions", body)
    assert events[-1] == ("message", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * len(ids)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(contents(events, index)) == "Hello there."
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == "length"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


@pytest.mark.long
async def test_openai_client_reads_the_stream() -> None:
    ids = await ids_of("Où est 🙂?")
    async with running(FakeEngine(says(ids))) as node, client_of(node) as client:
        stream = await client.chat.completions.create(model="demo", messages=HI, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Où est 🙂?"


async def test_split_characters_never_reach_the_client_in_halves() -> None:
    raw = "🙂".encode()
    async with running(FakeEngine(says([]))) as node:
        table = {node.state.tokenizer.token_bytes(i): i for i in range(node.state.tokenizer.vocab_size)}
        node.engine.script = says([table[bytes([byte])] for byte in raw])
        events = await post_events(node.session, f"{node.url}/v1/chat/completions", {"messages": HI, "stream": True})
    assert "".join(contents(events)) == "🙂"
    assert all("�" not in part for part in contents(events))


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens_ends_the_choice_and_tells_the_engine(stream: bool) -> None:
    before, inside, after = await ids_of("one"), await ids_of(" two three"), await ids_of(" four")

    async def script(line: Line) -> None:
        for token_id in [*before, *inside]:
            line.tokens([token_id])
        abort = await line.heard()
        assert abort == Abort(line.request.request_id, 0, FinishReason.STOP)
        line.tokens(after)  # a step that was under way
        line.tokens([], finish=FinishReason.STOP)

    body = {"messages": HI, "stop": ["wo thr", "never"], "stream": stream}
    async with running(FakeEngine(script)) as node:
        url = f"{node.url}/v1/chat/completions"
        if stream:
            events = await post_events(node.session, url, body | {"stream_options": {"include_usage": True}})
            finish = [c for _, d in events if d != "[DONE]" for c in d["choices"]][-1]
            text, usage = "".join(contents(events)), events[-2][1]["usage"]
        else:
            async with node.session.post(url, json=body) as response:
                answer = await response.json()
            finish, usage = answer["choices"][0], answer["usage"]
            text = finish["message"]["content"]
    assert text == "one t"
    assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", "wo thr")
    assert len(before) < usage["completion_tokens"] <= len(before) + len(inside)
    assert node.metric('pd_queue_seconds_count{work="generate"}') == 1, "the terminal reply came and was counted"


async def test_stop_token_shows_only_when_asked_for() -> None:
    ids = await ids_of("Hello there.")

    async def script(line: Line) -> None:
        line.tokens(ids, finish=FinishReason.STOP, stop_token_id=ids[-1])

    async with running(FakeEngine(script)) as node:
        for include, expected in ((False, "Hello there"), (True, "Hello there.")):
            body = {"messages": HI, "stop_token_ids": [ids[-1]], "include_stop_str_in_output": include}
            async with node.session.post(f"{node.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            assert answer["choices"][0]["message"]["content"] == expected
            assert answer["choices"][0]["stop_reason"] == ids[-1]
            assert answer["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_have_one_entry_a_token(stream: bool) -> None:
    ids = [*await ids_of("Hello there."), IM_END]

    async def script(line: Line) -> None:
        for token_id in ids[:-1]:
            line.tokens([token_id])
        line.tokens(ids[-1:], finish=FinishReason.STOP, stop_token_id=IM_END)

    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": stream}
    async with running(FakeEngine(script)) as node:
        url = f"{node.url}/v1/chat/completions"
        if stream:
            events = await post_events(node.session, url, body)
            choices = [choice for _, data in events if data != "[DONE]" for choice in data["choices"]]
            entries = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
        else:
            async with node.session.post(url, json=body) as response:
                entries = (await response.json())["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(ids)
    assert entries[0] == {
        "token": "Hello",
        "logprob": -0.5,
        "bytes": list(b"Hello"),
        "top_logprobs": [
            {"token": "<|endoftext|>", "logprob": -1.0, "bytes": list(b"<|endoftext|>")},
            {"token": "<|im_start|>", "logprob": -2.0, "bytes": list(b"<|im_start|>")},
        ],
    }


@pytest.mark.parametrize("number", [-1, 21])
async def test_too_many_alternatives_are_refused_by_the_name_of_their_field(number: int) -> None:
    async with running(FakeEngine(says([]))) as node:
        body = {"messages": HI, "logprobs": True, "top_logprobs": number}
        async with node.session.post(f"{node.url}/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "top_logprobs")
    assert error["message"] == f"top_logprobs must be between 0 and 20, not {number}"


async def test_text_parts_and_tool_calls_reach_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "not that"}]},
    ]
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.post(f"{node.url}/v1/chat/completions", json={"messages": messages}) as response:
            assert response.status == 200
        prompt = await node.state.tokenizer.decode(node.engine.requests[0].prompt_token_ids)
    assert "one\ntwo" in prompt
    assert "not that" in prompt
    assert "<|im_start|>tool\n3<|im_end|>" in prompt


async def test_sampling_fields_reach_the_engine() -> None:
    body = {
        "messages": HI, "max_completion_tokens": 7, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": -1,
        "min_p": 0.1, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2,
        "logit_bias": {"5": -100}, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [9], "priority": 3,
        "cache_salt": "tenant", "user": "ignored", "nonsense": 1,
    }  # fmt: skip
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.post(f"{node.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        request = node.engine.requests[0]
        assert node.metric("pd_unknown_fields_total") == 2
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed, sampling.logit_bias, sampling.min_tokens) == (0.1, 11, {5: -100.0}, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.ignore_eos, sampling.stop_token_ids) == (True, (9,))
    assert (request.priority, request.salt) == (0, "tenant")  # --priorities is off


async def test_output_may_fill_the_context_by_default() -> None:
    async with running(FakeEngine(says([5]), max_model_len=100)) as node:
        async with node.session.post(f"{node.url}/v1/chat/completions", json={"messages": HI}) as response:
            assert response.status == 200
        request = node.engine.requests[0]
    assert request.sampling.max_tokens == 100 - len(request.prompt_token_ids)


@pytest.mark.long
async def test_engine_failure_before_the_first_token_is_a_status() -> None:
    async def script(line: Line) -> None:
        line.push(RequestFailed(line.request.request_id, "Overloaded", "the queue is full"))

    async with running(FakeEngine(script)) as node, client_of(node) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="demo", messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"
    assert node.metric('pd_requests_total{endpoint="chat",outcome="server_error"}') == 1


async def test_engine_failure_inside_a_stream_comes_after_its_tokens() -> None:
    ids = await ids_of("Hello there.")

    async def script(line: Line) -> None:
        line.tokens(ids)
        line.push(RequestFailed(line.request.request_id, "EngineUnavailable", "it died"))

    async with running(FakeEngine(script)) as node:
        url = f"{node.url}/v1/chat/completions"
        events = await post_events(node.session, url, {"messages": HI, "stream": True})
        async with node.session.post(url, json={"messages": HI}) as response:
            status = response.status
    error = events[-2][1]["error"]
    events_before = [event for event in events if "error" not in event[1]]
    assert "".join(contents(events_before)) == "Hello there."
    assert (error["message"], error["code"]) == ("it died", "engine_unavailable")
    assert events[-1][1] == "[DONE]"
    assert status == 503


async def test_model_name_with_percent_sign_is_written_as_it_is() -> None:
    ids = await ids_of("Hello")
    async with running(FakeEngine(says(ids)), model_name="100%d model") as node:
        events = await post_events(node.session, f"{node.url}/v1/chat/completions", {"messages": HI, "stream": True})
    assert {data["model"] for _, data in events if data != "[DONE]"} == {"100%d model"}
