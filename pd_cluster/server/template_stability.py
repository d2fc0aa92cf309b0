"""When a chat template has decided how a message is written, whatever messages follow.

A router knows the beginning of a conversation. Tokens may be promised for it only if every conversation that begins so
has them. Templates break that: some drop the reasoning of all turns but the last, some write the system message into
the last user message. So each *kind* of message (role, keys, with or without tools and options of the template) is
tried once: in small conversations, with marks for its texts, before different continuations. If these leave the marks
in place, and the text up to them alike, the message is decided

    ITSELF      always
    NEXT        when a message follows: whatever it is, or one of an answer. Templates look into the text of others, to
                see whether these are questions
    QUESTION    when a whole user message follows: alike for all conversations that are the same up to its end
    NOTHING     by nothing that was tried

NOTHING decides a message with a literal of the template in its text, such as a tag of reasoning: the template may look
for it.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Message = dict[str, Any]
    _Written = tuple[str, Sequence[Message]]  # a text, and what stands in it behind the message
    Render = Callable[[Sequence[Message], "list[Message] | None", "dict[str, Any]"], str]

MAX_KINDS = 256  # remembered; clients choose keys and options
# Kinds tried at once, and seconds until one more may be: each takes 114 renderings, 20 to 80 ms of the one thread
# that tokenizes. A client may send ever new kinds; those that are not tried are decided by nothing until they are.
MAX_TRIES, TRY_EVERY_S = 48, 2.0
MAX_OPTION_BYTES = 256
_CALL_ID, _OTHER_ID, _LATER_ID = "abcdefghi", "abcdefghj", "abcdefghk"  # some templates demand nine characters
_LITERALS = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
_TIME_OF_DAY = re.compile(r"%-?[HIMSpcXfTRrs]")
_MARK = "Zq%d é  <&'\"\\\n z"  # what templates may trim, escape or split
_USER = {"role": "user", "content": "uq"}
_ANSWER = {"role": "assistant", "content": "aq"}
_CALLS = [{"id": _CALL_ID, "type": "function", "function": {"name": "fq", "arguments": {"kq": "vq"}}}]
_CALL = {"role": "assistant", "content": "", "tool_calls": _CALLS}
_RESULT = {"role": "tool", "content": "rq", "tool_call_id": _CALL_ID}
_OTHER_RESULT = _RESULT | {"tool_call_id": _OTHER_ID}
_LATER_CALL = _CALL | {"tool_calls": [_CALLS[0] | {"id": _LATER_ID}]}
_LATER_RESULT = _RESULT | {"tool_call_id": _LATER_ID}
_BEFORE = (
    (),
    ({"role": "system", "content": "sq"},),
    (_USER,),
    (_USER, _ANSWER),
    (_USER, _CALL),
    (_USER, _CALL, _RESULT),
)
_SYSTEM = {"role": "system", "content": "sq"}
_DEVELOPER = {"role": "developer", "content": "dq"}
_AFTER = (
    (),
    (_USER,),
    (_ANSWER,),
    (_ANSWER, _USER),
    (_USER, _ANSWER),  # templates that classify ask whether the number of messages is even
    (_USER, _ANSWER, _USER),
    (_RESULT, _ANSWER),
    (_RESULT, _OTHER_RESULT, _ANSWER, _USER),
    (_SYSTEM,),
    (_SYSTEM, _USER),
    (_SYSTEM, _ANSWER, _USER),
    (_DEVELOPER,),
    (_DEVELOPER, _USER),
    (_LATER_CALL, _RESULT),
    (_LATER_CALL, _LATER_RESULT, _ANSWER, _USER),  # they may be written before a call that waits for its result
    (_USER, _CALL, _RESULT, _ANSWER, _USER),
    (_USER, _SYSTEM, _USER),
    (_ANSWER, _SYSTEM, _USER),
    (_RESULT, _SYSTEM, _USER),
)
_ROLES_OF_ANSWERS = ("assistant", "tool")
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "tq", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


class DecidedBy(IntEnum):
    """What decides how a message is written."""

    ITSELF = 0
    NEXT = 1
    QUESTION = 2
    NOTHING = 3


class Decider(NamedTuple):
    """The message that decides another one, or itself."""

    message: int  # its index
    is_whole: bool = False  # with its content; else by being there, with its role


class TemplateStability:
    """Answers for one chat template. Use it from one thread."""

    def __init__(self, template: str, render: Render, clock: Callable[[], float] = time.monotonic) -> None:
        self._render = render
        self._clock = clock
        self._tries_end_s = -inf  # when MAX_TRIES may be made again
        literals = {(one or other).strip() for one, other in _LITERALS.findall(template)}
        self._literals = [one for one in literals if len(one) > 2 and not one.replace("_", "").isalnum()]
        self._kinds: OrderedDict[tuple[Any, ...], Mapping[str | None, DecidedBy]] = OrderedDict()
        self._has_time = "strftime_now" in template and bool(_TIME_OF_DAY.search(template))

    def deciders(self, messages: Sequence[Message], *, has_tools: bool, options: dict[str, Any]) -> list[Decider]:
        """For each message the one that decides it. Ends before the first message that none decides."""
        said = msgspec.json.encode(options, order="deterministic")
        if self._has_time or len(said) > MAX_OPTION_BYTES:
            return []
        deciders: list[Decider] = []
        tools = [PROBE_TOOL] if has_tools else None
        for index, message in enumerate(messages):
            follows = messages[index + 1].get("role") if index + 1 < len(messages) else None
            match self._decision(message, tools, options, said).get(follows, DecidedBy.NOTHING):
                case DecidedBy.ITSELF:
                    deciders.append(Decider(index))
                case DecidedBy.NEXT if index + 1 < len(messages):
                    deciders.append(Decider(index + 1))
                case DecidedBy.QUESTION if (question := self._question(messages, index + 1)) is not None:
                    deciders.append(Decider(question, is_whole=True))
                case _:
                    break
        return deciders

    def _question(self, messages: Sequence[Message], first: int) -> int | None:
        """The first user message from `first` on that a template takes for one."""
        for index in range(first, len(messages)):
            if messages[index].get("role") == "user" and not self._has_literal(messages[index]):
                return index
        return None

    def _has_literal(self, message: Message) -> bool:
        content = message.get("content") or ""
        return any(literal in content for literal in self._literals)

    def _decision(
        self, message: Message, tools: list[Message] | None, options: dict[str, Any], said: bytes
    ) -> Mapping[str | None, DecidedBy]:
        """By the role of the message that follows; None: none follows."""
        if self._has_literal(message):
            return {}
        keys = frozenset(key for key, value in message.items() if value is not None)
        num_calls = min(2, len(message.get("tool_calls") or ()))
        text = message.get("content") or ""
        kind = (message.get("role"), keys, bool(text.strip()), text != text.strip(), num_calls, bool(tools), said)
        if kind not in self._kinds:
            if not self._may_try():
                return {}
            self._kinds[kind] = self._try(message, tools, options)
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(kind)
        return self._kinds[kind]

    def _may_try(self) -> bool:
        """Take one of the tries, if one is left."""
        now_s = self._clock()
        end_s = max(self._tries_end_s, now_s) + TRY_EVERY_S
        if end_s > now_s + MAX_TRIES * TRY_EVERY_S:
            return False
        self._tries_end_s = end_s
        return True

    def _try(
        self, message: Message, tools: list[Message] | None, options: dict[str, Any]
    ) -> Mapping[str | None, DecidedBy]:
        marked = _marked(message)
        tried = []
        for before in _BEFORE:
            texts = [(self._written((*before, marked[0], *after), tools, options), after) for after in _AFTER]
            tried.append([(text, after) for text, after in texts if text])
        roles = {str(after[0]["role"]) if after else None for after in _AFTER}
        return {role: _least(tried, role, *marked[1:]) for role in roles}

    def _written(self, messages: Sequence[Message], tools: list[Message] | None, options: dict[str, Any]) -> str:
        try:
            return self._render(messages, tools, options)
        except Exception:  # templates are programs: most refuse some orders of roles
            return ""


def _least(tried: Sequence[Sequence[_Written]], role: str | None, content: str, others: list[str]) -> DecidedBy:
    """What decides a message before one of this role, in whatever was written before it."""
    decision, num_tried = DecidedBy.ITSELF, 0
    for written in tried:
        least = decision
        while decision < DecidedBy.NOTHING:
            groups = _alike(decision, role, written)
            if any(len(texts) > 1 for texts in groups) and all(_agree(texts, content, others) for texts in groups):
                num_tried += 1
                break
            if all(len(texts) < 2 for texts in groups) and decision is least:  # not refuted here
                break
            decision = DecidedBy(decision + 1)
    return decision if num_tried else DecidedBy.NOTHING


def _alike(decision: DecidedBy, role: str | None, written: Sequence[_Written]) -> list[list[str]]:
    """The texts that must agree for this decision, by what the canonical text tells when it is made."""
    groups: dict[str, list[str]] = {}
    for text, after in written:
        told: Sequence[Message] = ()
        if decision is DecidedBy.NEXT:
            if not after or (role in _ROLES_OF_ANSWERS and after[0]["role"] != role):
                continue
            told = [after[0] | {"content": ""}] if role in _ROLES_OF_ANSWERS else ()
        elif decision is DecidedBy.QUESTION:
            if _USER not in after or after[0]["role"] != role:
                continue
            told = after[: after.index(_USER) + 1]
        groups.setdefault(repr(told), []).append(text)
    return list(groups.values())


def _marked(message: Message) -> tuple[Message, str, list[str]]:
    """A message of this kind, the mark in place of its content ("": it has none), and those of its other texts."""
    marked, others = dict(message), []
    text = message.get("content") or ""
    content = _MARK % 0 if text.strip() else ""
    if content:  # some templates trim it when another message follows
        marked["content"] = content if text == text.strip() else f" \n{content}\n "
    for key, value in message.items():
        if key == "tool_calls" and value:
            marked[key] = [
                _CALLS[0] | {"id": call_id, "function": {"name": f"Zf{number}q", "arguments": {"kq": f"Za{number}q"}}}
                for number, call_id in enumerate((_CALL_ID, _OTHER_ID)[: len(value)])
            ]
            others += [f"Z{part}{number}q" for number in range(len(marked[key])) for part in "fa"]
        elif key == "tool_call_id":
            marked[key] = _CALL_ID
        elif isinstance(value, str) and key not in ("role", "content"):
            others.append(_MARK % (len(others) + 1))
            marked[key] = others[-1]
    return marked, content, others


def _agree(texts: list[str], content: str, others: list[str]) -> bool:
    """Whether all texts have the same marks in the same places, and are alike up to their end.

    Behind a content stands what the next message decides. Names of blocks keep MARGIN_TOKENS away from it.
    """
    marks = [content, *others] if content else others
    places = {tuple(text.find(mark) for mark in marks) for text in texts}
    if len(places) != 1:
        return False
    ends = [at + len(mark) for at, mark in zip(places.pop(), marks, strict=True) if at >= 0]
    head = texts[0][: max(ends, default=0)]
    return bool(ends) and all(text.startswith(head) for text in texts) and content in head
