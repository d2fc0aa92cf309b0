"""Histories that other servers and APIs wrote, as chat messages: what is shown, and what is left out by name."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pd_cluster.server.bodies.fields import IGNORED_HEADER
from pd_cluster.server.text.normal_messages import normal_messages
from pd_connectors.protocol import text_chain
from pd_connectors.protocol.text_chain import flat_content
from pd_http.left_out import LeftOut
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running
from tests.server.small_templates import TEMPLATES
from tests.server.test_prompt_steps import CHATML, Node, any_order, sibling, steps_of

PLAIN = {"role": "user", "content": "u"}


def call(name: str, arguments: Any, call_id: str | None = "c") -> dict[str, Any]:
    known: dict[str, Any] = {} if call_id is None else {"id": call_id}
    return {"type": "function", **known, "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def result(content: str, call_id: str | None = "c", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id}), **more}


def of(role: str, *parts: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts), **more}


THINKING = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
DETAILS = [{"type": "reasoning.text", "text": "Hm.", "index": 0}, {"type": "reasoning.encrypted", "data": "x"}]
ANSWERS: list[tuple[dict[str, Any], list[dict[str, Any]], set[str]]] = [
    # calls
    ({"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "sh", "input": "ls"}}]},
     [answer("", call("sh", {"input": "ls"}))], set()),
    ({"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": None, "arguments": "{"}}]},
     [answer("", call("", "{", "7"))], set()),
    ({"role": "assistant", "tool_calls": {"id": "c", "name": "f", "args": {"a": 1}}},
     [answer("", call("f", {"a": 1}))], set()),
    (of("assistant", {"type": "text", "text": "t"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}),
     [answer("t", call("f", {"a": 1}))], set()),
    (of("assistant", {"type": "tool-call", "toolCallId": "c", "toolName": "f", "input": {"a": 1}}),
     [answer("", call("f", {"a": 1}))], set()),
    (of("assistant", {"type": "tool_call", "id": "c", "function": {"name": "f", "arguments": "[1]"}}),
     [answer("", call("f", "[1]"))], set()),
    (of("assistant", {"type": "custom_tool_call", "call_id": "c", "name": "sh", "input": "ls"}),
     [answer("", call("sh", {"input": "ls"}))], set()),
    # the same call in both ways
    (of("assistant", {"type": "tool_use", "id": "c", "name": "f", "input": {}}, tool_calls=[call("f", "{}")]),
     [answer("", call("f", "{}"))], set()),
    # results
    (of("user", {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
        {"type": "tool_result", "tool_use_id": "d", "content": "s"}, {"type": "text", "text": "t"}),
     [result("r"), result("s", "d"), {"role": "user", "content": "t"}], set()),
    (of("assistant", {"type": "server_tool_use", "id": "c", "name": "f", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "c", "content": {"hits": 3}}),
     [answer("", call("f", {})), result('{"hits":3}')], set()),
    (of("tool", {"type": "tool-result", "toolCallId": "c", "toolName": "f", "output": {"a": 1}}),
     [result('{"a":1}', name="f")], set()),
    ({"role": "tool", "tool_call_id": "c", "content": {"id": 42, "text": "x", "ok": True}},
     [result('{"id":42,"ok":true}\nx')], set()),
    ({"role": "tool", "tool_call_id": "c", "content": {"type": "text", "text": "x"}}, [result("x")], set()),
    ({"role": "tool", "tool_call_id": "c", "content": 7}, [result("7")], set()),
    (of("tool", {"type": "json", "json": {"id": 1}}, "a", tool_call_id="c"),
     [result('{"type":"json","json":{"id":1}}\na')], set()),
    ({"role": "tool", "content": None}, [result("", None)], set()),
    ({"role": "tool", "tool_name": "f", "content": "r"}, [result("r", None, tool_name="f", name="f")], set()),
    ({"role": "function", "content": "r"}, [result("r", None)], set()),
    # reasoning
    (of("assistant", THINKING, {"type": "text", "text": "t"}), [answer("t", reasoning_content="Hm.")], set()),
    (of("assistant", {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "t"),
     [answer("t", reasoning_content="Hm.")], set()),
    (of("assistant", {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}, "t"),
     [answer("t", reasoning_content="Hm.")], set()),
    (of("assistant", {"type": "redacted_thinking", "data": "x"}, "t"), [answer("t")], {"messages.redacted_thinking"}),
    (of("user", {"type": "reasoning_text", "text": "Hm."}), [{"role": "user", "content": "Hm."}], set()),
    (answer("t", thinking_blocks=[THINKING]), [answer("t", reasoning_content="Hm.")], set()),
    (answer("t", reasoning_details=DETAILS), [answer("t", reasoning_content="Hm.")], {"messages.reasoning.encrypted"}),
    (answer("t", reasoning={"content": "Hm."}), [answer("t", reasoning_content="Hm.")], set()),
    (answer("t", reasoning="Hm. So", reasoning_details=[{"text": "Hm."}, {"text": " So"}], thinking_blocks=[THINKING]),
     [answer("t", reasoning="Hm. So")], set()),
    (answer("t", reasoning_content="", reasoning="Hm."),
     [answer("t", reasoning_content="Hm.", reasoning="Hm.")], set()),
    (answer("t", reasoning="a", thinking_blocks=[THINKING]),
     [answer("t", reasoning="a", reasoning_content="a\nHm.")], set()),
    # text in other places
    ({"role": "assistant", "content": None, "refusal": "No."}, [answer("No.")], set()),
    ({"role": "assistant", "content": None, "audio": {"id": "a", "transcript": "Yes."}}, [answer("Yes.")], set()),
    ({"role": "assistant", "content": None, "audio": {"id": "a"}}, [answer("")], {"messages.audio"}),
    (of("user", {"text": "t"}), [{"role": "user", "content": "t"}], set()),
    (of("user", {"type": "text", "text": None}, None, "t"), [{"role": "user", "content": "t"}], set()),
    (of("user", {"type": "note", "text": "t"}, {"type": "marker", "id": "x"}, {"id": 1}, "u"),
     [{"role": "user", "content": "t\nu"}], {"messages.marker", "messages.content"}),
    ({"role": "user", "content": {"type": "text", "text": "t"}}, [{"role": "user", "content": "t"}], set()),
    (of("user", {"type": "text", "text": "t", "cache_control": {}, "colour": "red", "annotations": []}),
     [{"role": "user", "content": "t"}], {"messages.text.colour"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "shown", "names"), ANSWERS)
def test_what_other_servers_write_is_shown_or_named(
    message: dict[str, Any], shown: list[dict[str, Any]], names: set[str]
) -> None:
    left_out = LeftOut()
    assert normal_messages([PLAIN, message], left_out) == [PLAIN, *shown]
    assert set(left_out) == names
    flat = flat_content(message.get("content"))
    texts = [one for one in (flat, message.get("refusal"), (message.get("audio") or {}).get("transcript")) if one]
    assert flat is None or shown[-1]["content"] == "\n".join(texts), "routers name the text that is rendered"


@pytest.mark.anyio
async def test_the_header_names_what_no_template_gets() -> None:
    messages = [PLAIN, answer("t", audio={"id": "a"}), of("user", {"type": "marker", "id": "x"}, "Zqu")]
    async with running(FakeEngine(says([5]))) as node:
        for path in ("/v1/chat/completions", "/tokenize"):
            async with node.session.post(f"{node.url}{path}", json={"messages": messages}) as response:
                assert response.status == 200, await response.text()
                assert response.headers[IGNORED_HEADER] == "messages.audio,messages.marker"
        prompt = await node.state.tokenizer.decode(node.engine.requests[0].prompt_token_ids)
    assert "Zqu" in prompt


def foreign(message: dict[str, Any]) -> dict[str, Any]:
    """The message as another server writes it, in a form that its beginning decides."""
    text, rest = message["content"] or "", {key: one for key, one in message.items() if key != "content"}
    forms: list[dict[str, Any]] = [message, message]
    if message["role"] == "assistant":
        forms += [
            rest | {"content": None, "refusal": text},
            message | {"refusal": "Zq refused"},
            rest | of("assistant", THINKING, {"text": text}),
            message | {"thinking_blocks": [THINKING]},
        ]
    else:
        forms += [
            of("user", {"type": "tool_result", "tool_use_id": "idb", "content": text}),
            of("user", {"text": text}),
        ]
        forms += [of("user", {"type": "tool_result", "content": text[::-1]}, text)]
    return forms[sum(text[:2].encode()) % len(forms)]


@pytest.mark.long
@pytest.mark.parametrize("template", [CHATML, TEMPLATES["one system message"], TEMPLATES["one call"]])
def test_names_for_routers_promise_no_wrong_token(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_chain, "STEP_BYTES", 16)
    node, rng, num_shared = Node(template), random.Random(5), 0
    for _ in range(80):
        talk = any_order(rng)
        ids, names = node.serve(body := {"messages": [foreign(one) for one in talk]})
        for _ in range(3):
            other = {"messages": [foreign(one) for one in sibling(rng, talk)]}
            other_ids, _ = node.serve(other)
            others = set(steps_of(other, node.chat.last_turn))
            for num_tokens, step in names:
                if step in others:
                    num_shared += 1
                    assert other_ids[:num_tokens] == ids[:num_tokens], (num_tokens, body, other)
    assert num_shared > 50


@pytest.mark.anyio
async def test_a_deep_history_is_answered() -> None:
    """At the depth that bodies may have."""
    deep: Any = "Zq"
    for _ in range(150):
        deep = [{"type": "thinking", "thinking": deep}]
    async with running(FakeEngine(says([5]))) as node:
        body = json.dumps({"messages": [PLAIN, {"role": "assistant", "content": deep}]})
        async with node.session.post(f"{node.url}/v1/chat/completions", data=body) as response:
            assert response.status in (200, 400)
