"""The measurement of steps at start, on CPU: which steps it launches, and what it decides."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.config import (
    TOKENS_BESIDE_DECODES,
    CacheConfig,
    ModelConfig,
    NodeConfig,
    SchedulerConfig,
    ServerConfig,
)
from pd_cluster.scheduling.step_cost import SIZES_BESIDE
from pd_cluster.worker.capacity import STEP_TOKENS
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.step_measurement import (
    STEPS,
    StepTimer,
    limit_beside_decodes,
    limit_of_prompts,
    measure_for_model,
)
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.tables import slabs_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.scheduling.batch import Batch
    from pd_kernels.values import StepSize

SMALL = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 4096}
KEY_S = 1e-6
LIMITS = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True)
class TableTimer(StepTimer):
    """Steps up to `bend` tokens take as long as each other; behind it all tokens take the same time."""

    bend: int = 1

    def seconds(self, num_decodes: int, prompts: Sequence[int], behind: int = 0, context: int = 0) -> float:
        tokens = num_decodes + sum(prompts)
        return max(1.0, tokens / self.bend) + KEY_S * behind * sum(prompts)


def bent(bend: int, max_len: int) -> TableTimer:
    def launch(batch: Batch) -> PendingStep:
        raise NotImplementedError

    return TableTimer(launch, slabs=slabs_of(10), block_size=16, max_len=max_len, vocab_size=100, bend=bend)


def noting(executor: DeviceExecutor, batches: list[Batch]) -> StepTimer:
    def launch(batch: Batch) -> PendingStep:
        batches.append(batch)
        return executor.launch(batch)

    return StepTimer(launch, executor.slabs, executor.block_size, executor.model.max_model_len, VOCAB_SIZE)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-experts"])
def test_measured_steps_have_the_wanted_tokens_and_leave_no_rows(models: ModelStore, name: str) -> None:
    saved = models.get(name)
    batches: list[Batch] = []
    executor = make_executor(saved.directory, num_blocks=40, max_num_seqs=6)
    timer = noting(executor, batches)
    assert timer.seconds(4, [9, 20]) > 0
    assert timer.seconds(6, []) > 0
    assert timer.seconds(0, [30]) > 0
    steps = [[chunk.num_tokens for chunk in batch.chunks] for batch in batches if batch.chunks]
    assert steps == [[1, 1, 1, 1, 9, 20]] * STEPS + [[1] * 6] * STEPS + [[30]] * STEPS
    assert all(chunk.num_samples == (chunk.num_tokens == 1) for batch in batches for chunk in batch.chunks)
    tokens = {start.token_ids for batch in batches[:STEPS] for start in batch.starts}
    assert len(tokens) == 4 + 2 * STEPS, "equal sequences would choose equal experts"
    for tensor in executor._cache.tensors:
        tensor.zero_()
    driver = Driver(executor, budget=23)
    for prompt in random_prompts((5, 30), VOCAB_SIZE):
        driver.add(prompt)
    assert driver.run() == [saved.generate(one.prompt, 12) for one in driver.sequences]


def test_a_prompt_as_long_as_a_sequence_may_be_is_measured(models: ModelStore) -> None:
    """A row has as many blocks as 512 tokens need, because that is a multiple of 16 blocks; so is 1,024 on a GPU."""
    executor = make_executor(models.get("qwen3").directory, num_blocks=40, max_num_seqs=2)
    assert executor.model.max_model_len == 512
    assert noting(executor, []).seconds(1, [511]) > 0


@pytest.mark.parametrize(
    ("bend", "limits", "max_len", "expected"),
    [
        (150, LIMITS, 4096, 192),
        (400, LIMITS, 4096, 512),
        (4000, LIMITS, 4096, 1024),
        (4000, LIMITS, 400, 384),  # no prompt is longer
        (4000, replace(LIMITS, max_num_batched_tokens=300), 4096, 256),
        (1, LIMITS, 4096, 128),
        (1, replace(LIMITS, max_num_seqs=1), 4096, -1),  # a sequence is alone in its steps
        (1, replace(LIMITS, max_num_batched_tokens=100), 4096, -1),
    ],
)
def test_the_limit_beside_decodes(bend: int, limits: SchedulerConfig, max_len: int, expected: int) -> None:
    lines: list[str] = []
    limited, keys = limit_beside_decodes(limits, bent(bend, max_len), 0, lines.append)
    assert (limited, keys) == (replace(limits, max_tokens_beside_decodes=expected), 0)
    assert [line.split(" (")[0] for line in lines] == [f"max_tokens_beside_decodes {expected}"] * (expected > 0)


def test_keys_cost_as_much_as_was_measured() -> None:
    # 192 tokens take 1.28 s, 32 decodes 1 s: a token of a prompt 1.75 ms, as long as 1,750 keys
    for by_flops, max_len, expected in ((1000, 8192, 1750), (5000, 8192, 5000), (100, 8192, 1600), (1000, 4096, 1000)):
        assert limit_beside_decodes(LIMITS, bent(150, max_len), by_flops, lambda line: None)[1] == expected


DECODES_ALONE = [(num, 0) for num in (1, 4, 12, 32, 64)]


@pytest.mark.parametrize(
    ("limits", "max_len", "expected"),
    [
        (LIMITS, 8192, [*DECODES_ALONE, (32, 0), (32, 96), (32, 224), (32, 480), (32, 992), (32, 96)]),
        (LIMITS, 300, [*DECODES_ALONE, (32, 0), (32, 96), (32, 224)]),  # no prompt is longer
        (replace(LIMITS, max_num_seqs=1), 8192, [(1, 0)]),
    ],
)
def test_the_steps_that_a_model_is_fitted_to(
    limits: SchedulerConfig, max_len: int, expected: list[tuple[int, int]]
) -> None:
    steps: list[tuple[int, int]] = []

    @dataclass(frozen=True, slots=True)
    class Noting(TableTimer):
        def seconds(self, num_decodes: int, prompts: Sequence[int], behind: int = 0, context: int = 0) -> float:
            steps.append((num_decodes, sum(prompts)))
            return 1.0

    timer = Noting(bent(1, max_len).launch, slabs=slabs_of(10), block_size=16, max_len=max_len, vocab_size=100)
    measure_for_model(limits, timer)
    assert sorted(steps) == sorted(expected)


@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_a_node_with_targets_measures_its_steps_and_sets_no_limit(models: ModelStore, role: str) -> None:
    executor = make_executor(models.get("qwen3").directory, num_blocks=40, max_num_seqs=4)
    executor.model = replace(executor.model, device="cuda:0")
    limits = replace(executor.config.scheduler, slo_tpot_ms=10.0)
    executor.config = replace(executor.config, server=ServerConfig(role=role), scheduler=limits)
    executor.measure()
    assert executor.config.scheduler == limits
    assert not executor.model.measured_keys
    assert len(executor.model.step_times) >= 4
    assert all(seconds > 0 for _, seconds in executor.model.step_times)
    assert not any(tensor.any() for tensor in executor._cache.tensors)


@pytest.mark.parametrize(
    ("bend", "limits", "max_len", "expected"),
    [
        (1000, LIMITS, 4096, 2048),
        (2048, LIMITS, 4096, 2048),
        (4096, LIMITS, 4096, 4096),
        (9000, LIMITS, 4096, 8192),
        (9000, LIMITS, 40, 2048),  # not 4,096 tokens in as many sequences as run
        (9000, replace(LIMITS, max_num_seqs=1), 4096, 2048),  # nothing can be measured
    ],
)
def test_the_limit_of_prompts(bend: int, limits: SchedulerConfig, max_len: int, expected: int) -> None:
    lines: list[str] = []
    limited = limit_of_prompts(limits, bent(bend, max_len), lines.append)
    assert limited == replace(limits, max_num_batched_tokens=expected)
    assert len(lines) == (limits.max_num_seqs > 1)


@pytest.mark.parametrize(
    ("role", "told", "is_measured"),
    [("decode", -1, True), ("decode", 0, False), ("decode", 64, False), ("mixed", -1, False)],
)
def test_an_executor_measures_what_a_decode_node_was_not_told(
    models: ModelStore, role: str, told: int, is_measured: bool
) -> None:
    """As on a GPU, from the warm-up of one on."""
    executor = make_executor(models.get("qwen3").directory)
    executor.model = replace(executor.model, device="cuda:0")
    limits = replace(executor.config.scheduler, max_tokens_beside_decodes=told)
    executor.config = replace(executor.config, server=ServerConfig(role=role), scheduler=limits)
    executor.measure()
    assert (executor.config.scheduler.max_tokens_beside_decodes != told) == is_measured
    assert bool(executor.model.measured_keys) == is_measured
    assert executor.model.keys_per_token >= executor.model.spec.keys_per_token
    assert not any(tensor.any() for tensor in executor._cache.tensors)


@pytest.mark.parametrize("last", [0, 1, STEPS])  # launches that succeed
def test_a_measurement_that_fails_leaves_the_defaults_and_no_rows(models: ModelStore, last: int) -> None:
    saved, lines = models.get("qwen3"), list[str]()
    executor = make_executor(saved.directory, num_blocks=40, max_num_seqs=6)
    executor._plan = replace(executor._plan, progress=lines.append, is_budget_measured=True)
    executor.model = replace(executor.model, device="cuda:0")
    limits = replace(executor.config.scheduler, max_num_batched_tokens=8192)
    executor.config = config = replace(executor.config, server=ServerConfig(role="decode"), scheduler=limits)
    launch, launched = executor._runner.launch, list[PendingStep]()

    def launch_some(batch: Batch, graph: StepSize | None = None, announce: object = None) -> PendingStep:
        pending = launch(batch, graph)
        launched.append(pending)
        if len(launched) > last:
            raise torch.OutOfMemoryError("no room")
        return pending

    executor._runner.launch = launch_some  # type: ignore[method-assign]
    executor.measure()
    executor._runner.launch = launch  # type: ignore[method-assign]
    assert lines == ["default sizes of steps: their measurement failed (OutOfMemoryError: no room)"]
    assert executor.config == replace(config, scheduler=replace(limits, max_num_batched_tokens=STEP_TOKENS))
    assert executor.config.tokens_beside_decodes_on("cuda:0") == TOKENS_BESIDE_DECODES
    assert not executor.model.measured_keys
    assert not any(tensor.any() for tensor in executor._cache.tensors)
    driver = Driver(executor)
    for prompt in random_prompts((5, 9, 30, 4, 17, 8), VOCAB_SIZE):  # as many as there are rows
        driver.add(prompt)
    assert driver.run() == [saved.generate(one.prompt, 12) for one in driver.sequences]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_decides_for_each_role(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["30b-a3b"], **SMALL}))
    model = ModelConfig(model=str(tmp_path), load_format="dummy", dtype="bfloat16", device="cuda", max_model_len=2048)

    def limits(role: str) -> SchedulerConfig:
        lines: list[str] = []
        config = NodeConfig(model=model, cache=CacheConfig(num_blocks=256), server=ServerConfig(role=role))
        executor = DeviceExecutor.started(config, lines.append)
        assert not any(tensor.any() for tensor in executor._cache.tensors)
        executor.close()
        measured = [line for line in lines if "tokens of a step" in line]
        assert len(measured) == (role != "mixed")
        return executor.config.scheduler

    decode, prefill, mixed = map(limits, ("decode", "prefill", "mixed"))
    assert decode.max_tokens_beside_decodes in SIZES_BESIDE
    assert (prefill.max_tokens_beside_decodes, mixed.max_tokens_beside_decodes) == (-1, -1)
    assert prefill.max_num_batched_tokens in (2048, 4096, 8192)
    assert decode.max_num_batched_tokens == mixed.max_num_batched_tokens == 2048
