"""A scheduler on a virtual clock in place of a device: drafts gain where they are right, and cost nothing elsewhere."""

from __future__ import annotations

import pytest

from benchmarks.draft_cells import AnsweringNode, SimulatedH200
from benchmarks.recorded_texts import UNMATCHED, RecordedAnswer

PROMPT = tuple(range(1, 1026))


@pytest.mark.parametrize(
    ("answer", "least", "most"), [(PROMPT[:64], 1.5, 20.0), (tuple(range(2000, 2064)), 0.99, 1.01)]
)
def test_drafts_gain_where_they_are_right(answer: tuple[int, ...], least: float, most: float) -> None:
    answers = [RecordedAnswer(UNMATCHED, (at, *PROMPT[1:]), answer) for at in range(2000, 2032)]
    rates = []
    for drafts in (False, True):
        node = AnsweringNode(SimulatedH200(1.0), len(answers), drafts=drafts)
        node.run(answers, 1)
        found = node.run(answers)
        assert (found.num_drafts > 0) == (drafts and least > 1)
        rates.append(found.rate)
    assert least < rates[1] / rates[0] < most
