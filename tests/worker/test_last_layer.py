"""After its keys and values the last layer computes only the rows that sample; beside steps that compute all rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.feed_forward import Dense
from pd_cluster.models.llama import Llama
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_kernels.backends import TORCH, Kernels
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.tables import table
from tests.worker.test_few_rows import FEW_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.step_inputs import StepInputs

LENGTHS = (1, 15, 16, 17, 50, 2)
WINDOWED = [
    "qwen3",
    "mistral-window",
    "gemma3",
    "qwen3-some-windows",
    "gpt-oss",
]  # none, all, all but one, the last, half
FEW = ("qwen3", "gemma3", "qwen3-experts")  # products of few rows: a dense one, one of two groups, and of experts


class Beside:
    """Runs each step a second time with all rows to the end, first, and compares what is sampled from."""

    def __init__(self, executor: DeviceExecutor, tolerance: float) -> None:
        self._forward = executor._runner.forward
        self._tolerance = tolerance
        self.rows: list[int | None] = []  # of each step's tail
        executor._runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        samples, tail = inputs.samples, inputs.tail
        whole = self._forward(replace(inputs, tail=None, samples=replace(samples, owners=None))).clone()
        found = self._forward(inputs)
        if tail is not None:
            whole = whole[tail.rows]
        if samples.owners is not None:
            whole = whole[samples.owners]
        assert found.shape == whole.shape == (sum(samples.counts), VOCAB_SIZE)
        assert (found.double() - whole.double()).norm() <= self._tolerance * whole.double().norm()
        self.rows.append(None if tail is None else len(tail.rows))
        return found


def run(executor: DeviceExecutor, budget: int) -> None:
    """Prompts around the block size, in chunks beside decodes."""
    driver = Driver(executor, budget)
    for seed, prompt in enumerate(random_prompts(LENGTHS, VOCAB_SIZE)):
        driver.add(prompt, SamplingParams(max_tokens=1 + seed, temperature=0.7 * (seed % 2)), seed)
    driver.run()


def last_layer_rows(executor: DeviceExecutor) -> list[int]:
    """Fills up with the number of rows of each product after the last layer's attention."""
    model, counts = executor._weights.model, list[int]()
    assert isinstance(model, Llama)
    layer = model._layers[-1]
    assert isinstance(layer.feed_forward, Dense)
    for linear in (layer.out, layer.feed_forward.gate_up, layer.feed_forward.down):

        def counted(x: torch.Tensor, forward: object = linear._multiply) -> torch.Tensor:
            counts.append(len(x))
            product: torch.Tensor = forward(x)  # type: ignore[operator]
            return product

        linear._multiply = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize(
    ("name", "kernels", "budget"),
    [
        pytest.param(name, kernels, budget, id=f"{name}-{title}-{budget}", marks=[pytest.mark.slow] * is_slow)
        for name in [*WINDOWED, "qwen3-experts", "deepseek-v3"]
        for kernels, title, budget, is_slow in (
            (TORCH, "usual", 9, False), (FEW_ROWS, "few-rows", 33, name not in FEW),
            (TORCH, "usual", 512, name not in ("qwen3", "gemma3")),
        )
    ],
)  # fmt: skip
def test_logits_equal_those_of_all_rows(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str, kernels: Kernels, budget: int
) -> None:
    monkeypatch.setattr("pd_cluster.worker.device_plan.select_kernels", lambda device: kernels)
    executor = make_executor(models.get(name).directory)
    beside = Beside(executor, 2e-5)
    run(executor, budget)
    assert {None, 0} <= set(beside.rows) if budget == 9 else None in beside.rows, "decodes alone, and chunks alone"
    assert any(beside.rows), "some of a step's rows"
    executor.close()


def test_rows_with_a_token_on_the_device_only(executor: DeviceExecutor) -> None:
    """A sequence decodes between another's chunks; each step is launched before the one before it is read."""
    first, second = random_prompts([20, 50], VOCAB_SIZE)
    driver = Driver(executor)
    driver.add(first, SamplingParams(max_tokens=4, temperature=0.0))
    driver.add(second, SamplingParams(max_tokens=1, temperature=0.0))
    expected, beside = driver.run(), Beside(executor, 2e-5)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    start, other = (
        SequenceStart(0, tuple(first), 20, table((0, 1)), greedy, 0),
        SequenceStart(1, tuple(second), 50, table((2, 3, 4, 5)), greedy, 0),
    )
    pending = executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 20, num_samples=1),)))
    tokens: list[list[int]] = [[], []]
    for step, (begin, size) in enumerate(((0, 30), (30, 19), (49, 1), (50, 1)), 1):
        chunk = SequenceChunk(1, begin, size, num_samples=int(begin + size >= 50))
        decode = SequenceChunk(0, 19 + step, 1, num_samples=1)
        following = executor.launch(Batch(step, (other,) if step == 1 else (), (decode, chunk)))
        for seq_id, sampled in pending.result().samples.items():
            tokens[seq_id] += [token.token_id for token in sampled]
        pending = following
    assert beside.rows == [1, 1, 1, None, None]
    assert tokens == expected


def test_several_samples_of_one_row(executor: DeviceExecutor) -> None:
    """The row is computed once: three tokens of a prompt, one of a decode, none in the middle of another prompt."""
    counts, beside = last_layer_rows(executor), Beside(executor, 2e-5)
    prompts = random_prompts([7, 20, 40], VOCAB_SIZE)
    drawn = SamplingParams(max_tokens=9, n=3, logprobs=1)
    starts = [
        SequenceStart(0, tuple(prompts[0]), 7, table((0,)), SamplingParams(max_tokens=9, temperature=0.0), 0),
        SequenceStart(1, tuple(prompts[1]), 20, table((1, 2)), drawn, 0, num_sample_seeds=(0, 1, 2)),
        SequenceStart(2, tuple(prompts[2]), 40, table((3, 4, 5)), drawn, 0),
    ]
    executor.launch(Batch(0, (starts[0],), (SequenceChunk(0, 0, 7, num_samples=1),))).result()
    counts.clear()
    chunks = (SequenceChunk(0, 7, 1, num_samples=1), SequenceChunk(1, 0, 20, num_samples=3), SequenceChunk(2, 0, 30))
    result = executor.launch(Batch(1, tuple(starts[1:]), chunks)).result()
    assert {seq_id: len(tokens) for seq_id, tokens in result.samples.items()} == {0: 1}
    assert {seq_id: len(tokens) for seq_id, tokens in result.first_samples.items()} == {1: 3}
    assert beside.rows == [1, 2]
    assert counts == [51, 51, 51, 2, 2, 2]


def test_nothing_of_a_chunk_in_the_middle_of_a_prompt_goes_on(executor: DeviceExecutor) -> None:
    counts = last_layer_rows(executor)
    start = SequenceStart(
        0, tuple(random_prompts([40], VOCAB_SIZE)[0]), 40, table((0, 1, 2)), SamplingParams(max_tokens=9), 0
    )
    executor.launch(Batch(0, (start,), (SequenceChunk(0, 0, 30),))).result()
    assert counts == []


@pytest.fixture
def cuda_executor(models: ModelStore) -> Iterator[DeviceExecutor]:
    """In bfloat16. Only decodes are captured: steps with prompts run as they are here."""
    config = NodeConfig(
        model=ModelConfig(model=str(models.get("qwen3").directory), device="cuda", dtype="bfloat16"),
        cache=CacheConfig(num_blocks=64, block_size=64),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_graph_tokens=0, max_graph_batch=4),
    )
    executor = DeviceExecutor.started(config, lambda _: None)
    yield executor
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("budget", [9, 33, 512])
def test_logits_equal_those_of_all_rows_on_a_gpu(cuda_executor: DeviceExecutor, budget: int) -> None:
    """To bfloat16's rounding: fewer rows are multiplied by other kernels."""
    beside = Beside(cuda_executor, 5e-2)
    run(cuda_executor, budget)
    assert any(beside.rows)
