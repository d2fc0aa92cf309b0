"""Every bad input is a 400 (or 404, 405) in OpenAI's error shape that names the field; none reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

pytestmark = pytest.mark.anyio

HI = [{"role": "user", "content": "hi"}]

# what is wrong with a beam search
WITH_BEAMS: list[dict[str, Any]] = [
    {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
    {"presence_penalty": 1}, {"frequency_penalty": -1}, {"logit_bias": {"5": 1}}, {"allowed_token_ids": [5]},
    {"bad_words": ["x"]}, {"min_tokens": 1}, {"stop": "x"}, {"n": 21}, {"best_of": 21}, {"best_of": 0},
    {"best_of": 2, "n": 3}, {"length_penalty": 11}, {"early_stopping": "always"}, {"early_stopping": 1},
]  # fmt: skip
BEAMS: list[tuple[dict[str, Any], str | None]] = [
    *(({"use_beam_search": True} | wrong, next(iter(wrong))) for wrong in WITH_BEAMS),
    ({"beam_width": 4}, "beam_width"),
]

# what is wrong with a chat request, and the field that the error names
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"role": "stranger", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 4.0, "n": 1.5}, "n"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"3072": 1}}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"min_tokens": 5000}, "min_tokens"),
    ({"best_of": 2}, "best_of"),
    *BEAMS,
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": [3072]}, "stop_token_ids"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"guided_json": 5}, "guided_json"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"priority": 2**31}, "priority"),
    ({"kv_transfer_params": [1]}, "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_prefill": "yes"}}, "kv_transfer_params"),
]

COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, -1]}, "prompt"),
    ({"prompt": [3072]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["a"] * 257}, "prompt"),
    ({"prompt": [5] * 4096}, "prompt"),
    ({"prompt": ["a"] * 256, "stop_token_ids": [5] * 5000}, "stop_token_ids"),
    ({"prompt": [[7]] * 256, "logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    *BEAMS,
    ({"min_tokens": 17}, "min_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.mark.long
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_wrong_fields_are_named(path: str) -> None:
    base: dict[str, Any] = {"messages": HI} if path.startswith("chat") else {"prompt": "hi"}
    async with running(FakeEngine(says([5]))) as node:
        for wrong, param in CHAT if path.startswith("chat") else COMPLETIONS:
            async with node.session.post(f"{node.url}/v1/{path}", json=base | wrong) as response:
                answer = await response.json()
            assert response.status == 400, (wrong, answer)
            error = answer["error"]
            assert error["param"] == param, (wrong, error)
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert error["code"]
        assert node.engine.requests == []


@pytest.mark.long_cases
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"x"', b'{"a":\xff}', b'{"prompt": "\\ud800"}', b"{}"])
@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions", "tokenize", "detokenize", "pd/release"])
async def test_bodies_that_are_no_json_object(path: str, raw: bytes) -> None:
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.post(f"{node.url}/{path}", data=raw) as response:
            answer = await response.json()
        assert response.status == 400
        assert answer["error"]["type"] == "invalid_request_error"


async def test_limits_are_said_as_they_would_be_typed() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for name, value, text in [("top_k", 1 << 25, "16777216, not 33554432"), ("top_p", 1.25, "0 and 1, not 1.25")]:
            async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "a", name: value}) as response:
                assert text in (await response.json())["error"]["message"]


async def test_what_is_too_long_says_both_numbers() -> None:
    async with running(FakeEngine(says([5]), max_model_len=32)) as node:
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": [5] * 40}) as response:
            error = (await response.json())["error"]
        assert error["code"] == "context_length_exceeded"
        assert "40" in error["message"]
        assert "32" in error["message"]
        async with node.session.post(
            f"{node.url}/v1/completions", json={"prompt": [5] * 20, "max_tokens": 13}
        ) as response:
            assert (await response.json())["error"]["code"] == "context_length_exceeded"
        async with node.session.post(
            f"{node.url}/v1/completions", json={"prompt": [5] * 20, "max_tokens": 12}
        ) as response:
            assert response.status == 200


async def test_unknown_model_path_and_method() -> None:
    async with running(FakeEngine(says([5]))) as node:
        async with node.session.post(f"{node.url}/v1/completions", json={"prompt": "a", "model": "gpt"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
        async with node.session.get(f"{node.url}/v1/nothing") as response:
            assert (response.status, "error" in await response.json()) == (404, True)
        async with node.session.get(f"{node.url}/v1/completions") as response:
            assert (response.status, "error" in await response.json()) == (405, True)
        assert node.metric('pd_requests_total{endpoint="completions",outcome="client_error"}') == 1


async def test_null_and_harmless_fields_are_accepted() -> None:
    body: dict[str, Any] = {
        "prompt": "a",
        "temperature": None,
        "stop": None,
        "echo": False,
        "suffix": None,
        "stop_token_ids": [],
    }
    async with (
        running(FakeEngine(says([5]))) as node,
        node.session.post(f"{node.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200
