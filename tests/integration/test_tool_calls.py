"""OpenAI's own Python client against the tool model, by both orders: a call, its result, the final answer.

What the decode node answers alone is what P and D answer together.
"""

from __future__ import annotations

import json
import re
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import openai
import pydantic
import pytest
from transformers import AutoTokenizer

import pd_cluster
from pd_cluster.server.tools.known_formats import FORMATS
from tests.integration.system import Path, System, running_system
from tests.server.test_template_parser import written

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.server.tools.tool_format import ToolFormat

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
pytest.importorskip("llguidance")

TIMEOUT_S = 60.0
CUTS = (6, 50, 110, 160)  # tokens of an answer of text around calls: within the text, the first call, a later one
TOOL_MODEL = f"{pd_cluster.__path__[0]}/tool_model"
CITIES = ["Paris", "Oslo"]  # the second is none of the training
RESULT = "sunny, 21 degrees"


class get_weather(pydantic.BaseModel):
    """The name is the tool's."""

    city: str


class add(pydantic.BaseModel):
    a: int
    b: int


class Answer(pydantic.BaseModel):
    text: Literal["yes", "no"]


WEATHER, ADD = openai.pydantic_function_tool(get_weather), openai.pydantic_function_tool(add)
assert WEATHER["function"]["strict"]
FREE = [tool | {"function": tool["function"] | {"strict": False}} for tool in (WEATHER, ADD)]

# Streamed by one path and whole by the others; the rest is slow
WAYS = [
    pytest.param(path, stream, marks=[] if stream == (path is Path.P_FIRST) else [pytest.mark.slow])
    for path, stream in product(Path, (False, True))
]


def client_of(system: System, path: Path) -> openai.OpenAI:
    url = system.urls[system.mixed] if path is Path.MIXED else system.router_url
    headers = {} if path is Path.MIXED else {"x-pd-route": path.value}
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", default_headers=headers, timeout=TIMEOUT_S, max_retries=0
    )


@pytest.fixture(params=list(Path))
def client(request: pytest.FixtureRequest, tool_system: System) -> Iterator[Any]:
    with client_of(tool_system, request.param) as client:
        yield client


def ask(client: Any, text: str | list[Any], *, stream: bool = False, **more: Any) -> Any:
    """The completion, put together by the client's own helper if it is streamed."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    body = {"model": "tool_model", "messages": messages, "temperature": 0, "max_tokens": 80} | more
    if not stream:
        return client.chat.completions.create(**body)
    with client.chat.completions.stream(**body) as events:
        return events.get_final_completion()


def calls_of(completion: Any) -> list[tuple[str, dict[str, Any]]]:
    choice = completion.choices[0]
    assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None), choice
    calls = choice.message.tool_calls
    assert len({call.id for call in calls}) == len(calls)
    assert {call.type for call in calls} == {"function"}
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize(("client", "stream"), WAYS, indirect=["client"])
def test_a_call_its_result_and_the_answer(client: Any, stream: bool) -> None:
    for city in CITIES:
        messages: list[Any] = [{"role": "user", "content": f"What is the weather in {city}?"}]
        first = ask(client, messages, stream=stream, tools=[WEATHER, ADD])
        assert calls_of(first) == [("get_weather", {"city": city})]
        message = first.choices[0].message
        messages += [
            {"role": "assistant", "tool_calls": [call.model_dump() for call in message.tool_calls]},
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT},
        ]
        last = ask(client, messages, stream=stream, tools=[WEATHER, ADD]).choices[0]
        assert (last.finish_reason, last.message.tool_calls or None) == ("stop", None)
        assert last.message.content == f"The weather in {city} is {RESULT}."


def test_free_calls_are_those_of_the_model(client: Any) -> None:
    assert calls_of(ask(client, "Add 17 and 25.", tools=FREE)) == [("add", {"a": 17, "b": 25})]
    assert ask(client, "Hello", tools=FREE).choices[0].message.content == "I can tell the weather and add numbers."


def test_parse(client: Any) -> None:
    body = {"model": "tool_model", "temperature": 0, "max_tokens": 80, "tools": [WEATHER, ADD]}
    question = [{"role": "user", "content": "What is 4 plus 38?"}]
    parsed = client.chat.completions.parse(messages=question, response_format=Answer, **body)
    assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == add(a=4, b=38)
    with client.chat.completions.stream(messages=question, response_format=Answer, **body) as events:
        pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
        final = events.get_final_completion().choices[0].message.tool_calls[0].function
    assert len(pieces) > 1  # arguments come in pieces
    assert "".join(event.arguments_delta for event in pieces) == final.arguments
    assert final.parsed_arguments == add(a=4, b=38)
    said = client.chat.completions.parse(
        messages=[{"role": "user", "content": "Hello"}], response_format=Answer, tool_choice="none", **body
    )
    assert said.choices[0].message.parsed.text in ("yes", "no")


@pytest.mark.parametrize(("client", "stream"), WAYS, indirect=["client"])
def test_calls_that_must_be_made(client: Any, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for seed in range(2):
        drawn: dict[str, Any] = {"temperature": 1.5, "seed": seed, "tools": FREE, "stream": stream, "max_tokens": 400}
        ((name, arguments),) = calls_of(ask(client, "Hello", tool_choice=named, **drawn))
        assert name == "add"
        add.model_validate(arguments, strict=True)
        required = ask(client, "Hello", tool_choice="required", parallel_tool_calls=False, **drawn)
        ((name, arguments),) = calls_of(required)
        models: dict[str, type[pydantic.BaseModel]] = {"add": add, "get_weather": get_weather}
        models[name].model_validate(arguments, strict=True)
    two = ask(client, "What is the weather in Paris and Lima?", tools=FREE, tool_choice="required", stream=stream)
    assert [name for name, _ in calls_of(two)] == ["get_weather"] * 2
    one = ask(client, "What is the weather in Paris and Lima?", tools=FREE, parallel_tool_calls=False, stream=stream)
    assert len(calls_of(one)) == 1


@pytest.mark.parametrize(("client", "stream"), WAYS, indirect=["client"])
def test_reasoning(client: Any, stream: bool) -> None:
    """The template opens the reasoning; a call that must be made comes after it."""
    for more in (
        {"extra_body": {"enable_thinking": True}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "tool_choice": "required"},
        {"reasoning_effort": "low"},
    ):
        completion = ask(client, "What is the weather in Paris?", stream=stream, tools=[WEATHER], **more)
        assert calls_of(completion) == [("get_weather", {"city": "Paris"})]
        if not stream:  # the client's helper does not join fields that it does not know
            assert completion.choices[0].message.reasoning_content.strip() == "I need a tool."
            assert completion.usage.completion_tokens_details.reasoning_tokens > 3
    hidden = ask(
        client, "Hello", stream=stream, extra_body={"enable_thinking": True, "include_reasoning": False}
    ).choices[0]
    assert hidden.message.content == "I can tell the weather and add numbers."
    assert getattr(hidden.message, "reasoning_content", None) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glm45", "glm47", "minimax_m2", "kimi_k2"])
def test_calls_of_formats_that_the_model_has_not_learned(name: str) -> None:
    """The grammar makes it write them, alike by both orders, streamed and whole."""
    some: dict[str, Any] = {
        "a": {"enum": ["x", "y z"], "type": "string"},
        "b": {"type": "boolean"},
        "c": {"enum": [1, 23]},
    }
    some["c"]["type"] = "integer"
    parameters = {"type": "object", "properties": some, "required": list(some), "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(2)]
    found = set()
    with running_system("--model=tool_model", f"--tool-format={name}") as system:
        for path, stream, seed in product(Path, (False, True), range(2)):
            drawn: dict[str, Any] = {
                "temperature": 1.0,
                "seed": seed,
                "tools": tools,
                "stream": stream,
                "max_tokens": 400,
            }
            with client_of(system, path) as client:
                one = ask(client, "Hello", tool_choice="required", parallel_tool_calls=False, **drawn)
            ((called, given),) = calls_of(one)
            assert given["a"] in some["a"]["enum"]
            assert isinstance(given["b"], bool)
            assert given["c"] in some["c"]["enum"]
            found.add((seed, called, json.dumps(given)))
    assert len(found) == 2, "each seed has one answer"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2"])
def test_calls_with_texts_and_lists_of_tags(name: str) -> None:
    """Both orders and a single node, some streamed and some whole, draw the same calls."""
    texts, tags = ["two </x>\n words", "null", ""], ["</parameter>", "</arg_value></tool_call>"]
    some = {"t": {"enum": texts, "type": "string"}, "l": {"type": "array", "items": {"enum": tags}, "maxItems": 2}}
    parameters = {"type": "object", "properties": some, "required": ["t", "l"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "note", "parameters": parameters}}]
    found: dict[int, list[Any]] = {}
    with running_system("--model=tool_model", f"--tool-format={name}") as system:
        for path, seed in product(Path, range(6)):
            stream = (path is Path.P_FIRST) == bool(seed % 2)
            drawn: dict[str, Any] = {"temperature": 2.0, "seed": seed, "stream": stream, "max_tokens": 600}
            with client_of(system, path) as client:
                one = ask(client, "Hello", tools=tools, tool_choice="required", **drawn)
            if one.choices[0].finish_reason == "tool_calls":
                found.setdefault(seed, []).append(calls_of(one))
    assert all(calls == answers[0] for answers in found.values() for calls in answers), found
    assert all(len(answers) == len(Path) for answers in found.values()), found
    given = [arguments for answers in found.values() for _, arguments in answers[0]]
    assert all(one["t"] in texts and set(one["l"]) <= set(tags) for one in given)


def spelled(form: ToolFormat, text: str) -> dict[str, Any]:
    """Fields that hold an answer to this text, with the format's markers as the tool model's tokens if it has them.

    Where tools may be called the grammar allows calls in place of the text, so the text's beginning is made likely.
    """
    vocabulary = AutoTokenizer.from_pretrained(TOOL_MODEL).get_vocab()
    marks = [token for token in form.tokens if token in vocabulary]
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    grammar = "start: " + " ".join(one if one in marks else json.dumps(one) for one in pieces if one)
    likely = {str(number): 100 for token, number in vocabulary.items() if text.startswith(token)}
    return {"structured_outputs": {"grammar": grammar}, "logit_bias": likely}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["glm45", "glm47", "minimax_m2", "kimi_k2"])
def test_text_around_several_calls_and_their_cuts(name: str) -> None:
    """A grammar holds the answer to one text. Whole and cut anywhere, both orders and a single node tell it alike."""
    form = FORMATS[name]
    wanted = [("note", {"text": "a b"}), ("stop", {}), ("note", {"text": "é\n<x>", "list": [1, {"a": None}]})]
    given = {"type": "object", "properties": {"text": {"type": "string"}, "list": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": one, "parameters": given}} for one in ("note", "stop")]
    text = written(form, wanted, before="Let me see.") + " Done."
    found: dict[tuple[bool, int], list[Any]] = {}
    with running_system("--model=tool_model", f"--tool-format={name}") as system:
        for path, stream, most in product(Path, (False, True), (400, *CUTS)):
            body = spelled(form, text)
            with client_of(system, path) as client:
                try:
                    one = ask(client, "Hello", tools=tools, stream=stream, max_tokens=most, extra_body=body).choices[0]
                except openai.LengthFinishReasonError as cut_off:  # of the client's helper
                    one = cut_off.completion.choices[0]
            calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls or []]
            found.setdefault((stream, most), []).append((one.finish_reason, one.message.content, calls))
    assert all(answers == [answers[0]] * len(Path) for answers in found.values()), found
    for stream in (False, True):
        reason, content, calls = found[stream, 400][0]
        assert reason == "tool_calls"
        assert content.split() == ["Let", "me", "see.", "Done."]
        assert [(called, json.loads(told)) for called, told in calls] == wanted
    cut = [answers[0] for (_, most), answers in found.items() if most in CUTS]
    assert {reason for reason, _, _ in cut} == {"length"}
    counts = {len(calls) for _, _, calls in cut}
    assert 0 in counts
    assert counts & {1, 2}, "some cuts are between calls or within one"


def test_refusals(client: Any) -> None:
    for more, place in (
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [FREE[0] | {"function": FREE[0]["function"] | {"parameters": {"minProperties": "x"}}}],
          "tool_choice": "required"}, "tools: "),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as raised:
            ask(client, "Hello", **more)
        assert place in str(raised.value)
