"""Fields that are not read: refused by name when they would change the answer, else named in a header."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.fields import (
    HARMLESS,
    IGNORED_HEADER,
    MAX_NAME_CHARS,
    MAX_NAMED,
    REFUSED,
    ignored_header,
    refuse,
)
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import Node, running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
FIELDS = dict(zip(BODIES, (ChatBody.__struct_fields__, CompletionBody.__struct_fields__), strict=True))
# change an answer elsewhere, and were ignored by earlier versions
ONCE_DROPPED = {
    "stop_regex": "a", "structural_tag": "x", "input_ids": [5], "prompt_embeds": "x",
    "lora_path": "x", "logprob_token_ids": [5],
    "modalities": ["text", "audio"], "documents": [{"text": "x"}], "no_stop_trim": True,
    "thinking_token_budget": 5, "session_params": {"id": 1},
    "custom_logit_processor": "x", "return_hidden_states": True, "repetition_detection": {"n": 1},
    "vllm_xargs": {"a": 1},
}  # fmt: skip


async def answer(node: Node, path: str, more: dict[str, Any], **kwargs: Any) -> tuple[int, dict[str, Any], str | None]:
    body = BODIES[path] | more
    async with node.session.post(f"{node.url}{path}", json=body, **kwargs) as response:
        content = {} if body.get("stream") else await response.json()
        await response.read()
        return response.status, content, response.headers.get(IGNORED_HEADER)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_every_refused_field_is_a_400_that_names_it(path: str) -> None:
    assert ONCE_DROPPED.keys() <= REFUSED.keys()
    async with running(FakeEngine(says([5]))) as node:
        refused = {name: refusal for name, refusal in REFUSED.items() if name not in FIELDS[path]}
        for name, refusal in refused.items():
            for wanted in ("something" * 20, ONCE_DROPPED.get(name, 1)):
                status, content, _ = await answer(node, path, {name: wanted})
                assert (status, content["error"]["param"]) == (400, name), content
                assert content["error"]["code"] == "unsupported_parameter"
                assert refusal.why in content["error"]["message"]
        assert node.engine.requests == []
        for name, refusal in refused.items():
            for harmless in refusal.harmless:
                status, _, named = await answer(node, path, {name: harmless})
                assert (status, named) == (200, name), (name, harmless)


def test_a_field_is_in_one_table_and_read_nowhere() -> None:
    read = set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)
    assert REFUSED.keys() & read == {"echo"}, "chat has another echo than completions"
    assert not HARMLESS.keys() & (read | REFUSED.keys())
    assert all(HARMLESS.values()), "each with its reason"


@pytest.mark.parametrize("raw", [b"[" * 100_000 + b"]" * 100_000, b'"\xff"', b'"\\ud800"', b"[[[[[[[1]]]]]]]"])
def test_values_that_are_hardly_json_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex"):
        refuse({"stop_regex": msgspec.Raw(raw)})


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_ignored_fields_are_named_in_the_answer(path: str, stream: bool) -> None:
    async with running(FakeEngine(says([5]))) as node:
        assert (await answer(node, path, {"stream": stream}))[2] is None
        names = sorted(HARMLESS)
        for some in (names[:MAX_NAMED], names[MAX_NAMED:]):
            status, _, named = await answer(node, path, dict.fromkeys(some, "x") | {"stream": stream})
            assert (status, named) == (200, ",".join(some))
        if stream:
            options = {"include_usge": True, "include_usage": True}
            _, _, named = await answer(node, path, {"stream": True, "stream_options": options})
            assert named == "stream_options.include_usge"


@pytest.mark.anyio
async def test_tokenize_names_what_it_ignores() -> None:
    async with running(FakeEngine(says([5]))) as node:
        body = {"prompt": "hi", "mm_processor_kwargs": {}}
        async with node.session.post(f"{node.url}/tokenize", json=body) as response:
            assert response.headers[IGNORED_HEADER] == "mm_processor_kwargs"


@pytest.mark.long_cases
@pytest.mark.anyio
@pytest.mark.parametrize("name", ["a\r\nx-evil: 1", "x,y", "\u2028", "\x00", "", "n" * 5000, "ü", "a b"])
async def test_hostile_names_are_cut_and_made_printable(name: str) -> None:
    async with running(FakeEngine(says([5]))) as node:
        status, _, named = await answer(node, "/v1/completions", {name: 1})
    assert status == 200
    assert named is not None
    assert 0 < len(named) <= MAX_NAME_CHARS
    assert all(char.isascii() and (char.isalnum() or char in "_.-?") for char in named)


def test_of_many_names_some_are_said() -> None:
    names = [f"name{i:04}" for i in range(1000)]
    assert ignored_header(names)[IGNORED_HEADER] == ",".join([*names[:MAX_NAMED], f"+{1000 - MAX_NAMED}"])


@pytest.mark.anyio
async def test_tools_are_refused_for_want_of_a_format_and_answered_when_none_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = "/v1/chat/completions"
    async with running(FakeEngine(says([5]))) as node:
        for choice in ({}, {"tool_choice": "auto"}):
            status, content, _ = await answer(node, path, {"tools": tools} | choice)
            assert (status, content["error"]["param"]) == (400, "tools")
            assert "--tool-format" in content["error"]["message"]
        assert (await answer(node, path, {"tools": tools, "tool_choice": "none"}))[0] == 200
        assert (await answer(node, path, {"tools": []}))[0] == 200
        assert len(node.engine.requests) == 2


@pytest.mark.anyio
async def test_special_tokens_can_be_asked_for_on_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    async with running(FakeEngine(says([5]))) as node:
        encode = node.state.tokenizer._encode

        def spy(text: str, add_special_tokens: bool, *note: Any) -> list[int]:
            asked.append(add_special_tokens)
            return encode(text, add_special_tokens, *note)

        monkeypatch.setattr(node.state.tokenizer, "_encode", spy)
        for given in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
            assert (await answer(node, "/v1/chat/completions", given))[0] == 200
    assert asked == [False, False, True]
