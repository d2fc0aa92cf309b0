"""Requests of other APIs as chat requests: by table, and a 400 that names the wrong place."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from pd_http.dialect import OPENAI, RawFields
from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES, dialect_of
from pd_http.errors import InvalidRequest, ModelNotFound, NodesDied, PdError

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
NAMED = {"type": "function", "function": {"name": "f"}}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}


def raw(body: dict[str, Any]) -> RawFields:
    return msgspec.json.decode(orjson.dumps(body), type=dict[str, msgspec.Raw])


def chat_of(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    chat, ignored, _ = dialect_of(path).to_chat(raw(body))
    return {name: orjson.loads(bytes(value)) for name, value in chat.items()}, set(ignored)


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content} | more


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value} | more


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"system": "s"}, {"messages": [{"role": "system", "content": "s"}, *HI]}),
        ({"system": [text("a", cache_control={"type": "ephemeral"}), text("b")]},
         {"messages": [{"role": "system", "content": "a\nb"}, *HI]}),
        ({"system": []}, {"messages": HI}),
        ({"system": "s", "messages": [{"role": "system", "content": [text("t")]}, *HI]},
         {"messages": [{"role": "system", "content": "s\nt"}, *HI]}),
        ({"messages": [{"role": "user", "content": [text("a"), text("b")]}]},
         {"messages": [{"role": "user", "content": "a\nb"}]}),
        # neighbours of one role are one turn
        ({"messages": [*HI, {"role": "user", "content": [text("a")]}, {"role": "assistant", "content": "I"},
                       {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result("r")]},
                       {"role": "user", "content": "so?"}]},
         {"messages": [{"role": "user", "content": "hi\na"},
                       {"role": "assistant", "content": "I", "tool_calls": [CALL]},
                       {"role": "tool", "tool_call_id": "c1", "content": "r"}, {"role": "user", "content": "so?"}]}),
        # an SDK's dump of an answer has members that are null; those of an input stay
        ({"messages": [*HI, {"role": "assistant", "content": [text("I", citations=None, colour=None),
                             USE | {"caller": None, "toolset_name": None, "input": {"a": None, "b": [{"c": None}]}}]},
                       {"role": "user", "content": [result([text("r", colour=None)], toolset_name=None)]}],
          "tools": [{"name": "f", "input_schema": {"enum": None}, "input_examples": None}]},
         {"messages": [*HI, {"role": "assistant", "content": "I", "tool_calls": [
             CALL | {"function": {"name": "f", "arguments": {"a": None, "b": [{"c": None}]}}}]},
                       {"role": "tool", "tool_call_id": "c1", "content": "r"}],
          "tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": None}}}]}),
        ({"messages": [*HI, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "why"}, text("I"), text(" see."), USE]},
            {"role": "user", "content": [text("first"), result("r"), result([text("x"), text("y")]), text("so?")]}]},
         {"messages": [*HI, {"role": "assistant", "content": "I see.", "reasoning_content": "why",
                              "tool_calls": [CALL]},
                       {"role": "user", "content": "first"},
                       {"role": "tool", "tool_call_id": "c1", "content": "r"},
                       {"role": "tool", "tool_call_id": "c1", "content": "x\ny"},
                       {"role": "user", "content": "so?"}]}),
        ({"messages": [*HI, {"role": "assistant", "content": "I"}]},
         {"messages": [*HI, {"role": "assistant", "content": "I"}], "add_generation_prompt": False,
          "continue_final_message": True}),
        ({"tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}]},
         {"messages": HI, "tools": [{"type": "function", "function": {
             "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}]}),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"messages": HI, "tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "tool", "name": "f"}}, {"messages": HI, "tool_choice": NAMED}),
        ({"tool_choice": {"type": "auto"}}, {"messages": HI, "tool_choice": "auto"}),
        ({"tool_choice": {"type": "none"}}, {"messages": HI, "tool_choice": "none"}),
        ({"stop_sequences": ["a"], "temperature": 0.5, "stream": True},
         {"messages": HI, "stop": ["a"], "temperature": 0.5, "stream": True}),
        ({"thinking": {"type": "adaptive"}}, {"messages": HI}),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}},
         {"messages": HI, "enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}},
         {"messages": HI, "enable_thinking": True, "include_reasoning": False}),
        ({"output_config": {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}}},
         {"messages": HI, "reasoning_effort": "max", "response_format": {
             "type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ],
)  # fmt: skip
def test_messages(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of(MESSAGES, {"messages": HI} | body)[0] == chat
    assert chat_of(COUNT_TOKENS, {"messages": HI} | body)[0] == chat


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": "hi"}, "messages: Expected"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type: 'image' is not supported: this server takes text only"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [
            result([text("a"), {"type": "image", "source": {}}])]}]},
         "messages[2].content[0].content[1].type: 'image' is not supported"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [text("a"), {"type": "document", "source": {
            "type": "base64", "media_type": "application/pdf", "data": "AA"}}]}]},
         "messages[0].content[1].type: 'document' is not supported"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]: a user message has no tool_use"),
        ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages: a tool_use block must be followed"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted"}, {"type": "text", "text": 5, "colour": 1}]}]},
         "messages[0].content[1].text: Expected"),
        ({"tools": [{"input_schema": {}}]}, "tools[0]: Object missing required field `name`"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}, {}]}, "tools[1]: Object missing"),
        ({"tools": [None]}, "tools[0]: Expected"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "name": "f"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": 5}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}, "colour": 1}}},
         "output_config.format: Object contains unknown field `colour`"),
        ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"stop_sequences": "a"}, "stop_sequences: Expected"),
    ],
)  # fmt: skip
def test_wrong_messages_are_named_by_place(body: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat_of(MESSAGES, {"messages": HI} | body)
    assert str(raised.value).startswith(place)
    assert raised.value.param == next(iter(body))


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


REASONING = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
FUNCTION_CALL = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
CALLED = CALL | {"function": {"name": "f", "arguments": '{"a":1}'}}
OUTPUT = {"type": "output_text", "text": "I see.", "annotations": [], "logprobs": []}


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"input": "hi", "instructions": "s"}, {"messages": [said("system", "s"), *HI]}),
        ({"input": "hi", "instructions": ""}, {"messages": HI}),
        ({"input": [*HI, FUNCTION_CALL | {"async_": None, "namespace": None},
                    {"type": "function_call_output", "call_id": "c1", "output": "r", "name": None}]},
         {"messages": [*HI, said("assistant", "", tool_calls=[CALLED]),
                       {"role": "tool", "tool_call_id": "c1", "content": "r"}]}),
        ({"tool_choice": "auto", "max_output_tokens": 4.0}, {"messages": HI, "max_tokens": 4}),
        ({"tool_choice": "auto", "tools": []}, {"messages": HI, "tools": []}),
        ({"input": [said("developer", "d"), said("user", [{"type": "input_text", "text": "hi"}], type="message")],
          "instructions": "s"}, {"messages": [said("system", "s\nd"), *HI]}),
        ({"input": [*HI, REASONING, said("assistant", [OUTPUT], type="message", id="m", status="completed"),
                    FUNCTION_CALL, {"type": "function_call_output", "call_id": "c1", "output": "r"}]},
         {"messages": [*HI, said("assistant", "I see.", reasoning_content="why", tool_calls=[CALLED]),
                       {"role": "tool", "tool_call_id": "c1", "content": "r"}]}),
        ({"input": [*HI, FUNCTION_CALL, FUNCTION_CALL | {"call_id": "c2"}]},
         {"messages": [*HI, said("assistant", "", tool_calls=[CALLED, CALLED | {"id": "c2"}])]}),
        ({"input": [said("assistant", "a"), said("assistant", "b"), REASONING]},
         {"messages": [said("assistant", "a"), said("assistant", "b"),
                       said("assistant", "", reasoning_content="why")]}),
        ({"tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": None}],
          "tool_choice": {"type": "function", "name": "f"}},
         {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
          "tool_choice": NAMED}),
        ({"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 5, "store": False},
         {"messages": HI, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 5}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
         {"messages": HI, "response_format": {
             "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
        ({"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}},
         {"messages": HI, "response_format": {"type": "text"}, "reasoning_effort": "low"}),
    ],
)  # fmt: skip
def test_responses(body: dict[str, Any], chat: dict[str, Any]) -> None:
    assert chat_of(RESPONSES, {"input": "hi"} | body)[0] == chat


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"input": 5}, "input: Expected"),
        ({"input": [said("user", [{"type": "input_image", "image_url": "x"}])]},
         "input[0].content[0].type: 'input_image' is not supported: this server takes text only"),
        ({"input": [*HI, {"type": "function_call", "name": "f"}]}, "input[1]: Object missing required field"),
        ({"input": [*HI, {"type": "compaction_trigger"}]}, "input[1].type: compaction_trigger is not supported"),
        ({"input": [*HI, FUNCTION_CALL, {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]}]},
         "input[2].output[1].type: 'input_image' is not supported: this server takes text only"),
        ({"input": [*HI, {"type": "computer_call_output", "call_id": "c1", "output": {"type": "computer_screenshot"}}]},
         "input[1].output.type: 'computer_screenshot'"),
        ({"tools": [{"name": "f"}]}, "tools[0] must be a tool with a type"),
        ({"tools": [{"type": "function"}]}, "tools[0]: Object missing required field `name`"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": 5}]}]},
         "tools[0].tools[0].name: Expected"),
        ({"tool_choice": "some"}, "tool_choice must be none, auto, required"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools must be a list"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_object", "colour": 1}}}, "text.format: Object contains unknown field"),
        ({"include": ["message.output_text.logprobs"]}, "include: message.output_text.logprobs is not supported"),
        ({"max_output_tokens": "5"}, "max_output_tokens: Expected"),
    ],
)  # fmt: skip
def test_wrong_responses_are_named_by_place(body: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat_of(RESPONSES, {"input": "hi"} | body)
    assert str(raised.value).startswith(place), raised.value
    assert raised.value.param == next(iter(body))


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS, RESPONSES])
def test_what_is_missing_is_named(path: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat_of(path, {"model": "m"})
    name = "input" if path == RESPONSES else "messages"
    assert str(raised.value) == f"{name} is required"
    assert (raised.value.param, raised.value.code) == (name, "missing_required_parameter")


def test_an_error_speaks_of_the_fields_of_its_api() -> None:
    for path, error, message in (
        (RESPONSES, InvalidRequest("the prompt has 3 tokens and max_tokens asks for 9 more", "max_tokens"),
         "the prompt has 3 tokens and max_output_tokens asks for 9 more"),
        (RESPONSES, InvalidRequest("messages must not be empty", "messages"), "input must not be empty"),
        (RESPONSES, InvalidRequest("reasoning_effort must be one of these", "reasoning_effort"),
         "reasoning must be one of these"),
        (MESSAGES, InvalidRequest("stop must not contain an empty string", "stop"),
         "stop_sequences must not contain an empty string"),
        (MESSAGES, InvalidRequest("max_tokens is required", "max_tokens"), "max_tokens is required"),
    ):  # fmt: skip
        assert dialect_of(path).error_body(error)["error"]["message"] == message


@pytest.mark.parametrize("depth", [100, 300, 450, 600, 900])
def test_deep_nesting_does_no_harm(depth: int) -> None:
    for nested in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b'"x"' + b"}" * depth):
        for path, body, is_shown in (
            (RESPONSES, b'{"input":[{"role":"user","content":%s}]}' % nested, True),
            (RESPONSES, b'{"input":[{"type":"new_output","call_id":"c","output":%s}]}' % nested, True),
            (MESSAGES, b'{"messages":[{"role":"user","content":[{"type":"text","text":"a","x":%s}]}]}' % nested, True),
            (MESSAGES, b'{"messages":[{"role":"user","content":[{"type":"new","content":%s}]}]}' % nested, True),
        ):
            try:
                dialect_of(path).to_chat(msgspec.json.decode(body, type=dict[str, msgspec.Raw]))
            except InvalidRequest:
                continue
            assert is_shown


def test_what_nothing_reads_is_named() -> None:
    shown = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result("r", is_error=True)]}]
    thinking = {"type": "disabled", "budget_tokens": 5}
    body = {"messages": [*HI, *shown], "thinking": thinking, "output_config": {"effort": "low"}}
    assert chat_of(MESSAGES, body)[1] == {
        "thinking.budget_tokens", "tool_result.is_error", "output_config.effort"
    }  # fmt: skip
    more = {"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]}
    assert chat_of(RESPONSES, {"input": "hi"} | more)[1] == {"reasoning.summary", "text.verbosity", "include"}
    assert chat_of("/v1/chat/completions", {"messages": HI, "tools": []}) == ({"messages": HI, "tools": []}, set())


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x", "stop"), 400, "invalid_request_error"),
        (ModelNotFound("x"), 404, "not_found_error"),
        (PdError("x", code="overloaded", status=503), 529, "overloaded_error"),
        (PdError("x", status=504), 504, "timeout_error"),
        (InvalidRequest("x", status=405), 405, "invalid_request_error"),
        (NodesDied("x"), 500, "api_error"),
    ],
)
def test_errors(error: PdError, status: int, kind: str) -> None:
    messages, responses = dialect_of(MESSAGES), dialect_of(RESPONSES)
    body = messages.error_body(error)
    assert (messages.status(error), body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["code"] == error.code, "routers read it"
    assert body["error"]["param"] == ("stop_sequences" if error.param else None)
    assert responses.error_body(error) == OPENAI.error_body(error)
    for dialect in (messages, responses):
        event = dialect.error_event(error)
        assert event.startswith(b"event: error\n")
        assert event.endswith(b"\n\n")
        assert dialect.is_whole(event)
        assert not dialect.is_whole(b"data: [DONE]\n\n")
    assert not messages.is_whole(b'data: {"text":"the last line is event: message_stop"}\n\n')
    assert not responses.is_whole(b'data: {"delta":"then comes event: response.completed"}\n\n')
    assert responses.is_whole(b'event: response.completed\ndata: {"type":"response.completed"}\n\n')
    assert responses.is_whole(b'event: response.completed\r\ndata: {"type":"response.completed"}\r\n\r\n')
    assert messages.is_whole(b'event: message_stop\r\ndata: {"type":"message_stop"}\r\n\r\n')
    assert OPENAI.is_whole(OPENAI.error_event(error))
