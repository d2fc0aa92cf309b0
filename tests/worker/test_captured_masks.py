"""Captured draws with masks take the tokens that draws by launches take, whatever else the rows ask for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker.cuda_graphs.draw_graphs import DrawGraphs
from pd_cluster.worker.draw_places import DrawLayout, first_token, mask_words
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.logits_stages.order import make_stages
from pd_cluster.worker.logits_stages.penalties import Penalties
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.sampler import sample
from pd_cluster.worker.sampling_state import SamplingState
from pd_kernels.backends import TORCH
from pd_kernels.values import StepSize
from tests.patient_masks import be_patient
from tests.worker.repeated_graphs import Repeater, near_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("llguidance")

NUM_ROWS, VOCAB_SIZE, EOS, CPU = 4, 3072, 2, torch.device("cpu")
GRAMMAR = "start: /[2-5]/"
SIZE = StepSize(32, 4, 4, has_decodes=False)


@pytest.fixture(scope="module")
def grammars(demo_directory: Path) -> Iterator[Grammars]:
    grammars = Grammars(demo_directory, VOCAB_SIZE, frozenset({EOS}))
    grammars.prepare(GRAMMAR).exception()
    yield grammars
    grammars.close()


def draw_both_ways(grammars: Grammars, settings: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """One token of each row: by a captured draw, by launches."""
    host_buffer = HostBuffer(CPU, 1 << 16)
    context = StageContext(NUM_ROWS, VOCAB_SIZE, frozenset({EOS}), CPU, host_buffer.move, grammars)
    stages = make_stages(context)
    state = SamplingState(NUM_ROWS, VOCAB_SIZE, stages, host_buffer)
    for row, each in enumerate(settings):
        params = SamplingParams(max_tokens=99, **each)
        state.start(row, SequenceStart(row, (5,) * 10, 10, (), params, 77 + row))
    tables = next(stage for stage in stages if isinstance(stage, Penalties)).tables()
    layout = DrawLayout(NUM_ROWS, VOCAB_SIZE, NUM_ROWS)
    draws = DrawGraphs(layout, torch.zeros(NUM_ROWS + 1, dtype=torch.int64), lambda: tables, TORCH)
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).mul_(2)
    with torch.inference_mode():
        draws.capture({size: logits[: size.num_seqs] for size in near_sizes(32, 4)}, Repeater(1000), lambda line: None)
    rows = np.arange(len(settings))
    lengths = np.full(len(rows), 10)
    late = rows[state.are_late(rows)]
    assert not state.absent(late).any()
    launched = sample(logits[: len(rows)].clone(), state.prepare(rows, lengths, [1] * len(rows)), TORCH)
    captured = state.capture(rows, lengths, None, layout)
    assert captured is not None
    with torch.inference_mode():
        replayed = draws.replay(captured, SIZE, len(rows))
    return replayed.token_ids.tolist(), launched.token_ids.tolist()


@pytest.mark.parametrize(
    "more",
    [
        {}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.7, "min_p": 0.1}, {"min_tokens": 3},
        {"logprobs": 2, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "top_k": 40, "top_p": 0.9},
    ],
)  # fmt: skip
def test_a_grammar_and_a_list_of_tokens(
    more: dict[str, Any], grammars: Grammars, demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar's tokens within the list; the first one of the grammar where the list has none of them."""
    be_patient(monkeypatch)
    vocab = json.loads((demo_directory / "tokenizer.json").read_text())["model"]["vocab"]
    three, five, nine = (vocab[digit] for digit in "359")
    lists = [(nine,), (three, five, nine), (five, *range(100, 900)), (EOS,)]
    settings: list[dict[str, Any]] = [{"grammar": GRAMMAR, "allowed_token_ids": each, **more} for each in lists]
    captured, launched = draw_both_ways(grammars, settings)
    assert captured == launched
    assert captured[0] == captured[3] == min(vocab[digit] for digit in "2345")
    assert captured[1] in (three, five)
    assert captured[2] == five
    for mixed in ([settings[1], more, settings[0]], [more, {"grammar": GRAMMAR, **more}, {"allowed_token_ids": (9,)}]):
        captured, launched = draw_both_ways(grammars, mixed)
        assert captured == launched


@pytest.mark.parametrize("tokens", [(0, 5), (31,), (31, 32), (63, 70), ()])
def test_the_first_token_of_a_mask(tokens: tuple[int, ...]) -> None:
    mask, first = (mask_words(np.isin(np.arange(96), some)) for some in (tokens, tokens[:1]))
    assert first_token(mask).tolist() == first.tolist()
