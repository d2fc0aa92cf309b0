"""Steps that are tried the other way: seldom, within the bounds of the step, and both ways."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np
import pytest

from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.trials import MOST_WITH, MOST_WITHOUT, NUM_PLAIN, NUM_TRIED, Trials
from pd_cluster.drafting.worth import StepPrice

OFFERS = [
    DraftOffer([1, 2, 3], np.array([0.2, 0.1, 0.1], np.float32)),
    DraftOffer([4, 5], np.array([0.6, 0.3], np.float32)),
]
PRICE = StepPrice(2, (0, 8), (10.0, 18.0), step_s=1.0, sequence_s=0.5)


def test_drafts_that_are_never_worth_it_are_tried_seldom() -> None:
    trials = Trials()
    decided = [trials.decided([0, 0], OFFERS, PRICE) for _ in range(2000)]
    tried = [at for at, counts in enumerate(decided) if any(counts)]
    assert tried == [at for at in range(2000) if at % (MOST_WITHOUT + NUM_TRIED) >= MOST_WITHOUT]
    assert decided[tried[0]] == [0, 2], "of the best offer"
    assert len(tried) * 0.43 < 0.003 * 2000, "a step with drafts takes 1.43 times as long at 128 streams"


@pytest.mark.parametrize(("most", "most_s", "num"), [(1, inf, 1), (8, 13.5, 2), (8, 13.0, 1), (8, 12.0, 0)])
def test_a_tried_step_has_as_many_drafts_as_it_may(most: int, most_s: float, num: int) -> None:
    """Within the target of gaps: of 32 decodes in 5.4 ms a trial once took 8.5, with a target of 6."""
    trials, price = Trials(), PRICE._replace(knots=(0, most), seconds=(10.0, 10.0 + most), most_s=most_s)
    assert [any(trials.decided([0, 0], OFFERS, price)) for _ in range(MOST_WITHOUT)] == [False] * MOST_WITHOUT
    assert trials.decided([0, 0], OFFERS, price) == [0, num]


def test_plain_steps_come_now_and_then_where_all_have_drafts() -> None:
    trials = Trials()
    decided = [any(trials.decided([2, 1], OFFERS, PRICE)) for _ in range(2 * (MOST_WITH + NUM_PLAIN))]
    assert decided == 2 * ([True] * MOST_WITH + [False] * NUM_PLAIN)


def test_a_step_of_the_other_kind_begins_the_count_of_drafts_that_are_not_worth_it() -> None:
    trials = Trials()
    for _ in range(4):
        assert not any(any(trials.decided([0, 0], OFFERS, PRICE)) for _ in range(MOST_WITHOUT))
        assert trials.decided([1, 0], OFFERS, PRICE) == [1, 0]


def test_a_step_that_is_not_worth_it_resets_no_count_of_those_with_drafts() -> None:
    """One in 100: with fewer than 256 in a row a node would never have learned what its decodes take."""
    trials = Trials()
    decided = [any(trials.decided([0, 0] if at % 100 == 99 else [2, 1], OFFERS, PRICE)) for at in range(4000)]
    pairs = sum(not one and not other for one, other in pairwise(decided))
    assert pairs >= 4000 // (MOST_WITH + NUM_PLAIN + 4)
