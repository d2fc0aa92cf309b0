"""Items of OpenAI's responses: those that are served, and what becomes of all others.

An item that is not served becomes items that are. It is told by its members, not by a list of types: one with `call_id`
is a call, or a result if its type ends with `_output`; one that has its result in it is both. So an item that is new
tomorrow is read as its like is today.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pd_http.dialect import refusal
from pd_http.errors import InvalidRequest
from pd_http.left_out import known, shape_of
from pd_http.readable import check_readable, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_http.left_out import LeftOut


# Members without use here are of type Any: answers have them, and clients send answers back. Others are named.
class TextPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of a message, of reasoning or of a summary."""

    type: str
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
    content: str | list[TextPart] = ""
    phase: Any = None


class ReasoningItem(_Item, tag_field="type", tag="reasoning"):
    summary: list[TextPart] = []
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class CallItem(_Item, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: Any = ""  # text, or whatever else the model once wrote
    namespace: str | None = None
    caller: Any = None
    parsed_arguments: Any = None


class CallOutputItem(_Item, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[TextPart] = ""
    name: Any = None
    namespace: Any = None
    caller: Any = None


Item = SaidItem | ReasoningItem | CallItem | CallOutputItem
_ITEM = shape_of(Item)
_OF_ALL = "functions"  # the API's namespace of functions that have no other
_SERVED = ("message", "reasoning", "function_call")
_TOOLS_OF = ("additional_tools", "tool_search_output")  # items with tools that may be called from here on
_RESULTS = ("output", "outputs", "results", "result", "error")
# Members of a call that are not its arguments
_OF_CALL = frozenset(("arguments", "async", "call_id", "caller", "id", "name", "namespace", "server_label", "status",
                      "type", *_RESULTS))  # fmt: skip
_STATE: Final = {
    "compaction_trigger": "this server does not compact: ask for a summary as a message",
}


def flat_name(name: str, namespace: str | None) -> str:
    """The name under which the model sees a function of a namespace."""
    if not namespace or namespace == _OF_ALL:
        return name
    return namespace + name if namespace.endswith("_") or name.startswith("_") else f"{namespace}__{name}"


class ForeignItems:
    """Reads the items of one input. `tools`: those that items bring with them."""

    def __init__(self, given: list[dict[str, Any]], left_out: LeftOut) -> None:
        self.tools: list[Any] = []
        self._given = given
        self._left_out = left_out
        self._called = {call for one in given if (call := _call_id(one)) and not _is_result(one)}
        self._answered = {call for one in given if (call := _call_id(one)) and _is_result(one)}

    def read(self) -> Iterator[Item]:
        """The items that are served. Raises InvalidRequest."""
        for i, one in enumerate(self._given):
            try:
                for item in self._items(one, f"input[{i}]"):
                    try:
                        yield msgspec.convert(item, Item)
                    except msgspec.ValidationError:
                        yield msgspec.convert(known(item, _ITEM, "input", self._left_out), Item)
            except (msgspec.ValidationError, RecursionError) as error:
                raise refusal(str(error), f"input[{i}]") from error

    def _items(self, one: dict[str, Any], place: str) -> list[dict[str, Any]]:
        kind = one.get("type") or ("item_reference" if "id" in one and "role" not in one else "message")
        kind = str(kind)
        if kind in _STATE:
            raise InvalidRequest(f"{place}.type: {kind} is not supported: {_STATE[kind]}", "input", "unsupported_value")
        if kind in _TOOLS_OF and isinstance(one.get("tools"), list):
            self.tools += one["tools"]
        if kind in _SERVED or (kind == "function_call_output" and self._is_of_call(one)):
            names = one.keys() & {"content", "output", "summary"}
            return [one | {"type": kind} | {name: self._parts(one[name], f"{place}.{name}") for name in names}]
        check_readable(one, place)
        return self._foreign(one, kind, place)

    def _is_of_call(self, one: dict[str, Any]) -> bool:
        """Whether a result has its call, or cannot be given one, because its tool has no name."""
        return _call_id(one) in self._called or not one.get("name")

    def _foreign(self, one: dict[str, Any], kind: str, place: str) -> list[dict[str, Any]]:
        call_id = _call_id(one) or (f"call_{place}" if kind == "function_call_output" else "")
        if call_id and _is_result(one):
            result = {"type": "function_call_output", "call_id": call_id, "output": _told(one, place)}
            if call_id in self._called:
                return [result]
            call = {"type": kind.removesuffix("_output"), "name": one.get("name"), "namespace": one.get("namespace")}
            return [_call(call_id, call), result]
        if call_id and (call_id in self._answered or kind == "custom_tool_call"):
            return [_call(call_id, one)]
        results = {name: one[name] for name in _RESULTS if one.get(name)}
        if kind.endswith("_call") and "result" not in results and (text := readable(results, place)):
            call_id = str(call_id or one.get("id"))
            return [_call(call_id, one), {"type": "function_call_output", "call_id": call_id, "output": text}]
        if kind != "additional_tools":
            self._left_out.add("item", f"input.{kind}")
        return []

    def _parts(self, content: Any, place: str) -> Any:
        """The parts that are text. Raises InvalidRequest for media."""
        if not isinstance(content, list):
            return "" if content is None else content
        parts = []
        for i, one in enumerate(content):
            check_readable(one, f"{place}[{i}]")
            if not isinstance(one, dict) or isinstance(one.get("text", one.get("refusal")), str):
                parts.append(one)
            elif text := readable(one, f"{place}[{i}]"):
                parts.append({"type": "input_text", "text": text})
            else:
                self._left_out.add("block", f"input.{one.get('type')}")
        return parts


def _call_id(one: dict[str, Any]) -> str:
    """Of a call or a result; some results have it as their `id`."""
    given = one.get("call_id") or (one.get("id") if _is_result(one) else None)
    return given if isinstance(given, str) else ""


def _is_result(one: dict[str, Any]) -> bool:
    return str(one.get("type")).endswith("_output")


def _call(call_id: str, one: dict[str, Any]) -> dict[str, Any]:
    kind = str(one["type"])
    name = one.get("name") or kind.removesuffix("_call")
    arguments = one.get("arguments")
    if arguments is None:
        arguments = {key: value for key, value in one.items() if key not in _OF_CALL}
    return {
        "type": "function_call", "call_id": call_id, "name": name, "namespace": one.get("namespace"),
        "arguments": arguments,
    }  # fmt: skip


def _told(one: dict[str, Any], place: str) -> str:
    """The text of a result; of tools that were found, their names."""
    if isinstance(one.get("tools"), list):
        return readable([tool.get("name") for tool in one["tools"] if isinstance(tool, dict)], place)
    shown = {name: value for name, value in one.items() if name in _RESULTS or name not in _OF_CALL}
    return readable(shown, place) or str(one.get("status") or "")


def chat_messages(instructions: str | None, items: Iterator[Item], left_out: LeftOut) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls of one answer are one message, as in chat."""
    messages = [_message("system", instructions)] if instructions else []
    for item in items:
        last: dict[str, Any] = messages[-1] if messages else {"role": ""}
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(item.output)]})
        elif isinstance(item, SaidItem) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"  # few chat templates know developers
            if role == last["role"] == "system":
                last["content"] += ["\n", _text(item.content)]
            else:
                messages.append(_message(role, _text(item.content)))
        elif not isinstance(item, ReasoningItem) or _has_text(item, left_out):
            if last["role"] != "assistant" or _begins_anew(item, last):
                last = _message("assistant")
                messages.append(last)
            _extend(last, item)
    return [_whole(one) for one in messages]


def _message(role: str, *texts: str) -> dict[str, Any]:
    """Its content is a list while it grows, so that many items take no time that rises with their square."""
    return {"role": role, "content": [*texts]}


def _whole(message: dict[str, Any]) -> dict[str, Any]:
    texts = {"content": "".join(message["content"])}
    if "reasoning_content" in message:
        texts["reasoning_content"] = "\n".join(message["reasoning_content"])
    return message | texts


def _has_text(item: ReasoningItem, left_out: LeftOut) -> bool:
    if item.encrypted_content:
        left_out.add("member", "input.reasoning.encrypted_content")
    return bool(item.content or item.summary)


def _begins_anew(item: Item, last: dict[str, Any]) -> bool:
    has_text = any(last["content"])
    if isinstance(item, ReasoningItem):
        return has_text or "tool_calls" in last
    return isinstance(item, SaidItem) and has_text and "tool_calls" not in last


def _extend(message: dict[str, Any], item: Item) -> None:
    """Add a part of an answer to its message."""
    if isinstance(item, SaidItem):
        message["content"].append(_text(item.content))
    elif isinstance(item, CallItem):
        function = {"name": flat_name(item.name, item.namespace), "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, ReasoningItem):
        texts = [part.text for part in item.content or item.summary]
        message.setdefault("reasoning_content", []).extend(texts)


def _text(content: str | list[TextPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(one.text or one.refusal for one in content)
