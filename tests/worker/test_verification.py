"""Drafts that are verified: which are accepted, and what stages change behind each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker.logits_stages.order import ORDER
from pd_cluster.worker.logits_stages.penalties import Penalties
from pd_cluster.worker.logits_stages.stage import LogitsStage, StageContext
from pd_cluster.worker.verification import NO_TOKEN, ExpectedRows, tokens_before

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE, NUM_ROWS = 40, 4
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def run_length(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    return int(ExpectedRows([drafts], [len(drawn)]).runs(np.array(drawn)).lens[0])


def one_by_one(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    length = 1
    for draft, before, token_id in zip(drafts, drawn, drawn[1:], strict=False):
        if before != draft or token_id == NO_TOKEN:
            break
        length += 1
    return length


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, 3)), min_size=1, max_size=5), st.data()
)
def test_runs_of_a_step_are_those_of_its_sequences(asked: list[tuple[list[int], int]], data: st.DataObject) -> None:
    """Beside sequences without drafts, which may draw several tokens, and rows without a draw."""
    drafts = [one for one, _ in asked]
    counts = [1 + len(one) if one else count for one, count in asked]
    drawn = [data.draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count)) for count in counts]
    begins, lens = ExpectedRows(drafts, counts).runs(np.array([token for one in drawn for token in one]))
    assert begins.tolist() == [sum(counts[:at]) for at in range(len(counts))]
    assert lens.tolist() == [one_by_one(*pair) for pair in zip(drafts, drawn, strict=True)]


@given(drafts=TOKENS, answer=TOKENS)
def test_a_run_is_the_answer_up_to_its_first_other_token(drafts: list[int], answer: list[int]) -> None:
    """Behind a wrong draft the draws are any."""
    answer = [*answer, *[9] * (len(drafts) + 1)]
    right = 0
    while right < len(drafts) and drafts[right] == answer[right]:
        right += 1
    drawn = [*answer[: right + 1], *[7] * (len(drafts) - right)]
    assert run_length(drafts, drawn) == right + 1


def test_each_draft_counts_once() -> None:
    assert run_length((), (5,)) == 1
    assert run_length((5,), (5, 6)) == 2
    assert run_length((5,), (6, 6)) == 1
    assert run_length((5, 5), (5, 6, 5)) == 2
    assert run_length((5, 6), (5, 6, 7)) == 3
    assert run_length((5, 6), (6, 6, 7)) == 1
    assert run_length((5, 6), (5, 6, NO_TOKEN)) == 2


def test_which_drafts_are_before_a_row() -> None:
    none = NO_TOKEN
    assert tokens_before([(5, 6), (), (7,)]).tolist() == [
        [none, none], [5, none], [5, 6], [none, none], [none, none], [7, none],
    ]  # fmt: skip
    assert tokens_before([(), ()]).shape == (2, 0)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"bad_words": ((5, 6), (6, 7, 8), (9,), (5, 5))},
    {"min_tokens": 6, "stop_token_ids": (11,)},
    {"logit_bias": {3: 4.0}, "repetition_penalty": 0.8, "bad_words": ((2, 5),)},
    {"allowed_token_ids": (5, 6, 7), "frequency_penalty": -0.6},
]
OUTPUT = st.lists(st.integers(2, 9), max_size=4)


def stages_of(starts: list[SequenceStart]) -> list[LogitsStage]:
    context = StageContext(NUM_ROWS, VOCAB_SIZE, frozenset((1,)), torch.device("cpu"), torch.from_numpy)
    stages: list[LogitsStage] = [kind(context) for kind in ORDER]
    active = [[stage.start(start.seq_id, start) for start in starts] for stage in stages]
    return [stage for stage, found in zip(stages, active, strict=True) if any(found)]


def changed(stages: list[LogitsStage], rows: list[int], lengths: list[int], before: Any = None) -> torch.Tensor:
    logits = torch.arange(len(rows) * VOCAB_SIZE, dtype=torch.float32).reshape(len(rows), -1).remainder(7) - 3
    logits = logits[:1].repeat(len(rows), 1)  # each row has the same
    for stage in stages:
        args = np.array(rows), np.array(lengths)
        inputs = stage.prepare(*args) if before is None else stage.prepare_behind(*args, before)
        if inputs is not None:
            stage.apply(logits, inputs)
    return logits


@pytest.mark.slow_cases
@pytest.mark.parametrize("beside", [{}, {"frequency_penalty": 0.5, "bad_words": ((7, 8),)}])
@pytest.mark.parametrize("asked", SETTINGS, ids=str)
@settings(max_examples=15, deadline=None)
@given(output=OUTPUT, drafts=st.lists(st.integers(2, 9), min_size=1, max_size=5), others=OUTPUT)
def test_a_row_behind_drafts_is_changed_as_if_they_were_noted(
    asked: dict[str, Any], beside: dict[str, Any], output: list[int], drafts: list[int], others: list[int]
) -> None:
    def start(row: int, params: dict[str, Any], tokens: list[int]) -> SequenceStart:
        return SequenceStart(row, (8, 9, *tokens), 2, (), SamplingParams(max_tokens=9, **params), 0)

    starts = [start(2, asked, output), start(0, beside, others), start(1, {}, [])]
    rows = [0, *[2] * (len(drafts) + 1), 1, 0]
    lengths = [2 + len(others), *range(2 + len(output), 3 + len(output) + len(drafts)), 2, 2 + len(others)]
    before = tokens_before([(), drafts, (), ()])
    stages = stages_of(starts)
    found = changed(stages, rows, lengths, before)
    again = changed(stages, rows, lengths, before)
    assert torch.equal(found, again), "nothing is noted"
    for at in range(len(drafts) + 1):
        single = stages_of([start(2, asked, [*output, *drafts[:at]]), *starts[1:]])
        expected = changed(single, [0, 2, 1, 0], [lengths[0], lengths[1 + at], 2, lengths[0]])
        assert torch.equal(found[[0, 1 + at, -2, -1]], expected), at


def test_drafts_leave_no_trace_in_the_tables_of_penalties() -> None:
    params = SamplingParams(max_tokens=9, repetition_penalty=1.4, frequency_penalty=1.0)
    start = SequenceStart(2, (8, 9, 3), 2, (), params, 0)
    [stage] = stages_of([start])
    assert isinstance(stage, Penalties)
    tables = [one.clone() for one in (stage.tables().seen, stage.tables().counts)]
    found = changed([stage], [2, 2, 2], [3, 4, 5], tokens_before([(5, 5)]))
    assert torch.equal(stage.tables().seen, tables[0])
    assert torch.equal(stage.tables().counts, tables[1])
    assert (found[1, 5] - found[2, 5]).item() == 1.0, "each occurrence counts"
