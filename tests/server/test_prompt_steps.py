"""A named block has the same tokens in every request with the same text up to the step that names it."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from pd_cluster.server.requests.prompt_steps import MAX_MISSED, PromptSteps, _spans, given_steps
from pd_cluster.server.text.chat_template import ChatTemplate
from pd_cluster.server.text.normal_messages import normal_messages
from pd_cluster.server.text.tokenizer import Encoded
from pd_connectors.protocol import text_chain
from pd_connectors.protocol.text_chain import (
    AS_ALWAYS,
    LastTurn,
    chain_key,
    read_canonical,
    step_hashes,
)
from tests.server import small_templates
from tests.server.live_server import MODEL_DIR

if TYPE_CHECKING:
    from collections.abc import Callable

KEY, SIZE = chain_key(b"k"), 16
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
# Templates of the shapes that matter. ChatML: the reasoning of turns before the last question is dropped, the
# last turn gets an empty one, results of tools stand in a user turn
CHATML = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1, looks=true) %}
{%- for message in messages[::-1] %}
{%- if ns.looks and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.looks = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set ns.reasoning = message.reasoning_content or '' %}{% set content = message.content or '' %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or ns.reasoning) %}
{{- '<think>\\n' + ns.reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}{{ content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function.name + ' ' + call.function.arguments | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Headers: a date and the tools before the system message, contents trimmed, one call for each turn
HEADERS = """
{{- '<|begin|>' }}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|head|>system<|end|>\\n\\nToday Date: ' + (date_string or '26 Jul 2024') + '\\n\\n' }}
{%- if tools is not none and tools is defined %}{{ 'Functions:\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}{% endif %}
{{- system + '<|eot|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}
{{- '<|head|>assistant<|end|>\\n\\n{"name": "' + message.tool_calls[0].function.name + '"}<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|head|>ipython<|end|>\\n\\n' + message.content | tojson + '<|eot|>' }}
{%- else %}{{ '<|head|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|end|>\\n\\n' }}{% endif %}"""
# Brackets: system message and tools stand in the last question; roles must alternate
BRACKETS = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- set ns = namespace(index=0) %}
{%- for message in turns %}{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.index = ns.index + 1 %}{% endif %}{% endfor %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools is defined and tools is not none and message == users[-1] %}
{{- '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif %}
{%- if system is defined and message == users[-1] %}{{ '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
{%- else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
{%- elif message.tool_calls %}{{ '[CALLS] ' + message.tool_calls | tojson + '</s>' }}
{%- elif message.role == 'tool' %}{{ '[RESULT] ' + message.content | tojson + '[/RESULT]' }}
{%- else %}{{ ' ' + message.content + '</s>' }}{% endif %}{% endfor %}"""
# As Qwen3.5 and 3.6: in the last turn each answer without reasoning gets an empty one
REASONING = CHATML.replace(" and (loop.last or ns.reasoning)", "")
TEMPLATES = {"chatml": CHATML, "reasoning": REASONING, "headers": HEADERS, "brackets": BRACKETS}
PIECES = ["the ", "Paris", " is\n\n", "  ", "x" * 9, "é漢", "\n", "'ll go", '{"a": 1}', "1234", "\t\t ", "<b>", ". "]


class Node:
    """Names prompts as a node does."""

    def __init__(self, template: str, size: int = SIZE, bos: str | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(MODEL_DIR))
        self.tokenizer.chat_template = template
        self.tokenizer.bos_token = bos
        self.tokenizer.add_tokens(["<|head|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]"], special_tokens=True)
        self.chat = ChatTemplate(self.tokenizer)
        self.chat.find_all_traits()
        self.size = size

    def serve(self, body: dict[str, Any]) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """Token ids and names."""
        raw = json.dumps(body).encode()
        messages, options = normal_messages(body["messages"]), {"add_generation_prompt": True}
        encoded = self.encode(self.chat.render(messages, body.get("tools"), options))
        names = PromptSteps(raw, KEY, "", self.size, self.chat.last_turn)
        names.name_text(encoded, self.chat.written_contents(messages))
        return encoded.ids, names.steps

    def encode(self, text: str) -> Encoded:
        encoded = self.tokenizer(text, add_special_tokens=False)
        return Encoded(text, list(encoded["input_ids"]), encoded.encodings[0])


def steps_of(body: dict[str, Any], last_turn: LastTurn = AS_ALWAYS) -> tuple[int, ...]:
    read = read_canonical({name: json.dumps(value).encode() for name, value in body.items()}, last_turn)
    assert read is not None
    return step_hashes(KEY, "", read.text, read.starts)


def words(rng: random.Random, most: int = 60) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, most)))


def turn(rng: random.Random, role: str) -> list[dict[str, Any]]:
    message: dict[str, Any] = {"role": role, "content": words(rng)}
    if role == "assistant" and rng.random() < 0.3:
        message["reasoning_content"] = words(rng, 20)
    if role == "assistant" and rng.random() < 0.25:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": words(rng, 3)}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [called, {"role": "tool", "content": words(rng), "tool_call_id": "abcdefghi"}, message]
    return [message]


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": words(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(3)):
        messages += [*turn(rng, "user"), *turn(rng, "assistant")]
    return [*messages, *turn(rng, "user")]


def sibling(rng: random.Random, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Another conversation that begins alike: it ends, goes on, or says something else, from some place on."""
    cut = rng.randrange(len(messages))
    message = dict(messages[cut])
    match rng.randrange(5):
        case 0:
            return messages[: cut + 1]
        case 1:
            return [*messages, *(any_order(rng) if rng.random() < 0.5 else turn(rng, "assistant")), *turn(rng, "user")]
        case 2 if message["content"]:
            at = rng.randrange(len(message["content"]))
            message["content"] = message["content"][:at] + rng.choice(["", "\n", " ", words(rng, 9)])
        case 3:
            follows = any_order(rng) if rng.random() < 0.5 else turn(rng, rng.choice(["user", "assistant"]))
            return [*messages[:cut], *follows, *turn(rng, "user")]
        case _:
            message["content"] = (message["content"] or "") + words(rng, 9)
    return [*messages[:cut], message, *(messages[cut + 1 :] if rng.random() < 0.3 else [])]


def any_order(rng: random.Random) -> list[dict[str, Any]]:
    """Roles as they come: neighbours of one role, systems and developers within, calls side by side, lost results."""
    messages: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for _ in range(rng.randrange(1, 8)):
        role = rng.choice(["system", "developer", "user", "user", "assistant", "assistant", "call", "tool"])
        message: dict[str, Any] = {"role": role, "content": words(rng, 30)}
        if role == "call":
            open_ids = [f"id{rng.randrange(99)}", "idb"][: rng.randrange(1, 3)]
            calls = [{"id": one, "function": {"name": "look", "arguments": words(rng, 4)}} for one in open_ids]
            content = message["content"] if rng.random() < 0.3 else rng.choice([None, ""])
            message = {"role": "assistant", "content": content, "tool_calls": calls}
        elif role == "tool":
            message["tool_call_id"] = rng.choice(open_ids) if open_ids else "id"
        messages.append(message)
    return messages


def has_strays(messages: list[dict[str, Any]]) -> bool:
    """Whether a message within may be joined with the last question: the system's, or a result of no call."""
    roles = [one["role"] for one in messages]
    follows = {"system": (), "developer": (), "tool": ("assistant", "tool")}
    return any(role in follows and before not in follows[role] for before, role in pairwise(roles))


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Steps as short as a block, so that a margin of error of one character is found."""

    def shorten(size: int) -> None:
        monkeypatch.setattr(text_chain, "STEP_BYTES", size)

    return shorten


@pytest.mark.long
@pytest.mark.parametrize("shape", TEMPLATES)
def test_a_name_promises_no_wrong_token(shape: str, short_steps: Callable[[int], None]) -> None:
    short_steps(16)
    check_names(Node(TEMPLATES[shape]), random.Random(shape))


@pytest.mark.long
@pytest.mark.parametrize("shape", ["one system message", "system before the first question", "one call"])
def test_a_name_sees_what_is_joined_and_moved(shape: str, short_steps: Callable[[int], None]) -> None:
    short_steps(16)
    check_names(Node(small_templates.TEMPLATES[shape]), random.Random(shape), any_order)


def check_names(
    node: Node,
    rng: random.Random,
    make: Callable[[random.Random], list[dict[str, Any]]] = conversation,
    num_conversations: int = 60,
) -> None:
    """Conversations that begin as a named one have its tokens, as far as the name says."""
    num_named = num_shared = 0
    for _ in range(num_conversations):
        body = {"messages": make(rng)} | ({"tools": [TOOL]} if rng.random() < 0.4 else {})
        try:
            ids, names = node.serve(body)
        except Exception:
            continue
        num_named += len(names)
        for _ in range(4):
            other = body | {"messages": sibling(rng, body["messages"])}
            if node.chat.last_turn.tools and has_strays(other["messages"]):
                continue
            try:
                other_ids, _ = node.serve(other)
            except Exception:
                continue
            others = set(steps_of(other, node.chat.last_turn))
            for num_tokens, step in names:
                if step in others:
                    num_shared += 1
                    assert other_ids[:num_tokens] == ids[:num_tokens], (num_tokens, body, other)
    assert num_named > num_conversations // 2
    assert num_shared > num_conversations // 4


@pytest.mark.long
def test_tools_after_the_system_message_are_named_before_a_short_question() -> None:
    """They are named where the question begins, which is shorter than a step."""
    node = Node(CHATML)
    function = {"name": "weather", "description": "It tells the weather. " * 90, "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    first: dict[str, Any] = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
        "tools": [tool],
    }
    ids, names = node.serve(first)
    answer = [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And now?"}]
    chain = set(steps_of(first | {"messages": first["messages"] + answer}))
    assert max(num_tokens for num_tokens, step in names if step in chain) > 0.9 * len(ids)


@pytest.mark.long
def test_a_name_waits_for_the_text_that_a_tokenizer_may_join(short_steps: Callable[[int], None]) -> None:
    """At every byte: what follows the text of a name changes none of its tokens."""
    short_steps(1)
    node, rng, num_cuts = Node(CHATML), random.Random(3), 0
    for _ in range(60):
        prompt = words(rng, 90)
        encoded = node.encode(prompt)
        names = PromptSteps(json.dumps({"prompt": prompt}).encode(), KEY, "", SIZE)
        names.name_text(encoded, [prompt])
        read = read_canonical({"prompt": json.dumps(prompt).encode()})
        assert read is not None
        text = read.text
        ends = {step: index + 1 for index, step in enumerate(step_hashes(KEY, "", text))}
        for num_tokens, step in names.steps:
            known = text[: ends[step]].removeprefix(text[: -len(prompt.encode())]).decode(errors="ignore")
            for follows in ("", "\n", " ", "x", "\n\n\n", "'ll", "é", words(rng, 4)):
                num_cuts += 1
                assert node.encode(known + follows).ids[:num_tokens] == encoded.ids[:num_tokens]
    assert num_cuts > 1000


def test_ids_are_named_to_the_token() -> None:
    prompt = list(range(500))
    names = PromptSteps(json.dumps({"prompt": prompt}).encode(), KEY, "", SIZE)
    names.name_ids(len(prompt))
    read = read_canonical({"prompt": json.dumps(prompt).encode()})
    assert read is not None
    # a step of 512 bytes is 128 ids, and the head of the text has 7 bytes
    assert names.steps == tuple(zip((112, 240, 368), step_hashes(KEY, "", read.text), strict=True))


@pytest.mark.slow_cases
@pytest.mark.long
@pytest.mark.parametrize("shape", TEMPLATES)
@pytest.mark.parametrize("reasons", [False, True])
def test_each_turn_finds_what_those_before_have_cached(
    shape: str, short_steps: Callable[[int], None], *, reasons: bool
) -> None:
    """What the names promise of each request of a conversation with a loop of calls, beside the tokens it shares.

    A block keeps its first name: the engine does not rename what is cached (`CacheNews`).
    """
    short_steps(16)
    node, rng = Node(TEMPLATES[shape]), random.Random(f"{shape} turns")

    def said() -> str:
        return words(rng) + str(rng.random())  # found in no other text

    messages: list[dict[str, Any]] = [{"role": "system", "content": said()}]
    told: dict[int, int] = {}
    named: set[tuple[int, ...]] = set()
    served: list[list[int]] = []
    for turn_number in range(4):
        messages.append({"role": "user", "content": said()})
        for call_number in range(3):
            body = {"messages": list(messages), "tools": [TOOL]}
            ids, names = node.serve(body)
            promised = next((told[one] for one in reversed(steps_of(body, node.chat.last_turn)) if one in told), 0)
            cached = max((num_shared(ids, before) for before in served), default=0)
            assert cached - 4 * SIZE <= promised <= cached, (turn_number, call_number)
            new = {tuple(ids[:num_tokens]): step for num_tokens, step in names if tuple(ids[:num_tokens]) not in named}
            told |= {step: len(block) for block, step in new.items()}
            named |= new.keys()
            served.append(ids)
            call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
            thought = {"reasoning_content": said()} if reasons else {}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
            messages.append({"role": "tool", "content": said(), "tool_call_id": "abcdefghi"})
        messages.append({"role": "assistant", "content": said()})


def num_shared(ids: list[int], others: list[int]) -> int:
    return next((i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(others))


@pytest.mark.long
def test_what_templates_write_in_the_last_turn_alone() -> None:
    found = {shape: Node(template).chat.last_turn for shape, template in TEMPLATES.items()}
    assert found == {
        "chatml": LastTurn(reasoning=True),
        "reasoning": LastTurn(answers=True, reasoning=True),
        "headers": AS_ALWAYS,
        "brackets": LastTurn(tools=True, system=True, answers=True, reasoning=True),
    }
    early = small_templates.TEMPLATES["system before the first question"]
    late = "{{ tools | tojson if tools and m.role == 'user' and loop.last }}"
    assert Node(small_templates.each(late + small_templates.BODY)).chat.last_turn == LastTurn(tools=True)
    assert Node(early).chat.last_turn == AS_ALWAYS


@pytest.mark.long
@pytest.mark.parametrize("is_pasted", [False, True])
def test_a_content_that_the_template_writes_otherwise_hides_none_after_it(*, is_pasted: bool) -> None:
    """Also where its own text stands before it: a client pasted the reasoning that the template drops."""
    thought = "<think>\nHm.\n</think>\n\nYes."
    asked = f"Why {thought if is_pasted else ''}? " * 40
    first = [{"role": "user", "content": asked}, {"role": "assistant", "content": thought}]
    body = {"messages": [*first, {"role": "user", "content": "And then? " * 200}]}
    ids, names = Node(CHATML).serve(body)
    assert max(num_tokens for num_tokens, _ in names) > 0.8 * len(ids)


def test_contents_are_looked_for_in_vain_a_bounded_number_of_times() -> None:
    """Each time the rest of the text is read."""

    class Text(str):
        num_reads = 0

        def find(self, *args: Any) -> int:
            self.num_reads += 1
            return super().find(*args)

    text = Text("seen " * 10)
    contents = ["seen", *("unseen" for _ in range(1000)), "seen"]
    spans = list(_spans(text, contents, range(len(contents))))
    assert (len(spans), text.num_reads) == (1, MAX_MISSED + 1)


@pytest.mark.long
def test_results_that_are_quoted_are_named_to_their_end() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
    said = '{"line": "one\\ttwo"}\n"three"\n' * 100
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": said, "tool_call_id": "abcdefghi"},
    ]
    ids, names = Node(BRACKETS).serve({"messages": messages, "tools": [TOOL]})
    assert max(num_tokens for num_tokens, _ in names) > 0.7 * len(ids)


@pytest.mark.parametrize(
    ("template", "has_time"),
    [
        ("{{ strftime_now('%d %b %Y') }}", False),
        ('{%set a = "b"%}{%if a%}{{strftime_now("%Y-%m-%d")}}{%endif%}', False),
        ("{%-set day = '%-d %B' %}{{ strftime_now(day) }}", False),
        ("{%set s='100%'%}{%-set c=7%2%}{%if s%}{{ strftime_now('%F') }}{%endif%}", False),
        ("{{ strftime_now('%H:%M') }}", True),
        ("""{{ strftime_now("%H o'clock") }}""", True),
        ("{%set form = '{} %-Ih'%}{{ strftime_now(form) }}", True),
        ('{%set form = "%-I %p"%}{{ strftime_now(form) }}', True),
        ("{{ strftime_now('%c') }}", True),
    ],
)
def test_a_template_that_writes_the_time_is_told_from_one_with_the_date(template: str, *, has_time: bool) -> None:
    chat = Node(template).chat
    assert chat.writes_date
    assert chat.writes_time == has_time


def test_names_of_another_node_are_taken_where_they_fit() -> None:
    assert given_steps([(32, 5), (16, 4), (40, 1), (0, 1), (48, 2), (64, 1 << 64)], 47, 16) == ((16, 4), (32, 5))
