"""What a chat request says about tools and reasoning: what is read of it, and a 400 that names the wrong place."""

from __future__ import annotations

from typing import Any

import pytest

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.reasoning_options import reasoning_options, unread_reasoning_fields
from pd_cluster.server.bodies.schema import ChatBody, JsonSchemaFormat, ResponseFormat
from pd_cluster.server.bodies.tool_use import ToolUse, inlined, leave_out_tools, tool_use
from pd_cluster.server.grammar.grammar_source import chat_grammar_source, check_format
from pd_cluster.server.text.normal_messages import normal_messages
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_cluster.server.tools.known_formats import FORMATS
from pd_http.dialect import OPENAI
from tests.server.live_server import MODEL_DIR

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def nested(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = [{"anyOf": schema}]
    return schema


def body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[], **fields)


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([{"name": "f"}], "tools[0].function "),
        ([{}], "tools[0].function "),
        ([tool(), {"type": "custom", "custom": {"name": "g"}}], "tools[1].type"),
        ([{"type": "function"}], "tools[0].function "),
        ([{"type": "function", "function": "f"}], "tools[0].function "),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([tool(7)], "tools[0].function.name"),
        ([tool("")], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool('a"')], "tools[0].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters "),
        ([tool(parameters="{}")], "tools[0].function.parameters "),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"properties": {"a": 1}})], "tools[0].function.parameters.properties"),
        ([tool(parameters={"required": "a"})], "tools[0].function.parameters.required"),
        ([tool(parameters={"$defs": [1]})], "tools[0].function.parameters.$defs"),
        ([tool(parameters={"definitions": 5})], "tools[0].function.parameters.definitions"),
        ([tool(parameters={"anyOf": nested(900)})], "tools[0].function.parameters is nested"),
        ([tool(f"f{i}") for i in range(OPENAI.tool_limits.tools + 1)], "tools has"),
    ],
)
def test_malformed_tools_are_named_by_place(tools: list[dict[str, Any]], place: str) -> None:
    for choice in (None, "auto", "none", "required"):
        with pytest.raises(InvalidRequest) as raised:
            tool_use(body(tools=tools, tool_choice=choice))
        assert raised.value.param == "tools"
        assert str(raised.value).startswith(place)


@pytest.mark.parametrize(
    "choice",
    [
        "f", {}, {"type": "tool"}, {"type": "function", "name": None}, {"type": "web_search"}, {"type": ["auto"]},
        {"type": "allowed_tools"}, {"type": "function"}, {"type": "function", "function": "f"},
        {"type": "function", "function": {"name": 1}}, {"type": "function", "function": {"name": "other"}},
    ],
)  # fmt: skip
def test_malformed_choices(choice: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tool_use(body(tools=[tool()], tool_choice=choice))
    assert raised.value.param == "tool_choice"


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_choice_needs_tools(choice: Any, tools: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice needs tools"):
        tool_use(body(tools=tools, tool_choice=choice))


def test_choices() -> None:
    tools = [tool("f", parameters=SCHEMA), tool("g.h", strict=True, parameters=None)]

    def read(choice: Any, parallel: bool | None = None) -> tuple[list[str], bool, bool]:
        use = tool_use(body(tools=tools, tool_choice=choice, parallel_tool_calls=parallel))
        assert use.shown is (tools if use.functions else None)
        return [function.name for function in use.functions], use.required, use.parallel

    assert read(None) == read("auto") == (["f", "g.h"], False, True)
    assert read("required", False) == (["f", "g.h"], True, False)
    assert read({"type": "function", "function": {"name": "f"}}) == (["f"], True, False)
    assert read("none") == ([], False, True)
    # in the forms of other APIs
    for auto in (
        {"type": "auto"},
        allowed("auto", tool("f"), tool("g.h"))["allowed_tools"] | {"type": "allowed_tools"},
    ):
        assert read(auto) == (["f", "g.h"], False, True)
    for required in ("any", {"type": "any"}, {"type": "required"}):
        assert read(required) == (["f", "g.h"], True, True)
    for named in ({"type": "function", "name": "f"}, {"type": "tool", "name": "f"}, {"function": {"name": "f"}}):
        assert read(named) == (["f"], True, False)
    assert read({"type": "auto", "disable_parallel_tool_use": True}) == (["f", "g.h"], False, False)
    assert read({"type": "none"}) == ([], False, True)
    assert tool_use(body()) == tool_use(body(tools=[], tool_choice="none")) == ToolUse()
    f, g = tool_use(body(tools=tools)).functions
    assert (f.parameters, f.strict) == (SCHEMA, False)
    assert (g.parameters, g.strict) == ({"type": "object"}, True)


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


def test_tools_that_are_allowed() -> None:
    tools = [tool("f"), tool("g"), tool("h")]

    def read(choice: Any) -> tuple[list[str], bool, bool, bool]:
        use = tool_use(body(tools=tools, tool_choice=choice))
        assert use.shown in (tools, None)
        return [function.name for function in use.functions], use.required, use.parallel, use.is_constrained

    assert read(allowed("auto", tool("h"), tool("f"))) == (["f", "h"], False, True, True)
    assert read(allowed("required", tool("g"))) == (["g"], True, True, True)
    hosted = {"type": "custom", "custom": {"name": "c"}}
    assert read(allowed("auto", tool("g"), hosted)) == (["g"], False, True, True)
    assert read(allowed("auto", hosted)) == ([], False, True, False)
    assert tool_use(body(tools=tools, tool_choice=allowed("auto", hosted))).shown is tools, "the prompt stays the same"
    for wrong in (
        allowed("any", tool("g")), allowed("auto", 5), allowed("auto", tool("other")), allowed("required"),
        allowed("required", hosted), {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}},
        {"type": "allowed_tools"}, allowed("auto", {"type": "function"}),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as raised:
            read(wrong)
        assert raised.value.param == "tool_choice"


def test_tools_that_are_no_functions_are_left_out() -> None:
    hosted = [{"type": "custom", "custom": {"name": "c"}}, {"type": "web_search"}, {"type": "web_search"}]
    one = body(tools=[hosted[0], tool("f"), *hosted[1:]], tool_choice="auto")
    assert leave_out_tools(one) == {"tools.custom", "tools.web_search"}
    assert [function.name for function in tool_use(one).functions] == ["f"]
    bare = body(tools=[{"google_search": {}}, {"function": {"name": "f"}}, {"type": None, "code_execution": {}}])
    assert leave_out_tools(bare) == {"tools.google_search", "tools.type"}
    assert [function.name for function in tool_use(bare).functions] == ["f"]
    alone = body(tools=hosted, tool_choice="auto")
    leave_out_tools(alone)
    assert tool_use(alone) == tool_use(body(tool_choice="auto")) == ToolUse()
    required = body(tools=hosted, tool_choice="required")
    leave_out_tools(required)
    with pytest.raises(InvalidRequest, match="tool_choice needs tools that this server serves"):
        tool_use(required)
    whole = body(tools=[tool(), {"function": {}}, {"type": 5}])
    assert leave_out_tools(whole) == leave_out_tools(body()) == set()
    assert whole.tools is not None
    assert len(whole.tools) == 3, "errors name their places"


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": None, "properties": None, "required": None, "$defs": None, "additionalProperties": None},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object"},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": True}},
        {"type": ["object", "null"]}, {"title": "T"}, None, {},
    ],
)  # fmt: skip
def test_schemas_as_clients_write_them(parameters: Any) -> None:
    (function,) = tool_use(body(tools=[tool(parameters=parameters, description=None, strict=None)])).functions
    assert function.parameters["type"] == "object"
    assert None not in function.parameters.values()


LOOSE: dict[str, Any] = {"type": "OBJECT", "description": None, "required": ["a", None], "properties": {
    "a": None, "b": "string", "c": {"type": "ARRAY", "items": {"type": "Object", "properties": {"d": "NUMBER"}}},
    "e": {"anyOf": [{"type": ["STRING", "null"]}, {"enum": None, "default": None}]}, "f": True}}  # fmt: skip
MEANT = {"type": "object", "required": ["a"], "properties": {
    "a": {}, "b": {"type": "string"}, "c": {"type": "array", "items": {
        "type": "object", "properties": {"d": {"type": "number"}}}},
    "e": {"anyOf": [{"type": ["string", "null"]}, {"default": None}]}, "f": True}}  # fmt: skip


@pytest.mark.anyio
async def test_schemas_that_are_not_strict_are_read_as_they_are_meant(tokenizer: Tokenizer) -> None:
    one = body(tools=[tool(parameters=LOOSE)], tool_choice="required")
    (function,) = tool_use(one).functions
    assert function.parameters["required"] == ["a"]
    assert function.parameters["properties"].keys() == LOOSE["properties"].keys()
    assert function.parameters["properties"]["c"]["type"] == "array", "a parser of XML reads it"
    source = await chat_grammar_source(one, tool_use(one), FORMATS["hermes"], tokenizer, {})
    assert source is not None
    assert source.message is not None
    assert source.message.functions == (("f", MEANT),)
    with pytest.raises(InvalidRequest, match=r"parameters\.properties"):
        tool_use(body(tools=[tool(parameters=LOOSE, strict=True)]))


def test_definitions_are_inlined_once() -> None:
    root = {"$defs": {"p": {"type": "object", "properties": {"q": {"$ref": "#/$defs/p"}}}}}
    assert inlined({"$ref": "#/$defs/p"}, root) == root["$defs"]["p"]
    assert inlined({"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}], "x": 1}, root) == {
        "anyOf": [root["$defs"]["p"], {"type": "null"}],
        "x": 1,
    }
    assert inlined({"$ref": "#/$defs/missing"}, root) == {}
    assert inlined(True, root) is True


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR.with_name("tool_model"))


@pytest.mark.anyio
async def test_the_form_of_an_answer(tokenizer: Tokenizer) -> None:
    free, strict = [tool("f", parameters=SCHEMA)], [tool("f", parameters=SCHEMA), tool("g", strict=True)]
    wanted = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=SCHEMA))

    async def form(options: dict[str, Any] | None = None, name: str = "hermes", **fields: Any) -> Any:
        one = body(**fields)
        return await chat_grammar_source(one, tool_use(one), FORMATS[name], tokenizer, options or {})

    assert await form() is None
    assert await form(tools=free) is None
    assert await form(tools=strict, tool_choice="none") is None
    required = await form(tools=free, tool_choice="required")
    assert (required.kind, required.param) == ("", "tools")
    assert required.message.functions == (("f", SCHEMA),)
    assert (required.message.required, required.message.thinking) == (True, "no")
    assert (await form(tools=strict)).message.strict == ("g",)
    auto = await form({"enable_thinking": True}, tools=strict, parallel_tool_calls=False)
    assert auto.message.functions == (("f", {"type": "object"}), ("g", {"type": "object"}))
    assert (auto.message.required, auto.message.parallel, auto.message.thinking) == (False, False, "open")
    both = await form(tools=free, response_format=wanted)
    assert (both.kind, both.value, both.param) == ("json", SCHEMA, "response_format")
    assert both.message.functions == (("f", {"type": "object"}),)
    assert (await form(tools=free, tool_choice="required", response_format=wanted)).kind == ""
    assert (await form(response_format=wanted)).message is None
    assert (await form({"enable_thinking": True}, response_format=wanted)).message.thinking == "open"
    assert (await form(response_format=wanted, name="llama3_json")).message is None
    assert (await form({"continue_final_message": True}, response_format=wanted)).message is None


@pytest.mark.anyio
async def test_whether_an_answer_may_begin_with_reasoning() -> None:
    tokenizer = Tokenizer.load(MODEL_DIR.with_name("tool_model"))
    one = body(response_format=ResponseFormat(type="json_object"))

    async def thinking(behind: str) -> str:
        template = "{{ messages[0].content }}{% if add_generation_prompt %}BEHIND{% endif %}"
        tokenizer._tokenizer.chat_template = template.replace("BEHIND", behind)
        source = await chat_grammar_source(one, ToolUse(), FORMATS["hermes"], tokenizer, {})
        assert source is not None
        return "no" if source.message is None else source.message.thinking

    assert await thinking("assistant:") == "may"
    assert await thinking("<think>") == "open"
    assert await thinking("<think></think>") == await thinking("</think>") == "no"
    assert await thinking("{% if thinking %}<think>{% endif %}") == "no"
    assert await thinking("{{ raise_exception('no') }}") == "may"  # the tokenizer has the marker


def test_reasoning_fields() -> None:
    on, off = ({"enable_thinking": value, "thinking": value} for value in (True, False))
    assert reasoning_options(body()) == {}
    assert reasoning_options(body(enable_thinking=True)) == on
    assert reasoning_options(body(reasoning_effort="none")) == off | {"reasoning_effort": "none"}
    for most in ("xhigh", "max", "ultra"):
        assert reasoning_options(body(reasoning_effort=most)) == on | {"reasoning_effort": "xhigh"}
    assert reasoning_options(body(reasoning_effort="low", enable_thinking=True)) == on | {"reasoning_effort": "low"}
    for fields in ({"reasoning_effort": "much"}, {"reasoning_effort": "none", "enable_thinking": True}):
        with pytest.raises(InvalidRequest):
            reasoning_options(body(**fields))
    asked = body(reasoning_effort="low", enable_thinking=True)
    assert unread_reasoning_fields(asked, ["{{ messages }} rethinking"]) == {"reasoning_effort", "enable_thinking"}
    for known in ("{% if enable_thinking %}", "{{ reasoning_effort }}", "{% if thinking is defined %}"):
        assert unread_reasoning_fields(asked, ["{{ messages }}", known]) == set()
    assert unread_reasoning_fields(body(), ()) == set()


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls[0] must"),
        ({"role": "assistant", "tool_calls": "f"}, "messages[0].tool_calls must"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0] must"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0] must"),
        ({"role": "assistant", "function_call": {"name": 1}}, "messages[0].tool_calls[0].function.name"),
        *(
            ({"role": role, "tool_call_id": "a", "content": [part]}, f"messages[0].content[0].type: '{kind}' ")
            for role in ("system", "user", "assistant", "tool")
            for kind in ("image_url", "input_image", "input_audio", "file", "video_url")
            for part in ({"type": kind, kind: {"url": "data:"}},)
        ),
        ({"role": "user", "content": "x", "images": ["aGk="]}, "messages[0].images.type: 'image' is not supported"),
        ({"role": "user", "content": ["x", 5]}, "messages[0].content[1] must be a string or"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text must"),
        ({"role": "user", "content": None}, "messages[0].content is required"),
        ({"role": "system"}, "messages[0].content is required"),
        ({"role": "user", "content": {"a": 1}}, "messages[0].content must"),
    ],
)
def test_malformed_messages(message: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        normal_messages([message])
    assert str(raised.value).startswith(place)


def test_the_older_form_of_a_call_and_its_result() -> None:
    called, result = normal_messages(
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
            {"role": "function", "name": "f", "content": "2"},
        ]
    )
    assert called["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert (result["role"], result["content"]) == ("tool", "2")


def test_tools_without_a_format_need_a_parser_and_no_grammar() -> None:
    use = tool_use(body(tools=[tool()]))
    check_format(use, None, has_parser=True)
    for refused, has_parser in ((use, False), (tool_use(body(tools=[tool()], tool_choice="required")), True)):
        with pytest.raises(InvalidRequest, match="--tool-format"):
            check_format(refused, None, has_parser=has_parser)
