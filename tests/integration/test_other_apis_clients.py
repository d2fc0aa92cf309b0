"""Anthropic's Python client, and OpenAI's for responses, against the tool model: by both orders, and one node alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import anthropic
import openai
import pydantic
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types.responses import response_create_params

from pd_cluster.server.bodies.fields import ELSEWHERE, HARMLESS, REFUSED
from pd_cluster.server.bodies.schema import ChatBody
from pd_http.dialects import MESSAGES, RESPONSES
from pd_http.messages_dialect import MessagesFields
from pd_http.responses_dialect import ResponsesFields
from tests.integration.system import Path, System

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
pytest.importorskip("llguidance")

TIMEOUT_S = 60.0
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
ADD = {"name": "add", "description": "A sum.", "input_schema": NUMBERS}
FUNCTIONS = [
    {"type": "function", "name": one["name"], "parameters": one["input_schema"], "strict": False}
    for one in (WEATHER, ADD)
]
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
RESULT = "sunny, 21 degrees"
THOUGHT = "I need a tool."
GREETING = "I can tell the weather and add numbers."


class Answer(pydantic.BaseModel):
    text: Literal["yes", "no"]


@pytest.fixture(params=list(Path))
def place(request: pytest.FixtureRequest, tool_system: System) -> tuple[str, dict[str, Any]]:
    path = request.param
    url = tool_system.urls[tool_system.mixed] if path is Path.MIXED else tool_system.router_url
    headers = {} if path is Path.MIXED else {"x-pd-route": path.value}
    return url, {"api_key": "none", "default_headers": headers, "timeout": TIMEOUT_S, "max_retries": 0}


@pytest.fixture
def claude(place: tuple[str, dict[str, Any]]) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=place[0], **place[1]) as client:
        yield client


@pytest.fixture
def responses(place: tuple[str, dict[str, Any]]) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{place[0]}/v1", **place[1]) as client:
        yield client.responses


def message(client: Any, text: str | list[Any], *, stream: bool, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    body = {"model": "tool_model", "max_tokens": 80, "messages": messages, "extra_body": {"temperature": 0}} | more
    if not stream:
        return client.messages.create(**body)
    with client.messages.stream(**body) as events:
        return events.get_final_message()


def response(client: Any, text: str | list[Any], *, stream: bool, **more: Any) -> Any:
    body = {"model": "tool_model", "max_output_tokens": 80, "input": text, "temperature": 0} | more
    if not stream:
        return client.create(**body)
    with client.stream(**body) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_messages_its_result_and_the_answer(claude: Any, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?"}]}]
    more: dict[str, Any] = {"tools": [WEATHER, ADD], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    first = message(claude, asked, stream=stream, **more)
    thinking, use = first.content
    assert (thinking.type, thinking.thinking.strip()) == ("thinking", THOUGHT)
    assert (first.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "get_weather")
    assert use.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    asked += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = message(claude, asked, stream=stream, tools=[WEATHER, ADD], thinking={"type": "disabled"})
    assert [(block.type, block.text) for block in last.content] == [("text", f"The weather in Oslo is {RESULT}.")]
    assert (last.stop_reason, last.usage.output_tokens > 5) == ("end_turn", True)
    usage = last.usage
    counted = claude.messages.count_tokens(model="tool_model", messages=asked, tools=[WEATHER, ADD])
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_what_messages_asks_for(claude: Any, stream: bool) -> None:
    forced = message(claude, "Hello", stream=stream, tools=[ADD, WEATHER], tool_choice={"type": "tool", "name": "add"})
    assert (forced.stop_reason, [block.name for block in forced.content]) == ("tool_use", ["add"])
    free = message(claude, "Hello", stream=stream, tools=[ADD], tool_choice={"type": "none"}, stop_sequences=["add"])
    assert (free.stop_reason, free.stop_sequence, free.content[0].text) == (
        "stop_sequence", "add", GREETING.partition("add")[0]
    )  # fmt: skip
    form = {"format": {"type": "json_schema", "schema": Answer.model_json_schema() | {"additionalProperties": False}}}
    said = message(claude, "Hello", stream=stream, output_config=form)
    Answer.model_validate_json(said.content[0].text)
    short = message(claude, "Hello", stream=stream, max_tokens=2)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
    assert message(claude, "Hello", stream=stream, system="Be brief.").usage.output_tokens > 0


def test_errors_of_messages(claude: Any) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://example.org/x.png"}}
    for body, error, text in (
        ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError, "'image' is not supported"),
        ({"model": "other"}, anthropic.NotFoundError, "other"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, anthropic.BadRequestError, "web_search"),
        ({"extra_body": {"n": 2}}, anthropic.BadRequestError, "n is not supported"),
    ):
        with pytest.raises(error) as raised:
            message(claude, "Hello", stream=False, **body)
        assert (raised.value.body["type"], text in str(raised.value)) == ("error", True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_responses_its_result_and_the_answer(responses: Any, stream: bool) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = response(responses, asked, stream=stream, tools=FUNCTIONS, reasoning={"effort": "low"}, store=False)
    reasoning, call = first.output
    assert (reasoning.type, reasoning.content[0].text.strip()) == ("reasoning", THOUGHT)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    assert first.usage.output_tokens_details.reasoning_tokens > 3
    asked += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    last = response(responses, asked, stream=stream, tools=FUNCTIONS)
    assert (last.status, last.output_text) == ("completed", f"The weather in Oslo is {RESULT}.")


def test_what_responses_asks_for(responses: Any) -> None:
    body: dict[str, Any] = {"model": "tool_model", "input": "Hello", "temperature": 0, "max_output_tokens": 80}
    parsed = responses.parse(text_format=Answer, **body)
    assert parsed.output_parsed.text in ("yes", "no")
    with responses.stream(text_format=Answer, **body) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert Answer.model_validate_json("".join(deltas)) == events.get_final_response().output_parsed
    forced = responses.create(tools=FUNCTIONS, tool_choice={"type": "function", "name": "add"}, **body)
    assert [item.name for item in forced.output] == ["add"]
    short = responses.create(**body | {"max_output_tokens": 2})
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    for more, text in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "web_search"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ):
        with pytest.raises(openai.BadRequestError, match=text.replace("[", "\\[")):
            responses.create(**body | more)


def test_what_is_left_out_and_what_comes_back(claude: Any, responses: Any) -> None:
    raw = claude.messages.with_raw_response
    body: dict[str, Any] = {"model": "tool_model", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    label = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.0; cch=1;"}
    answer = raw.create(system=[label], tools=[SEARCH, ADD | {"input_examples": [{}]}], **body)
    assert answer.headers["x-pd-ignored"] == (
        "system.x-anthropic-billing-header,tools.web_search_20250305,tools[].input_examples"
    )
    tools: list[Any] = [{"type": "custom", "name": "note"}, {"type": "web_search"},
                        {"type": "namespace", "name": "math", "description": "", "tools": [FUNCTIONS[0]]}]  # fmt: skip
    asked: dict[str, Any] = {"model": "tool_model", "input": "Hello", "temperature": 0, "max_output_tokens": 80}
    whole = responses.with_raw_response.create(tools=tools, store=True, **asked)
    assert whole.headers["x-pd-ignored"] == "store,tools.web_search"
    named = {"type": "function", "name": FUNCTIONS[0]["name"]}
    (call,) = responses.create(tools=tools, tool_choice=named, **asked).output
    assert (call.type, call.name, call.namespace) == ("function_call", FUNCTIONS[0]["name"], "math")
    history = [{"role": "user", "content": "Hello"}, call, {"type": "function_call_output", "call_id": call.call_id,
               "output": "5"}]  # fmt: skip
    assert responses.create(tools=tools, **asked | {"input": history}).status in ("completed", "incomplete")


def test_every_field_of_the_clients_is_known() -> None:
    """Read, refused by name, or harmless."""
    known = REFUSED.keys() | HARMLESS.keys() | set(ChatBody.__struct_fields__)
    create, count = message_create_params, message_count_tokens_params
    kinds = create.MessageCreateParamsBase, create.MessageCreateParamsStreaming, count.MessageCountTokensParams
    asked = {name for kind in kinds for name in kind.__annotations__}
    assert asked - known - set(MessagesFields.__struct_fields__) - ELSEWHERE[MESSAGES].keys() == set()
    asked = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert asked - known - set(ResponsesFields.__struct_fields__) - ELSEWHERE[RESPONSES].keys() == set()
