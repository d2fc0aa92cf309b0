"""Which texts of conversations a chat template's prompt lacks: each role, part, call and result has a mark."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from pd_cluster.server.text.chat_template import ChatTemplate
from pd_cluster.server.text.normal_messages import normal_messages

KINDS = ("system", "developer", "user", "assistant", "call", "calls", "tool")
OPTIONS = {"add_generation_prompt": True}
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
# What a model may once have written as arguments, and what of it must be in the prompt
ARGUMENTS: tuple[tuple[Any, str], ...] = (
    ('{"path": "M"}', "M"),
    ({"path": "M"}, "M"),
    ('{"path": "M', "M"),
    ('["M", 2]', "M"),
    ('"M"', "M"),
    ("M", "M"),
    (["M"], "M"),
    ("71", "71"),
    (None, ""),
    ("null", ""),
    ("", ""),
    ("{}", ""),
)


def lost_marks(tokenizer: Any, template: Any, num_random: int = 60) -> list[str]:
    """One line for each conversation that the template refuses, or of which its prompt lacks a text."""
    tokenizer.chat_template = template
    chat, rng = ChatTemplate(tokenizer), random.Random(7)
    sequences = [roles for length in (1, 2) for roles in itertools.product(KINDS, repeat=length)]
    sequences += [tuple(rng.choice(KINDS) for _ in range(rng.randrange(3, 10))) for _ in range(num_random)]
    found = (lost(chat, conversation(roles, rng), roles, rng) for roles in sequences)
    return [line for line in found if line]


def lost(chat: ChatTemplate, talk: tuple[list[dict[str, Any]], list[str]], roles: Any, rng: random.Random) -> str:
    messages, marks = talk
    tools, thinks = rng.choice((None, [TOOL])), rng.choice((None, True, False))
    options = OPTIONS if thinks is None else OPTIONS | {"enable_thinking": thinks, "thinking": thinks}
    try:
        text = chat.render(normal_messages(messages), tools, options)
    except Exception as error:  # templates are programs, which may raise anything
        return f"{roles} with {tools and 'tools'}: {error}"
    missing = [mark for mark in marks if mark not in text]
    return f"{roles} with {tools and 'tools'}: {missing} not in {text!r}" if missing else ""


def conversation(roles: Any, rng: random.Random) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages as clients send them, and their marks."""
    messages: list[dict[str, Any]] = []
    marks: list[str] = []
    open_ids: list[str] = []

    def mark(name: str) -> str:
        marks.append(f"Zq{name}{len(marks)}z")
        return marks[-1]

    for index, kind in enumerate(roles):
        if kind in ("call", "calls"):
            open_ids = [f"call_{index}_{number}" for number in range(1 + (kind == "calls"))]
            calls = [call(call_id, mark("name "), mark, rng) for call_id in open_ids]
            content: Any = rng.choice((None, "", [], "text"))
            message = {"role": "assistant", "content": mark("beside") if content == "text" else content}
            messages.append(message | {"tool_calls": calls})
            if rng.random() < 0.4:
                messages[-1]["reasoning_content"] = "Hm."
        elif kind == "tool":
            call_id = open_ids.pop(rng.randrange(len(open_ids))) if open_ids else "call_of_none"
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content_of(mark, rng)})
        else:
            messages.append({"role": kind, "content": content_of(mark, rng), "tool_calls": [], "refusal": None})
    return messages, marks


def content_of(mark: Any, rng: random.Random) -> Any:
    parts = [{"type": "text", "text": mark("part")}, {"type": "refusal", "refusal": mark("refused")}]
    return parts if rng.random() < 0.3 else "\n".join([part.get("text", part.get("refusal", "")) for part in parts])


def call(call_id: str, name: str, mark: Any, rng: random.Random) -> dict[str, Any]:
    arguments, shown = rng.choice(ARGUMENTS)
    if "M" in shown:
        arguments = json.loads(json.dumps(arguments).replace("M", mark("argument")))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
