"""The rule of accepted and rejected prediction tokens: exact numbers, and beside a slow reading of its words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.server.requests.predicted_tokens import FollowedPrediction, PredictedTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

few = st.lists(st.integers(0, 3), max_size=30)  # tokens that repeat much
large = st.lists(st.sampled_from([0, 1, (1 << 31) - 1, (1 << 18) + 7]), max_size=12)


def followed(prediction: Sequence[int], *pieces: Sequence[int]) -> FollowedPrediction:
    one = FollowedPrediction(PredictedTokens(prediction))
    for piece in pieces:
        one.push(piece)
    return one


def accepted_by_words(prediction: Sequence[int], answer: Sequence[int]) -> set[int]:
    """The places that are accepted, as the module's docstring has it, in quadratic time."""
    place: int | None = 0
    newest, accepted = -1, set[int]()
    for index, token in enumerate(answer):
        if place is not None and place < len(prediction) and prediction[place] == token:
            accepted.add(place)
            newest, place = place, place + 1
            continue
        two = list(answer[index - 1 : index + 1]) if index else None
        places = [p for p in range(2, len(prediction)) if list(prediction[p - 2 : p]) == two]
        place = min((p for p in places if p > newest), default=min(places, default=None))
    return accepted


@pytest.mark.parametrize(
    ("prediction", "answer", "num_accepted"),
    [
        ("abcdef", "abcdef", 6),
        ("abcdef", "abc", 3),
        ("abc", "abcdef", 3),
        ("", "abc", 0),
        ("abc", "", 0),
        ("abcdefgh", "abxdefgh", 5),  # another token: a b, and f g h after the next two
        ("abcdefgh", "abxycdefgh", 6),  # more tokens: c d find the place
        ("abcdefgh", "abefgh", 4),  # fewer
        ("abcdef", "thinks abcdef", 4),  # it begins late
        ("abcxabcy", "abcyabcx", 4),  # a b c, then the second c: the nearest place is after the first x
        ("abab", "abababab", 4),  # once each
        ("abcdwxyz", "wxyzabcd", 4),  # parts that changed places: y z, and c d, of which the place lies before
        ("aaaa", "aaaaaaaa", 4),
        ("xyz", "abcabc", 0),
        ("ab", "xab", 0),  # too short to be found
    ],
)
def test_exact_numbers(prediction: str, answer: str, num_accepted: int) -> None:
    one = followed(list(map(ord, prediction)), list(map(ord, answer)))
    assert (one.num_accepted, one.num_rejected) == (num_accepted, len(prediction) - num_accepted)


@pytest.mark.long
@given(prediction=few | large, answer=few | large, cuts=st.sets(st.integers(0, 30)))
@settings(max_examples=200)
def test_it_is_what_the_rule_says_in_whatever_pieces_the_answer_comes(
    prediction: list[int], answer: list[int], cuts: set[int]
) -> None:
    ends = sorted(one for one in cuts if one < len(answer))
    pieces = [answer[begin:end] for begin, end in zip([0, *ends], [*ends, len(answer)], strict=True)]
    one = followed(prediction, *pieces)
    assert one.num_accepted == len(accepted_by_words(prediction, answer))
    assert one.num_accepted <= min(len(prediction), len(answer))
    assert one.num_accepted + one.num_rejected == len(prediction)


@pytest.mark.long
@given(prediction=few, more=few)
def test_a_prediction_that_the_answer_begins_with_is_accepted_whole(prediction: list[int], more: list[int]) -> None:
    assert followed(prediction, [*prediction, *more]).num_rejected == 0
    assert followed([*prediction, *more], prediction).num_accepted == len(prediction)


@pytest.mark.long
@given(prediction=few, first=few, second=few)
def test_answers_to_one_request_are_counted_apart(prediction: list[int], first: list[int], second: list[int]) -> None:
    predicted = PredictedTokens(prediction)
    one, other = FollowedPrediction(predicted), FollowedPrediction(predicted)
    for i in range(max(len(first), len(second))):
        one.push(first[i : i + 1])
        other.push(second[i : i + 1])
    assert one.num_accepted == followed(prediction, first).num_accepted
    assert other.num_accepted == followed(prediction, second).num_accepted


def test_the_work_does_not_grow_with_the_places_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 equal tokens, and an answer that leaves the place with every second token."""
    predicted = PredictedTokens([7] * 100_000)
    looks = 0

    class Counted:
        def __init__(self, places: memoryview) -> None:
            self._places = places

        def __len__(self) -> int:
            return len(self._places)

        def __getitem__(self, index: int) -> int:
            nonlocal looks
            looks += 1
            return int(self._places[index])

    for name in ("_pairs", "_places"):
        monkeypatch.setattr(predicted, name, Counted(getattr(predicted, name)))
    one = FollowedPrediction(predicted)
    one.push([7, 7, 7, 8] * 1000)
    assert one.num_accepted > 1000
    assert looks < 4000 * 60
