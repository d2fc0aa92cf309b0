"""Bodies at the bounds of members: what clients send is served, and the largest that are served take little time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.server.bodies.fields import ignored_header
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody, decode_body
from pd_cluster.server.bodies.tool_use import leave_out_tools, tool_use
from pd_cluster.server.grammar.grammar_checks import MAX_GRAMMAR_BYTES
from pd_cluster.server.grammar.grammar_source import parser_options
from pd_cluster.server.routes.translated_body import translated
from pd_cluster.server.text.normal_messages import normal_messages
from pd_connectors.protocol.text_chain import MAX_CHAIN_BYTES, chain_key
from pd_http.dialect import MANY_TOOLS, OPENAI
from pd_http.dialects import MESSAGES, RESPONSES, dialect_of
from pd_http.errors import InvalidRequest
from pd_http.left_out import LeftOut
from pd_http.member_bounds import CHAT_BOUNDS, MAX_FIELDS, TRANSLATED_BOUNDS, check_members
from pd_router.calls.body import RequestBody
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.fake_engine import Line

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = chain_key(b"k" * 32)
HI = [{"role": "user", "content": "hi"}]
ENTRIES, VALUES, _ = CHAT_BOUNDS.others
ITEMS = TRANSLATED_BOUNDS.others.entries


def calls(count: int, arguments: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "tool_calls": [{"id": f"c{i}"} | call for i in range(count)]}]


def through_router(path: str, raw: bytes) -> bytes:
    body = RequestBody(raw, dialect_of(path))
    body.text_chain(KEY)
    return body.for_prefill()


def through_node(path: str, raw: bytes) -> Any:
    """The work of a node on its event loop, from the body to the checked messages and tools."""
    check_members(raw, dialect_of(path).bounds)
    left_out = LeftOut()
    if path in (MESSAGES, RESPONSES):
        raw = translated(path, raw).chat
    if path == COMPLETIONS:
        return decode_body(raw, CompletionBody)
    body, unread = decode_body(raw, ChatBody)
    left_out.update(dict.fromkeys(unread, "field"))
    leave_out_tools(body)
    body.messages = normal_messages(body.messages, left_out)
    use = tool_use(body, dialect_of(path).tool_limits)
    parser_options(body, use)
    ignored_header(left_out)
    return body, use


def chat_tool(i: int, properties: int, **more: Any) -> dict[str, Any]:
    """A property has 4 values."""
    names = {f"argument_{j}": {"type": "string", "description": "what it is"} for j in range(properties)}
    function = {"name": f"tool_{i}", "parameters": {"type": "object", "properties": names}}
    return {"type": "function", "function": function | more}


def session(num: int) -> list[dict[str, Any]]:
    """Of an agent, in Anthropic's form, with blocks in all messages."""
    said: list[dict[str, Any]] = []
    for i in range(num // 2):
        use = {"type": "tool_use", "id": f"c{i}", "name": "f", "input": {"path": "a.py", "lines": [1, 2]}}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": [{"type": "text", "text": "ab, [c] {d}"}]}
        said.append({"role": "user", "content": [result if i else {"type": "text", "text": "Do it."}]})
        said.append({"role": "assistant", "content": [{"type": "text", "text": "Reading."}, use]})
    said[-1]["content"].pop()
    return said


def calls_of_chat(num: int) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": 2}]}'}}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "x"}]}
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*HI, *[called, result] * (num // 2)]


def schema(num_bytes: int) -> dict[str, Any]:
    one: dict[str, Any] = {"type": "object", "properties": {}}
    size = len(json.dumps(one)) - 2  # no comma stands before the first property
    while size < num_bytes - 100:
        name = f"p{len(one['properties'])}"
        one["properties"][name] = {"enum": list(range(10))}
        size += len(json.dumps({name: one["properties"][name]}))  # its braces are as long as a comma and a blank
    assert len(json.dumps(one)) == size
    return one


FUNCTIONS = [{"type": "function", "name": f"f{i}", "parameters": schema(500)} for i in range(300)]
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "128 tools": (CHAT, {"messages": HI, "tools": [chat_tool(i, 8) for i in range(128)]}),
    "300 tools, messages": (MESSAGES, {"max_tokens": 9, "messages": HI, "tools": [
        {"name": f"f{i}", "description": "d", "input_schema": schema(500)} for i in range(300)]}),
    "300 tools, responses": (RESPONSES, {"input": "hi", "tools": FUNCTIONS}),
    "2,000 messages, messages": (MESSAGES, {"max_tokens": 9, "messages": session(2000)}),
    "2,000 messages, chat": (CHAT, {"messages": calls_of_chat(2000)}),
    "2,000 items": (RESPONSES, {"input": [
        {"role": role, "content": [{"type": kind, "text": "a"}]}
        for role, kind in (("user", "input_text"), ("assistant", "output_text")) * 1000]}),
    "400 KB of text": (COMPLETIONS, {"prompt": "ab,[c{" * 66_000}),
    "400 KB of text, chat": (CHAT, {"messages": [{"role": "user", "content": "ab,[c{" * 66_000}]}),
    "300 KB of tools": (CHAT, {"messages": HI, "tools": [chat_tool(i, 36) for i in range(128)]}),
    "a schema of 64 KB": (CHAT, {"messages": HI, "response_format": {
        "type": "json_schema", "json_schema": {"schema": schema(MAX_GRAMMAR_BYTES)}}}),
    "a long prompt of ids": (COMPLETIONS, {"prompt": [7] * 131_072, "logit_bias": {str(i): 1 for i in range(131_072)}}),
    "256 prompts": (COMPLETIONS, {"prompt": [[7] * 4096] * 256}),
}  # fmt: skip


@pytest.mark.long_cases
@pytest.mark.parametrize("name", SERVED)
def test_what_clients_send_is_served(name: str) -> None:
    path, body = SERVED[name]
    raw = json.dumps(body).encode()
    through_router(path, raw)
    through_node(path, raw)


def test_sizes_of_what_clients_send() -> None:
    assert len(json.dumps(SERVED["300 KB of tools"][1])) > 300_000
    assert len(session(2000)) == 2000


ONE_MORE: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, {"messages": HI, "tools": [chat_tool(i, 1) for i in range(129)]}, "tools has 129 entries; 128 are"),
    (MESSAGES, {"max_tokens": 1, "messages": HI, "tools": [{"name": f"f{i}", "input_schema": {}} for i in
     range(MANY_TOOLS + 1)]}, f"tools has {MANY_TOOLS + 1} entries; {MANY_TOOLS} are"),
    (CHAT, {"messages": HI * (ENTRIES + 1)},
     f"the body has {ENTRIES + 1} entries, most of them in messages; {ENTRIES} are"),
    (RESPONSES, {"input": HI * (ITEMS + 1)},
     f"the body has {ITEMS + 1} entries, most of them in input; {ITEMS} are"),
    (CHAT, {"messages": HI, "stream_options": {f"k{i}": i for i in range(MAX_FIELDS + 1)}},
     f"stream_options has {MAX_FIELDS + 1} fields; {MAX_FIELDS} are"),
    (CHAT, {"messages": [*HI, *calls(2, json.dumps({"a": [0] * (VALUES // 2)}))]},
     f"tool_calls has {VALUES + 2} values in texts of JSON; {VALUES} are"),
    (COMPLETIONS, {"prompt": [[7] * 999] * 257}, "prompt has 257 entries; 256 are"),
)  # fmt: skip


@pytest.mark.long_cases
@pytest.mark.parametrize(("path", "body", "told"), ONE_MORE)
def test_one_more_is_a_400_that_names_it(path: str, body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)) as caught:
        through_node(path, json.dumps(body).encode())
    assert caught.value.param in (*body, None)


@pytest.mark.long
def test_texts_in_arguments_are_served() -> None:
    """Code has the marks of JSON, and they stand in strings."""
    code = json.dumps({"path": "a.py", "content": "f(a, [b, {c}]);\n" * VALUES})
    through_node(CHAT, json.dumps({"messages": [*HI, *calls(2, code), *calls(2, code[:-9])]}).encode())


def test_a_body_with_all_fields_reaches_its_node() -> None:
    for path, asked in ((CHAT, {"messages": HI}), (RESPONSES, {"input": "hi"}), (MESSAGES, {"messages": HI})):
        body = asked | {"max_tokens" if path == MESSAGES else "user": 1}
        body |= {f"k{i}": i for i in range(MAX_FIELDS - len(body))}
        through_node(path, through_router(path, json.dumps(body).encode()))
        with pytest.raises(InvalidRequest, match=f"the body has {MAX_FIELDS + 1} fields; {MAX_FIELDS} are"):
            through_router(path, json.dumps(body | {"one_more": 1}).encode())


async def says_nothing(line: Line) -> None:
    pass


def test_no_more_messages_than_the_context_has_tokens() -> None:
    """And a node answers with what the bounds say, in the client's own names."""

    async def main() -> None:
        async with running(FakeEngine(says_nothing)) as node:
            limit = node.state.ready.max_model_len
            for path, body, told in (
                (CHAT, {"messages": HI * (limit + 1)}, f"messages has {limit + 1} entries; {limit} are allowed"),
                (RESPONSES, {"input": HI * (ITEMS + 1)}, f"the body has {ITEMS + 1} entries, most of them in input; "
                 f"{ITEMS} are allowed"),
            ):  # fmt: skip
                async with node.session.post(node.url + path, json=body) as answer:
                    assert answer.status == 400
                    assert (await answer.json())["error"]["message"] == told

    asyncio.run(main())


def test_a_long_text_has_no_chain() -> None:
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "a" * MAX_CHAIN_BYTES}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": "a" * MAX_CHAIN_BYTES}]}),
        (RESPONSES, {"input": "a" * MAX_CHAIN_BYTES}),
    ):
        asked = RequestBody(json.dumps(body).encode(), dialect_of(path))
        assert not asked.has_chain
        assert asked.text_chain(KEY) == ()


def listed(head: str, member: str, number: int, tail: str) -> bytes:
    return f"{head}{','.join([member] * number)}{tail}".encode()


def numbered(head: str, member: str, number: int, tail: str) -> bytes:
    return f"{head}{','.join(member % i for i in range(number))}{tail}".encode()


CALIBRATED_S = 0.09  # of `_calibration`
IN_MESSAGES = '{"max_tokens":1,"messages":[{"role":"user","content":'
ASKED = '{"messages":[{"role":"user","content":"a"}],'
AT_BOUNDS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "messages": (CHAT, lambda: listed('{"messages":[', '{"role":"user","content":"a","name":"b"}', ENTRIES, "]}")),
    "parts": (CHAT, lambda: listed('{"messages":[{"role":"user","content":[', '{"type":"text","text":"a","x":1}',
                                   ENTRIES - 1, "]}]}")),
    "texts": (CHAT, lambda: listed('{"messages":[{"role":"user","content":[', '""', VALUES - 8, "]}]}")),
    "calls": (CHAT, lambda: listed(
        '{"messages":[', '{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":"{}"}}]}',
        ENTRIES // 2, "]}")),
    "arguments": (CHAT, lambda: numbered(
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"a","arguments":{', '"%d":1',
        VALUES - 12, "}}}]}]}")),
    "tools": (CHAT, lambda: json.dumps({"messages": HI, "tools": [chat_tool(i, 165) for i in range(128)]}).encode()),
    "kinds": (CHAT, lambda: numbered(ASKED + '"tools":[', '{"type":"x%d"}', ENTRIES - 1, "]}")),
    "arguments of templates": (CHAT, lambda: numbered(ASKED + '"chat_template_kwargs":{', '"k%d":1', VALUES - 8, "}}")),
    "fields": (CHAT, lambda: numbered(ASKED, '"k%d":1', VALUES - 8, "}")),
    "items": (RESPONSES, lambda: listed('{"input":[', '{"role":"user","content":"a"}', ITEMS, "]}")),
    "calls of items": (RESPONSES, lambda: listed(
        '{"input":[', '{"type":"function_call","call_id":"a","name":"f","x":1}', ITEMS, "]}")),
    "items of other kinds": (RESPONSES, lambda: listed(
        '{"input":[', '{"type":"x_call","result":[{"a":1}]}', ITEMS // 2, "]}")),
    "functions": (RESPONSES, lambda: numbered(
        '{"input":"a","tools":[', '{"type":"function","name":"f%d","x":1}', MANY_TOOLS, "]}")),
    "turns": (MESSAGES, lambda: listed(
        '{"max_tokens":1,"messages":[', '{"role":"user","content":"a","x":1},{"role":"assistant","content":"a"}',
        ITEMS // 2, "]}")),
    "blocks": (MESSAGES, lambda: listed(IN_MESSAGES + "[", '{"type":"text","text":"a","x":1}', ITEMS - 1, "]}]}")),
    "prompt": (COMPLETIONS, lambda: listed('{"prompt":[', "1", 1 << 21, "]}")),
    "biases": (COMPLETIONS, lambda: numbered('{"prompt":"a","logit_bias":{', '"%d":1', 1 << 18, "}}")),
    "8 MB of marks": (COMPLETIONS, lambda: b'{"prompt":"' + b",[" * (4 << 20) + b'"}'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_BOUNDS)
def test_a_body_at_a_bound_takes_little_time(name: str) -> None:
    """A node may take two turns: for the translation of a body, and for the chat request."""
    path, made = AT_BOUNDS[name]
    raw = made()
    for work, most_s in ((through_router, 0.1), (through_node, 0.2 if path in (MESSAGES, RESPONSES) else 0.1)):
        assert least_s(work, path, raw) < most_s, work


@pytest.mark.slow
@pytest.mark.parametrize("field", ["messages", "input", "prompt", "tools", "x", "stop", "logit_bias"])
@pytest.mark.parametrize("member", ["{}", "[]", '""', "1", '{"a":1}', '"\\\\"'])
def test_8_mb_of_the_smallest_members_take_little_time(field: str, member: str) -> None:
    for path in (CHAT, COMPLETIONS, MESSAGES, RESPONSES):
        raw = listed(
            f'{{"prompt":"a","input":"a","max_tokens":1,"{field}":[', member, (8 << 20) // (len(member) + 1), "]}"
        )
        for work in (through_router, through_node):
            assert least_s(work, path, raw) < 0.15


def least_s(work: Callable[[str, bytes], object], path: str, raw: bytes) -> float:
    """CPU time, less in proportion if this machine is slower than that of CALIBRATED_S, or busy.

    The best of some times, each beside one of the same work: a cache that others use makes both slower.
    """
    times = [(_time_of(work, path, raw), _time_of(_calibration, path, raw)) for _ in range(5)]
    best_s, calibration_s = (min(each) for each in zip(*times, strict=True))
    return float(best_s / max(1.0, calibration_s / CALIBRATED_S))


def _calibration(_path: str, _raw: bytes) -> object:
    """What bodies cost, for as long as they take: members that are made, looked up and freed."""
    return sum(map(len, {str(number): [number] for number in range(200_000)}.values()))


def _time_of(work: Callable[[str, bytes], object], path: str, raw: bytes) -> float:
    began_s = time.thread_time()
    with contextlib.suppress(InvalidRequest):
        work(path, raw)
    return time.thread_time() - began_s


def test_the_limits_of_tools() -> None:
    assert (OPENAI.tool_limits.tools, MANY_TOOLS) == (128, 4096)
