"""OpenAI's Responses API as chat requests, without state (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd_http.dialect import (
    ChatRequest,
    Dialect,
    RawFields,
    check_entries,
    raw_fields,
    read,
    refusal,
    without_nulls,
)
from pd_http.errors import InvalidRequest
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_http.errors import PdError

_LAST_EVENTS = {
    b"event: " + name for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
}


# Members without use here are of type Any: answers have them, and clients send answers back. Others are refused.
class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a message, of reasoning or of a summary."""

    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None
    prompt_cache_breakpoint: Any = None


class _Item(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    id: Any = None
    status: Any = None


class SaidItem(_Item, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]
    phase: Any = None


class ReasoningItem(_Item, tag_field="type", tag="reasoning"):
    summary: list[TextPart] = []
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class CallItem(_Item, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str
    caller: Any = None
    parsed_arguments: Any = None


class CallOutputItem(_Item, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[TextPart]
    caller: Any = None


Item = SaidItem | ReasoningItem | CallItem | CallOutputItem


class ResponsesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]  # others are tools that OpenAI's servers run, or have no schema
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str


class ResponsesFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesFields(msgspec.Struct, kw_only=True):
    """The fields that only this API has, or has in another form than chat."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: Literal[False] | None = None


class ResponsesDialect(Dialect):
    """Beside its own fields a body may have those of chat that keep their meaning here."""

    token_limit = "max_output_tokens"
    params = {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
        "reasoning_effort": "reasoning",
    }  # fmt: skip

    def to_chat(self, fields: RawFields) -> ChatRequest:
        if bytes(fields.get("store", b"")) == b"true":
            raise InvalidRequest("store: answers are not stored; send store: false", "store", "unsupported_value")
        given = read(fields, ResponsesFields)
        check_entries([given.tools], "tools")
        chat: dict[str, Any] = {
            "messages": _messages(given),
            "max_tokens": given.max_output_tokens,
            "tools": None if given.tools is None else [_tool(one) for one in given.tools],
            # OpenAI's clients send "auto", the default, without tools too
            "tool_choice": None if given.tool_choice == "auto" and not given.tools else _choice(given.tool_choice),
            "response_format": _format(given.text),
            "reasoning_effort": given.reasoning and given.reasoning.effort,
        }
        others = {name: raw for name, raw in fields.items() if name not in ResponsesFields.__struct_fields__}
        return ChatRequest(others | raw_fields(chat), frozenset(_ignored(given)))

    def error_event(self, error: PdError) -> bytes:
        """With the error's object too, which OpenAI's clients raise; their type for the event alone raises nothing."""
        body = self.error_body(error)
        shown = {name: body["error"][name] for name in ("code", "message", "param")}
        return event_bytes({"type": "error", "sequence_number": 0} | shown | body, "error")

    def is_whole(self, tail: bytes) -> bool:
        return not _LAST_EVENTS.isdisjoint(
            tail.splitlines()
        )  # an answer may speak of events, but in no line of its own


def _items(given: ResponsesFields) -> list[Item]:
    if isinstance(given.input, str):
        return [SaidItem(role="user", content=given.input)]
    check_entries([given.input, *(part for one in given.input for part in one.values())], "input")
    items = []
    for i, one in enumerate(given.input):
        try:
            items.append(msgspec.convert({"type": "message"} | without_nulls(one), Item))
        except (msgspec.ValidationError, RecursionError) as error:
            raise refusal(str(error), f"input[{i}]") from error
    return items


def _messages(given: ResponsesFields) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls of one answer are one message, as in chat."""
    system = [SaidItem(role="system", content=given.instructions)] if given.instructions else []
    messages: list[dict[str, Any]] = []
    for item in [*system, *_items(given)]:
        last = messages[-1] if messages else {"role": ""}
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif isinstance(item, SaidItem) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"  # few chat templates know developers
            if role == last["role"] == "system":
                last["content"] += "\n" + _text(item.content)
            else:
                messages.append({"role": role, "content": _text(item.content)})
        else:
            if last["role"] != "assistant" or _begins_anew(item, last):
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            _extend(last, item)
    return messages


def _begins_anew(item: Item, last: dict[str, Any]) -> bool:
    if isinstance(item, ReasoningItem):
        return bool(last["content"]) or "tool_calls" in last
    return isinstance(item, SaidItem) and bool(last["content"]) and "tool_calls" not in last


def _extend(message: dict[str, Any], item: Item) -> None:
    """Add a part of an answer to its message."""
    if isinstance(item, SaidItem):
        message["content"] += _text(item.content)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        texts = [part.text for part in item.content or item.summary]
        if item.encrypted_content and not texts:
            raise InvalidRequest("input: encrypted_content of a reasoning item cannot be read here", "input")
        message["reasoning_content"] = "\n".join([*filter(None, [message.get("reasoning_content")]), *texts])


def _text(content: str | list[TextPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(one.text or one.refusal for one in content)


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: str | NamedTool | None) -> str | dict[str, Any] | None:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedTool) else choice


def _format(config: TextConfig | None) -> dict[str, Any] | None:
    form = None if config is None else config.format
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    members = {name: getattr(form, name) for name in ("name", "schema", "strict", "description")}
    return {"type": form.type, "json_schema": {key: value for key, value in members.items() if value is not None}}


def _ignored(given: ResponsesFields) -> Iterable[str]:
    reasoning = given.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        yield "reasoning.summary"
    if given.text is not None and given.text.verbosity:
        yield "text.verbosity"
    if given.include:
        yield "include"
