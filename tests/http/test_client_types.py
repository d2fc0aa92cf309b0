"""Every block, item and tool of the newest types of OpenAI's and Anthropic's clients is taken, or refused for a reason.

The types are found in the installed packages, so that an upgrade of them tries what is new.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
import pytest

from pd_http.dialects import MESSAGES, RESPONSES, dialect_of
from pd_http.errors import InvalidRequest
from tests.http.client_types import values

pytestmark = pytest.mark.slow

# What may be refused, by a part of the message
REASONS = ("takes text only", "nothing is stored", "does not compact", "must be followed by its", "field `call_id`")
CALL = {"type": "tool_use", "id": "text", "name": "f", "input": {}}
FUNCTION_CALL = {"type": "function_call", "call_id": "text", "name": "f", "arguments": "{}"}
RESULT = {"type": "tool_result", "tool_use_id": "text", "content": "r"}


def taken(path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The chat request. None: the body is refused for one of the reasons."""
    fields = msgspec.json.decode(orjson.dumps(body), type=dict[str, msgspec.Raw])
    try:
        asked = dialect_of(path).to_chat(fields)
    except InvalidRequest as error:
        if not any(reason in str(error) for reason in REASONS):
            raise
        return None
    chat = {name: orjson.loads(bytes(raw)) for name, raw in asked.fields.items()}
    check_pairs(chat["messages"])
    return chat | {"left_out": asked.left_out}


def check_pairs(messages: list[dict[str, Any]]) -> None:
    """Each result has its call before it."""
    called: set[str] = set()
    for message in messages:
        called |= {call["id"] for call in message.get("tool_calls", ())}
        assert message["role"] != "tool" or message["tool_call_id"] in called, messages


def test_blocks_of_messages() -> None:
    from anthropic.types.beta import BetaContentBlockParam

    num_taken = 0
    for block in values(BetaContentBlockParam):
        role = "user" if block["type"] in ("tool_result", "image", "document") else "assistant"
        turns = [{"role": "assistant", "content": [CALL]}, {"role": "user", "content": [block]}]
        if role == "assistant":
            then: Any = [RESULT] if "input" in block else "hi"
            turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": then}]
        num_taken += taken(MESSAGES, {"messages": [{"role": "user", "content": "hi"}, *turns]}) is not None
    assert num_taken > 100


def test_tools_of_messages() -> None:
    from anthropic.types.beta import BetaToolUnionParam

    for tool in values(BetaToolUnionParam):
        chat = taken(MESSAGES, {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]})
        assert chat is not None
        assert bool(chat["tools"]) is ("input_schema" in tool) or chat["left_out"]


def test_fields_of_messages() -> None:
    from anthropic.types.beta.message_create_params import MessageCreateParamsBase

    for body in values(MessageCreateParamsBase, 2):
        body = body | {"messages": [{"role": "user", "content": "hi"}], "tool_choice": {"type": "auto"}}
        for name in ("system", "tools", "output_config"):
            body.pop(name, None)
        assert taken(MESSAGES, body) is not None


def test_items_of_responses() -> None:
    from openai.types.responses import ResponseInputItemParam

    num_taken = 0
    for item in values(ResponseInputItemParam):
        before = [FUNCTION_CALL] if item.get("type") == "function_call_output" and not item.get("name") else []
        num_taken += taken(RESPONSES, {"input": [{"role": "user", "content": "hi"}, *before, item]}) is not None
    assert num_taken > 500


def test_tools_of_responses() -> None:
    from openai.types.responses import ToolParam

    for tool in values(ToolParam):
        chat = taken(RESPONSES, {"input": "hi", "tools": [tool]})
        assert chat is not None
        assert chat["tools"] or chat["left_out"], tool
