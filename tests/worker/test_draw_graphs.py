"""The inputs of draws: what fits into a captured one, and several positions of a row in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker.cuda_graphs.draw_graphs import VARIANTS, DrawGraphs
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes
from pd_cluster.worker.draw_places import (
    ENTRIES,
    ENTRIES_PER_ROW,
    CapturedDraw,
    DrawChanges,
    DrawLayout,
    DrawVariant,
    mask_words,
)
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.logits_stages.order import make_stages
from pd_cluster.worker.logits_stages.penalties import PenaltyTables
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.sampler import sample
from pd_cluster.worker.sampling_state import SamplingState
from pd_kernels.backends import TORCH
from pd_kernels.values import StepSize
from tests.worker.repeated_graphs import Repeater, near_sizes

if TYPE_CHECKING:
    from pd_kernels.values import Ints

NUM_ROWS, VOCAB_SIZE, CPU = 4, 700, torch.device("cpu")
LAYOUT = DrawLayout(NUM_ROWS, VOCAB_SIZE, NUM_ROWS)


def make_state(*settings: dict[str, Any]) -> SamplingState:
    """Rows with these settings, each after a prompt of ten tokens."""
    host_buffer = HostBuffer(CPU, 1 << 16)
    context = StageContext(NUM_ROWS, VOCAB_SIZE, frozenset({2}), CPU, host_buffer.move)
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, make_stages(context), host_buffer)
    for row, each in enumerate(settings):
        state.start(row, SequenceStart(row, (5,) * 10, 10, (), SamplingParams(max_tokens=99, **each), 77 + row))
    return state


def test_several_positions_of_a_row_are_drawn_as_if_alone() -> None:
    """As a verification of drafts would ask. `min_tokens` ends between two of the positions."""
    bans = {"min_tokens": 2, "logit_bias": dict.fromkeys(range(3, 700), -6.0), "temperature": 0.4}
    state = make_state({"top_k": 20, "top_p": 0.9}, bans, {"min_p": 0.001, "temperature": 1.7, "logprobs": 2}, {})
    rows = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3])
    lengths = np.array([12, 13, 14, 15, 10, 11, 12, 13, 40, 41, 42, 10, 11])
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).mul_(3)
    logits[:, 2] += 8  # EOS, where it is allowed
    together = sample(logits.clone(), state.prepare(rows, lengths, [1] * len(rows)), TORCH)
    for at in range(len(rows)):
        one = slice(at, at + 1)
        alone = sample(logits[one].clone(), state.prepare(rows[one], lengths[one], [1]), TORCH)
        assert alone.token_ids.tolist() == together.token_ids[one].tolist()
    assert (together.token_ids[4:8] == 2).tolist() == [False, False, True, True]
    same = logits[:1].expand(4, -1).clone()
    drawn = sample(same, state.prepare(rows[11:][[0] * 4], np.arange(10, 14), [1] * 4), TORCH).token_ids
    assert len(set(drawn.tolist())) > 1, "each position has noise of its own"


def capture(state: SamplingState, rows: Ints) -> DrawVariant | None:
    draw = state.capture(rows, np.full(len(rows), 12), np.arange(len(rows)), LAYOUT)
    return None if draw is None else draw.variant


def test_lists_that_do_not_fit_are_left_to_launches() -> None:
    each = (ENTRIES + NUM_ROWS * ENTRIES_PER_ROW) // 3
    lists = [{"logit_bias": dict.fromkeys(range(9, 9 + each + (row == 3)), 1.0)} for row in range(4)]
    state = make_state(*lists)
    assert capture(state, np.arange(3)) == DrawVariant(has_changes=True)
    assert capture(state, np.arange(1, 4)) is None
    assert capture(state, np.array([3])) == DrawVariant(has_changes=True)
    assert capture(make_state({"logit_bias": dict.fromkeys(range(513), 1.0)}), np.array([0])) is None, "it is long"


def test_a_draw_changes_no_logits_after_min_tokens() -> None:
    state = make_state({"min_tokens": 2}, {"min_tokens": 3}, {"top_p": 0.3, "logprobs": 0}, {"presence_penalty": 1.0})
    assert capture(state, np.array([0])) == DrawVariant()
    assert capture(state, np.array([0, 1])) == DrawVariant(has_changes=True)
    assert capture(state, np.array([0, 2])) == DrawVariant(has_logprobs=True)
    assert capture(state, np.array([2, 3])) == DrawVariant(has_changes=True, has_logprobs=True)


def tokens_of_masks(draw: CapturedDraw) -> list[list[int]]:
    assert draw.masks is not None
    bits = np.unpackbits(draw.masks.numpy().view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in bits]


def test_allowed_tokens_are_masks_of_a_captured_draw() -> None:
    """At the places of their rows, beside a row that may take all."""
    state = make_state({"allowed_token_ids": (5, 699)}, {}, {"allowed_token_ids": (33,), "min_p": 0.1})
    rows = np.array([0, 1, 2])
    draw = state.capture(rows, np.full(3, 12), np.array([3, 1, 0]), LAYOUT)
    assert draw is not None
    assert draw.variant == DrawVariant(has_masks=True)
    assert tokens_of_masks(draw) == [[5, 699], [33]]
    assert LAYOUT.places(draw.fields.numpy(), np.float32).masks.tolist() == [1, -1, -1, 0]
    again = state.capture(rows[1:2], np.full(1, 12), None, LAYOUT)
    assert again is not None
    assert again.masks is None
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    launched = sample(logits.clone(), state.prepare(rows, np.full(3, 12), [1] * 3), TORCH).token_ids.tolist()
    assert launched[0] in (5, 699)
    assert launched[2] == 33


def test_two_masks_of_a_row_allow_what_both_do_or_the_first_of_the_last_one() -> None:
    masks = [mask_words(np.isin(np.arange(VOCAB_SIZE), tokens)) for tokens in ((1, 2, 3), (2, 3), (63, 64, 69), (63,))]
    changes = DrawChanges(LAYOUT.places(LAYOUT.padded(), np.float32), np.array([2, 0]), VOCAB_SIZE)
    changes.mask([0, 1], [masks[0], masks[0]])
    changes.mask([0], [masks[1]])
    changes.mask([1], [masks[2]])
    assert [mask.tolist() for mask in changes.take_masks()] == [masks[1].tolist(), masks[3].tolist()]
    assert changes.is_empty, "a mask changes no logits"


def test_places_are_all_of_the_array_and_do_not_overlap() -> None:
    fields = LAYOUT.padded()
    for at, place in enumerate(LAYOUT.places(fields, np.float32)):
        place[...] = at + 1
    found = [np.unique(place).tolist() for place in LAYOUT.places(fields, np.float32)]
    assert found == [[at + 1] for at in range(12)]
    assert fields.all(), "no part is left over"
    assert len(LAYOUT.used(fields, has_changes=False)) * 8 == sum(
        place.nbytes for place in LAYOUT.places(fields, np.float32)[:10]
    )


@pytest.mark.parametrize(("room", "is_captured"), [(100, True), (12, False)])
def test_draws_are_captured_for_all_sizes_or_for_none(room: int, is_captured: bool) -> None:
    """Sizes of 1, 2 and 4 decodes, and steps with prompts that share logits. Captures leave all rows as they were."""
    shared = torch.zeros(NUM_ROWS, VOCAB_SIZE)
    logits = {size: torch.zeros(size.num_seqs, VOCAB_SIZE) for size in decode_sizes(4)}
    logits |= {size: shared[: size.num_seqs] for size in near_sizes(32, 4)}
    tables, last_tokens = PenaltyTables.make(NUM_ROWS, VOCAB_SIZE, CPU), torch.full((NUM_ROWS + 1,), 9)
    draws, lines = DrawGraphs(LAYOUT, last_tokens, lambda: tables, TORCH), list[str]()
    draws.capture(logits, Repeater(room), lines.append)
    assert (draws.layout is LAYOUT) == is_captured
    assert lines[0].startswith("48 graphs of draws in" if is_captured else "no memory for graphs of draws")
    assert last_tokens[:-1].tolist() == [9] * NUM_ROWS
    assert not tables.seen[:-1].any()
    assert not tables.counts[:-1].any()
    if is_captured:
        state = make_state({"top_k": 1, "logprobs": 3}, {"frequency_penalty": 1.0}, {}, {})
        shared[:3] = torch.arange(VOCAB_SIZE) % 97
        draw = state.capture(np.arange(3), np.full(3, 12), np.arange(3), LAYOUT)
        assert draw is not None
        assert draw.variant == VARIANTS[3]
        with torch.inference_mode():
            sampled = draws.replay(draw, StepSize(32, 4, 4, has_decodes=False), 3)
        assert sampled.token_ids.tolist() == last_tokens[:3].tolist()
        assert int(tables.counts[1, sampled.token_ids[1]]) == 1
        assert int(tables.counts[:-1].sum()) == 1, "rows without penalties are not counted"
        assert int(last_tokens[3]) == 9
