"""/v1/completions against a scripted engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import openai
import pytest

from pd_cluster.config import SchedulerConfig
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.bodies.schema import MAX_LOGITS_ARGS_BYTES
from pd_connectors.protocol.ticket import Offer, sign
from tests.http.answer import COMPLETIONS, post
from tests.server.fake_engine import FAR, FakeEngine, Line, decodes, says
from tests.server.live_server import KEY, running
from tests.server.sse import post_events

pytestmark = pytest.mark.anyio
MESSAGE = {"role": "user", "content": "hi"}


def echo(line: Line) -> None:
    """Says the last prompt token, n times over."""
    n = line.request.sampling.n
    for index in range(n):
        last = line.request.prompt_token_ids[-1]
        line.tokens([last], index=index, finish=FinishReason.LENGTH, finished=index == n - 1, num_cached=1)


async def echo_script(line: Line) -> None:
    echo(line)


async def test_every_form_of_prompt() -> None:
    async with running(FakeEngine(echo_script)) as node:
        hello, there = [await node.state.tokenizer.encode(text, max_tokens=4096) for text in ("Hello", " there")]
        one = (await post(node, COMPLETIONS, {"prompt": "Hello"})).ok
        several = (await post(node, COMPLETIONS, {"prompt": ["Hello", " there"]})).ok
        ids = (await post(node, COMPLETIONS, {"prompt": there})).ok
        lists = (await post(node, COMPLETIONS, {"prompt": [hello, there], "n": 2})).ok
        prompts = [request.prompt_token_ids for request in node.engine.requests]
    assert [choice["text"] for choice in one["choices"]] == ["Hello"]
    assert [choice["text"] for choice in several["choices"]] == ["Hello", " there"]
    assert [choice["text"] for choice in ids["choices"]] == [" there"]
    assert [choice["text"] for choice in lists["choices"]] == ["Hello", "Hello", " there", " there"]
    assert [choice["index"] for choice in lists["choices"]] == [0, 1, 2, 3]
    assert prompts == [hello, hello, there, there, hello, there]
    usage = lists["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(hello) + len(there), 4)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_stream_of_several_prompts() -> None:
    async with running(FakeEngine(echo_script)) as node:
        body = {"prompt": ["Hello", " there"], "stream": True, "stream_options": {"include_usage": True}}
        events = await post_events(node.session, f"{node.url}/v1/completions", body)
    texts = {c["index"]: c["text"] for _, data in events if data != "[DONE]" for c in data["choices"]}
    assert texts == {0: "Hello", 1: " there"}
    assert events[-2][1]["usage"]["completion_tokens"] == 2
    assert events[-1][1] == "[DONE]"


@pytest.mark.parametrize(("prompt", "timings"), [("Hello", {"queue": 1.0, "prefill": 2.0}), (["Hello", " there"], {})])
async def test_a_stream_tells_what_it_waited_for(prompt: object, timings: dict[str, float]) -> None:
    async with running(FakeEngine(echo_script)) as node:
        options = {"include_usage": True, "include_timings": True}
        body = {"prompt": prompt, "stream": True, "stream_options": options}
        asked = await post_events(node.session, f"{node.url}/v1/completions", body)
        body["stream_options"] = {"include_usage": True}
        unasked = await post_events(node.session, f"{node.url}/v1/completions", body)
        received = [request.received_s for request in node.engine.requests]
    assert asked[-2][1]["usage"]["timings"] == timings, "of several prompts there is no one answer"
    assert "timings" not in unasked[-2][1]["usage"]
    assert all(0 < received_s <= time.monotonic() for received_s in received)


async def test_one_failing_prompt_fails_the_request_and_aborts_the_others() -> None:
    async def script(line: Line) -> None:
        if line.request is line.engine.requests[0]:
            await line.heard()
        else:
            line.tokens([], finish=FinishReason.ABORT)

    async with running(FakeEngine(script)) as node:
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": ["a", "b"]}) as response:
            assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert node.engine.aborts.get_nowait().request_id == node.engine.requests[0].request_id


@pytest.mark.long
async def test_logprobs_in_the_legacy_shape_through_the_openai_client() -> None:
    async with running(FakeEngine(says([]))) as node:
        ids = await node.state.tokenizer.encode("Hello there.", max_tokens=4096)
        node.engine.script = says(ids)
        async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none") as client:
            answer = await client.completions.create(model="demo", prompt="hi", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hello", " there", "."]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 5, 11]
    assert logprobs.top_logprobs == [{token: -0.5, "<|endoftext|>": -1.0} for token in logprobs.tokens]


async def test_streamed_offsets_continue() -> None:
    async with running(FakeEngine(says([]))) as node:
        node.engine.script = says(await node.state.tokenizer.encode("Hello there.", max_tokens=4096))
        body = {"prompt": "hi", "logprobs": 0, "stream": True}
        events = await post_events(node.session, f"{node.url}/v1/completions", body)
    shaped = [c["logprobs"] for _, data in events if data != "[DONE]" for c in data["choices"]]
    assert [offset for one in shaped for offset in one["text_offset"]] == [0, 5, 11]
    assert [list(top) for one in shaped for top in one["top_logprobs"]] == [["Hello"], [" there"], ["."]]


async def test_backlog_is_coalesced_without_losing_a_token() -> None:
    async with running(FakeEngine(says([]))) as node:
        ids = await node.state.tokenizer.encode("Hello there. " * 20, max_tokens=4096)
        node.engine.script = says(ids)
        body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
        events = await post_events(node.session, f"{node.url}/v1/completions", body)
    choices = [c for _, data in events if data != "[DONE]" for c in data["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Hello there. " * 20
    assert len(choices) < len(ids)
    assert events[-2][1]["usage"]["completion_tokens"] == len(ids)


async def test_split_character_is_spelled_out_in_logprobs() -> None:
    async with running(FakeEngine(says([]))) as node:
        table = {node.state.tokenizer.token_bytes(i): i for i in range(node.state.tokenizer.vocab_size)}
        node.engine.script = says([table[bytes([byte])] for byte in "é".encode()])
        answer = (await post(node, COMPLETIONS, {"prompt": "hi", "logprobs": 0})).ok
    assert answer["choices"][0]["text"] == "é"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize("given", [{}, {"max_tokens": None}])
async def test_a_completion_without_a_limit_has_sixteen_tokens(given: dict[str, Any]) -> None:
    async with running(FakeEngine(says([5]), max_model_len=32)) as node:
        assert (await post(node, COMPLETIONS, {"prompt": [5] * 4} | given)).status == 200
        assert (await post(node, COMPLETIONS, {"prompt": [5] * 24} | given)).status == 200
        assert [request.sampling.max_tokens for request in node.engine.requests] == [16, 8]


async def test_integers_may_be_written_with_a_point() -> None:
    async with running(FakeEngine(says([5]))) as node:
        raw = b'{"prompt": "hi", "max_tokens": 4.0, "seed": -1.0, "n": 1.00 , "temperature": 1.0, "user": 2.0}'
        async with node.session.post(f"{node.url}/v1/completions", data=raw) as response:
            assert response.status == 200
        sampling = node.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.n, sampling.temperature) == (4, -1, 1, 1.0)


async def test_usage_in_every_chunk() -> None:
    async with running(FakeEngine(says([5, 6, 7]))) as node:
        options = {"include_usage": True, "continuous_usage_stats": True}
        for path, body in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": [MESSAGE]})):
            events = await post_events(
                node.session, f"{node.url}/v1/{path}", body | {"stream": True, "stream_options": options}
            )
            counts = [data["usage"]["completion_tokens"] for _, data in events[:-1]]
            assert counts == sorted(counts)
            assert (counts[0] > 0, counts[-1]) == (True, 3)


async def test_priorities_are_the_operators_choice() -> None:
    for config, expected in ((SchedulerConfig(), 0), (SchedulerConfig(priorities=True), 3)):
        async with running(FakeEngine(says([5]))) as node:
            node.state.config = replace(node.state.config, scheduler=config)
            async with node.session.post(
                f"{node.url}/v1/completions", json={"prompt": "hi", "max_tokens": 1, "priority": 3}
            ) as response:
                assert response.status == 200
            assert node.engine.requests[0].priority == expected


async def test_arguments_of_logits_stages_are_read_or_refused_and_bounded() -> None:
    """Every prompt has a copy on the engine."""
    async with running(FakeEngine(says([5]))) as node:
        for stages, args, num_prompts, expected in (
            ((), {"ban": 1}, 1, "has no --logits-stage"),
            ((), {}, 1, ""),
            (("a:A",), {"ban": 1}, 2, ""),
            (("a:A",), {"x": 2**64}, 1, "64 bits"),
            (("a:A",), {"x": "y" * (MAX_LOGITS_ARGS_BYTES // 2 - 8)}, 2, ""),
            (("a:A",), {"x": "y" * (MAX_LOGITS_ARGS_BYTES // 2)}, 2, "65536 are allowed"),
        ):
            config = node.state.config
            node.state.config = replace(config, model=replace(config.model, logits_stages=stages))
            body = {"prompt": ["hi"] * num_prompts, "max_tokens": 1, "logits_args": args}
            before = len(node.engine.requests)
            async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
                answer = await response.json()
            assert response.status == (400 if expected else 200), answer
            assert expected in str(answer)
            assert len(node.engine.requests) - before == (0 if expected else num_prompts)


async def test_prompts_of_one_request_are_one_group() -> None:
    """Whatever its `x-request-id` is: clients choose that, and one that has another's must not join its group."""
    async with running(FakeEngine(says([5]))) as node:
        for prompt in (["a", "b"], "c"):
            body = {"prompt": prompt, "max_tokens": 1}
            async with node.session.post(
                f"{node.url}/v1/completions", json=body, headers={"x-request-id": "the same"}
            ) as response:
                assert response.status == 200
        first, second, third = (request.group for request in node.engine.requests)
        assert first == second != third
        assert "the same" not in (first, third)


async def test_prompts_that_d_sends_on_keep_their_group() -> None:
    async with (
        running(FakeEngine(says([5]), engine_id="p"), node_id="p") as p,
        running(FakeEngine(decodes([5])), node_id="d") as d,
    ):
        params = {"do_remote_prefill": True, "offer": sign(KEY, Offer((p.url,), FAR))}
        body = {"prompt": ["a", "b"], "max_tokens": 1, "kv_transfer_params": params}
        async with d.session.post(f"{d.url}/v1/completions", json=body) as response:
            assert response.status == 200
        groups = {request.group for node in (p, d) for request in node.engine.requests}
        assert (len(p.engine.requests), len(d.engine.requests), len(groups)) == (2, 2, 1)


async def test_more_prompts_than_the_queue_takes_are_refused_before_any_is_admitted() -> None:
    async with running(FakeEngine(says([5]))) as node:
        node.state.config = replace(node.state.config, scheduler=SchedulerConfig(max_waiting=10))
        assert node.engine.stats is not None
        for num_queued, num_prompts, status in ((0, 5, 200), (0, 6, 400), (3, 2, 200), (3, 3, 503), (9, 1, 200)):
            node.engine.stats = msgspec.structs.replace(node.engine.stats, num_queued=num_queued)
            num_before = len(node.engine.requests)
            body = {"prompt": ["a"] * num_prompts, "max_tokens": 1}
            async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
                assert response.status == status
                text = await response.text()
            assert len(node.engine.requests) - num_before == (num_prompts if status == 200 else 0)
            if status != 200:
                assert "queue" in text
