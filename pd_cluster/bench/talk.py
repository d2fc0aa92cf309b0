"""What the client of a conversation sends and keeps: token ids with the generated ids, or messages with tools."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.bench.turns import Conversation


_TOOLS = {"read_file": ["path"], "run_command": ["command"], "replace_text": ["path", "old", "new"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"{name} of the project", "parameters": {
        "type": "object", "properties": {one: {"type": "string"} for one in parameters}, "required": parameters,
    }}}
    for name, parameters in _TOOLS.items()
]  # fmt: skip


def draw_texts(conversation: Conversation, vocabulary: Sequence[int], seed: int | str) -> list[list[int]]:
    """Token ids of the head, then of what each turn adds."""
    head = random.Random(f"{seed}/head/{conversation.head}").choices(vocabulary, k=conversation.num_head)
    return [head] + [
        random.Random(f"{seed}/turn/{conversation.index}/{number}").choices(vocabulary, k=turn.num_new)
        for number, turn in enumerate(conversation.turns)
    ]


@dataclass(slots=True)
class IdsTalk:
    """Prompts of token ids: each is the prompt before, the ids of its answer, and new ones."""

    history: list[int]  # at first the head
    news: Sequence[list[int]]  # of each turn
    path: ClassVar[str] = "/v1/completions"

    def ask(self, number: int) -> dict[str, Any]:
        """The fields of this turn's body, when the answers before were heard."""
        self.history += self.news[number]
        return {"prompt": self.history, "return_token_ids": True}

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event of the answer's stream."""
        for choice in event.get("choices") or ():
            self.history += choice.get("token_ids") or ()


@dataclass(slots=True)
class ChatTalk:
    """Messages with tools: an answer is sent back as its content and calls, without its reasoning, and calls get
    results. What is new is a result, or else the user's."""

    head: str  # the system's message
    news: Sequence[str]
    path: ClassVar[str] = "/v1/chat/completions"
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _content: str = ""
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    def ask(self, number: int) -> dict[str, Any]:
        """As of IdsTalk."""
        if number:
            answer: dict[str, Any] = {"role": "assistant", "content": self._content}
            self._messages.append(answer | ({"tool_calls": [*self._calls.values()]} if self._calls else {}))
        elif self.head:
            self._messages.append({"role": "system", "content": self.head})
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in self._calls.values()]
        self._messages += results or [{"role": "user"}]
        self._messages[-1]["content"] = self.news[number]
        self._content, self._calls = "", {}
        return {"messages": self._messages, "tools": TOOLS}

    def hear(self, event: dict[str, Any]) -> None:
        """As of IdsTalk. A call comes in pieces."""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self._content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = self._calls.setdefault(piece["index"], empty)
                call["id"] = piece.get("id") or call["id"]
                for name in call["function"]:
                    call["function"][name] += (piece.get("function") or {}).get(name) or ""


Talk: TypeAlias = IdsTalk | ChatTalk
