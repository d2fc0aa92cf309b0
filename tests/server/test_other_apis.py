"""/v1/messages and /v1/responses of a node: fields, answers and errors, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_cluster.protocol.messages import RequestFailed
from pd_cluster.server.bodies.fields import ELSEWHERE, HARMLESS, IGNORED_HEADER, REFUSED
from pd_connectors.protocol.text_chain import chain_key
from pd_http.dialect import MANY_TOOLS
from pd_http.dialects import COUNT_TOKENS, MESSAGES, RESPONSES, dialect_of
from pd_http.left_out import KINDS
from pd_http.messages_dialect import MessagesFields
from pd_http.responses_dialect import ResponsesFields
from pd_router.calls.body import RequestBody
from tests.cut_streams import post
from tests.server.cut_nodes import GROUPED, LOOK, PATCH, Pair, message, response
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.live_server import Node, running
from tests.server.sse import parse_events, post_events

pytestmark = pytest.mark.anyio

HI: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {MESSAGES: {"messages": HI, "max_tokens": 9}, RESPONSES: {"input": "hi"}}
CHAT = "/v1/chat/completions"
NO_CALL: dict[str, Any] = {CHAT: "none", MESSAGES: {"type": "none"}, RESPONSES: "none"}
TEXTS = "<think>why</think>I see. Paris"


async def ask(node: Node, path: str, **more: Any) -> tuple[int, dict[str, Any], str | None]:
    async with node.session.post(f"{node.url}{path}", json=BODIES.get(path, {}) | more) as answer:
        return answer.status, await answer.json(), answer.headers.get(IGNORED_HEADER)


@pytest.mark.long
@pytest.mark.parametrize("path", BODIES)
async def test_every_field_is_refused_by_name_or_named_as_ignored(path: str) -> None:
    own = set((MessagesFields if path == MESSAGES else ResponsesFields).__struct_fields__)
    renamed = dialect_of(path).params
    async with running(FakeEngine(says([5]))) as node:
        for name, refusal in (REFUSED | ELSEWHERE[path]).items():
            if name in own:
                continue
            status, content, _ = await ask(node, path, **{name: "something" * 20})
            assert (status, content["error"]["param"]) == (400, renamed.get(name, name)), content
            assert refusal.why in content["error"]["message"]
        assert node.engine.requests == []
        names = sorted(HARMLESS.keys() - own)
        for some in (names[:30], names[30:]):
            status, content, ignored = await ask(node, path, **dict.fromkeys(some, "x"))
            assert (status, ignored) == (200, ",".join(some)), content


@pytest.mark.long
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_an_answer(path: str) -> None:
    make = message if path == MESSAGES else response
    case, texts, end = make("an answer", TEXTS)
    async with Pair(texts, end=end) as pair:
        status, raw = await post(pair.apps[0], path, case.body | {"stream": False}, {"x-request-id": "one"})
    assert status == 200, raw
    answer = json.loads(raw)
    if path == MESSAGES:
        assert (answer["id"], answer["type"], answer["role"], answer["model"]) == (
            "msg_one",
            "message",
            "assistant",
            "m",
        )
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
        assert [block.get("text") or block["thinking"] for block in answer["content"]] == ["why", "I see. Paris"]
        return
    assert (answer["id"], answer["object"], answer["status"], answer["store"]) == (
        "resp_one",
        "response",
        "completed",
        False,
    )
    assert answer["tools"] == case.body["tools"]
    assert [(item["type"], item["content"][0]["text"]) for item in answer["output"]] == [
        ("reasoning", "why"), ("message", "I see. Paris")
    ]  # fmt: skip
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.long
async def test_ends_of_messages() -> None:
    for more, text, end, wanted in (
        ({}, "Hello, there", True, ("end_turn", None)),
        ({"stop_sequences": [", th"]}, "Hello, there", True, ("stop_sequence", ", th")),
        ({}, "Hello", False, ("max_tokens", None)),
    ):
        case, texts, end = message("end", text, end=end, **more)
        async with Pair(texts, end=end) as pair:
            _, raw = await post(pair.apps[0], MESSAGES, case.body | {"stream": False}, {})
            _, events = await post(pair.apps[0], MESSAGES, case.body, {})
        answer, told = json.loads(raw), parse_events(events.decode())
        names = [name for name, _ in told]
        assert names[:3] == ["message_start", "ping", "content_block_start"]
        assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert all(name == data["type"] for name, data in told)
        assert (answer["stop_reason"], answer["stop_sequence"]) == wanted
        assert (told[-2][1]["delta"]["stop_reason"], told[-2][1]["delta"]["stop_sequence"]) == wanted
        assert told[-2][1]["usage"]["output_tokens"] == answer["usage"]["output_tokens"] > 0


async def test_events_of_responses() -> None:
    case, texts, end = response("cut", "Hello", end=False)
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], RESPONSES, case.body, {})
    events = parse_events(raw.decode())
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == sorted(set(numbers)), "they rise"
    name, last = events[-1]
    assert (name, last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert "".join(data["delta"] for name, data in events if name.endswith(".delta")) == "Hello"
    assert events[0][1]["response"]["usage"] is None


async def test_fields_that_are_echoed() -> None:
    async with running(FakeEngine(says([5]))) as node:
        big = b'{"input": "hi", "metadata": {"a":\n 1%s}, "temperature": null}' % (b"0" * 30)
        for raw, status in (
            (big, 200),
            (b'{"input":"hi","metadata":"\xff"}', 400),
            (b'{"input":"hi","metadata":1e400}', 400),
        ):
            async with node.session.post(f"{node.url}{RESPONSES}", data=raw) as answer:
                assert answer.status == status, await answer.text()
                told = await answer.json()
                if status == 200:
                    assert (told["metadata"], told["temperature"]) == ({"a": 10**30}, None)
                else:
                    assert told["error"]["param"] == "metadata"
        async with node.session.post(f"{node.url}{RESPONSES}", data=big[:-1] + b', "stream": true}') as answer:
            assert parse_events(await answer.text())[-1][0] == "response.incomplete"


async def test_tokens_are_counted_as_they_are_charged() -> None:
    async with running(FakeEngine(says([5]))) as node:
        body: dict[str, Any] = {"messages": HI, "system": "Be brief."}
        _, counted, _ = await ask(node, COUNT_TOKENS, **body)
        _, answer, _ = await ask(node, MESSAGES, **body)
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]}
        body["truncate_prompt_tokens"] = 3
        _, counted, _ = await ask(node, COUNT_TOKENS, **body)
        _, answer, _ = await ask(node, MESSAGES, **body)
        assert counted == {"input_tokens": answer["usage"]["input_tokens"]} == {"input_tokens": 3}
        status, content, _ = await ask(node, COUNT_TOKENS, messages=5)
        assert (status, content["type"], content["error"]["param"]) == (400, "error", "messages")


async def test_errors_have_the_shape_of_their_api() -> None:
    async def fails(line: Line) -> None:
        line.tokens([5])
        await line.taken()
        line.push(RequestFailed(line.request.request_id, "EngineUnavailable", "gone"))

    async with running(FakeEngine(fails)) as node:
        for path, more, status, kind in (
            (MESSAGES, {"model": "other"}, 404, "not_found_error"),
            (MESSAGES, {"top_k": -5}, 400, "invalid_request_error"),
            (RESPONSES, {"model": "other"}, 404, "invalid_request_error"),
        ):
            got, content, _ = await ask(node, path, **more)
            assert (got, content["error"]["type"], content.get("type")) == (
                status, kind, "error" if path == MESSAGES else None
            )  # fmt: skip
        for missing in ({}, {"max_tokens": None}):
            async with node.session.post(f"{node.url}{MESSAGES}", json={"messages": HI} | missing) as answer:
                assert (await answer.json())["error"]["message"] == "max_tokens is required"
        for path, body in BODIES.items():
            events = await post_events(node.session, f"{node.url}{path}", body | {"stream": True})
            name, data = events[-1]
            assert (name, data["type"], data["error"]["message"]) == ("error", "error", "gone")
            assert data["error"]["code"] == "engine_unavailable"


async def test_arguments_are_the_numbers_that_the_model_wrote() -> None:
    """An integer of more than 64 bits is not rounded."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 123456789012345678901234567890}}\n</tool_call>'
    case, texts, end = message("big", call)
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], MESSAGES, case.body | {"stream": False}, {})
    assert json.loads(raw)["content"][0]["input"] == {"city": 123456789012345678901234567890}


async def test_a_call_that_breaks_off_is_incomplete() -> None:
    """Text follows pieces of a call that the client has."""
    case, texts, end = response("broken", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa"</tool_call>')
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], RESPONSES, case.body, {})
    events = parse_events(raw.decode())
    items = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in items] == [
        ("function_call", "incomplete"), ("message", "completed")
    ]  # fmt: skip
    assert events[-1][1]["response"]["output"] == items


async def test_calls_come_back_in_the_form_that_the_client_knows() -> None:
    case, texts, end = response("forms", f"Go. {PATCH}\n{LOOK}", tools=GROUPED)
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], RESPONSES, case.body | {"stream": False}, {"x-request-id": "one"})
        _, streamed = await post(pair.apps[0], RESPONSES, case.body, {"x-request-id": "one"})
    text, patch, look = json.loads(raw)["output"]
    assert text["type"] == "message"
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "é\n🙂 end")
    assert "arguments" not in patch
    assert (look["type"], look["name"], look["namespace"], look["arguments"]) == (
        "function_call", "look", "mcp__s", '{"at": "x"}'
    )  # fmt: skip
    events = parse_events(streamed.decode())
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item | {"call_id": 0} for item in done] == [item | {"call_id": 0} for item in (text, patch, look)], (
        "as in the whole answer"
    )
    added = [data["item"] for name, data in events if name == "response.output_item.added"]
    assert (added[1]["type"], added[1]["input"], added[2]["namespace"]) == ("custom_tool_call", "", "mcp__s")
    pieces = [(name, data) for name, data in events if name.startswith("response.custom_tool_call_input")]
    assert [(name.rsplit(".")[-1], data.get("delta", data.get("input"))) for name, data in pieces] == [
        ("delta", "é\n🙂 end"), ("done", "é\n🙂 end")
    ]  # fmt: skip
    assert all((data["item_id"], data["output_index"]) == (patch["id"], 1) for _, data in pieces)
    ids = [data["sequence_number"] for _, data in events]
    assert ids == sorted(set(ids))
    (whole,) = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert whole["name"] == "look", "as in the item"


async def test_text_for_a_tool_that_is_cut_is_its_beginning() -> None:
    case, texts, end = response("cut", PATCH[:-18], end=False, tools=GROUPED)
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], RESPONSES, case.body, {})
    (patch,) = [data["item"] for name, data in parse_events(raw.decode()) if name == "response.output_item.done"]
    assert (patch["type"], patch["status"], patch["input"]) == ("custom_tool_call", "incomplete", "é\n🙂 e")


async def test_messages_limit_is_cut_to_the_room_that_is_left() -> None:
    """The API requires a limit, so agents send 32,000 to every model."""
    async with running(FakeEngine(says([5]))) as node:
        status, content, named = await ask(node, MESSAGES, max_tokens=32_000, service_tier="x")
        assert (status, named) == (200, "service_tier,max_tokens"), content
        (request,) = node.engine.requests
        assert len(request.prompt_token_ids) + request.sampling.max_tokens == 4096
        assert (await ask(node, MESSAGES, max_tokens=9))[2] is None
        status, content, _ = await ask(node, RESPONSES, max_output_tokens=32_000)
        assert (status, content["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.slow
async def test_events_are_those_of_the_clients_types() -> None:
    from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
    from pydantic import TypeAdapter

    case, texts, end = response("forms", f"<think>why</think>Go. {PATCH}\n{LOOK}", tools=GROUPED)
    async with Pair(texts, end=end) as pair:
        _, raw = await post(pair.apps[0], RESPONSES, case.body | {"stream": False}, {})
        _, streamed = await post(pair.apps[0], RESPONSES, case.body, {})
    event, item = TypeAdapter[Any](ResponseStreamEvent), TypeAdapter[Any](ResponseOutputItem)
    told = [data for _, data in parse_events(streamed.decode()) if "response" not in data]  # has the tools as they came
    kinds = {type(event.validate_python(data)).__name__ for data in told}
    assert {"ResponseCustomToolCallInputDeltaEvent", "ResponseCustomToolCallInputDoneEvent"} <= kinds
    kinds = {type(item.validate_python(one)).__name__ for one in json.loads(raw)["output"]}
    assert {"ResponseCustomToolCall", "ResponseFunctionToolCall"} <= kinds


@pytest.mark.long
async def test_what_is_left_out_is_named_and_counted_by_kind() -> None:
    tools = [{"type": "web_search"}, {"type": "function", "name": "f", "colour": 1}, {"type": "custom", "name": "c"}]
    search = {"type": "web_search_call", "id": "w", "status": "completed"}
    async with running(FakeEngine(says([5]))) as node:
        body: dict[str, Any] = {"input": [*HI, search], "tools": tools, "tool_choice": "none", "service_tier": "x"}
        status, content, named = await ask(node, RESPONSES, **body)
        assert (status, named) == (200, "input.web_search_call,service_tier,tools.web_search,tools[].colour"), content
        label = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=5;"}
        hosted = [{"type": "web_search_20250305", "name": "web_search"}]
        asked = {"messages": HI, "system": [label], "tools": hosted, "context_management": {"edits": []}}
        for path in (MESSAGES, COUNT_TOKENS):
            status, content, named = await ask(node, path, **asked)
            assert status == 200, content
            assert named == "context_management,system.x-anthropic-billing-header,tools.web_search_20250305"
        status, content, named = await ask(node, CHAT, messages=HI, tools=[{"type": "custom", "custom": {"name": "c"}}])
        assert (status, named) == (200, "tools.custom"), content
        counts = {kind: node.metric(f'pd_left_out_total{{kind="{kind}"}}') for kind in KINDS}
        assert counts == {"field": 3, "member": 1, "tool": 4, "block": 0, "item": 1, "label": 2}


async def test_a_label_that_changes_leaves_the_prompt_as_it_is() -> None:
    async with running(FakeEngine(says([5]))) as node:
        for digest in ("00001", "ea6aa"):
            label = {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={digest};",
            }
            await ask(node, MESSAGES, system=[label, {"type": "text", "text": "Be brief."}])
        await ask(node, MESSAGES, system="Be brief.")
        first, *others = [request.prompt_token_ids for request in node.engine.requests]
        assert others == [first, first]


async def test_names_of_clients_cannot_break_the_header() -> None:
    members = {"a\r\nset-cookie: b=1": 1, "é,x": 1, "long" * 99: 1}
    async with running(FakeEngine(says([5]))) as node:
        status, _, named = await ask(node, MESSAGES, messages=[HI[0] | members], tools=[{"type": "x\ny", "name": "f"}])
        assert status == 200
        assert named is not None
        assert named.split(",")[0] == "messages[].a??set-cookie??b?1"
        assert "tools.x?y" in named
        assert max(map(len, named.split(","))) == 48
        many = [HI[0] | {f"m{i}": 1 for i in range(500)}]
        _, _, named = await ask(node, MESSAGES, messages=many)
        assert named is not None
        assert named.endswith(",+468")


@pytest.mark.long_cases
@pytest.mark.parametrize(("path", "most"), [(CHAT, 128), (MESSAGES, MANY_TOOLS), (RESPONSES, MANY_TOOLS)])
async def test_the_number_of_tools_is_bounded_by_the_api(path: str, most: int) -> None:
    forms: dict[str, Any] = {
        CHAT: lambda name: {"type": "function", "function": {"name": name}},
        MESSAGES: lambda name: {"name": name, "input_schema": {}},
        RESPONSES: lambda name: {"type": "function", "name": name},
    }
    body = {"messages": HI} if path == CHAT else {}
    async with running(FakeEngine(says([5]))) as node:
        for num, length, expected in ((most, 9, 200), (most + 1, 9, 400), (1, 64, 200), (1, 300, 400)):
            tools = [forms[path](f"t{i}".ljust(length, "_")) for i in range(num)]
            status, content, _ = await ask(node, path, tools=tools, tool_choice=NO_CALL[path], **body)
            assert status == expected, (num, length, content)


async def test_ignored_fields_have_the_names_of_their_api(monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(*_: object) -> set[str]:
        return {"enable_thinking", "reasoning_effort"}

    monkeypatch.setattr("pd_cluster.server.requests.request_checks.disabled_fields", unread)
    async with running(FakeEngine(says([5]))) as node:
        assert (await ask(node, MESSAGES, thinking={"type": "enabled"}))[2] == "output_config,thinking"
        assert (await ask(node, RESPONSES, reasoning={"effort": "low"}))[2] == "enable_thinking,reasoning"


def test_a_conversation_has_one_name_in_every_api() -> None:
    """The router's names of the prompt are those of the chat request."""
    long = "Once upon a time. " * 60
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    named = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    bodies = {
        "/v1/chat/completions": {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": long}],
            "tools": [{"type": "function", "function": tool}],
        },
        MESSAGES: {"system": "s", "messages": [{"role": "user", "content": long}], "tools": [named]},
        RESPONSES: {"instructions": "s", "input": long, "tools": [{"type": "function", **tool}]},
    }
    key = chain_key(b"k" * 32)
    names = {RequestBody(json.dumps(body).encode(), dialect_of(path)).text_chain(key) for path, body in bodies.items()}
    assert len(names) == 1
    assert len(names.pop()) == 4, "two whole steps, and one that ends where each content begins"
    wrong = json.dumps({"messages": [{"role": "user", "content": 5}]}).encode()
    assert RequestBody(wrong, dialect_of(MESSAGES)).text_chain(key) == ()


@pytest.mark.parametrize(("path", "limit"), [(MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")])
def test_the_prefill_leg_is_bounded_by_the_field_of_its_api(path: str, limit: str) -> None:
    body = RequestBody(json.dumps(BODIES[path] | {limit: 500, "stream": True}).encode(), dialect_of(path))
    leg = json.loads(body.for_prefill())
    kept = BODIES[path].keys() | {"stream", limit, "kv_transfer_params"}
    assert (leg[limit], leg["stream"], leg.keys()) == (1, False, kept)
