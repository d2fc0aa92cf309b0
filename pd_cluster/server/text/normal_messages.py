"""The messages of a chat request in one form, whatever form a client has sent: content as text, calls as `tool_calls`.

A history may hold what other servers and APIs write: reasoning, calls and results among the parts of a content. What a
message says stays as it is: it holds what a model once wrote, arguments that are no JSON included. `message_adapter`
brings it into the form that a chat template takes. `text_chain.flat_content` gives the same text for a content, or
none.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_connectors.protocol.text_chain import REASONING_MEMBERS, TEXT_PARTS
from pd_http.left_out import LeftOut
from pd_http.member_bounds import check_texts
from pd_http.readable import check_text_only, says_anything, text_of, text_of_block, texts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    Message = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Types of parts, in the words of several APIs, and members with one meaning
_CALL = re.compile(r"(\w+_)?(tool|function)[_-](use|call)")
_RESULT = re.compile(r"(\w+_)?(tool|function)([_-]call)?[_-](result|output|response)")
_REASONING = re.compile("thinking|reasoning")
_IDS = ("tool_call_id", "call_id", "tool_use_id", "toolCallId")
_CALL_IDS = (*_IDS, "id")
_NAMES = ("name", "tool_name", "toolName")
_ARGUMENTS = ("arguments", "input", "args", "parameters")
_RESULTS = ("content", "output", "result")
_THOUGHTS = ("thinking", "reasoning", "text", "content", "summary")
# Members of a text that are read, or say nothing
_OF_TEXT = frozenset(("type", "text", "refusal", "annotations", "cache_control", "logprobs"))
_AS_TEXT = ("reasoning_content", "thinking", "reasoning")  # transformers gives templates the one that they read
_USUAL = {"role", "content"}
_MEMBERS = frozenset(("role", "content", "name"))  # all that most messages have
_PLAIN = {"tool": _MEMBERS | {"tool_call_id"}, "function": frozenset[str]()}
_MEDIA = frozenset(("images", "videos", "audios"))  # of a message
_MAX_TYPE_CHARS = 64


class _Said(NamedTuple):
    """What a content says."""

    texts: list[str]
    reasoning: list[str]
    calls: list[Message]
    results: list[Message]


def normal_messages(messages: list[Message], left_out: LeftOut | None = None) -> list[Message]:
    """Messages without null members: content is one string, and arguments of calls are an object or text.

    Results among the parts of a message become messages. `left_out`: takes the names of what is no text. Raises
    InvalidRequest that names the wrong place.
    """
    if not messages:
        raise InvalidRequest("messages must not be empty: at least one message is required", "messages")
    reader = _Reader(LeftOut() if left_out is None else left_out)
    normal = [one for i, message in enumerate(messages) for one in reader.read(message, f"messages[{i}]")]
    given = [call["function"]["arguments"] for one in normal for call in one.get("tool_calls", ())]
    check_texts([text for text in given if isinstance(text, str)], "tool_calls", "messages")
    return normal


class _Reader:
    def __init__(self, left_out: LeftOut) -> None:
        self._left_out = left_out

    def read(self, given: Message, place: str) -> list[Message]:
        role = given.get("role")
        if given.keys() == _USUAL and role in _ROLES[:4] and isinstance(given["content"], str):
            return [given]
        if role not in _ROLES:
            raise InvalidRequest(f"{place}.role must be one of {', '.join(_ROLES)}", "messages")
        message = {key: value for key, value in given.items() if value is not None}
        texts = (message.get("content"), message.get("tool_call_id", ""))
        if message.keys() <= _PLAIN.get(role, _MEMBERS) and all(isinstance(text, str) for text in texts):
            return [message]
        if role in ("tool", "function"):
            role = message["role"] = "tool"
            message = {key: one for key, one in message.items() if key != "tool_call_id"} | _about(message)
        for media in _MEDIA.intersection(message):
            check_text_only({"type": "image"} if message[media] else None, f"{place}.{media}")
        said = self._said(message.get("content"), role, f"{place}.content")
        self._take_members(message, said, place)
        message["content"] = "\n".join(said.texts)
        if role == "assistant" or not said.results:
            return [message, *said.results]
        if role == "tool":  # several results in one message
            said = said._replace(results=[message | one for one in said.results])
        return [*said.results, *([message] if said.texts else [])]

    def _said(self, content: Any, role: str, place: str) -> _Said:
        said = _Said([], [], [], [])
        if isinstance(content, str):
            said.texts.append(content)
        elif isinstance(content, list) or (isinstance(content, dict) and (role == "tool" or "type" in content)):
            parts = content if isinstance(content, list) else [content]
            for i, part in enumerate(parts):
                self._take(part, role, f"{place}[{i}]", said)
        elif role == "tool":
            said.texts.append(text_of(content))
        elif content is not None:
            raise InvalidRequest(f"{place} must be a string or a list of parts", "messages")
        elif role != "assistant":
            raise InvalidRequest(f"{place} is required", "messages")
        return said

    def _take(self, part: Any, role: str, place: str, said: _Said) -> None:
        kind = part.get("type") if isinstance(part, dict) else None
        kind = kind[:_MAX_TYPE_CHARS] if isinstance(kind, str) else ""
        if isinstance(part, str):
            said.texts.append(part)
        elif kind in TEXT_PARTS:
            self._take_text(part, kind, place, said)
        elif _REASONING.search(kind):
            (said.reasoning if role == "assistant" else said.texts).extend(self._thoughts([part]))
        elif role == "assistant" and _CALL.fullmatch(kind):
            said.calls.append(_normal_call(part, place))
        elif _RESULT.fullmatch(kind):
            texts = texts_of(_first(part, _RESULTS), place)
            said.results.append({"role": "tool", "content": "\n".join(texts)} | _about(part))
        elif role == "tool" or (isinstance(part, dict) and says_anything(part)):
            said.texts.append(text_of_block(part, place))
        elif isinstance(part, dict):
            check_text_only(part, place)
            self._left_out.add("block", f"messages.{kind or 'content'}")
        elif part is not None:
            raise InvalidRequest(f"{place} must be a string or an object with a type", "messages")

    def _take_text(self, part: Message, kind: str, place: str, said: _Said) -> None:
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str | None):
            raise InvalidRequest(f"{place}.{TEXT_PARTS[kind]} must be a string", "messages")
        said.texts.extend([] if text is None else [text])
        if len(part) > 2:
            for key in [key for key, one in part.items() if one and key not in _OF_TEXT]:
                self._left_out.add("member", f"messages.{kind}.{key}")

    def _thoughts(self, blocks: list[Any]) -> list[str]:
        """The reasoning in these blocks. That which is encrypted is left out."""
        texts = []
        for block in blocks:
            if text := _thought(block):
                texts.append(text)
            elif isinstance(block, dict):
                self._left_out.add("block", f"messages.{str(block.get('type'))[:_MAX_TYPE_CHARS]}")
        return texts

    def _take_members(self, message: Message, said: _Said, place: str) -> None:
        """Take what a message has beside its content: a refusal, speech, calls, reasoning."""
        audio, refusal = message.pop("audio", None), message.pop("refusal", None)
        spoken = audio.get("transcript") if isinstance(audio, dict) else None
        if audio and not spoken:
            self._left_out.add("member", "messages.audio")
        said.texts.extend([one for one in (spoken, refusal) if one and isinstance(one, str)])
        calls, called = message.pop("tool_calls", None), message.pop("function_call", None)
        calls = [calls] if isinstance(calls, dict) else calls or ([] if called is None else [{"function": called}])
        if not isinstance(calls, list):
            raise InvalidRequest(f"{place}.tool_calls must be a list of function calls", "messages")
        calls = [_normal_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)]
        if said.calls:  # clients may send a call both ways
            ids = {call["id"] for call in calls if "id" in call}
            calls += [call for call in said.calls if call.get("id") not in ids]
        if calls:
            message["tool_calls"] = calls
        if said.reasoning or not REASONING_MEMBERS.isdisjoint(message):
            self._take_reasoning(message, said.reasoning)

    def _take_reasoning(self, message: Message, texts: list[str]) -> None:
        """All of it under one name. Many servers write it under several: each text counts once."""
        forms = [[message[key]] for key in _AS_TEXT if isinstance(message.get(key), str)]
        first = forms[0][0] if forms else ""
        for key in sorted(REASONING_MEMBERS):
            if isinstance(message.get(key), list | dict):
                blocks = message.pop(key)
                forms.append(self._thoughts(blocks if isinstance(blocks, list) else [blocks]))
        joined = ""
        for form in (*forms, texts):
            if "".join(form) not in joined and (text := "\n".join(form)) not in joined:
                joined = f"{joined}\n{text}" if joined else text
        if joined != first:
            message["reasoning_content"] = joined


def _first(given: Message, names: Sequence[str]) -> Any:
    for name in names:
        if (value := given.get(name)) is not None:
            return value
    return None


def _thought(block: Any) -> str:
    given = _first(block, _THOUGHTS) if isinstance(block, dict) else block
    parts = given if isinstance(given, list) else [given]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "\n".join(text for text in texts if text and isinstance(text, str))


def _about(result: Message) -> Message:
    """What a result says of its call."""
    call_id, name = _first(result, _IDS), _first(result, _NAMES)
    about = {"tool_call_id": str(call_id) if isinstance(call_id, int) else call_id, "name": name}
    return {key: value for key, value in about.items() if value and isinstance(value, str)}


def _normal_call(call: Any, place: str) -> Message:
    """A call in the form of chat, of one in the form of chat or of another API. A custom tool takes one text."""
    given = call if isinstance(call, dict) else {}
    function, custom = given.get("function"), None
    if not function:
        function = custom = given.get("custom", given if "custom_" in str(given.get("type")) else None)
    if function is None and _first(given, _NAMES) is not None:
        function = {"name": _first(given, _NAMES), "arguments": _first(given, _ARGUMENTS)}
    if not isinstance(function, dict):
        raise InvalidRequest(f"{place} must be a function call", "messages")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str | None):
        raise InvalidRequest(f"{place}.function.name must be a string", "messages")
    if custom is not None:
        function, arguments = {}, {"input": custom.get("input")}
    if not isinstance(arguments, str | dict | None):
        arguments = msgspec.json.encode(arguments).decode()
    call_id = _first(given, _CALL_IDS)
    about = {"id": str(call_id)} if call_id and isinstance(call_id, str | int) else {}
    return {"type": "function", **about, "function": function | {"name": name or "", "arguments": arguments or {}}}
