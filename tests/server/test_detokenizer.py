"""Text comes out whole, in order, once, and never past a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.server.text.detokenizer import Detokenizer, StopMatcher
from tests.server.live_server import demo_tokenizer


class Bytes:
    """A vocabulary of the given pieces; the ids in `special` are special tokens."""

    def __init__(self, pieces: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._special = special

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


DEMO = demo_tokenizer()


def spell(
    pieces: list[bytes], stops: tuple[str, ...] = (), *, include_stop: bool = False, min_tokens: int = 0
) -> list[str]:
    """What each token released, then what the end released; ends at a stop string."""
    detokenizer = Detokenizer(Bytes(pieces), stops, include_stop=include_stop, min_tokens=min_tokens)
    shown = []
    for token_id in range(len(pieces)):
        shown.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            return shown
    return [*shown, detokenizer.flush()]


def naive_stop(pieces: list[str], stops: tuple[str, ...]) -> str:
    """Character by character: the text before the first stop string to be completed, the longest of those."""
    text = ""
    for char in "".join(pieces):
        text += char
        ended = [stop for stop in stops if text.endswith(stop)]
        if ended:
            return text[: -len(max(ended, key=len))]
    return text


@pytest.mark.long
@given(st.lists(st.integers(0, 3071), max_size=40))
def test_released_text_is_the_whole_text(ids: list[int]) -> None:
    tokenizer = DEMO
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    shown = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert shown == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")


@pytest.mark.long
@given(st.text(max_size=30), st.lists(st.integers(0, 60), max_size=10))
def test_any_split_of_utf8_gives_the_same_text_and_no_half_characters(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    shown = spell(pieces)
    assert "".join(shown) == text
    assert all("�" not in part or "�" in text for part in shown)


@pytest.mark.long
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_agree_with_a_naive_search(pieces: list[str], stops: list[str]) -> None:
    shown = "".join(spell([piece.encode() for piece in pieces], tuple(stops)))
    assert shown == naive_stop(pieces, tuple(stops))


@pytest.mark.long
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=12), st.text("abc", min_size=1, max_size=5))
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stop: str) -> None:
    detokenizer = Detokenizer(Bytes([piece.encode() for piece in pieces]), (stop,))
    shown = text = ""
    for token_id, piece in enumerate(pieces):
        shown += detokenizer.push(token_id)
        text += piece
        if detokenizer.stop is not None:
            return
        longest = max(k for k in range(len(stop)) if text.endswith(stop[:k]))
        assert shown == text[: len(text) - longest]


def test_emoji_split_over_four_tokens_appears_once_complete() -> None:
    assert spell([bytes([byte]) for byte in "🙂".encode()]) == ["", "", "", "🙂", ""]


def test_unfinished_character_at_the_end_is_marked() -> None:
    assert spell([b"a", "é".encode()[:1]]) == ["a", "", "�"]


def test_stop_string_across_three_tokens_is_cut_out() -> None:
    assert spell([b"one E", b"N", b"D two", b"never"], ("END",)) == ["one ", "", ""]


def test_stop_string_is_kept_when_asked_for() -> None:
    assert "".join(spell([b"one E", b"ND two"], ("END",), include_stop=True)) == "one END"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    assert "".join(spell([b"END", b" a END", b" b END c"], ("END",), min_tokens=2)) == "END a END b "


def test_special_and_hidden_tokens_count_but_show_nothing() -> None:
    detokenizer = Detokenizer(Bytes([b"a", b"<s>"], frozenset({1})))
    assert [detokenizer.push(0), detokenizer.push(1), detokenizer.push(0, hidden=True)] == ["a", "", ""]
    assert detokenizer.num_tokens == 3


def test_special_tokens_show_when_they_are_not_skipped() -> None:
    assert Detokenizer(Bytes([b"<s>"], frozenset({0})), skip_special=False).push(0) == "<s>"


@pytest.mark.parametrize(("text", "end"), [("aab", 3), ("aaab", 4), ("abaab", 5)])
def test_matcher_falls_back_along_borders(text: str, end: int) -> None:
    assert StopMatcher(["aab"]).feed(text) == (end, "aab")
