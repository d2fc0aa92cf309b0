"""Members of bodies are counted before anything is made of them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from pd_http import member_bounds
from pd_http.dialects import MESSAGES, RESPONSES, dialect_of
from pd_http.errors import InvalidRequest
from pd_http.member_bounds import (
    CHAT_BOUNDS,
    FREE_BYTES,
    MAX_FIELDS,
    TOKEN_FIELDS,
    TRANSLATED_BOUNDS,
    BodyBounds,
    CountedJson,
    Members,
    check_members,
    top_level,
)

MAX_ENTRIES, MAX_VALUES, _ = CHAT_BOUNDS.others
MAX_ITEMS = TRANSLATED_BOUNDS.others.entries
HOSTILE = ['"', "\\", '\\"', '\\\\"', "[", "]", "{", "}", ",", ":", "{}", "[]", ":{", ",[", " ", "\t", "\n", "\ud800",
           "\U0001f600", "ä", "a", "", "\\u0022", "//", "0"]  # fmt: skip


def text(rng: random.Random) -> str:
    return "".join(rng.choices(HOSTILE, k=rng.randrange(5)))


def value(rng: random.Random, levels: int) -> Any:
    match rng.randrange(8 if levels else 5):
        case 0 | 1:
            return text(rng)
        case 2:
            return rng.choice([None, True, False, 0, -1.5e-9, 10**20])
        case 3:
            return []
        case 4:
            return {}
        case 5 | 6:
            return [value(rng, levels - 1) for _ in range(rng.randrange(5))]
        case _:
            return {text(rng): value(rng, levels - 1) for _ in range(rng.randrange(5))}


def counted(one: Any) -> list[int]:
    """The entries, values and strings below a value."""
    total = [0, 0, int(isinstance(one, str))]
    for member in one.values() if isinstance(one, dict) else one if isinstance(one, list) else ():
        total[0] += isinstance(one, list) and isinstance(member, list | dict)
        total[1] += 1
        total[2] += isinstance(one, dict)
        total = [a + b for a, b in zip(total, counted(member), strict=True)]
    return total


@pytest.mark.long
def test_the_count_is_exact() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        one = value(rng, 5)
        layout: Any = rng.choice([{}, {"indent": 1}, {"separators": (" ,\t", "\n: ")}, {"separators": (",", ":")}])
        raw = json.dumps(one, ensure_ascii=rng.random() < 0.5, **layout).encode(errors="surrogatepass")
        assert list(CountedJson(raw).exact) == counted(one), raw


def check(body: Any, path: str = "") -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    check_members(raw, dialect_of(path).bounds)


def listed(name: str, number: int, member: str = "1") -> bytes:
    return b'{"%s":[%s]}' % (name.encode(), ",".join([member] * number).encode())


IDS = f"[{','.join('1' * 999)}]"


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "most", "word", "name", "member"),
    [
        ("", MAX_ENTRIES, "entries", "messages", "{}"),
        ("", MAX_ENTRIES, "entries", "tools", "[ ]"),
        ("", MAX_ENTRIES, "entries", "documents", '{"a":"b,[{"}'),
        (MESSAGES, MAX_ITEMS, "entries", "system", "{}"),
        (RESPONSES, MAX_ITEMS, "entries", "input", "{}"),
        ("", MAX_VALUES - 1, "values", "documents", '""'),
        ("", MAX_VALUES - 1, "values", "messages", r'"\\\",["'),
        ("", MAX_VALUES - 1, "values", "metadata", "1"),
        ("", TOKEN_FIELDS["prompt"].entries, "entries", "prompt", IDS),
        ("", TOKEN_FIELDS["prompt"].strings, "strings", "prompt", f'"{"a,[" * 99}"'),
        ("", TOKEN_FIELDS["prompt"].values, "values", "prompt", "1"),
        ("", TOKEN_FIELDS["input"].entries, "entries", "input", IDS),
        ("", TOKEN_FIELDS["stop_token_ids"].values, "values", "stop_token_ids", "1"),
        ("", TOKEN_FIELDS["kv_transfer_params"].entries, "entries", "kv_transfer_params", "[1,1]"),
    ],
)
def test_one_more_than_a_bound_is_refused(path: str, most: int, word: str, name: str, member: str) -> None:
    """The values of all fields together have the field itself among them."""
    check(listed(name, most, member), path)
    with pytest.raises(InvalidRequest, match=rf"has \d+ {word}.*; \d+ are allowed") as caught:
        check(listed(name, most + 1, member), path)
    assert caught.value.param in (name, None)


@pytest.mark.parametrize(
    ("path", "field", "inner"),
    [
        (MESSAGES, "messages", '{"role":"user","content":[%s]}'),
        (MESSAGES, "messages", '{"content":[{"type":"tool_result","content":[%s]}]}'),
        (MESSAGES, "messages", '{"content":[{"type":"document","source":{"content":[%s]}}]}'),
        (RESPONSES, "input", '{"type":"x_call","results":{"x":[%s]}}'),
        (RESPONSES, "tools", '{"type":"namespace","tools":[%s]}'),
        ("", "tools", '{"function":{"parameters":{"anyOf":[%s]}}}'),
    ],
)
def test_entries_count_wherever_they_are(path: str, field: str, inner: str) -> None:
    """16 MiB of messages of a letter would hold an event loop, and so all streams, for seconds."""
    most = dialect_of(path).bounds.others.entries
    for number, is_served in ((most - 64, True), (most + 64, False)):
        nested = inner % ",".join(["{}"] * (number // 2))
        raw = b'{"%s":[%s,%s]}' % (field.encode(), nested.encode(), nested.encode())
        if is_served:
            check(raw, path)
            continue
        with pytest.raises(InvalidRequest, match=f"entries, most of them in {field}; {most} are") as caught:
            check(raw, path)
        assert caught.value.param == field


@pytest.mark.long
def test_fields_are_bounded_before_they_become_a_dict() -> None:
    assert len(top_level(json.dumps({str(i): i for i in range(MAX_FIELDS)}).encode())) == MAX_FIELDS
    with pytest.raises(InvalidRequest, match=f"{MAX_FIELDS + 1} fields; {MAX_FIELDS} are allowed"):
        top_level(json.dumps({str(i): i for i in range(MAX_FIELDS + 1)}).encode())
    for name in (b"k", b"messages"):  # a name that is there twice takes as long
        for end in (b"}", b"!"):
            raw = b'{"prompt":"a"' + b',"%b":1' % name * (MAX_VALUES + 1) + end
            with pytest.raises(InvalidRequest, match=r"are allowed|not valid JSON"):
                check(raw)


@pytest.mark.long
def test_text_is_no_member() -> None:
    for text in ("a,{[" * 100_000, '\\"[{,' * 100_000, "\\" * 100_000 + '",[' * 50_000):
        check({"messages": [{"role": "user", "content": text}], "x": text, "metadata": {text: text}})
        check({"prompt": text, "logit_bias": {"1": 1}})
        check({"prompt": [text] * 3, "input": text})


@pytest.mark.long
def test_random_bodies_are_refused_exactly_above_the_bounds() -> None:
    rng = random.Random(11)
    for _ in range(2000):
        names = rng.sample(["messages", "tools", "x", "y", "prompt", "input"], 4)
        body = {name: value(rng, 4) for name in names}
        of_tokens = [counted(one) for name, one in body.items() if name == "prompt"]
        entries = rng.randrange(-1, 20)
        values = rng.randrange(max(entries, 0), 60)
        others = Members(entries, values, 2 * values)
        bounds = BodyBounds({"prompt": Members(99, 99, 99)}, others)
        found = [total - sum(part[i] for part in of_tokens) for i, total in enumerate(counted(body))]
        is_within = all(number <= most for number, most in zip(found, others, strict=True))
        raw = json.dumps(body).replace("\\ud800", "").encode()
        try:
            check_members(raw, bounds, free_bytes=0)
        except InvalidRequest:
            assert not is_within, (raw, bounds)
        else:
            assert is_within, (raw, bounds)


@pytest.mark.parametrize(
    ("text", "lone"),
    [
        ("a\\ud83d", "\\ud83d at byte 11"),  # of `{"user": "a`
        ("\\ud83d\\ude00\\uDE00", "\\uDE00 at byte 22"),
        ("\\\\\\ud83dx", "\\ud83d at byte 12"),
        ("\\ud83d\\ud83d\\ude00", "\\ud83d at byte 10"),
        ("\\ud83d\\ude00\\\\ud83d\\q", ""),  # no escape of a surrogate, and none that there is
    ],
)
def test_half_of_a_character_is_named_in_a_field_that_is_not_read(text: str, lone: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        top_level(f'{{"user": "{text}", "prompt": "a"}}'.encode())
    expected = f"the body has a lone surrogate, half of a character: {lone}" if lone else "the body is not valid JSON: "
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("half", ["\\ud800", "\\udc00", "\\ud800 and more"])
@pytest.mark.parametrize("piece", ["a", "\\n", "\\\\", "\\ud83d\\ude00"])
def test_half_of_a_character_is_found_in_a_large_body(piece: str, half: str) -> None:
    text = piece * 300_000
    with pytest.raises(InvalidRequest) as caught:
        top_level(f'{{"user": "{text}{half}"}}'.encode())
    is_hidden = piece == "\\\\" and half == "\\ud800"  # no byte is told, and backslashes fill the end
    assert str(caught.value).endswith("truncated" if is_hidden else f"{half[:6]} at byte {10 + len(text)}")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (rb'{"a": 1,, "b": "\ud800"}', "(byte 8)"),
        (rb'{"prompt": "ok"} \ud800', "trailing characters (byte 18)"),
        (rb'{"a": "\ud800", "b": "\q"}', r"lone surrogate, half of a character: \ud800 at byte 7"),
        (rb'{"a": "\q", "b": "\ud800"}', "invalid escaped character (byte 8)"),
        (rb'{"a": "\\ud800"', "truncated"),  # an escaped backslash
        (rb'{"a": "\\\ud800"', r"\ud800 at byte 9"),
        (rb'{"a": "\ud83d\ude0', "truncated"),  # cut in a whole pair
        (rb'{"a": "\\ud83d\ud800xxxxxx"}', r"\ud800 at byte 14"),
        (rb'{"a": "\\ud83d\udc00"}', r"\udc00 at byte 14"),
    ],
)
def test_the_fault_that_is_told_is_the_one_that_ended_the_decoding(raw: bytes, told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        top_level(raw)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize("broken", [b",", b""])
def test_a_broken_body_is_searched_at_its_end_only(broken: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the event loop: 48 MB of escapes took 0.6 s to search."""
    searched: list[int] = []

    class Pattern:
        def search(self, body: memoryview, start: int) -> None:
            searched.append(len(body) - start)

        def match(self, *_: object) -> None:
            raise AssertionError("no surrogate was told")

    for name in ("_HALF", "_SECOND_HALF", "_HALF_AT_END"):
        monkeypatch.setattr(member_bounds, name, Pattern())
    with pytest.raises(InvalidRequest, match="is not valid JSON"):
        top_level(b'{"a": "' + b"\\n" * (1 << 20) + (b'",' + broken if broken else b""))
    assert searched == ([] if broken else [member_bounds._END_BYTES])


def test_small_bodies_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("pd_http.member_bounds.CountedJson")
    check(b" " * FREE_BYTES)
    with pytest.raises(NameError):
        check(b" " * (FREE_BYTES + 1))
