"""Anthropic's Messages API as chat requests (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd_http.client_labels import is_label_of_system
from pd_http.dialect import MANY_TOOLS, ChatRequest, Dialect, RawFields, ToolLimits, raw_fields, read
from pd_http.errors import InvalidRequest
from pd_http.left_out import BindingForm, LeftOut
from pd_http.member_bounds import TRANSLATED_BOUNDS
from pd_http.messages_blocks import (
    BLOCKS,
    Block,
    ForeignBlocks,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from pd_http.messages_tools import MessagesToolChoice, MessagesTools, choice_of_messages
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_http.errors import PdError

_OVERLOADED = 529  # Anthropic's status for it
_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error", _OVERLOADED: "overloaded_error",
}  # fmt: skip


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ThinkingConfig(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class MessagesFormat(BindingForm):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    format: MessagesFormat | None = None


class MessagesFields(msgspec.Struct, kw_only=True):
    """The fields that only this API has, or has in another form than chat."""

    messages: list[MessageTurn]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


class MessagesDialect(Dialect):
    """Beside its own fields a body may have those of chat that keep their meaning here."""

    requires_limit = True
    tool_limits = ToolLimits(MANY_TOOLS, 128)
    bounds = TRANSLATED_BOUNDS
    params = {
        "stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config",
        "enable_thinking": "thinking",
    }  # fmt: skip

    def to_chat(self, fields: RawFields) -> ChatRequest:
        left_out = LeftOut()
        given = read(fields, MessagesFields, left_out, partial(_rewrite, left_out=left_out))
        tools = MessagesTools(left_out)
        tools.take(given.tools or [])
        system = [MessageTurn("system", blocks)] if (blocks := _system(given.system, left_out)) else []
        turns = _turns([*system, *given.messages], -len(system))
        chat: dict[str, Any] = {
            "messages": [message for role, blocks in turns for message in _chat(role, blocks)],
            "stop": given.stop_sequences,
            "tools": None if given.tools is None else tools.shown,
            **tools.choice(given.tool_choice),
            **_thinking(given.thinking),
            **_output(given.output_config),
        }
        if chat.get("enable_thinking") is False:
            chat["reasoning_effort"] = None  # here the effort is that of reasoning only
        if chat["messages"] and (last := chat["messages"][-1])["role"] == "assistant":
            if last.get("tool_calls"):
                raise InvalidRequest("messages: a tool_use block must be followed by its tool_result", "messages")
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
        for name in _ignored(given):
            left_out.add("member", name)
        others = {name: raw for name, raw in fields.items() if name not in MessagesFields.__struct_fields__}
        return ChatRequest(others | raw_fields(chat), left_out)

    def status(self, error: PdError) -> int:
        return _OVERLOADED if error.code == "overloaded" else error.status

    def error_body(self, error: PdError) -> dict[str, Any]:
        """With `param` and `code` beside Anthropic's members: routers read the code."""
        body = super().error_body(error)
        status = self.status(error)
        body["error"]["type"] = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error"} | body

    def error_event(self, error: PdError) -> bytes:
        return event_bytes(self.error_body(error), "error")

    def is_whole(self, tail: bytes) -> bool:
        lines = tail.splitlines()  # an answer may speak of events, but its JSON has no line breaks
        return b"event: message_stop" in lines or b"event: error" in lines


def _rewrite(given: dict[str, Any], left_out: LeftOut) -> None:
    """Replace what this server does not know. `given`: as JSON has it."""
    turns = given.get("messages")
    if isinstance(turns, list):
        blocks = ForeignBlocks(turns, left_out)
        given["messages"] = [
            turn | {"content": blocks.rewritten(turn["content"], f"messages[{i}].content")}
            if isinstance(turn, dict) and "content" in turn
            else turn
            for i, turn in enumerate(turns)
        ]
    given["system"] = ForeignBlocks([], left_out).rewritten(given.get("system"), "system")
    given["tool_choice"] = choice_of_messages(given.get("tool_choice"))


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _system(content: str | list[Block] | None, left_out: LeftOut) -> list[Block]:
    """The blocks of `system` without a client's label."""
    blocks = [*_blocks(content)] if content else []
    first = blocks[0] if blocks else None
    is_label = isinstance(first, TextBlock) and is_label_of_system(first.text, left_out)
    return blocks[1:] if is_label else blocks


def _blocks(content: str | Sequence[Block]) -> Sequence[Block]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _turns(messages: list[MessageTurn], first: int) -> list[tuple[str, list[Block]]]:
    """Roles and blocks. Neighbours of one role are one turn, as in Anthropic's API: some chat templates refuse two.

    `first`: the index of the first one, for errors.
    """
    turns: list[tuple[str, list[Block]]] = []
    for index, one in enumerate(messages, first):
        blocks = _blocks(one.content)
        for i, block in enumerate(blocks):
            if not isinstance(block, BLOCKS[one.role]):
                tag = block.__struct_config__.tag
                raise InvalidRequest(f"messages[{index}].content[{i}]: a {one.role} message has no {tag}", "messages")
        if turns and turns[-1][0] == one.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((one.role, [*blocks]))
    return turns


def _chat(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """The chat messages of one turn: a result of a tool is a message of its own.

    Results of tools that a server ran stand between the parts of an answer. A call that has its result in a later turn
    must stay in the message before that turn: no part of the answer begins after it.
    """
    messages: list[dict[str, Any]] = []
    part: list[Block] = []
    results: list[dict[str, Any]] = []
    waiting: set[str] = set()  # calls of the part without a result
    for one in blocks:
        if isinstance(one, ToolResultBlock):
            content = "" if one.content is None else _text(one.content)
            results.append({"role": "tool", "tool_call_id": one.tool_use_id, "content": content})
            waiting.discard(one.tool_use_id)
            continue
        if results and not waiting:
            messages += [_message(role, part), *results] if part else results
            part, results = [], []
        part.append(one)
        if isinstance(one, ToolUseBlock):
            waiting.add(one.id)
    return [*messages, *([_message(role, part)] if part or not results else []), *results]


def _message(role: str, blocks: list[Block]) -> dict[str, Any]:
    """Texts of an assistant are joined as they stood in the answer."""
    texts = [one.text for one in blocks if isinstance(one, TextBlock) and one.text]
    message: dict[str, Any] = {"role": role, "content": ("" if role == "assistant" else "\n").join(texts)}
    if thoughts := [one.thinking for one in blocks if isinstance(one, ThinkingBlock) and one.thinking]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [one for one in blocks if isinstance(one, ToolUseBlock)]:
        message["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}} for one in calls
        ]
    return message


def _thinking(config: ThinkingConfig | None) -> dict[str, Any]:
    """Adaptive thinking is what the chat template does by itself; so does every other type."""
    if config is None:
        return {}
    thinks = {"enabled": True, "disabled": False}.get(config.type)
    return {"enable_thinking": thinks, "include_reasoning": False if config.display == "omitted" else None}


def _output(config: OutputConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    form = None
    if config.format is not None:
        form = {"type": "json_schema", "json_schema": {"schema": config.format.schema}}
    return {"reasoning_effort": config.effort, "response_format": form}


def _ignored(given: MessagesFields) -> Iterable[str]:
    thinking, output = given.thinking, given.output_config
    if thinking is not None and thinking.budget_tokens is not None:
        yield "thinking.budget_tokens"
    if thinking is not None and thinking.type not in ("enabled", "disabled", "adaptive"):
        yield "thinking.type"
    if thinking is not None and thinking.display not in (None, "summarized", "omitted"):
        yield "thinking.display"
    if thinking is not None and thinking.type == "disabled" and output is not None and output.effort is not None:
        yield "output_config.effort"
    blocks = (block for turn in given.messages if not isinstance(turn.content, str) for block in turn.content)
    if any(isinstance(block, ToolResultBlock) and block.is_error for block in blocks):
        yield "tool_result.is_error"
