"""Biases and bans of many tokens: the same tokens as with short lists, and nothing made anew in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker import token_lists
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.sampling_state import SamplingState
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts

if TYPE_CHECKING:
    import pytest

    from pd_connectors.protocol.messages import SampledToken

EVERYTHING = {token: (token * 37 % 101) / 10 - 5 for token in range(VOCAB_SIZE)}
LISTS: tuple[SamplingParams, ...] = (
    SamplingParams(max_tokens=8, temperature=0.0, logit_bias=EVERYTHING),
    SamplingParams(max_tokens=8, temperature=1.2, logit_bias=EVERYTHING, logprobs=3),
    SamplingParams(max_tokens=8, temperature=1.2, top_p=0.9, logit_bias=EVERYTHING, frequency_penalty=0.5),
    SamplingParams(max_tokens=8, logit_bias={5: 40.0, 6: 39.0}, min_tokens=4, stop_token_ids=(5, 6)),
    SamplingParams(max_tokens=8, min_tokens=5, stop_token_ids=tuple(range(10, VOCAB_SIZE))),
    SamplingParams(max_tokens=8, temperature=0.7),
)
DEMO_VOCAB_SIZE = 3072


def generated(models: ModelStore) -> list[list[SampledToken]]:
    """Of LISTS, all in the same steps."""
    driver = Driver(make_executor(models.get("qwen3").directory))
    prompts = random_prompts([9, 30, 17, 5, 21, 12], VOCAB_SIZE, seed=4)
    generations = [driver.add(prompt, one, seed) for seed, (prompt, one) in enumerate(zip(prompts, LISTS, strict=True))]
    driver.run()
    return [generation.tokens for generation in generations]


def test_long_lists_choose_the_tokens_that_short_ones_do(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and logprobs are equal to the last bit, however a list reaches the device."""
    found = []
    for longest in (1 << 30, 0, 100):
        monkeypatch.setattr(token_lists, "LONG_LIST", longest)
        found.append(generated(models))
    assert found[0] == found[1] == found[2]


def started(*all_params: SamplingParams) -> SamplingState:
    """A state whose row i has the i-th of `all_params`."""
    cpu = torch.device("cpu")
    state = SamplingState(len(all_params), DEMO_VOCAB_SIZE, frozenset({2}), HostBuffer(cpu, 1024), cpu)
    for row, params in enumerate(all_params):
        state.start(row, SequenceStart(row, (1, 2, 3), 3, (0,), params, row))
    return state


def test_a_step_converts_no_list() -> None:
    """A bias and a ban of a whole vocabulary are made once for a request: its rows and all its steps have the same."""
    everything = SamplingParams(
        max_tokens=9, min_tokens=9, logit_bias=dict.fromkeys(range(DEMO_VOCAB_SIZE), 1.0),
        stop_token_ids=tuple(range(DEMO_VOCAB_SIZE)),
    )  # fmt: skip
    state = started(everything, everything, SamplingParams(max_tokens=9), everything)
    rows, lengths = np.arange(4), np.full(4, 3)
    first, second = (state.prepare(rows, lengths, [1] * 4) for _ in range(2))
    assert first.bias is None
    assert first.banned is None
    assert len(first.shifts) == 2
    for one, other in zip(first.shifts, second.shifts, strict=True):
        assert one.amounts is other.amounts
        assert isinstance(one.rows, torch.Tensor)
        assert one.rows.tolist() == [0, 1, 3]
    later = state.prepare(rows, np.full(4, 12), [1] * 4)
    assert [shift.amounts is first.shifts[0].amounts for shift in later.shifts] == [True]


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    state = started(SamplingParams(max_tokens=9, min_tokens=3, logit_bias=dict.fromkeys(range(1000), 1.0)))
    rows, lengths = np.arange(1), np.full(1, 3)
    inputs = state.prepare(rows, lengths, [1])
    assert [shift.rows for shift in inputs.shifts] == [slice(0, 1)]
    assert inputs.banned is not None
    assert inputs.banned.tokens.tolist() == [2]
    state.start(0, SequenceStart(1, (1, 2, 3), 3, (0,), SamplingParams(max_tokens=9), 0))
    inputs = state.prepare(rows, lengths, [1])
    assert not inputs.changes_logits
