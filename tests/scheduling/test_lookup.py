"""What is looked up for a sequence, beside a search of everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster.drafting.chances import LONGEST, MOST_NEW, Chances
from pd_cluster.drafting.lookup import LAG, NUM_NONE, PIECE, REST, Lookup, num_followed
from pd_cluster.drafting.token_index import NUM_NEAR, NUM_TRIED, OutputIndex, TokenIndex
from pd_cluster.drafting.token_index import PIECE as INDEX_PIECE

FEW = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def places_of(tokens: list[int], first: int, second: int, start: int = 0) -> list[int]:
    """All places behind a pair, newest first; those from `start` on."""
    ends = range(len(tokens), max(1, start), -1)
    return [end for end in ends if end > 1 and tokens[end - 2 : end] == [first, second]]


def lookup_of(prompt: list[int], prediction: list[int] | None = None) -> tuple[list[int], Lookup]:
    """A sequence without output, and what looks it up."""
    token_ids, texts = prompt[:], []
    texts.append((token_ids, TokenIndex(prompt)))
    if prediction is not None:
        texts.append((prediction, TokenIndex(prediction)))
    num = len(prompt)
    return token_ids, Lookup(token_ids, texts, Chances(), prediction, num_indexed=num, output=OutputIndex(num))


def offered(lookup: Lookup, most: int = 4, num_ahead: int = 0) -> list[int]:
    found = lookup.offer(num_ahead, most)
    if found is None:
        return []
    tokens = found.first(len(found.chances))
    assert len(tokens) == len(found.chances) > 0
    assert all(1 >= one >= other > 0 for one, other in zip(found.chances, found.chances[1:], strict=False))
    return [*tokens]


@pytest.mark.long
@given(FEW, st.integers(0, 3), st.integers(0, 3))
def test_indexes_find_the_newest_places_of_a_pair(tokens: list[int], first: int, second: int) -> None:
    assert TokenIndex(tokens).places(first, second) == places_of(tokens, first, second)[:NUM_TRIED]
    half = max(1, len(tokens) // 2)
    output = OutputIndex(half)
    for end in range(half + 1, len(tokens) + 1, 3):
        output.take(tokens[end - 2], tokens[end - 1 : end + 2])
    assert output.places(first, second) == places_of(tokens, first, second, half)[:NUM_NEAR]


def test_an_index_of_many_pieces_is_that_of_the_whole() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(60) for _ in range(2 * INDEX_PIECE + 7)] + [2**31 - 1, 2**31 - 2]
    index = TokenIndex(tokens)
    for at in (0, 5, INDEX_PIECE - 1, INDEX_PIECE, 2 * INDEX_PIECE - 1, len(tokens) - 2):
        first, second = tokens[at : at + 2]
        assert index.places(first, second) == places_of(tokens, first, second)[:NUM_TRIED]
    assert index.places(99, 0) == []
    assert TokenIndex([]).places(0, 0) == TokenIndex([4]).places(4, 4) == []


def longest_match(token_ids: list[int], prediction: list[int]) -> int:
    """The length of the longest match that there is, of all places; 0: none of two tokens."""
    lengths = [0]
    for text in (token_ids, prediction):
        for place in range(2, len(text)):
            length = 0
            while length < min(place, len(token_ids), LONGEST) and text[place - length - 1] == token_ids[~length]:
                length += 1
            lengths.append(length)
    return max(lengths) if max(lengths) > 1 else 0


@pytest.mark.long
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), FEW.map(lambda tokens: [10 * one for one in tokens]))
def test_a_search_finds_the_longest_match(answer: list[int], prediction: list[int]) -> None:
    """Where no pair stands in more places than are tried."""
    token_ids, lookup = lookup_of(answer[: len(answer) // 2 + 1], prediction)
    for token in answer[len(answer) // 2 + 1 :]:
        token_ids.append(token)
        was_followed = lookup.expected == token
        lookup.advance()
        pair = token_ids[-2:]
        is_rare = all(len(places_of(text, *pair)) <= NUM_NEAR for text in (token_ids, prediction))
        if not was_followed and is_rare:
            longest = longest_match(token_ids, prediction)
            assert (lookup.expected is not None) == (longest > 0)
            assert not longest or lookup._length == longest


@pytest.mark.long
@given(FEW, FEW, st.lists(st.integers(1, 40), min_size=1), st.integers(0, 2))
def test_offers_are_what_stands_behind_a_match(
    prompt: list[int], answer: list[int], steps: list[int], num_ahead: int
) -> None:
    token_ids, lookup = lookup_of(prompt)
    for at, num in enumerate(steps):
        token_ids += answer[sum(steps[:at]) :][:num]
        found = offered(lookup, 5, num_ahead)
        if lookup.expected is None:
            assert not found
            continue
        run, place = token_ids[:], lookup._place
        for _ in range(num_ahead + 5):  # one that reaches the end repeats
            run.append(run[place])
            place += 1
        assert run[len(token_ids) + num_ahead :] == found


def test_the_newest_of_equal_matches_counts_and_the_output_comes_first() -> None:
    token_ids, lookup = lookup_of([1, 2, 3, 1, 2, 4, 9, 1, 2])
    token_ids.append(7)
    assert offered(lookup) == []
    token_ids += [1, 2]
    assert offered(lookup, 3) == [7, 1, 2]
    token_ids += [8, 1, 2]
    assert offered(lookup, 2) == [8, 1]
    token_ids += [9, 1, 2]  # three tokens: longer than what came last
    assert offered(lookup, 3) == [7, 1, 2]


def test_a_prediction_is_followed_from_its_beginning_and_found_again() -> None:
    prediction = [11, 12, 13, 14, 15, 16, 17]
    token_ids, lookup = lookup_of([1, 2, 3], prediction)
    assert offered(lookup) == [11, 12, 13, 14]
    assert offered(lookup, 2, 1) == [12, 13]
    token_ids += [11, 12]
    assert offered(lookup, 9) == [13, 14, 15, 16, 17]
    token_ids += [13, 99]
    assert offered(lookup) == []
    token_ids += [15]
    assert offered(lookup) == []
    token_ids += [16]
    assert offered(lookup) == [17]
    assert offered(lookup, 3, 1) == []
    token_ids += [17]
    assert offered(lookup) == [], "the text is at its end"


@pytest.mark.parametrize(
    ("answer", "num"),
    [([], 0), ([1, 2, 3, 4, 5, 6], 6), ([1, 2, 3, 4, 5, 6, 7], 6), ([9, 9, 9], 0), ([1, 2, 9, 4, 5, 6], 3),
     ([2, 3, 4], 1), ([1, 3, 4, 5, 9, 1, 2, 3], 3)],
)  # fmt: skip
def test_what_an_answer_follows_of_a_prediction(answer: list[int], num: int) -> None:
    assert num_followed([1, 2, 3, 4, 5, 6], answer) == num
    assert num_followed([], answer) == 0


def test_an_output_that_was_not_looked_up_is_indexed_in_pieces() -> None:
    token_ids, lookup = lookup_of([1, 2])
    token_ids += range(10, 10 + 2 * PIECE)
    token_ids += [10, 11]
    for _ in range(2):
        assert offered(lookup) == []
    assert offered(lookup) == [12, 13, 14, 15]
    token_ids += range(12, 12 + LAG - 1)
    offered(lookup)
    assert lookup._num_indexed < len(token_ids), "a match is followed without an index"
    token_ids.append(5000)
    assert offered(lookup) == []
    assert lookup._num_indexed == len(token_ids)


@pytest.mark.long
@given(FEW, FEW, st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_what_is_indexed_while_no_step_waits_changes_no_offer(
    prompt: list[int], answer: list[int], steps: list[int]
) -> None:
    """Before the next tokens are taken, or after that."""
    plain, *others = (lookup_of(prompt) for _ in range(3))
    done = 0
    for num in steps:
        for token_ids, _ in (plain, *others):
            token_ids += answer[done:][:num]
        done += num
        others[0][1].index(1)
        found = [offered(lookup) for _, lookup in (plain, *others)]
        others[1][1].index(1)
        assert found[1:] == [found[0]] * 2


def test_a_match_that_breaks_at_an_indexed_token_is_searched() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 6, 20, 21, 22, 23, 24, 25]
    token_ids, lookup = lookup_of(prompt)
    found = []
    for token in (2, 3, 4, 5, 6, 20):
        token_ids.append(token)
        lookup.index()
        found.append(offered(lookup))
    assert found[-1] == [21, 22, 23, 24]


def waited(lookup: Lookup) -> list[int]:
    """What is offered where steps leave time to prepare."""
    found = lookup.offer(0, 4, may_wait=True)
    return [] if found is None else [*found.first(len(found.chances))]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_match_that_begins_after_none_is_searched_while_no_step_waits(is_prepared: bool) -> None:
    """And followed from the next token on. Where a search had no time the next one does not wait for that, too."""
    token_ids, lookup = lookup_of([*range(20)])
    for token in range(50, 50 + NUM_NONE):
        token_ids.append(token)
        assert waited(lookup) == []
        assert lookup._num_searched == len(token_ids), "a match may end for some tokens"
    offers = []
    for token in (4, 5, 6, 7):
        token_ids.append(token)
        offers.append(waited(lookup))
        if is_prepared:
            lookup.prepare()
    assert offers == [[], [] if is_prepared else [6, 7, 8, 9], [7, 8, 9, 10], [8, 9, 10, 11]]
    token_ids += [9, 10]
    assert waited(lookup) == [11, 12, 13, 14], "after several tokens at once nothing waits"
    token_ids += [3, 4]
    assert waited(lookup) == [5, 6, 7, 8], "nor where a match has just ended"


def test_what_has_come_since_is_searched_with_the_next_offer() -> None:
    token_ids, lookup = lookup_of([*range(20)])
    for token in (*range(50, 50 + NUM_NONE), 4):
        token_ids.append(token)
        assert waited(lookup) == []
    token_ids.append(5)
    lookup.prepare()
    assert lookup.expected is None, "the place of a match is the one after all tokens that were taken"
    assert waited(lookup) == [6, 7, 8, 9]


def test_a_sequence_rests_behind_a_right_draft_without_a_mask() -> None:
    """Verification accepted less than what was drawn: it had no mask. A wrong draft is no such thing."""
    token_ids, lookup = lookup_of([*range(400)])
    token_ids += [5, 6]
    rests = []
    for _ in range(3):
        assert offered(lookup) == [token_ids[-1] + 1 + at for at in range(4)]
        lookup.note(4, 0)
        token_ids.append(token_ids[-1] + 1)
        start = len(token_ids)
        while not offered(lookup):
            token_ids.append(token_ids[-1] + 1)
        rests.append(len(token_ids) - start)
    assert rests == [REST, 2 * REST, 4 * REST]
    lookup.note(4, 1)
    token_ids += [token_ids[-1] + 1, 9]
    offered(lookup)
    token_ids += [10]
    assert offered(lookup)


def test_a_sequence_with_wrong_matches_is_trusted_less_and_no_other() -> None:
    """What other sequences teach stays: prose beside edits is not drafted as if it were one."""
    prompt = [token for number in range(40) for token in (1, 2, 100 + number)]
    token_ids, lookup = lookup_of(prompt)
    first = list[float]()
    for number in range(10):
        for token in (1, 2):
            token_ids.append(token)
            lookup.advance()
        found = lookup.offer(0, 4)
        assert found is not None
        assert len(found.chances) == 4
        first.append(found.trust * float(found.chances[0]))
        token_ids.append(200 + number)
        lookup.advance()
    assert first == sorted(first, reverse=True)
    assert first[0] == pytest.approx(0.25), "half of what matches of two tokens have: it has just begun"
    assert first[-1] < 0.25
    for token in prompt[:60]:
        token_ids.append(token)
        lookup.advance()
    found = lookup.offer(0, 1)
    assert found is not None
    assert found.trust * found.chances[0] > 0.9, "right ones are believed again"


def test_chances_learn_and_forget() -> None:
    """By the length of the match and the place in the run; each run counts only as far as it says something."""
    chances = Chances()
    short, long = chances.after[2], chances.after[12]
    assert short.reached[0] == pytest.approx(0.5)
    assert long.reached[0] == pytest.approx(0.92)
    assert short.reached[1] == pytest.approx(0.5 * 0.6), "a later place is one behind a longer match"
    for _ in range(5 * MOST_NEW):
        short.note(3, 2)
    first, second, third, *_ = short.reached
    assert first > 0.97
    assert second > 0.95
    assert third < 0.1
    for _ in range(5 * MOST_NEW):
        short.note(1, 0)
    assert short.reached[0] < 0.15
    assert short.reached[2] / short.reached[1] == pytest.approx(third / second, abs=0.2), "no run has come so far"
    assert long.reached[0] == pytest.approx(0.92)
    assert chances.after[5] is chances.after[8]
    assert chances.after[9] is chances.after[LONGEST]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_chances_come_near_the_truth(share: float) -> None:
    rng, runs = random.Random(7), Chances().after[4]
    for _ in range(25 * MOST_NEW):
        num = rng.randrange(1, 24)
        runs.note(num, next((at for at in range(num) if rng.random() > share), num))
    for at in range(3):
        assert runs.reached[at] == pytest.approx(share ** (at + 1), abs=0.12)
