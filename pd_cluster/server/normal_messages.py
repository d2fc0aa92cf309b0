"""The messages of a chat request in one form, whatever form a client has sent: content as text, calls as `tool_calls`.

What a message says stays as it is: a history holds what a model once wrote, arguments that are no JSON included.
`message_adapter` brings it into the form that a chat template takes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_connectors.protocol.text_chain import TEXT_PARTS

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def normal_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without null members: content is one string, and arguments of calls are an object or text.

    Raises InvalidRequest that names the wrong place.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty: at least one message is required", "messages")
    return [_normal_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normal_message(message: dict[str, Any], place: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(_ROLES)}", "messages")
    message = _without_functions({key: value for key, value in message.items() if value is not None}, place)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    elif content is None and role in ("assistant", "tool", "function"):
        content = ""
    elif content is None:
        raise InvalidRequest(f"{place}.content is required", "messages")
    elif not isinstance(content, str):
        raise InvalidRequest(f"{place}.content must be a string or a list of parts", "messages")
    calls = message.pop("tool_calls", None)
    normal = message | {"content": content}
    return normal | {"tool_calls": _normal_calls(calls, f"{place}.tool_calls")} if calls else normal


def _without_functions(message: dict[str, Any], place: str) -> dict[str, Any]:
    """OpenAI's older form of a call and of its result in the newer form, the only one that chat templates read."""
    if message["role"] == "function":
        if not isinstance(message.get("name"), str):
            raise InvalidRequest(f"{place}.name must be the name of the function", "messages")
        return message | {"role": "tool"}
    if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequest(f"{place}.tool_call_id must be the id of a call", "messages")
    called = message.pop("function_call", None)
    if called is not None and not message.get("tool_calls"):
        message = message | {"tool_calls": [{"function": called}]}
    return message


def _part_text(part: Any, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise InvalidRequest(
            f"{place}: a part of type {kind!s:.40} cannot be read: this model takes text only",
            "messages",
            "unsupported_value",
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{place}.{TEXT_PARTS[kind]} must be a string", "messages")
    return text


def _normal_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{place} must be a list of function calls", "messages")
    return [_normal_call(call, f"{place}[{i}]") for i, call in enumerate(calls)]


def _normal_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place} must be a function call", "messages")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{place}.function.name must be a string", "messages")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        arguments = msgspec.json.encode(arguments).decode()
    normal = function | {"arguments": arguments or {}}
    return {"type": "function", **{key: value for key, value in call.items() if value is not None}, "function": normal}
