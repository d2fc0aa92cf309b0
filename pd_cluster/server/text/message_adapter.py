"""Conversations in the form that a chat template takes, so that it drops no message.

What becomes of a message depends on the messages before it and on the next one alone: a longer conversation begins as
the shorter one does, and its prefix stays cached. So a system message where a template has none stays in its place, as
a user message: moved to the front, it would change all tokens after it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict, defaultdict, deque
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.bodies.tool_use import is_flat
from pd_cluster.server.text.template_traits import END, START, CallIds, Joint, NoContent, ResultForm
from pd_http.member_bounds import BAD_JSON

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_cluster.server.text.template_traits import TemplateTraits

    Message = dict[str, Any]

NEIGHBOURS = "\n"  # between joined texts, as the dialects join them
_AROUND_SYSTEM = "\n\n"  # between the text of the system and a user's, as Gemma's templates write it
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OLD_ROLES = frozenset(("system", "user", "assistant"))
_PLAIN_ROLES = _OLD_ROLES | {"developer"}
_RAW = "arguments"  # the member that holds arguments which are no object, for a template that takes objects only


def adapt(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """The messages, in normal form (`normal_messages`), as the template takes them. Raises InvalidRequest.

    It takes time in proportion to their number and length.
    """
    if _are_taken(messages, traits):
        return list(messages)
    sequence, calls = _Sequence(traits), _Calls(traits)
    for message in messages:
        role = message["role"]
        if role == "assistant" and message.get("tool_calls"):
            sequence.add_all(calls.called(message))
            continue
        if role == "tool":
            sequence.add_all(calls.result(message))
            continue
        sequence.add_all(calls.rest())
        if role == "developer" and not traits.has_developer:
            sequence.add(message | {"role": "system"})
        else:
            sequence.add(message)
    sequence.add_all(calls.rest())
    return sequence.end()


def _are_taken(messages: Sequence[Message], traits: TemplateTraits) -> bool:
    """Whether the template takes these as they are: the most usual case, found in a quarter of the time."""
    roles = [message["role"] for message in messages]
    if traits.content_as_parts or not (_PLAIN_ROLES if traits.has_developer else _OLD_ROLES).issuperset(roles):
        return False
    return traits.joints.keys().isdisjoint(pairwise([START, *roles, END])) and not any(
        "tool_calls" in message for message in messages
    )


def arguments_text(arguments: Any) -> str:
    """Arguments as JSON text, as the model wrote them if they are text."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps(arguments, ensure_ascii=False)


def _arguments_object(arguments: Any) -> dict[str, Any] | None:
    """None: they are no JSON object, or one that is nested too deeply for templates, which recurse."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except BAD_JSON:
            return None
        arguments = {} if arguments is None else arguments
    return arguments if isinstance(arguments, dict) and is_flat(arguments) else None


class _Calls:
    """Calls and their results, one after another. Where messages have one call, a call waits for its result."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._traits = traits
        self._num_calls = 0
        self._names: dict[str, str] = {}  # of the called functions, by the ids of the calls
        self._named: dict[str, str] = {}  # ids with the names in them, by the ids of the calls
        self._open: OrderedDict[int, str] = OrderedDict()  # ids of calls without a result, by the calls' numbers
        self._by_id: defaultdict[str, deque[int]] = defaultdict(deque)  # these numbers, and some of others
        self._by_name: defaultdict[str, deque[int]] = defaultdict(deque)
        # Calls, and what their message has beside them, which goes with the first one that is written
        self._held: OrderedDict[int, tuple[list[Message], Message]] = OrderedDict()
        self._has_result = True  # since the last call

    def called(self, message: Message) -> Iterator[Message]:
        traits = self._traits
        if self._has_result:  # else this is one more of the messages that call together
            yield from self.rest()
            for table in (self._open, self._by_id, self._by_name):
                table.clear()
            self._has_result = False
        first = self._num_calls
        calls = [self._numbered(call) for call in message["tool_calls"]]
        for number, call in enumerate(calls, first):
            self._open[number] = call["id"]
            self._by_id[call["id"]].append(number)
            self._by_name[call["function"]["name"]].append(number)
        self._names |= {call["id"]: call["function"]["name"] for call in calls}
        head = {key: value for key, value in message.items() if key != "tool_calls"}
        if traits.calls_as_text:
            yield head | {"content": NEIGHBOURS.join(filter(None, [head["content"], *map(_call_text, calls)]))}
        elif traits.parallel_calls:
            yield from self._written(head, calls)
        else:
            beside = [head]
            self._held.update((number, (beside, call)) for number, call in enumerate(calls, first))

    def result(self, message: Message) -> Iterator[Message]:
        self._has_result = True
        number = self._answered(message)
        call_id = message.get("tool_call_id") or self._open.get(number, "")
        self._open.pop(number, None)
        if self._held:
            yield from self._release(*self._held.pop(number if number in self._held else next(iter(self._held))))
        if self._traits.results is ResultForm.TEXT:
            yield as_user(message)
            return
        result = message | {"tool_call_id": self._id(call_id)}
        name = message.get("name") or self._names.get(call_id)
        # A result of no known call: templates that look for its name may find null, which they cannot write
        yield result | {"name": name or ""} if self._traits.results is ResultForm.NAMED or name is None else result

    def rest(self) -> Iterator[Message]:
        """The calls without a result."""
        held, self._held, self._has_result = self._held, OrderedDict(), True
        for one in held.values():
            yield from self._release(*one)

    def _release(self, beside: list[Message], call: Message) -> Iterator[Message]:
        return self._written(beside.pop() if beside else {"role": "assistant", "content": ""}, [call])

    def _answered(self, message: Message) -> int:
        """The number of the call that a result answers; without an id the first one of the function, else of all.

        -1: none. Each number is looked at once for its id and once for its name.
        """
        call_id = message.get("tool_call_id")
        numbers = self._by_id.get(call_id) if call_id else self._by_name.get(str(message.get("name")))
        while numbers:
            if (number := numbers.popleft()) in self._open:
                return number
        return -1 if call_id else next(iter(self._open), -1)

    def _numbered(self, call: Message) -> Message:
        """With an id: OpenAI's older form has none."""
        self._num_calls += 1
        call = call if call.get("id") else call | {"id": f"call_{self._num_calls}"}
        self._named[call["id"]] = f"functions.{call['function']['name']}:{self._num_calls - 1}"
        return call

    def _written(self, head: Message, calls: list[Message]) -> Iterator[Message]:
        if head["content"].strip() and not self._traits.text_beside_calls:
            yield {"role": "assistant", "content": head["content"]}
            head = head | {"content": ""}
        elif not head["content"].strip():
            head = head | {"content": ""}
        message = head | {"tool_calls": [self._formed(call) for call in calls]}
        if not head["content"] and self._traits.no_content is NoContent.NULL:
            message["content"] = None
        elif not head["content"] and self._traits.no_content is NoContent.ABSENT:
            del message["content"]
        yield message

    def _formed(self, call: Message) -> Message:
        traits, function = self._traits, call["function"]
        arguments, text = _arguments_object(function["arguments"]), arguments_text(function["arguments"])
        if traits.arguments_as_text or (arguments is None and traits.takes_text):
            shown: Any = text
        else:
            shown = {_RAW: text} if arguments is None else arguments
        return call | {"id": self._id(call["id"]), "function": function | {"arguments": shown}}

    def _id(self, call_id: str) -> str:
        if self._traits.ids is CallIds.NAMED:
            named = self._named.get(call_id, call_id)
            return call_id if call_id.rpartition(":")[0] == named.rpartition(":")[0] else named
        if self._traits.ids is CallIds.AS_SENT or _SHORT_ID.fullmatch(call_id):
            return call_id
        return blake2b(call_id.encode(errors="surrogatepass"), digest_size=5).hexdigest()[:9]


class _Turn:
    """A message while others may join it."""

    __slots__ = ("is_system", "kind", "message", "reasoning", "texts")

    def __init__(self, message: Message, kind: str) -> None:
        self.message = message
        self.kind = kind
        self.is_system = False  # the last text was the system's
        self.texts = [message.get("content") or ""]
        self.reasoning = _reasoning(message)

    def join(self, message: Message, separator: str) -> None:
        """Take the text, reasoning and calls of a message."""
        self.texts += [separator, message.get("content") or ""]
        self.reasoning += _reasoning(message)
        if "tool_calls" in message:
            self.kind = "call"
            self.message = self.message | {"tool_calls": message["tool_calls"]}

    def whole(self) -> Message:
        if len(self.texts) == 1:
            return self.message
        joined = {key: value for key, value in self.message.items() if key not in _REASONING}
        if self.reasoning:
            joined["reasoning_content"] = NEIGHBOURS.join(self.reasoning)
        return joined | {"content": "".join(self.texts)}


class _Sequence:
    """Messages of roles that the template takes one after another."""

    def __init__(self, traits: TemplateTraits) -> None:
        self._joints = traits.joints
        self._as_parts = traits.content_as_parts
        self._turns: list[_Turn] = []

    def add_all(self, messages: Iterator[Message]) -> None:
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        last = self._turns[-1] if self._turns else None
        kind = "call" if message.get("tool_calls") else str(message["role"])
        if last is not None and last.is_system and kind == "user":
            last.join(message, _AROUND_SYSTEM)
            last.is_system = False
            return
        before = START if last is None else last.kind
        match self._joints.get((before, kind)):
            case Joint.JOINED if last is not None:
                last.join(message, NEIGHBOURS)
            case Joint.AS_USER if kind == "tool":
                self.add(as_user(message))
            case Joint.AS_USER:
                self._add_as_user(message)
            case Joint.AFTER_USER:
                self._turns += [_Turn(_filler("user"), "user"), _Turn(message, kind)]
            case Joint.AFTER_ASSISTANT:
                self._turns += [_Turn(_filler("assistant"), "assistant"), _Turn(message, kind)]
            case Joint.REFUSED:
                place = "at the beginning" if before == START else f"after one of kind {before}"
                raise InvalidRequest(f"the chat template drops a message of kind {kind} {place}", "messages")
            case _:
                self._turns.append(_Turn(message, kind))

    def _add_as_user(self, message: Message) -> None:
        """The system's text where the template has no system message, before or after a user's text."""
        user = {"role": "user", "content": message["content"]}
        last = self._turns[-1] if self._turns else None
        if last is not None and last.kind == "user":
            last.join(user, _AROUND_SYSTEM)
        elif self._joints.get((START if last is None else last.kind, "user")) is Joint.AFTER_ASSISTANT:
            self._turns += [_Turn(_filler("assistant"), "assistant"), _Turn(user, "user")]
        else:
            self._turns.append(_Turn(user, "user"))
        self._turns[-1].is_system = True

    def end(self) -> list[Message]:
        last = self._turns[-1].kind if self._turns else START
        match self._joints.get((last, END)):
            case Joint.AFTER_USER:
                self._turns.append(_Turn(_filler("user"), "user"))
            case Joint.REFUSED:
                raise InvalidRequest(f"the chat template drops a last message of kind {last}", "messages")
        messages = [turn.whole() for turn in self._turns]
        return [_in_parts(message) for message in messages] if self._as_parts else messages


def as_user(result: Message) -> Message:
    """The result of a tool as a user message, in the form of Hermes and Qwen."""
    return {"role": "user", "content": f"<tool_response>\n{result['content']}\n</tool_response>"}


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}] if content else []}


def _reasoning(message: Message) -> list[str]:
    """Its reasoning, which has several names: transformers gives templates the one that they read."""
    return [text for key in _REASONING if isinstance(text := message.get(key), str)][:1]


def _call_text(call: Message) -> str:
    name = json.dumps(call["function"]["name"], ensure_ascii=False)
    arguments = arguments_text(call["function"]["arguments"])
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _filler(role: str) -> Message:
    return {"role": role, "content": ""}
