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
from pd_http.left_out import KINDS, MAX_NAMES, LeftOut
from pd_http.readable import text_of, text_of_block, texts_of
from pd_http.responses_tools import text_of_input
from pd_router.calls.body import RequestBody

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
    assert not request.left_out


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
    ([{"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "p"}],
     [said("", call("patch", {"input": "p"}))], {}),
    ([{"type": "function_call_output", "call_id": "c1", "output": "o"}], [result("o")], {}),
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


def told(path: str, *entries: Any) -> ChatRequest:
    """`entries`: blocks of an assistant and then of a user, or items."""
    if path == RESPONSES:
        return asked(path, {"input": [HI, *entries]})
    turns = [{"role": role, "content": blocks} for role, blocks in zip(("assistant", "user"), entries, strict=False)]
    return asked(path, {"messages": [HI, *turns]})


def use(call_id: str, kind: str = "tool_use") -> dict[str, Any]:
    return {"type": kind, "id": call_id, "name": "f", "input": {}}


def calls(call_id: str) -> dict[str, Any]:
    return CALLED | {"call_id": call_id, "arguments": {}}


def output(call_id: str, value: Any = "r") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


ANSWERED = [{"type": "tool_result", "tool_use_id": one, "content": "r"} for one in "ab"]
SERVERS = [use("s", "server_tool_use"), {"type": "new_result", "tool_use_id": "s", "content": "r"}]
WHY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w"}]}
ONE_ANSWER = [
    (MESSAGES, [[use("a"), *SERVERS, use("b")], ANSWERED], "asb", "sab"),
    (RESPONSES, [calls("a"), WHY, calls("b"), output("a"), output("b")], "ab", "ab"),
    (RESPONSES, [calls("a"), calls("s"), output("s"), WHY, calls("b"), output("a"), output("b")], "asb", "sab"),
]


@pytest.mark.parametrize(("path", "entries", "called", "answered"), ONE_ANSWER)
def test_calls_stay_with_their_results(path: str, entries: list[Any], called: str, answered: str) -> None:
    answer, *results = field(told(path, *entries), "messages")[1:]
    assert [one["id"] for one in answer["tool_calls"]] == [*called]
    assert [(one["role"], one["tool_call_id"]) for one in results] == [("tool", one) for one in answered]


def test_answers_begin_after_results_where_no_call_waits() -> None:
    steps = [calls("a"), output("a"), calls("b"), output("b"), WHY, {"role": "assistant", "content": "I"}, WHY]
    roles = [one["role"] for one in field(told(RESPONSES, *steps), "messages")]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant", "assistant"]
    blocks = [use("s", "new_use"), SERVERS[1], text("I"), use("a")]
    roles = [one["role"] for one in field(told(MESSAGES, blocks, ANSWERED[:1]), "messages")]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


DATA: list[Any] = [
    {"files": [{"type": "file", "name": "a.py"}]}, {"type": "url", "url": "u"}, {"type": "file", "path": "p"},
    {"type": "json", "json": {"id": 42, "index": 3, "ok": True}}, {"id": 42, "rows": [{"text": "x", "score": 0.5}]},
    {"type": "resource", "resource": {"uri": "u", "mimeType": "text/x-python", "text": "t"}},
    {"type": "resource_link", "uri": "u", "mimeType": "image/png"}, {"name": "chair", "image_url": "u"}, 5, [1, "a"],
    {"type": "file_diff", "diff": "d"}, {"type": "image_stats", "count": 3}, {"type": "file", "path": "p", "url": "u"},
    {"type": "media_search_result", "id": 1}, {"type": "profile", "id": 1},
]  # fmt: skip


@pytest.mark.parametrize("data", DATA)
def test_results_lose_nothing(data: Any) -> None:
    for content in (data, [data]):
        results = [
            told(MESSAGES, [use("c")], [{"type": "tool_result", "tool_use_id": "c", "content": content}]),
            told(MESSAGES, [use("c", "new_use"), {"type": "new_result", "tool_use_id": "c", "content": content}]),
            *(told(RESPONSES, {"type": kind, "call_id": "c"}, output("c", content) | {"type": f"{kind}_output"})
              for kind in ("shell_call", "custom_tool_call")),
            told(RESPONSES, calls("c"), output("c", content)),
            told(RESPONSES, {"type": "new_call", "id": "c", "results": content}),
        ]  # fmt: skip
        for request in results:
            shown = orjson.loads(field(request, "messages")[-1]["content"])
            assert shown in (data, content)
            assert not request.left_out


def test_results_show_all_members() -> None:
    hit = {"filename": "f", "score": 1, "text": "T"}
    searched = told(RESPONSES, {"type": "file_search_call", "id": "c", "queries": ["q"], "results": [hit]})
    assert field(searched, "messages")[-1]["content"] == '{"filename":"f","score":1}\nT'
    patched = [{"type": "apply_patch_call", "call_id": "c"}, {"type": "apply_patch_call_output", "call_id": "c"}]
    for more, wanted in (
        ({"status": "failed", "output": "no"}, '{"status":"failed"}\nno'), ({"status": "failed"}, "failed"),
        ({"status": "completed", "output": "yes"}, "yes"),
    ):  # fmt: skip
        assert field(told(RESPONSES, patched[0], patched[1] | more), "messages")[-1]["content"] == wanted


PICTURES: list[Any] = [
    {"type": "output_image", "image_url": "u"}, {"image_url": "u"}, {"type": "image-data", "data": "AA"},
    {"type": "pdf"}, {"type": "input_video", "video": "u"}, {"type": "file", "file": {"file_data": "AA"}},
    {"type": "input_audio", "input_audio": {}}, {"type": "image", "url": "u"},
    {"type": "file-data", "data": "AA"}, {"type": "media", "data": "AA"}, {"inline_data": {"data": "AA"}},
    {"type": "new", "data": "AA", "mimeType": "image/png"}, {"type": "file", "file_id": "f"},
    {"type": "resource", "resource": {"uri": "u", "blob": "AA"}},
    {"type": "new", "source": {"type": "url", "url": "u"}},
    {"type": "document", "source": {"type": "new", "media_type": "image/png", "data": "AA"}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": {}}]}},
]  # fmt: skip


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_are_refused_where_blocks_stand(picture: Any) -> None:
    for path, entries in (
        (MESSAGES, [[picture]]), (MESSAGES, [[text("a")], [text("a"), picture]]),
        (MESSAGES, [[use("c")], [{"type": "tool_result", "tool_use_id": "c", "content": [text("a"), picture]}]]),
        (RESPONSES, [{"role": "user", "content": [picture]}]), (RESPONSES, [calls("c"), output("c", [picture])]),
        (RESPONSES, [calls("c") | {"type": "new_call"}, output("c", [picture]) | {"type": "new_call_output"}]),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="this server takes text only") as raised:
            told(path, *entries)
        assert raised.value.param == ("messages" if path == MESSAGES else "input")
    with pytest.raises(InvalidRequest, match="'image_generation_call' is not supported"):
        told(RESPONSES, {"type": "image_generation_call", "id": "g", "result": "AAAA"})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "input_text", "text": "Q"}, {"role": "user", "content": "Q"}),
        ({"type": "agent_message", "role": "assistant", "content": [text("a"), text("b")]}, said("a\nb")),
        ({"type": "note", "content": "N"}, {"role": "user", "content": "N"}),
        ({"role": "user", "content": ["a", "b"]}, {"role": "user", "content": "a\nb"}),
        ({"role": "user", "content": {"type": "input_text", "text": "a"}}, {"role": "user", "content": "a"}),
        ({"type": "reasoning", "summary": ["a", "b"], "content": "c"}, said("") | {"reasoning_content": "c"}),
        ({"type": "tether", "content": [{"type": "quote", "text": "a", "url": "u"}]},
         {"role": "user", "content": '{"type":"quote","url":"u"}\na'}),
    ],
)  # fmt: skip
def test_forms_of_items(item: Any, message: Any) -> None:
    request = told(RESPONSES, item)
    assert field(request, "messages")[1:] == [message]
    assert not request.left_out


def test_ids_of_any_kind() -> None:
    for call_id in (7, ["x"], {"a": 1}, None, "x"):
        blocks = [
            {"type": "new_use", "id": call_id, "name": "n"},
            {"type": "new_result", "tool_use_id": call_id, "content": "r"},
        ]
        answer, behind = field(told(MESSAGES, blocks), "messages")[1:]
        assert answer["tool_calls"][0]["id"] == behind["tool_call_id"] == str(call_id)
        assert told(MESSAGES, blocks[:1], [text("a")]).left_out == {"messages.new_use": "block"}
    assert field(told(RESPONSES, {"type": "function_call", "id": "c", "name": "f"}, output("c")), "messages")[1:] == [
        said("", call("f", "", "c")), result("r", "c")
    ]  # fmt: skip


def test_null_texts_of_messages() -> None:
    blocks = [{"type": "thinking", "thinking": None}, {"type": "text", "text": None}, text("I")]
    assert field(told(MESSAGES, blocks, None), "messages")[1:] == [said("I"), {"role": "user", "content": ""}]


@pytest.mark.parametrize("kind", ["server_tool_result", "left_out"])
def test_no_type_is_the_servers_own(kind: str) -> None:
    assert told(MESSAGES, [text("I"), {"type": kind}]).left_out == {f"messages.{kind}": "block"}


def test_names_are_bounded() -> None:
    more = {str(i): i for i in range(5000)}
    assert len(told(RESPONSES, HI | more).left_out) == len(told(MESSAGES, [text("I") | more]).left_out) == MAX_NAMES


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


def test_another_tool_of_a_name_is_named() -> None:
    mine = {"type": "namespace", "name": "a", "tools": [function("t")]}
    for brought, left_out in (
        (mine, {}), (function("a__t"), {"tools.function": "tool"}),
        ({"type": "namespace", "name": "a", "tools": [function("t", description="new")]}, {"tools.function": "tool"}),
        ({"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "t"}]}, {"tools.custom": "tool"}),
    ):  # fmt: skip
        request = asked(RESPONSES, {"input": [{"type": "additional_tools", "tools": [brought]}, HI], "tools": [mine]})
        assert [one["function"] for one in field(request, "tools")] == [{"name": "a__t", "parameters": SCHEMA}]
        assert request.left_out == left_out
    new = {"type": "new"}
    request = asked(RESPONSES, {"input": "hi", "tools": [new], "tool_choice": allowed("auto", new)})
    assert "tool_choice" not in request.fields
    hosted = [{"type": "additional_tools", "tools": [{"type": "new"}]}, HI]
    with pytest.raises(InvalidRequest, match="tool_choice requires new, which this server does not serve"):
        asked(RESPONSES, {"input": hosted, "tool_choice": "required"})
    twice = [{"type": "namespace", "name": name, "tools": [function("t")]} for name in "ab"]
    with pytest.raises(InvalidRequest, match="tool_choice requires t"):
        asked(RESPONSES, {"input": "hi", "tools": twice, "tool_choice": {"type": "function", "name": "t"}})


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("required", "required"), ("auto", "auto"), ({"type": "function", "name": "f"}, of_f := {
            "type": "function", "function": {"name": "f"}}),
        ({"type": "function", "function": {"name": "f"}}, of_f), ({"type": "tool", "name": "f"}, of_f),
        ({"type": "none"}, "none"),
    ],
)  # fmt: skip
def test_choices_of_messages(given: Any, choice: Any) -> None:
    request = asked(MESSAGES, {"messages": [HI], "tools": [{"name": "f"}], "tool_choice": given})
    assert field(request, "tool_choice") == choice
    assert field(request, "tools") == [{"type": "function", "function": {"name": "f"}}]


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
        (MESSAGES, {"tools": [MINE | {"allowed_callers": ["x"]}], "tool_choice": {"type": "any"}}, "f"),
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
        ("x-anthropic-billing-header: cc_version=1; cc-workload=x; key2=y;", True),
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
    for head in ("", "{", '{"inp', '{ "input" : '):
        assert text_of_input(head) == ""
    for other in ('{"inps', '{"input": 5}', '{"input": "a", "b": 1}', "[1]"):
        assert text_of_input(other) == other


def test_text_of_values() -> None:
    deep: Any = "x"
    for i in range(20):
        deep = {"type": "t", "content": [deep] if i % 2 else deep, "b": 1}
    told, levels = text_of_block(deep, "p"), 8
    assert told.startswith('{"type":"t","b":1}\n' * (levels // 2)), "each level copies the text below it"
    assert told.count("\n") <= levels
    assert "encrypted" not in text_of({"a": [{"encrypted_b": "AA"}]})
    for _ in range(600):
        deep = [deep]
    assert text_of(deep).startswith("[" * 600 + '{"type":"t"'), "of any depth"
    empty: tuple[Any, ...] = (None, "", [], {}, {"encrypted_x": "AA"})
    for nothing in empty:
        assert text_of(nothing) == ""
    data: tuple[Any, ...] = (
        {"id": 42, "index": 3, "ok": True},
        {"text": "T", "price": 9},
        [1, 2],
        [[]],
        5,
        {"a": ["b"]},
    )
    for value in data:
        for shown in (texts_of(value, "p"), [text_of(value)]):
            assert orjson.loads("".join(shown)) == value
    assert texts_of(["a", {"type": "new", "text": "b"}, {"type": "new", "text": "c", "title": "C"}], "p") == [
        "a", "b", '{"type":"new","title":"C"}\nc'
    ]  # fmt: skip
