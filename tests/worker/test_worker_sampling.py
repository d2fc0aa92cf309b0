"""Sampling settings end to end: a sequence's tokens depend on its request alone."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from tests.worker.conftest import VOCAB_SIZE, ModelStore, SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.tables import table

if TYPE_CHECKING:
    from pd_cluster.worker.device_executor import DeviceExecutor

PROMPT = random_prompts([37], VOCAB_SIZE, seed=9)[0]


def params(**settings: object) -> SamplingParams:
    return msgspec.convert({"max_tokens": 16, **settings}, SamplingParams)


def alone(executor: DeviceExecutor, wanted: SamplingParams, seed: int, prompt: list[int] = PROMPT) -> list[int]:
    driver = Driver(executor)
    driver.add(prompt, wanted, seed)
    return driver.run()[0]


VARIED = (
    params(),
    params(temperature=0.7, top_k=20),
    params(temperature=1.5, top_p=0.8),
    params(min_p=0.05, frequency_penalty=0.7),
    params(repetition_penalty=1.3, presence_penalty=0.4, top_k=100, top_p=0.95),
    params(temperature=0.0),
    params(temperature=0.0, repetition_penalty=1.5, logprobs=3),
    params(temperature=0.0, logit_bias={7: 6.0}, frequency_penalty=1.5),
    params(logit_bias={7: 5.0, 8: -100.0}, min_tokens=9, logprobs=0),
)


def test_tokens_do_not_depend_on_the_batch(models: ModelStore) -> None:
    """Every setting alone, all together, and all together in chunks, in another order and with strangers."""
    executor = make_executor(models.get("qwen3").directory)
    prompts = random_prompts([37, 5, 16, 60, 33, 20, 41, 29, 37], VOCAB_SIZE, seed=2)
    expected = [alone(executor, VARIED[i], 100 + i, prompts[i]) for i in range(len(VARIED))]
    for budget, shuffle in ((512, 0), (21, 1), (70, 2)):
        order = random.Random(shuffle).sample(range(len(VARIED)), len(VARIED))
        driver = Driver(executor, budget, seed=shuffle)
        for i in order:
            driver.add(prompts[i], VARIED[i], 100 + i)
        driver.add(prompts[0][::-1], params(max_tokens=3), 5)
        assert driver.run()[: len(order)] == [expected[i] for i in order]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


def test_a_preempted_sequence_resumes_with_the_same_tokens(executor: DeviceExecutor) -> None:
    for wanted in VARIED:
        expected = alone(executor, wanted, 3)
        driver = Driver(executor, seed=5)
        generation = driver.add(PROMPT, wanted, 3)
        for _ in range(6):
            driver.step()
        driver.preempt(generation)
        assert driver.run() == [expected]


def test_seeds_and_positions_change_tokens(executor: DeviceExecutor) -> None:
    outputs = {tuple(alone(executor, params(temperature=1.5), seed)) for seed in (0, 1, 2, -1, 1 << 63, (1 << 64) + 4)}
    assert len(outputs) == 6
    assert all(len(set(tokens)) > 4 for tokens in outputs)


def test_several_first_tokens_are_those_of_their_seeds(executor: DeviceExecutor) -> None:
    """The n first tokens that one prefill samples equal the first tokens of n separate sequences.

    The sequence goes on with the first of them, also when the next step is launched before they are read.
    """
    seeds, wanted = (11, 12, 13, 14), params(temperature=1.8, logprobs=1)
    expected = [alone(executor, params(temperature=1.8), seed) for seed in seeds]
    expected.append(alone(executor, params(temperature=0.0), 0))
    alone(executor, params(temperature=0.0), 0, PROMPT[::-1])  # its tokens are what the rows hold before
    start = SequenceStart(0, tuple(PROMPT), len(PROMPT), table((1, 2, 3)), wanted, seeds[0], seeds)
    neighbour = SequenceStart(1, tuple(PROMPT), len(PROMPT), table((4, 5, 6)), params(temperature=0.0), 0)
    chunks = (SequenceChunk(0, 0, 37, num_samples=4), SequenceChunk(1, 0, 37, num_samples=1))
    pending = executor.launch(Batch(0, (start, neighbour), chunks))
    chunks = (SequenceChunk(0, 37, 1, num_samples=1), SequenceChunk(1, 37, 1, num_samples=1))
    following = executor.launch(Batch(1, (), chunks))
    result, next_samples = pending.result(), following.result().samples
    firsts, samples = result.first_samples, result.samples
    assert [token.token_id for token in firsts[0]] == [tokens[0] for tokens in expected[:4]]
    assert all(token.logprob is not None and len(token.top) == 1 for token in firsts[0])
    assert (samples[1][0].token_id, samples[1][0].logprob) == (expected[4][0], None)
    assert next_samples[0][0].token_id == expected[0][1]
    assert next_samples[1][0].token_id == expected[4][1]


def reference_greedy(saved: SavedModel, wanted: SamplingParams, eos: int) -> list[int]:
    """Greedy decoding with penalties, one step at a time, from transformers' logits."""
    ids = list(PROMPT)
    for step in range(wanted.max_tokens):
        with torch.no_grad():
            logits = saved.model(torch.tensor([ids])).logits[0, -1]
        for token in set(ids):
            logits[token] *= 1 / wanted.repetition_penalty if logits[token] > 0 else wanted.repetition_penalty
        for token in set(ids[len(PROMPT) :]):
            logits[token] -= wanted.presence_penalty + wanted.frequency_penalty * ids[len(PROMPT) :].count(token)
        for token, bias in wanted.logit_bias.items():
            logits[token] += bias
        if step < wanted.min_tokens:
            logits[[*wanted.stop_token_ids, *([] if wanted.ignore_eos else [eos])]] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5, "presence_penalty": -0.5},
        {"repetition_penalty": 0.7, "frequency_penalty": 2.0},
        {"logit_bias": {2: 30.0}, "min_tokens": 5},
        {"logit_bias": {2: 30.0}, "min_tokens": 5, "ignore_eos": True},
        {"logit_bias": {40: 30.0, 2: 29.0}, "min_tokens": 3, "stop_token_ids": [40]},
    ],
    ids=str,
)
def test_greedy_with_penalties_equals_a_plain_loop(models: ModelStore, settings: dict[str, object]) -> None:
    saved = models.get("qwen3")
    wanted = params(temperature=0.0, **settings)
    assert alone(make_executor(saved.directory), wanted, 0) == reference_greedy(saved, wanted, eos=2)


def test_logprobs_are_of_the_unmodified_distribution(models: ModelStore) -> None:
    saved = models.get("qwen3")
    driver = Driver(make_executor(saved.directory))
    wanted = params(temperature=1.7, top_k=3, frequency_penalty=1.0, logit_bias={9: 4.0}, logprobs=20, max_tokens=4)
    generation = driver.add(PROMPT, wanted, 8)
    driver.run()
    expected = saved.logprobs(generation.all_ids)
    for index, token in enumerate(generation.tokens):
        row = expected[len(PROMPT) - 1 + index]
        assert token.logprob == pytest.approx(row[token.token_id].item(), abs=2e-4)
        assert [entry.logprob for entry in token.top] == pytest.approx(row.topk(20).values.tolist(), abs=2e-4)


def test_each_row_gets_the_logprobs_it_asked_for(executor: DeviceExecutor) -> None:
    driver = Driver(executor)
    generations = [driver.add(PROMPT, params(logprobs=wanted, max_tokens=2), 1) for wanted in (None, 0, 4, 20)]
    driver.run()
    for generation, count in zip(generations, (0, 0, 4, 20), strict=True):
        assert [len(token.top) for token in generation.tokens] == [count, count]
        assert all((token.logprob is None) == (generation.params.logprobs is None) for token in generation.tokens)
