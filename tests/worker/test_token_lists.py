"""Biases and bans of many tokens: the same tokens as with short lists, and nothing made anew in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.logits_stages import token_lists
from pd_cluster.worker.logits_stages.bias import Bias
from pd_cluster.worker.logits_stages.min_tokens import MinTokens
from pd_cluster.worker.logits_stages.order import make_stages
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.sampling_state import SamplingState
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.tables import table

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
    """A state: its row i has the i-th of `all_params`."""
    cpu = torch.device("cpu")
    host_buffer = HostBuffer(cpu, 1024)
    context = StageContext(len(all_params), DEMO_VOCAB_SIZE, frozenset({2}), cpu, host_buffer.move)
    state = SamplingState(len(all_params), DEMO_VOCAB_SIZE, make_stages(context), host_buffer)
    for row, params in enumerate(all_params):
        state.start(row, SequenceStart(row, (1, 2, 3), 3, table((0,)), params, row))
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
    assert [type(stage) for stage, _ in first.changes] == [Bias, MinTokens]
    for (_, one), (_, other) in zip(first.changes, second.changes, strict=True):
        assert one.entries is None
        assert [shift.amounts is same.amounts for shift, same in zip(one.shifts, other.shifts, strict=True)] == [True]
        assert one.shifts[0].rows.tolist() == [0, 1, 3]
    ((stage, later),) = state.prepare(rows, np.full(4, 12), [1] * 4).changes
    assert isinstance(stage, Bias)
    assert [shift.amounts is first.changes[0][1].shifts[0].amounts for shift in later.shifts] == [True]


def test_a_row_keeps_nothing_of_the_request_before() -> None:
    state = started(SamplingParams(max_tokens=9, min_tokens=3, logit_bias=dict.fromkeys(range(1000), 1.0)))
    rows, lengths = np.arange(1), np.full(1, 3)
    inputs = state.prepare(rows, lengths, [1])
    (_, bias), (_, ban) = inputs.changes
    assert [shift.rows for shift in bias.shifts] == [slice(0, 1)]
    assert ban.entries.tokens.tolist() == [2]
    state.start(0, SequenceStart(1, (1, 2, 3), 3, table((0,)), SamplingParams(max_tokens=9), 0))
    inputs = state.prepare(rows, lengths, [1])
    assert not inputs.changes
