"""Tokens that a grammar forces, as drafts: from which place on, with which chances, and beside a drafter's."""

from __future__ import annotations

import numpy as np
import pytest

from pd_cluster.drafting.forced import PRIOR, ForcedDrafts, ForcedTokens
from pd_cluster.drafting.offer import DraftOffer

KNOWN = [1, 2, 3]  # prompt and output


def drafts_of(*told: ForcedTokens) -> ForcedDrafts:
    forced = ForcedDrafts(lambda: told)
    forced.take({0})
    return forced


def offered(*token_ids: int, chance: float = 0.5) -> DraftOffer:
    return DraftOffer(token_ids, np.power(chance, np.arange(1, 1 + len(token_ids))).astype(np.float32))


@pytest.mark.parametrize(
    ("start", "token_ids", "num_ahead", "wanted"),
    [
        (3, [4, 5, 6], 0, [4, 5, 6]),
        (3, [4, 5, 6], 1, [5, 6]),
        (3, [4, 5, 6], 3, None),
        (1, [2, 3, 4, 5], 0, [4, 5]),
        (1, [2, 3, 4, 5], 1, [5]),
        (1, [2, 3], 0, None),
        (1, [2, 9, 4, 5], 0, None),
        (4, [5, 6], 0, None),
        (3, [4, 5, 6, 7, 8, 9], 0, [4, 5, 6, 7]),
    ],
)
def test_what_follows_the_known_tokens_is_offered(
    start: int, token_ids: list[int], num_ahead: int, wanted: list[int] | None
) -> None:
    offer = drafts_of(ForcedTokens(0, start, token_ids)).joined(0, KNOWN, num_ahead, 4, None)
    assert (None if offer is None else list(offer.first(len(offer.chances)))) == wanted
    if offer is not None:
        assert offer.chances.tolist() == pytest.approx([PRIOR**place for place in range(1, 1 + len(offer.chances))])
        assert offer.chances.dtype == np.float32


def test_a_drafter_that_agrees_goes_on_after_them() -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]))
    offer = forced.joined(0, KNOWN, 0, 4, offered(4, 5, 6, 7))
    assert offer is not None
    assert list(offer.first(len(offer.chances))) == [4, 5, 6, 7]
    certain = PRIOR**2
    assert offer.chances.tolist() == pytest.approx([PRIOR, certain, certain / 2, certain / 4], rel=1e-6)
    assert forced.note(0, 4, 3), "it hears of its drafts"


@pytest.mark.parametrize("other", [(4, 9, 6, 7), (4, 5), (4,), (9,)])
def test_a_drafter_that_expects_something_else_has_none(other: tuple[int, ...]) -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]))
    offer = forced.joined(0, KNOWN, 0, 4, offered(*other))
    assert offer is not None
    assert list(offer.first(len(offer.chances))) == [4, 5]
    assert not forced.note(0, 2, 2), "they were not its own"


def test_without_forced_tokens_the_offer_is_the_drafter_s() -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]), ForcedTokens(7, 3, [4, 5]))
    own = offered(4, 5)
    assert [*forced.known] == [0], "the other one may have no drafts"
    assert forced.joined(0, KNOWN, 2, 4, own) is own, "running steps draw them"
    assert forced.joined(0, [*KNOWN, 8], 0, 4, own) is own
    assert not forced.known, "a wrong one is gone"
    assert forced.note(0, 2, 1)


def test_the_newest_of_a_sequence_count() -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]), ForcedTokens(0, 3, [6, 7]))
    offer = forced.joined(0, KNOWN, 0, 4, None)
    assert offer is not None
    assert list(offer.first(len(offer.chances))) == [6, 7]


def test_the_chance_is_learned() -> None:
    """Where masks after drafts are late none is accepted, and soon none is worth it."""
    forced = drafts_of(ForcedTokens(0, 3, [4, 5, 6]))

    def chance(num_right: int) -> float:
        for _ in range(100):
            assert forced.joined(0, KNOWN, 0, 3, None) is not None
            forced.note(0, 3, num_right)
        offer = forced.joined(0, KNOWN, 0, 3, None)
        assert offer is not None
        return float(offer.chances[0])

    assert chance(3) > 0.99
    assert 0.4 < chance(1) < 0.6
    assert chance(0) < 0.25


def test_nothing_is_kept_of_an_ended_sequence() -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]))
    forced.joined(0, KNOWN, 0, 4, None)
    forced.forget(0)
    assert not forced.known
    assert forced.note(0, 2, 2), "nor of its last offer"
    forced.forget(0)


def test_a_chance_that_fell_returns_and_a_bad_grammar_costs_little() -> None:
    """A step takes them while the chance is above one half. At first masks are late, then again and again."""
    forced = drafts_of(ForcedTokens(0, 3, [4, 5, 6]))

    def taken(num_offers: int, num_right: int) -> list[int]:
        """The offers of which a step takes its drafts."""
        found = []
        for at in range(num_offers):
            offer = forced.joined(0, KNOWN, 0, 3, None)
            assert offer is not None
            if offer.chances[0] > 0.5:
                found.append(at)
                forced.note(0, 3, num_right)
        return found

    assert len(taken(60, 0)) < 12
    assert len(taken(10_000, 0)) < 0.03 * 10_000, "of a grammar that stays bad"
    first, *rest = taken(400, 3)
    assert first < 100
    assert len(rest) > 300


def test_a_drafter_s_chance_of_zero_leaves_the_others_alone() -> None:
    """Chances of fp32 underflow after many places, and one that is no number would end the drafts of all streams."""
    many = [*range(4, 24)]
    forced = drafts_of(ForcedTokens(0, 3, many[:-2]))
    for chance in (0.0, 1e-3, 5e-3):
        offer = forced.joined(0, KNOWN, 0, 20, offered(*many, chance=chance))
        assert offer is not None
        assert list(offer.first(18)) == many[:-2]
        assert np.isfinite(offer.chances).all()
        assert (np.diff(offer.chances) <= 0).all()


def test_an_offer_of_an_ended_sequence_is_found() -> None:
    forced = drafts_of(ForcedTokens(0, 3, [4, 5]))
    forced.joined(0, KNOWN, 0, 4, None)
    forced.known.clear()
    with pytest.raises(AssertionError):
        forced.check()
    forced.forget(0)
    forced.check()
