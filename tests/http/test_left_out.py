"""What no answer depends on is left out and named; what can be shown is shown; what is required and absent is a 400."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from pd_connectors.protocol.text_chain import chain_key
from pd_http.client_labels import is_label_of_system
from pd_http.dialect import MANY_TOOLS, CallForm, ChatRequest
from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES, dialect_of
from pd_http.errors import InvalidRequest
from pd_http.left_out import KINDS, LeftOut
from pd_http.readable import text_of, text_of_block, texts_of
from pd_http.responses_tools import text_of_input
from pd_router.body import RequestBody

HI = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
LABEL = "x-anthropic-billing-header: cc_version=2.1.197.00a; cc_entrypoint=sdk-cli; cch=%s;"


def asked(path: str, body: dict[str, Any]) -> ChatRequest:
    return dialect_of(path).to_chat(msgspec.json.decode(orjson.dumps(body), type=dict[str, msgspec.Raw]))


def field(request: ChatRequest, name: str) -> Any:
    return orjson.loads(bytes(request.fields[name]))


def call(name: str, arguments: Any, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": [*calls]} if calls else {})


def result(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


FOUND = [{"type": "web_search_result", "title": "Sea", "url": "u", "encrypted_content": "AA"}]
SEARCH = {"type": "server_tool_use", "id": "c1", "name": "web_search", "input": {"q": 1}}
SHOWN_BLOCKS: list[tuple[str, list[Any], list[Any], dict[str, str]]] = [
    # role, blocks, messages, left out
    ("assistant", [{"type": "redacted_thinking", "data": "AA"}, text("I")], [said("I")],
     {"messages.redacted_thinking": "block"}),
    ("user", [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The sea."}},
              text("What?")], [{"role": "user", "content": "The sea.\nWhat?"}], {}),
    ("user", [{"type": "document", "title": "T", "source": {"type": "content", "content": [text("a"), text("b")]}}],
     [{"role": "user", "content": '{"type":"document","title":"T"}\na\nb'}], {}),
    ("user", [{"type": "search_result", "source": "u", "title": "T", "content": [text("a")]}],
     [{"role": "user", "content": '{"type":"search_result","source":"u","title":"T"}\na'}], {}),
    ("user", [{"type": "document", "context": "C", "source": {"type": "text", "data": "D"}, "citations": {"a": 1}}],
     [{"role": "user", "content": '{"type":"document","context":"C"}\nD'}], {}),
    ("user", [{"type": "new", "markdown": "MD"}], [{"role": "user", "content": '{"type":"new","markdown":"MD"}'}], {}),
    ("user", [{"type": "container_upload", "file_id": "f"}, text("a")], [{"role": "user", "content": "a"}],
     {"messages.container_upload": "block"}),
    ("assistant", [text("I "), SEARCH, {"type": "web_search_tool_result", "tool_use_id": "c1", "content": FOUND},
                   text("see.")],
     [said("I ", call("web_search", {"q": 1})), result('{"type":"web_search_result","title":"Sea","url":"u"}'),
      said("see.")], {}),
    # a call without its result, and a result without its call
    ("assistant", [text("I"), SEARCH], [said("I")], {"messages.server_tool_use": "block"}),
    ("assistant", [{"type": "mcp_tool_result", "tool_use_id": "gone", "content": [text("r")]}], [said("r")], {}),
    # tomorrow's types are told by their members
    ("assistant", [{"type": "new_use", "id": "c1", "name": "n", "input": [1]},
                   {"type": "new_result", "tool_use_id": "c1", "content": {"stdout": "o", "code": 0}}, text("I")],
     [said("", call("n", [1])), result('{"stdout":"o","code":0}'), said("I")], {}),
    ("user", [{"type": "new", "x": {"y": 1}}, text("a")], [{"role": "user", "content": "a"}],
     {"messages.new": "block"}),
    ("user", [{"type": "text", "text": "a", "colour": 1, "shade": None}], [{"role": "user", "content": "a"}],
     {"messages.text.colour": "member"}),
    ("system", [text("s"), {"type": "tool_addition", "tool": {"name": "f"}}], [{"role": "system", "content": "s"}],
     {"messages.tool_addition": "block"}),
]  # fmt: skip


@pytest.mark.parametrize(("role", "blocks", "messages", "left_out"), SHOWN_BLOCKS)
def test_blocks(role: str, blocks: list[Any], messages: list[Any], left_out: dict[str, str]) -> None:
    before = [HI] if role == "assistant" else [HI, said("so")]
    for path in (MESSAGES, COUNT_TOKENS):
        behind = [HI] if role == "assistant" else [said("so"), HI]
        request = asked(path, {"messages": [*before, {"role": role, "content": blocks}, *behind]})
        assert field(request, "messages") == [*before, *messages, *behind]
        assert dict(request.left_out) == left_out


def test_a_result_of_references_is_text() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "find", "input": "cut {"}
    found = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": "add"},
             {"type": "redacted", "encrypted_data": "AA"}, {"type": "search_result", "source": "u"}]}  # fmt: skip
    request = asked(
        MESSAGES, {"messages": [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]}
    )
    assert field(request, "messages")[1:] == [
        said("", call("find", "cut {")),
        result('{"type":"tool_reference","tool_name":"add"}\nu'),
    ]
    assert dict(request.left_out) == {"messages.redacted": "block"}


CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
ITEMS: list[tuple[list[Any], list[Any], dict[str, str]]] = [
    # input, messages, left out
    ([{"type": "reasoning", "summary": [], "encrypted_content": "AA"}], [],
     {"input.reasoning.encrypted_content": "member"}),
    ([{"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "q"}}], [],
     {"input.web_search_call": "item"}),
    ([{"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "p"},
      {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}],
     [said("", call("patch", {"input": "p"})), result("done")], {}),
    ([{"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
      {"type": "local_shell_call_output", "id": "c1", "output": "a b"}],
     [said("", call("local_shell", {"action": {"type": "exec", "command": ["ls"]}})), result("a b")], {}),
    ([{"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
      {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a", "stderr": "", "outcome": {
          "type": "exit", "exit_code": 0}}]}],
     [said("", call("shell", {"action": {"commands": ["ls"]}})),
      result('{"stdout":"a","stderr":"","outcome":{"type":"exit","exit_code":0}}')], {}),
    ([{"type": "mcp_call", "id": "m1", "name": "find", "server_label": "s", "arguments": "{}", "output": "o"}],
     [said("", call("find", "{}", "m1")), result("o", "m1")], {}),
    ([{"type": "code_interpreter_call", "id": "i1", "code": "1", "container_id": "c",
       "outputs": [{"type": "logs", "logs": "1"}]}],
     [said("", call("code_interpreter", {"code": "1", "container_id": "c"}, "i1")),
      result('{"type":"logs","logs":"1"}', "i1")], {}),
    ([{"type": "image_generation_call", "id": "g", "result": None}, {"type": "mcp_list_tools", "tools": [{}]},
      {"type": "compaction", "encrypted_content": "AA"}, {"type": "new", "x": 1}], [],
     dict.fromkeys(("input.image_generation_call", "input.mcp_list_tools", "input.compaction", "input.new"), "item")),
    ([{"type": "item_reference", "id": "x"}, {"id": "msg_1"}], [], {"input.item_reference": "item"}),
    # a call without its result, and a result without its call
    ([{"type": "shell_call", "call_id": "c1", "action": {}}], [], {"input.shell_call": "item"}),
    ([{"type": "new_output", "call_id": "c1", "output": "o"}], [said("", call("new", {})), result("o")], {}),
    ([{"type": "function_call_output", "name": "f", "namespace": "n", "output": "o"}],
     [said("", call("n__f", {}, "call_input[1]")), result("o", "call_input[1]")], {}),
    ([CALLED | {"namespace": "n", "arguments": ["cut"], "extra": 1, "shade": None},
      {"type": "function_call_output", "call_id": "c1", "output": [text("a"), {"type": "new", "b": "c"}]}],
     [said("", call("n__f", ["cut"])), result('a\n{"type":"new","b":"c"}')], {"input.function_call.extra": "member"}),
    ([{"role": "assistant", "content": None}, {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}],
     [said(""), {"role": "user", "content": "a"}], {"input.message.content[].x": "member"}),
]  # fmt: skip


@pytest.mark.parametrize(("items", "messages", "left_out"), ITEMS)
def test_items(items: list[Any], messages: list[Any], left_out: dict[str, str]) -> None:
    request = asked(RESPONSES, {"input": [HI, *items]})
    assert field(request, "messages") == [HI, *messages]
    assert dict(request.left_out) == left_out


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA} | more


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
TOOLS: list[dict[str, Any]] = [
    function("run", description="", strict=False, output_schema={}, defer_loading=True),
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": GRAMMAR},
    {"type": "namespace", "name": "mcp__s", "description": "Of s.", "tools": [
        function("a", description="A."), function("_b"), {"type": "custom", "name": "c"}, {"type": "hosted"}]},
    function("of_programs", allowed_callers=["programmatic"]), {"type": "local_shell"}, {"type": "new", "name": "n"},
]  # fmt: skip
NAMES = ["run", "patch", "mcp__s__a", "mcp__s_b", "mcp__s__c"]


def test_tools_of_responses() -> None:
    request = asked(RESPONSES, {"input": "hi", "tools": TOOLS, "tool_choice": "auto"})
    functions = [tool["function"] for tool in field(request, "tools")]
    assert [one["name"] for one in functions] == NAMES
    assert functions[0] == {"name": "run", "description": "", "parameters": SCHEMA, "strict": False}
    assert functions[1]["description"] == "Edits.\n\nThe input follows this lark grammar:\nstart: /.+/"
    assert functions[1]["parameters"]["required"] == ["input"]
    assert functions[2]["description"] == "Of s.\n\nA."
    assert "description" not in functions[3]
    assert dict(request.calls) == {
        "run": CallForm("run"), "patch": CallForm("patch", is_custom=True), "mcp__s__a": CallForm("a", "mcp__s"),
        "mcp__s_b": CallForm("_b", "mcp__s"), "mcp__s__c": CallForm("c", "mcp__s", is_custom=True),
    }  # fmt: skip
    assert dict(request.left_out) == {
        "tools[].output_schema": "member", "tools[].defer_loading": "member", "tools.custom.format": "member",
        **{f"tools.{kind}": "tool" for kind in ("web_search", "hosted", "local_shell", "new")},
        "tools[].allowed_callers": "tool",
    }  # fmt: skip


def test_tools_that_items_bring() -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [function("run"), {"type": "web_search"},
               {"type": "namespace", "name": "functions", "tools": [{"type": "custom", "name": "exec"}]}]}  # fmt: skip
    found = [{"type": "tool_search_call", "call_id": "c1", "execution": "client", "arguments": {"query": "q"}},
             {"type": "tool_search_output", "call_id": "c1", "tools": [function("g", defer_loading=True)]}]  # fmt: skip
    request = asked(RESPONSES, {"input": [brought, HI, *found], "tools": [function("run", strict=True)]})
    assert [tool["function"]["name"] for tool in field(request, "tools")] == ["run", "exec", "g"]
    assert field(request, "messages")[1:] == [said("", call("tool_search", {"query": "q"})), result("g")]
    assert set(request.left_out) == {"tools.web_search", "tools[].defer_loading"}
    assert request.calls["exec"] == CallForm("exec", "functions", is_custom=True)


def of_function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [*tools]}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ({"type": "function", "name": "run"}, of_function("run")),
        ({"type": "custom", "name": "patch"}, of_function("patch")),
        ({"type": "function", "name": "mcp__s__a"}, of_function("mcp__s__a")),
        ({"type": "function", "name": "a", "namespace": "mcp__s"}, of_function("mcp__s__a")),
        ({"type": "function", "name": "_b"}, of_function("mcp__s_b")),
        ("required", "required"),
        (allowed("auto", {"type": "function", "name": "run"}, {"type": "web_search"}),
         {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [of_function("run")]}}),
        (allowed("required", {"type": "namespace", "name": "mcp__s"}),
         {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [*map(of_function, NAMES[2:])]}}),
        (allowed("auto", {"type": "web_search"}),
         {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ({"type": "function", "function": {"name": "run"}}, of_function("run")),
        ({"type": "tool", "name": "run"}, of_function("run")),
        ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ("any", "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [of_function("run")]}},
         {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [of_function("run")]}}),
    ],
)  # fmt: skip
def test_choices_of_responses(given: Any, choice: Any) -> None:
    assert field(asked(RESPONSES, {"input": "hi", "tools": TOOLS, "tool_choice": given}), "tool_choice") == choice


HOSTED = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
]
MINE = {"name": "f", "input_schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (RESPONSES, {"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "web_search"),
        (RESPONSES, {"tools": TOOLS, "tool_choice": {"type": "mcp", "server_label": "s"}}, "mcp"),
        (RESPONSES, {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "other"),
        (RESPONSES, {"tools": TOOLS, "tool_choice": allowed("required", {"type": "computer"})}, "computer"),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "web_search"),
        (MESSAGES, {"tools": [MINE, *HOSTED], "tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        (MESSAGES, {"tools": HOSTED, "tool_choice": {"type": "any"}}, "bash, web_search"),
    ],
)  # fmt: skip
def test_a_choice_that_requires_what_is_left_out_is_refused(path: str, body: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=f"tool_choice requires {names}, which") as raised:
        asked(path, {"input": "hi", "messages": [HI]} | body)
    assert raised.value.param == "tool_choice"


def test_tools_of_messages() -> None:
    more = {"input_examples": [{}], "defer_loading": True, "eager_input_streaming": None}
    request = asked(MESSAGES, {"messages": [HI], "tools": [HOSTED[0], MINE | more | {"type": "custom"}, HOSTED[1],
                               MINE | {"name": "p", "allowed_callers": ["code_execution_20260120"]}]})  # fmt: skip
    assert field(request, "tools") == [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    assert set(request.left_out) == {
        "tools.web_search_20250305", "tools.bash_20250124", "tools[].input_examples", "tools[].defer_loading",
        "tools[].allowed_callers",
    }  # fmt: skip
    assert set(request.left_out.values()) <= set(KINDS)
    many = [MINE | {"name": f"mcp__{'s' * 60}__{i}"} for i in range(200)]
    assert len(field(asked(MESSAGES, {"messages": [HI], "tools": many}), "tools")) == 200
    assert dialect_of(MESSAGES).tool_limits == (MANY_TOOLS, 128)


def test_members_of_settings() -> None:
    body = {"thinking": {"type": "between_tools", "display": "updates", "block_binding": {}},
            "output_config": {"effort": "low", "task_budget": {"total": 5}}, "tool_choice": {"type": "auto", "x": 1},
            "messages": [HI | {"clear_at": "never"}]}  # fmt: skip
    request = asked(MESSAGES, body)
    assert set(request.left_out) == {
        "thinking.type", "thinking.display", "thinking.block_binding", "output_config.task_budget", "tool_choice.x",
        "messages[].clear_at",
    }  # fmt: skip
    more = {"reasoning": {"context": "all", "effort": "low"}, "text": {"colour": 1}, "stream_options": {"x": True},
            "include": ["web_search_call.results"], "store": True}  # fmt: skip
    assert set(asked(RESPONSES, {"input": "hi"} | more).left_out) == {
        "reasoning.context", "text.colour", "stream_options.x", "include", "store"
    }  # fmt: skip


def test_a_label_is_left_out_at_its_place_alone() -> None:
    key, long = chain_key(b"k" * 32), text("Be brief. " * 200)

    def names(system: list[Any], *turns: dict[str, Any]) -> tuple[int, ...]:
        raw = orjson.dumps({"system": system, "messages": [*turns, HI]})
        return RequestBody(raw, dialect_of(MESSAGES)).text_chain(key)

    first, second = text(LABEL % "00001"), text(LABEL % "ea6aa")
    assert names([first, long]) == names([second, long]) == names([long]) != ()
    assert names([long, first]) != names([long])
    labelled = asked(MESSAGES, {"system": [first, long], "messages": [HI]})
    assert dict(labelled.left_out) == {"system.x-anthropic-billing-header": "label"}
    assert field(labelled, "messages")[0] == {"role": "system", "content": long["text"]}
    for system in ([first], first["text"]):
        assert field(asked(MESSAGES, {"system": system, "messages": [HI]}), "messages") == [HI]
    kept = {"system": [text(first["text"] + "\nBe brief.")], "messages": [{"role": "user", "content": [first]}]}
    request = asked(MESSAGES, kept)
    assert [one["content"] for one in field(request, "messages")] == [first["text"] + "\nBe brief.", first["text"]]
    assert not request.left_out


@pytest.mark.parametrize(
    ("given", "is_label"),
    [
        ("x-anthropic-billing-header: cc_version=2.1.39.c39; cc_entrypoint=cli; cch=56445;", True),
        ("x-anthropic-billing-header: cc_version=0.0.0; cc_entrypoint=cli; cch=00001; cc_is_subagent=true;\n", True),
        ("x-anthropic-billing-header: cc_version=1; cc_entrypoint=cli", True),
        ("x-anthropic-billing-header:", False),
        ("x-anthropic-billing-header: is a header. Explain it.", False),
        ("What is x-anthropic-billing-header: cc_version=1;", False),
        ("x-anthropic-billing-header: cc_version=1; You are an agent.", False),
        ("x-anthropic-billing-header: a=" + "b" * 2000 + ";", False),
        ("x-anthropic-billing-header:" + " a=b" * 250 + " c", False),
    ],
)
def test_forms_of_labels(given: str, is_label: bool) -> None:
    assert is_label_of_system(given, LeftOut()) is is_label


def test_text_of_input() -> None:
    assert text_of_input('{"input": "a\\nb"}') == "a\nb"
    for cut, text in (('{"input": "cu', "cu"), ('{"input":"a\\nb\\', "a\nb"), ('{"input":"a\\u00e', "a"), (
        '{"input": "\\ud83d\\ude00\\ud83d\\u', "\U0001f600"), ('{"input": "a"', "a")):  # fmt: skip
        assert text_of_input(cut) == text
    for other in ("", '{"inp', '{"input": 5}', '{"input": "a", "b": 1}', "[1]"):
        assert text_of_input(other) == other


def test_text_of_values() -> None:
    deep: Any = "x"
    for _ in range(50):
        deep = {"a": deep, "content": {"type": "t", "content": [deep], "b": 1}} if len(str(deep)) < 999 else {"a": deep}
    assert len(text_of_block(deep, "p")) < 10_000
    for nothing in ({"encrypted_x": "AA"}, [], {}, None, ""):
        assert text_of(nothing) == ""
    for value in ({"id": 42, "index": 3, "ok": True}, {"text": "T", "price": 9}, [1, 2], [[]], 5, False, {"a": ["b"]}):
        for told in (texts_of(value, "p"), [text_of(value)]):
            assert orjson.loads("".join(told)) == value
    assert texts_of(["a", {"type": "new", "text": "b"}, {"type": "new", "text": "c", "title": "C"}], "p") == [
        "a", "b", '{"type":"new","title":"C"}\nc'
    ]  # fmt: skip
