"""The measurement of steps at start, on CPU: which steps it launches, and what it decides."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig, ServerConfig
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.worker import step_measurement
from pd_cluster.worker.capacity import STEP_TOKENS
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.pending_step import PendingStep
from pd_cluster.worker.step_measurement import (
    CPU_DRAFTS,
    DRAFTS,
    NUM_BEFORE,
    STEPS,
    StepTimer,
    draft_sizes,
    limit_of_prompts,
    measure_drafts,
    measure_for_model,
    measure_sizes,
)
from tests.deadlines import HANG_S
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
    """Steps up to `bend` tokens take as long as each other; after it all tokens take the same time."""

    bend: int = 1

    def seconds(self, num_decodes: int, prompts: Sequence[int], before: int = 0, context: int = 0) -> float:
        tokens = num_decodes + sum(prompts)
        return max(1.0, tokens / self.bend) + KEY_S * before * sum(prompts)


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


@pytest.mark.parametrize("name", ["qwen3", "qwen3-experts"])
def test_measured_steps_with_drafts_go_on_where_the_drafts_were_wrong(models: ModelStore, name: str) -> None:
    """The worker asserts that each begins with its sequence's last token."""
    executor = make_executor(models.get(name).directory, num_blocks=40, max_num_seqs=6)
    batches: list[Batch] = []
    timer = noting(executor, batches)
    assert timer.seconds_with_drafts(2, 3) > 0
    context = 512 - STEPS * 4
    work = StepWork(2, 2 * context, 0, 0, num_drafts=6, draft_keys=2 * keys_of(3, context), num_drafting=2)
    assert [work for work, _ in timer.samples] == [work], "a sequence has room for all drafts of all steps"
    steps = [batch.chunks for batch in batches if batch.chunks]
    assert len(steps) == STEPS
    assert all(chunk.num_tokens == 4 and chunk.is_decode for chunks in steps for chunk in chunks)
    for before, after in pairwise(steps):
        assert all(0 < new.start - old.start <= 4 for old, new in zip(before, after, strict=True))
    assert len({chunk.drafts for chunks in steps for chunk in chunks}) > STEPS, "equal rows would choose equal experts"
    assert not executor._runner.rows._row_of


def test_a_prompt_as_long_as_a_sequence_may_be_is_measured(models: ModelStore) -> None:
    """A row has as many blocks as 512 tokens need, because that is a multiple of 16 blocks; so is 1,024 on a GPU."""
    executor = make_executor(models.get("qwen3").directory, num_blocks=40, max_num_seqs=2)
    assert executor.model.max_model_len == 512
    assert noting(executor, []).seconds(1, [511]) > 0


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
        def seconds(self, num_decodes: int, prompts: Sequence[int], before: int = 0, context: int = 0) -> float:
            steps.append((num_decodes, sum(prompts)))
            return 1.0

    timer = Noting(bent(1, max_len).launch, slabs=slabs_of(10), block_size=16, max_len=max_len, vocab_size=100)
    measure_for_model(limits, timer)
    assert sorted(steps) == sorted(expected)


@pytest.mark.parametrize("sizes", [DRAFTS, CPU_DRAFTS])
@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize(
    ("num_seqs", "budget", "max_len"), [(1, 2048, 40), (8, 8, 512), (64, 64, 4100), (256, 2048, 8192)]
)
def test_only_steps_with_drafts_that_a_node_may_run_are_measured(
    num_seqs: int, budget: int, max_len: int, most: int, sizes: tuple[tuple[int, int, int], ...]
) -> None:
    limits = replace(LIMITS, max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    found = draft_sizes(sizes, limits, max_len, most)
    assert found
    assert len(set(found)) == len(found)
    for num, drafts, context in found:
        assert num * max(1, drafts) <= num_seqs
        assert num * (1 + drafts) <= budget
        assert drafts <= most
        assert STEPS * (1 + drafts) < max_len
        assert context != NUM_BEFORE or NUM_BEFORE + STEPS * (1 + drafts) <= max_len
    if (num_seqs, most) == (256, 16):
        assert found == list(sizes)


def test_measured_drafts_end_where_they_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, measured = 0.0, list[tuple[int, int]]()

    @dataclass(frozen=True, slots=True)
    class Slow(TableTimer):
        def seconds_with_drafts(self, num_decodes: int, num_drafts: int, context: int = 0) -> float:
            nonlocal now_s
            now_s += 1.3
            measured.append((num_decodes, num_drafts))
            return 1.0

    monkeypatch.setattr(step_measurement, "time", SimpleNamespace(perf_counter=lambda: now_s))
    timer = Slow(bent(1, 8192).launch, slabs=slabs_of(10), block_size=16, max_len=8192, vocab_size=100)
    measure_drafts(replace(LIMITS, max_num_seqs=256), timer, 16, on_cpu=False)
    assert measured == [size[:2] for size in DRAFTS[:3]]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_node_that_drafts_measures_steps_with_and_without_drafts(
    models: ModelStore, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_measurement, "CPU_DRAFTS_S", HANG_S)
    monkeypatch.setattr(step_measurement, "DRAFTS_S", HANG_S)
    executor, lines = make_executor(models.get("qwen3").directory, num_blocks=40, max_num_seqs=8), list[str]()
    model = replace(executor.model, device=device)
    _, model = measure_sizes(
        executor.config, model, noting(executor, []), lines.append, measures_budget=False, may_fail=True, most_drafts=4
    )
    times = [work for work, _ in model.step_times]
    each = {work.num_drafts // work.num_decodes for work in times}
    assert each == ({0, 1, 2, 4} if device == "cpu" else {0, 1, 4}), "8 rows beyond one a sequence are for 8 drafts"
    assert any(work.num_tokens for work in times) == (device != "cpu")
    assert not lines, "no gap of streams is told"
    assert StepModel(model.step_times).is_fitted
    executor.close()


@pytest.mark.parametrize(
    ("role", "tpot_ms", "num_lines"),
    [("decode", 10.0, 0), ("mixed", 10.0, 0), ("decode", 0.0, 1), ("mixed", 0.0, None), ("prefill", 0.0, 0)],
)
def test_a_node_with_targets_or_usual_gaps_measures_its_steps(
    models: ModelStore, role: str, tpot_ms: float, num_lines: int | None
) -> None:
    """As on a GPU, from the warm-up of one on. None: it measures none."""
    executor, lines = make_executor(models.get("qwen3").directory, num_blocks=40, max_num_seqs=4), list[str]()
    executor._plan = replace(executor._plan, progress=lines.append)
    executor.model = replace(executor.model, device="cuda:0")
    limits = replace(executor.config.scheduler, slo_tpot_ms=tpot_ms)
    executor.config = replace(executor.config, server=ServerConfig(role=role), scheduler=limits)
    executor.measure()
    assert executor.config.scheduler == limits
    assert len(executor.model.step_times) >= 4 * (num_lines is not None)
    assert bool(executor.model.step_times) == (num_lines is not None)
    assert len(lines) == (num_lines or 0)
    assert all("steps beside streams take " in line for line in lines)
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
    ("rates", "expected", "num_measured"),
    [
        ((46.3, 45.9, 44.9), 2048, 2),  # 8B
        ((66.2, 73.8, 81.1), 8192, 3),  # Qwen3-30B-A3B
        ((60.0, 70.0, 74.0), 4096, 3),
        ((60.0, 62.0, 80.0), 2048, 2),  # the first size without gain ends the search
    ],
)
def test_prompts_are_read_in_the_smallest_steps_that_are_nearly_as_fast(
    rates: tuple[float, ...], expected: int, num_measured: int
) -> None:
    seconds = {size: size / rate / 1e3 for size, rate in zip((2048, 4096, 8192), rates, strict=True)}

    @dataclass(frozen=True, slots=True)
    class Recorded(TableTimer):
        def seconds(self, num_decodes: int, prompts: Sequence[int], before: int = 0, context: int = 0) -> float:
            return seconds[sum(prompts)]

    lines: list[str] = []
    timer = Recorded(bent(1, 4096).launch, slabs=slabs_of(10), block_size=16, max_len=4096, vocab_size=100)
    assert limit_of_prompts(LIMITS, timer, lines.append).max_num_batched_tokens == expected
    told = ", ".join(f"{size:,}: {seconds[size] * 1e3:.1f} ms" for size in list(seconds)[:num_measured])
    assert lines == [f"max_num_batched_tokens {expected} (tokens of a step of prompts: {told})"]


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
    assert not executor.model.step_times
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

    def budget(role: str) -> int:
        lines: list[str] = []
        config = NodeConfig(model=model, cache=CacheConfig(num_blocks=256), server=ServerConfig(role=role))
        executor = DeviceExecutor.started(config, lines.append)
        assert not any(tensor.any() for tensor in executor._cache.tensors)
        executor.close()
        assert any("tokens of a step of prompts" in line for line in lines) == (role == "prefill")
        assert any("steps beside streams take" in line for line in lines) == (role == "decode")
        assert bool(executor.model.step_times) == (role != "mixed")
        return executor.config.scheduler.max_num_batched_tokens

    decode, prefill, mixed = map(budget, ("decode", "prefill", "mixed"))
    assert prefill in (2048, 4096, 8192)
    assert decode == mixed == 2048
