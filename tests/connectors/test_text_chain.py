"""The canonical text of a request: equal for equal requests, longer for longer ones, different for all others."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_connectors.protocol.text_chain import (
    AS_ALWAYS,
    MAX_CHAIN_BYTES,
    STEP_BYTES,
    CanonicalText,
    LastTurn,
    chain_key,
    is_short,
    read_canonical,
    step_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = chain_key(b"k" * 32)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"b": 1, "a": 2}}}
CONTENT = st.one_of(
    st.text(max_size=40),
    st.none(),
    st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=9)), max_size=3),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT},
    optional={"reasoning_content": st.text(max_size=9), "name": st.text(max_size=3)},
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=5)


def text_of(**body: Any) -> bytes:
    raw = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
    return text_in(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]))


def text_in(fields: Mapping[str, msgspec.Raw | bytes]) -> bytes:
    read = read_canonical(fields)
    assert read is not None
    return read.text


def fields_of(**body: Any) -> dict[str, bytes]:
    return {name: json.dumps(value).encode() for name, value in body.items()}


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(MESSAGES, MESSAGES)
def test_a_longer_conversation_extends_the_text_and_no_other_does(first: list[Any], second: list[Any]) -> None:
    text, other = text_of(messages=first), text_of(messages=second)
    assert text_of(messages=first + second).startswith(text)
    is_prefix = [flat(one) for one in second[: len(first)]] == [flat(one) for one in first]
    assert other.startswith(text) == is_prefix


def flat(message: dict[str, Any]) -> dict[str, Any]:
    """The message with parts as one string, which the node gives to the template."""
    content = message["content"] or ""
    return message | {"content": "\n".join(part["text"] for part in content) if isinstance(content, list) else content}


@pytest.mark.long
@settings(max_examples=50, deadline=None)
@given(MESSAGES, st.randoms())
def test_white_space_escapes_and_the_order_of_keys_change_nothing(messages: list[Any], random: Any) -> None:
    def shuffled(given: dict[str, Any]) -> dict[str, Any]:
        return dict(random.sample(list(given.items()), len(given)))

    body = shuffled({"messages": [shuffled(one) for one in messages], "tools": [TOOL], "temperature": 1, "stop": None})
    raw = json.dumps(body, indent=random.choice([None, 3]), ensure_ascii=True).encode()
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    assert text_in(fields) == text_of(messages=messages, tools=[TOOL])


def test_the_client_s_text_lies_where_the_parts_say() -> None:
    messages: list[dict[str, str | None]] = [
        {"role": "system", "content": "You are ä"},
        {"content": None, "role": "assistant"},
        {"content": "b"},
    ]
    read = read_canonical(fields_of(messages=messages))
    assert read is not None
    ends = [start + len((one.get("content") or "").encode()) for start, one in zip(read.starts, messages, strict=True)]
    texts = [read.text[start:end].decode() for start, end in zip(read.starts, ends, strict=True)]
    assert texts == ["You are ä", "", "b"]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": [TOOL]},
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": {"a": 2, "b": 1}}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "low"},
        {"documents": [{"text": "a"}]},
        {"continue_final_message": True},
    ],
)
def test_what_a_template_reads_comes_before_the_messages(change: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "x" * STEP_BYTES}]
    plain, changed = text_of(messages=messages), text_of(messages=messages, **change)
    assert step_hashes(KEY, "", plain)[0] != step_hashes(KEY, "", changed)[0]
    seen = {text_of(messages=messages, tools=tools) for tools in ([TOOL], [TOOL, TOOL])}
    assert len(seen) == 2


def test_tools_that_are_not_shown_count_as_absent() -> None:
    messages = [{"role": "user", "content": "a"}]
    for none in ("none", {"type": "none"}):
        assert text_of(messages=messages, tools=[TOOL], tool_choice=none) == text_of(messages=messages)
    escaped = fields_of(messages=messages, tools=[TOOL]) | {"tool_choice": rb'"non\u0065"'}
    assert text_in(escaped) == text_of(messages=messages)
    assert text_of(messages=messages, tools=[]) == text_of(messages=messages, tools=None)


def test_what_reaches_no_template_changes_nothing() -> None:
    """Null members and empty lists of calls, as many clients send them."""
    plain = {"role": "assistant", "content": "a"}
    unread: list[dict[str, Any]] = [{"tool_calls": None}, {"tool_calls": []}, {"refusal": None, "audio": None}]
    for members in unread:
        assert text_of(messages=[plain | members]) == text_of(messages=[plain])
    called = {"role": "assistant", "tool_calls": [TOOL]}
    contents: list[Any] = [None, "", []]
    for content in contents:
        assert text_of(messages=[called | {"content": content}]) == text_of(messages=[called])
    for kind in ("text", "input_text", "output_text"):
        assert text_of(messages=[plain | {"content": [{"type": kind, "text": "a"}]}]) == text_of(messages=[plain])
    assert text_of(messages=[plain | {"content": ["a"]}]) == text_of(messages=[plain])


ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "q" * 20}]
CALLED = [{"role": "assistant", "content": "c" * 20}, {"role": "tool", "content": "r" * 20}]
NEXT = [{"role": "assistant", "content": "a" * 20}, {"role": "user", "content": "n" * 20}]


@pytest.mark.parametrize(
    ("last_turn", "shared"),  # the messages that both texts have in common; 4: all of the shorter one
    [
        (AS_ALWAYS, 4),
        (LastTurn(answers=True), 2),
        (LastTurn(tools=True), 1),
        (LastTurn(system=True), 1),
        (LastTurn(tools=True, answers=True), 1),
        (LastTurn(reasoning=True), 4),
    ],
)
def test_a_turn_has_another_text_when_the_next_question_has_come(last_turn: LastTurn, shared: int) -> None:
    def read(messages: list[Any]) -> CanonicalText:
        found = read_canonical(fields_of(messages=messages, tools=[TOOL]), last_turn)
        assert found is not None
        assert [found.text[start : start + 1] for start in found.starts] == [
            one["content"][:1].encode() for one in messages
        ]
        return found

    asked, called, more = read(ASKED), read(ASKED + CALLED), read(ASKED + CALLED + CALLED)
    followed = read(ASKED + CALLED + NEXT)
    assert called.text.startswith(asked.text)
    assert more.text.startswith(called.text)
    pairs = enumerate(zip(called.text, followed.text, strict=False))
    same = next((place for place, (one, other) in pairs if one != other), len(called.text))
    ends = [start + len(one["content"]) for start, one in zip(called.starts, ASKED + CALLED, strict=True)]
    assert sum(end <= same for end in ends) == shared
    assert not any(same > start for start in called.starts[shared:])


def test_where_the_last_turn_begins() -> None:
    def begin(last_turn: LastTurn, *roles: str, has_tools: bool = True) -> int:
        return last_turn.begin([{"role": role} for role in roles], has_tools=has_tools)

    tools, answers = LastTurn(tools=True), LastTurn(answers=True)
    assert begin(tools, "user", "assistant", "user", "user", "assistant", "tool") == 2  # joined by some templates
    assert begin(answers, "user", "assistant", "user", "user", "assistant", "tool") == 4
    assert begin(tools, "system", "user", has_tools=False) == 2
    assert begin(LastTurn(system=True), "user", "assistant", "user") == 3
    assert begin(LastTurn(system=True), "developer", "user", "assistant", "user") == 3
    for last_turn in (tools, answers):
        assert begin(last_turn) == begin(last_turn, "assistant") == 0


@pytest.mark.parametrize(
    ("answer", "reasons"),
    [
        *(({name: "Hm."}, True) for name in ("reasoning_content", "reasoning", "thinking")),
        ({"content": "<think>\nHm.\n</think>\n\nYes."}, True),
        ({"content": [{"type": "text", "text": "Hm.</think>Yes."}]}, True),
        ({"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]}, True),
        ({"content": None, "thinking_blocks": [{"type": "thinking", "thinking": "Hm."}]}, True),
        ({"content": "", "reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]}, True),
        ({"content": "Yes."}, False),
        ({"content": [{"type": "text", "text": "Yes."}]}, False),
        ({"content": None, "reasoning_content": "", "reasoning": None, "reasoning_details": []}, False),
    ],
)
def test_an_answer_is_written_otherwise_where_it_reasons(answer: dict[str, Any], *, reasons: bool) -> None:
    """Else the next question finds what was named before: most clients send no reasoning back."""
    call, result = {"role": "assistant", "content": ""}, {"role": "tool", "content": "a</think>"}
    messages = [{"role": "user"}, {**call, "thinking": "Hm."}, {"role": "user"}, call, result, call | answer, result]
    last_turn = LastTurn(reasoning=True)
    assert last_turn.begin(messages, has_tools=True) == (5 if reasons else len(messages))
    assert LastTurn(answers=True, reasoning=True).begin(messages, has_tools=True) == 3
    assert last_turn.begin(messages[:-1], has_tools=True) == 5, "some templates write a last answer with an empty one"


def test_prompts_as_text_and_as_ids() -> None:
    assert text_of(prompt="abc").startswith(text_of(prompt="ab"))
    assert text_of(prompt=["ab"]) == text_of(prompt="ab")
    assert text_of(prompt=[[1, 2]]) == text_of(prompt=[1, 2])
    assert text_of(prompt=[1, 2, 3]).startswith(text_of(prompt=[1, 2]))
    assert not text_of(prompt=[1, 2, 3]).startswith(text_of(prompt="a")[:-1])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"prompt": [-1]},
        {"prompt": 7},
        {"prompt": "a", "truncate_prompt_tokens": 3},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"content": "a" * MAX_CHAIN_BYTES}]},
        {"prompt": "a" * (MAX_CHAIN_BYTES // 2), "tools": ["a" * (MAX_CHAIN_BYTES // 2)]},
    ],
)
def test_bodies_without_a_chain(body: dict[str, Any]) -> None:
    assert read_canonical(fields_of(**body)) is None


def test_router_and_node_agree_on_what_is_too_long_for_a_chain() -> None:
    """The router looks at the client's fields, and nodes at those of chat, which tell the same of what is long."""
    text = "a" * (MAX_CHAIN_BYTES - 1000)
    for body in ({"prompt": text}, {"messages": [{"role": "user", "content": text}], "logit_bias": "b" * 5000}):
        assert is_short(fields_of(**body))
        assert read_canonical(fields_of(**body)) is not None
    for body in ({"input": text + 1000 * "a"}, {"system": text, "messages": "a" * 1000}, {"instructions": text * 2}):
        assert not is_short(fields_of(**body))


def test_bytes_that_are_not_json_have_no_chain() -> None:
    for raw in (b"[", b'["\xff"]', b"[" * 100_000, b'[{"content": "\\ud800"}]'):
        assert read_canonical({"messages": raw}) is None


def test_hashes_depend_on_key_salt_and_all_text_before() -> None:
    text = bytes(range(256)) * 10
    hashes = step_hashes(KEY, "", text)
    assert len(hashes) == len(text) // STEP_BYTES == 5
    assert step_hashes(KEY, "", text + b"more") == hashes
    assert step_hashes(KEY, "", text[: 3 * STEP_BYTES]) == hashes[:3]
    changed = step_hashes(KEY, "", text[: STEP_BYTES + 7] + b"?" + text[STEP_BYTES + 8 :])
    assert changed[0] == hashes[0]
    for others in (changed[1:], step_hashes(KEY, "tenant", text), step_hashes(chain_key(b"other"), "", text)):
        assert not set(others) & set(hashes)
