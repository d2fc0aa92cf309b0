"""Token ids in answers, echoed prompts, cut prompts, ids of requests, and words as token ids."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.answer import CHAT, COMPLETIONS, post
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

pytestmark = pytest.mark.anyio

HI = {"messages": [{"role": "user", "content": "hi"}]}


async def test_token_ids_of_a_chat_answer() -> None:
    body = HI | {"n": 2, "return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    async with running(FakeEngine(says([5, 6, 7]))) as node:
        whole = (await post(node, CHAT, body)).json
        chunks = (await post(node, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})).chunks
        prompt = node.engine.requests[0].prompt_token_ids
        plain = (await post(node, CHAT, HI)).json
    assert whole["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [[5, 6, 7]] * 2
    names = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert names == ["token_id:5", "token_id:6", "token_id:7"]
    said: dict[int, list[int]] = {0: [], 1: []}
    prompts = []
    for chunk in chunks:
        prompts += [chunk["prompt_token_ids"]] if "prompt_token_ids" in chunk else []
        for choice in chunk["choices"]:
            said[choice["index"]] += choice.get("token_ids", [])
    assert said == {0: [5, 6, 7], 1: [5, 6, 7]}
    assert prompts == [prompt, prompt], "in the first chunk of each choice"
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_token_ids_of_completions_and_tokens_without_text() -> None:
    eos = 2
    body = {
        "prompt": [[8, 9], [9]],
        "n": 2,
        "return_token_ids": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    async with running(FakeEngine(says([5, eos, 6]))) as node:
        whole = (await post(node, COMPLETIONS, body)).json
        del body["logprobs"]
        chunks = (await post(node, COMPLETIONS, body | {"stream": True})).chunks
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[8, 9], [8, 9], [9], [9]]
    assert whole["choices"][3]["token_ids"] == [5, eos, 6]
    assert whole["choices"][0]["logprobs"]["tokens"] == ["token_id:5", "token_id:2", "token_id:6"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 2]
    assert [token for choice in choices for token in choice["token_ids"]] == [5, eos, 6]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [[9]]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_each_choice(stream: bool) -> None:
    async with running(FakeEngine(says([5, 6]))) as node:
        said = node.state.tokenizer.text_of([5, 6])
        for prompt, echoed in (
            ("Hello <|im_end|> there", ["Hello <|im_end|> there"]),
            ([[70, 71], [72]], [node.state.tokenizer.text_of(ids) for ids in ([70, 71], [72])]),
        ):
            body = {"prompt": prompt, "echo": True, "n": 2, "stream": stream}
            answer = await post(node, COMPLETIONS, body)
            texts = dict.fromkeys(range(2 * len(echoed)), "")
            for chunk in answer.chunks if stream else [answer.json]:
                for choice in chunk["choices"]:
                    texts[choice["index"]] += choice["text"]
            assert list(texts.values()) == [text + said for text in echoed for _ in range(2)]
        cut = (await post(node, COMPLETIONS, {"prompt": [70, 71], "echo": True, "truncate_prompt_tokens": 1})).json
        assert cut["choices"][0]["text"] == node.state.tokenizer.text_of([71]) + said


async def test_prompts_are_cut_at_their_beginning() -> None:
    async with running(FakeEngine(says([5]), max_model_len=20)) as node:
        for path, body in ((CHAT, HI), (COMPLETIONS, {"prompt": "a b c d e f"}), (COMPLETIONS, {"prompt": [7] * 30})):
            assert (await post(node, path, body | {"truncate_prompt_tokens": 3})).status == 200
        whole = await node.state.tokenizer.encode("a b c d e f", max_tokens=20)
    assert [len(request.prompt_token_ids) for request in node.engine.requests] == [3, 3, 3]
    assert node.engine.requests[1].prompt_token_ids == whole[-3:]


async def test_bad_words_are_those_at_the_beginning_and_after_a_blank() -> None:
    async with running(FakeEngine(says([5]))) as node:
        assert (await post(node, COMPLETIONS, {"prompt": "a", "bad_words": ["Hello there", " x"]})).status == 200
        tokenizer = node.state.tokenizer
        words = [tokenizer._encode(text, False) for text in ("Hello there", " Hello there", "x", " x")]
        sampling = node.engine.requests[0].sampling
    assert sampling.bad_words == tuple(dict.fromkeys(map(tuple, words)))


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_the_body_may_name_the_request(name: str) -> None:
    async with running(FakeEngine(says([5]))) as node:
        assert (await post(node, CHAT, HI | {name: "mine-1"})).json["id"] == "chatcmpl-mine-1"
        assert (await post(node, COMPLETIONS, {"prompt": "a", name: "100%d"})).json["id"] == "cmpl-100%d"
        chunks = (await post(node, COMPLETIONS, {"prompt": "a", name: "100%d", "stream": True})).chunks
        assert chunks[0]["id"] == "cmpl-100%d"


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [3072]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": ["  "]}, "bad_words"),
        ({"bad_words": ["word " * 40]}, "bad_words"),
        ({"bad_words": [f"{i} {i}" for i in range(200)]}, "bad_words"),
        ({"bad_words": ["x" * 5000]}, "bad_words"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"rid": ""}, "rid"),
        ({"rid": ["a"]}, "rid"),
        ({"truncation_side": "right"}, "truncation_side"),
        (
            {"kv_transfer_params": {"do_remote_decode": True, "sampling": {"max_tokens": 1, "bad_words": [[]]}}},
            "bad_words",
        ),
    ],
)
async def test_what_cannot_be_served_is_a_400_by_name(wrong: dict[str, Any], field: str) -> None:
    async with running(FakeEngine(says([5]))) as node:
        status, answer = (await post(node, COMPLETIONS, {"prompt": "a"} | wrong)).told
    assert (status, answer["error"]["param"]) == (400, field), answer


async def test_tokenize_and_back_as_other_servers_do() -> None:
    async with running(FakeEngine(says([5]))) as node:
        answer = (await post(node, "/tokenize", {"prompt": "Hello there<|im_end|>", "return_token_strs": True})).json
        assert len(answer["token_strs"]) == answer["count"]
        assert answer["token_strs"][-1] == "<|im_end|>"
        assert answer["token_strs"] == node.state.tokenizer._tokenizer.convert_ids_to_tokens(answer["tokens"])
        for skip, text in ((True, "Hello there"), (False, "Hello there<|im_end|>")):
            body = {"tokens": answer["tokens"], "skip_special_tokens": skip}
            assert (await post(node, "/detokenize", body)).told == (200, {"prompt": text})
