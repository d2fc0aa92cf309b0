"""OpenAI's Responses API as chat requests, without state (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pd_http.dialect import (
    MANY_TOOLS,
    ChatRequest,
    Dialect,
    RawFields,
    ToolLimits,
    raw_fields,
    read,
)
from pd_http.errors import InvalidRequest
from pd_http.left_out import BindingForm, LeftOut
from pd_http.member_bounds import TRANSLATED_BOUNDS
from pd_http.responses_items import ForeignItems, SaidItem, chat_messages
from pd_http.responses_tools import ResponsesTools
from pd_http.sse import event_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pd_http.errors import PdError

_LOGPROBS = "message.output_text.logprobs"
_LAST_EVENTS = {
    b"event: " + name for name in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
}


class ResponsesFormat(BindingForm):
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None


class ResponsesDialect(Dialect):
    """Beside its own fields a body may have those of chat that keep their meaning here."""

    token_limit = "max_output_tokens"
    tool_limits = ToolLimits(MANY_TOOLS, 256)  # a name of 128, after that of a namespace
    bounds = TRANSLATED_BOUNDS
    params = {
        "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text",
        "reasoning_effort": "reasoning",
    }  # fmt: skip

    def to_chat(self, fields: RawFields) -> ChatRequest:
        left_out = LeftOut()
        given = read(fields, ResponsesFields, left_out)
        if given.include and _LOGPROBS in given.include:
            raise InvalidRequest(f"include: {_LOGPROBS} is not supported", "include", "unsupported_value")
        tools = ResponsesTools(left_out)
        tools.take(given.tools or [])
        if isinstance(given.input, str):
            messages = chat_messages(given.instructions, iter([SaidItem(role="user", content=given.input)]), left_out)
        else:
            foreign = ForeignItems(given.input, left_out)
            messages = chat_messages(given.instructions, foreign.read(), left_out)
            tools.take(foreign.tools, "input.tools", brought=True)
        chat: dict[str, Any] = {
            "messages": messages,
            "max_tokens": given.max_output_tokens,
            "tools": tools.shown if tools.shown or given.tools is not None else None,
            "tool_choice": tools.choice(given.tool_choice),
            "response_format": _format(given.text),
            "reasoning_effort": given.reasoning and given.reasoning.effort,
        }
        for name in _ignored(given):
            left_out.add("member", name)
        others = {name: raw for name, raw in fields.items() if name not in ResponsesFields.__struct_fields__}
        return ChatRequest(others | raw_fields(chat), left_out, tools.calls)

    def error_event(self, error: PdError) -> bytes:
        """With the error's object too, which OpenAI's clients raise; their type for the event alone raises nothing."""
        body = self.error_body(error)
        shown = {name: body["error"][name] for name in ("code", "message", "param")}
        return event_bytes({"type": "error", "sequence_number": 0} | shown | body, "error")

    def is_whole(self, tail: bytes) -> bool:
        return not _LAST_EVENTS.isdisjoint(
            tail.splitlines()
        )  # an answer may speak of events, but in no line of its own


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
    if given.store:
        yield "store"
