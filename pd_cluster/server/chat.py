"""/v1/chat/completions: checks and normal form of messages, and the shape of answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import FinishReason
from pd_cluster.server.logprobs import chat_logprobs
from pd_cluster.server.output_parser import Reasoning, ToolCall
from pd_cluster.server.schema import NOT_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_cluster.server.choice import ChoiceOutput
    from pd_cluster.server.detokenizer import Vocabulary
    from pd_cluster.server.output_parser import Part
    from pd_cluster.server.schema import ChatBody, TokenizeBody

_ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_num_logprobs(body: ChatBody) -> int | None:
    """The number of alternatives for each token; None for no logprobs. Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def check_tools(body: ChatBody) -> None:
    """Raises InvalidRequest when the model may call a tool: the call would come back as text."""
    choice = body.tool_choice
    if choice not in (None, "none", "auto"):
        raise InvalidRequest(
            "tool_choice must be none: the model cannot be made to call a tool", "tool_choice", "unsupported_value"
        )
    if choice == "auto" and not body.tools:
        raise InvalidRequest("tool_choice auto needs tools", "tool_choice")
    if body.tools and choice != "none":
        raise InvalidRequest(
            "tools is not supported: this server has no tool-call parser, so a call would come back as text; "
            'with tool_choice "none" the request is answered without tools',
            "tools",
            "unsupported_parameter",
        )


def template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """The arguments of the chat template beside messages and tools. Raises InvalidRequest."""
    add = body.add_generation_prompt is not False
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("continue_final_message excludes add_generation_prompt: true", "continue_final_message")
    options = dict(body.chat_template_kwargs or {})
    if reserved := options.keys() & {"tokenize", "chat_template", "conversation", "tools", "return_tensors"}:
        raise InvalidRequest(f"chat_template_kwargs must not contain {sorted(reserved)[0]}", "chat_template_kwargs")
    if body.continue_final_message:
        return options | {"add_generation_prompt": False, "continue_final_message": True}
    return options | {"add_generation_prompt": add}


def normal_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that chat templates expect: text as one string, tool arguments as objects.

    Raises InvalidRequest that names the wrong place.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty: at least one message is required", "messages")
    return [_normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normal_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(_ROLES)}", "messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(f"{place}.content must be a string or a list of parts", "messages")
    calls = message.get("tool_calls")
    if content is None and not calls:
        if role != "assistant":
            raise InvalidRequest(f"{place}.content is required", "messages")
        content = ""
    normal = message | {"content": content}
    if calls:
        normal["tool_calls"] = _normal_calls(calls, f"{place}.tool_calls")
    return normal


def _part_text(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{place}: only parts of type text are supported", "messages", "unsupported_value")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{place}.{kind} must be a string", "messages")
    return text


def _normal_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """The tool calls with their arguments, which clients send as JSON text, as objects, which templates expect."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise InvalidRequest(f"{place} must be a list of function calls", "messages")
    normal = []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
            except NOT_JSON as error:
                raise InvalidRequest(f"{place}: arguments is not valid JSON", "messages") from error
        normal.append(call | {"function": function | {"arguments": arguments}})
    return normal


class ChatShape:
    """`chat.completion` and its chunks. The constant part of a chunk is encoded once."""

    def __init__(
        self, request_id: str, model: str, vocabulary: Vocabulary, *, with_logprobs: bool, include_usage: bool
    ) -> None:
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs
        self._started: set[int] = set()  # choices that have sent their role
        self._calling: set[int] = set()  # choices with a tool call
        self._before = (
            b"data: " + orjson.dumps(self._head)[:-1].replace(b"%", b"%%") + b',"choices":[{"index":%d,"delta":'
        )
        self._after = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def chunk(self, index: int, output: ChoiceOutput, usage: dict[str, Any] | None = None) -> bytes:
        events = []
        after = self._after if usage is None else b'}],"usage":%s}\n\n' % orjson.dumps(usage)
        if index not in self._started:
            self._started.add(index)
            events.append(self._event(index, b'{"role":"assistant","content":""}', after))
        show_logprobs = self._with_logprobs and output.tokens
        if output.parts or show_logprobs:
            delta = _message(output.parts)
            if "tool_calls" in delta:
                self._calling.add(index)
            logprobs = orjson.dumps(chat_logprobs(self._vocabulary, output.tokens)) if show_logprobs else b"null"
            events.append(self._event(index, orjson.dumps(delta), after, logprobs))
        if output.finish_reason is not None:
            reason = _finish_reason(output.finish_reason, index in self._calling)
            end = b'%s,"stop_reason":%s' % (orjson.dumps(reason), orjson.dumps(output.stop_reason))
            events.append(self._event(index, b"{}", after, finish_reason=end))
        return b"".join(events)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps(self._head | {"choices": [], "usage": usage}) + b"\n\n"

    def body(self, choices: Sequence[ChoiceOutput], usage: dict[str, Any]) -> dict[str, Any]:
        shaped = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._head | {"object": "chat.completion", "choices": shaped, "usage": usage}

    def _choice(self, index: int, choice: ChoiceOutput) -> dict[str, Any]:
        said = _message(choice.parts)
        calls = said.get("tool_calls", ())
        for call in calls:
            del call["index"]  # the calls of a whole message are in order
        return {
            "index": index,
            "message": {"role": "assistant", "content": None, "refusal": None} | said,
            "logprobs": chat_logprobs(self._vocabulary, choice.tokens) if self._with_logprobs else None,
            "finish_reason": _finish_reason(choice.finish_reason, bool(calls)),
            "stop_reason": choice.stop_reason,
        }

    def _event(
        self, index: int, delta: bytes, after: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null"
    ) -> bytes:
        rest = b'%s,"logprobs":%s,"finish_reason":%s%s' % (delta, logprobs, finish_reason, after)
        return self._before % index + rest


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """The fields of a message, or of a chunk's delta, that hold these parts. `content` may be left out or empty."""
    content = [part for part in parts if isinstance(part, str)]
    if len(content) == len(parts):
        return {"content": "".join(content)}
    message: dict[str, Any] = {"content": "".join(content)} if content else {}
    if reasoning := [part.text for part in parts if isinstance(part, Reasoning)]:
        message["reasoning_content"] = "".join(reasoning)
    if calls := _tool_calls(part for part in parts if isinstance(part, ToolCall)):
        message["tool_calls"] = calls
    return message


def _tool_calls(pieces: Iterable[ToolCall]) -> list[dict[str, Any]]:
    """One entry per call; only the entry with the first piece of a call has its id and name."""
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name:
            call |= {"id": piece.id, "type": "function"}
            call["function"]["name"] = piece.name
        call["function"]["arguments"] += piece.arguments
    return list(calls.values())


def _finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    """OpenAI's word. A choice that was cut off is "length", even inside a tool call."""
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason
