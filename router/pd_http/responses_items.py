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
from pd_http.readable import check_text_only, is_blocks, text_of, text_of_block, texts_of

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
# msgspec takes 10 us more for a union, which it reads anew at each call
_ITEMS: Final[dict[str, type[Item]]] = {
    "message": SaidItem, "reasoning": ReasoningItem, "function_call": CallItem, "function_call_output": CallOutputItem
}  # fmt: skip
_OF_ALL = "functions"  # the API's namespace of functions that have no other
_CONTENTS = ("content", "summary", "output")
_TEXT_TYPES = (None, "text", "input_text", "output_text", "reasoning_text", "refusal", "summary_text")
_TOOLS_OF = ("additional_tools", "tool_search_output")  # items with tools that may be called from here on
_RESULTS = ("output", "outputs", "results", "result", "error")
# Members of a call that are not its arguments, and of a result that are not what it says
_OF_CALL = frozenset(("arguments", "async", "call_id", "caller", "id", "name", "namespace", "server_label", "status",
                      "type", *_RESULTS))  # fmt: skip
_OF_RESULT = frozenset(("call_id", "caller", "execution", "id", "name", "namespace", "type"))
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
                    struct = _ITEMS[item["type"]]
                    try:
                        yield msgspec.convert(item, struct)
                    except msgspec.ValidationError:
                        yield msgspec.convert(known(item, shape_of(struct), "input", self._left_out), struct)
            except (msgspec.ValidationError, RecursionError) as error:
                raise refusal(str(error), f"input[{i}]") from error

    def _items(self, one: dict[str, Any], place: str) -> list[dict[str, Any]]:
        kind = one.get("type") or ("item_reference" if "id" in one and "role" not in one else "message")
        kind, call_id = str(kind), _call_id(one)
        if kind in _STATE:
            raise InvalidRequest(f"{place}.type: {kind} is not supported: {_STATE[kind]}", "input", "unsupported_value")
        if kind in _TOOLS_OF and isinstance(one.get("tools"), list):
            self.tools += one["tools"]
        # A result without its call gets one, if its tool has a name
        if kind in _ITEMS and (kind != "function_call_output" or call_id in self._called or not one.get("name")):
            parts = {name: self._parts(one[name], f"{place}.{name}") for name in _CONTENTS if name in one}
            return [one | {"type": kind} | parts | ({"call_id": call_id} if call_id else {})]
        check_text_only(one, place)
        return self._foreign(one, kind, call_id, place)

    def _foreign(self, one: dict[str, Any], kind: str, call_id: str, place: str) -> list[dict[str, Any]]:
        if _is_result(one) and (call_id or kind == "function_call_output"):
            call_id = call_id or f"call_{place}"
            result = {"type": "function_call_output", "call_id": call_id, "output": _told(one, place)}
            if call_id in self._called:
                return [result]
            call = {"type": kind.removesuffix("_output"), "name": one.get("name"), "namespace": one.get("namespace")}
            return [_call(call_id, call), result]
        if call_id and (call_id in self._answered or kind == "custom_tool_call"):
            return [_call(call_id, one)]
        results = {name: one[name] for name in _RESULTS if one.get(name)} if kind.endswith("_call") else {}
        if results:
            call_id = call_id or f"call_{place}"
            return [_call(call_id, one), {"type": "function_call_output", "call_id": call_id,
                                          "output": _text_of_members(results, place)}]  # fmt: skip
        if not call_id and (one.get("content") or one.get("text")):
            role = one["role"] if one.get("role") in ("assistant", "system", "developer") else "user"
            shown = {name: value for name, value in one.items() if name not in ("id", "role", "status")}
            if text := text_of_block(shown, place):
                return [{"type": "message", "role": role, "content": text}]
        if kind != "additional_tools":
            self._left_out.add("item", f"input.{kind}")
        return []

    def _parts(self, content: Any, place: str) -> list[Any]:
        """The parts that are text. Raises InvalidRequest for media."""
        parts = []
        for i, one in enumerate(content if is_blocks(content) else [content]):
            is_text = isinstance(one, dict) and isinstance(one.get("text", one.get("refusal")), str)
            if is_text and one.get("type") in _TEXT_TYPES:
                parts.append(one)
            elif text := "\n".join(texts_of(one, f"{place}[{i}]")):
                parts.append({"type": "input_text", "text": text})
            elif isinstance(one, dict):
                self._left_out.add("block", f"input.{one.get('type')}")
        return parts


def _call_id(one: dict[str, Any]) -> str:
    """Of a call or a result; some have it as their `id`. "" for all else."""
    has_id = str(one.get("type")).endswith(("_call", "_output"))
    given = one.get("call_id") or (one.get("id") if has_id else None)
    return str(given) if isinstance(given, str | int) else ""


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
        return "\n".join(str(tool.get("name")) for tool in one["tools"] if isinstance(tool, dict))
    shown = {name: value for name, value in one.items() if value is not None and name not in _OF_RESULT}
    if shown.keys() == {"status"}:
        return str(shown["status"])
    if shown.get("status") in ("completed", "in_progress"):
        del shown["status"]
    return _text_of_members(shown, place)


def _text_of_members(given: dict[str, Any], place: str) -> str:
    """What a tool gave, after the other members, if it has any."""
    said = [text for name in _RESULTS if name in given for text in texts_of(given[name], f"{place}.{name}")]
    others = {name: value for name, value in given.items() if name not in _RESULTS}
    return "\n".join(filter(None, (text_of(others), *said)))


def chat_messages(instructions: str | None, items: Iterator[Item], left_out: LeftOut) -> list[dict[str, Any]]:
    """Chat messages. Reasoning, text and calls of one answer are one message, as in chat.

    A call that has its result further on must stay in the message before that result, so no answer begins while a call
    waits for one, even where results of other calls stand between.
    """
    messages = [_message("system", instructions)] if instructions else []
    answer: dict[str, Any] | None = None  # the last one, if nothing else was said after it
    waiting: set[str] = set()  # its calls without a result
    for item in items:
        last: dict[str, Any] = messages[-1] if messages else {"role": ""}
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(item.output)]})
            waiting.discard(item.call_id)
        elif isinstance(item, SaidItem) and item.role != "assistant":
            answer, role = None, "user" if item.role == "user" else "system"  # few chat templates know developers
            if role == last["role"] == "system":
                last["content"] += ["\n", _text(item.content)]
            else:
                messages.append(_message(role, _text(item.content)))
        elif not isinstance(item, ReasoningItem) or _has_text(item, left_out):
            if answer is None or (not waiting and (last is not answer or _begins_anew(item, answer))):
                answer = _message("assistant")
                messages.append(answer)
                waiting.clear()
            _extend(answer, item)
            if isinstance(item, CallItem):
                waiting.add(item.call_id)
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
