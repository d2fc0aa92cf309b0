"""From a node's config to tensors: sizes, dtypes, dummy weights, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.models.decoder import Decoder
from pd_cluster.scheduling.batch import Batch
from pd_cluster.worker import model_loading
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.memory_measurement import run_largest_step
from tests.cluster import READY_DEADLINE_S
from tests.worker.driver import Driver, make_executor

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.worker.pending_step import PendingStep
    from pd_kernels.values import StepSize
    from tests.worker.conftest import ModelStore


def build(model: Path | str, cache: CacheConfig, **options: Any) -> tuple[DeviceExecutor, list[str]]:
    lines: list[str] = []
    return DeviceExecutor.started(
        NodeConfig(model=ModelConfig(model=str(model), device="cpu", **options), cache=cache), lines.append
    ), lines


def test_the_cache_is_block_first_and_as_large_as_asked(models: ModelStore) -> None:
    executor, lines = build(models.get("qwen3").directory, CacheConfig(kv_cache_gb=0.004, swap_gb=0.001))
    tensor, layout = executor.cache.tensors[0], executor.cache.layout
    assert tensor.shape == (executor.slabs.num_blocks(0), 2, 3, 2, 16, 16)
    assert tensor.is_contiguous()
    assert tensor[0].nbytes == layout.block_bytes
    assert 0.004e9 - layout.block_bytes < tensor.nbytes <= 0.004e9
    assert executor.num_host_blocks == 0.001e9 // layout.block_bytes
    assert not tensor.any(), "the warm-up must leave nothing behind"
    assert lines[:3] == [
        "max_num_seqs 8, max_num_batched_tokens 2048 (CPU)",
        "attention of 3 layers: torch (hopper: needs a Hopper GPU; triton: needs a GPU)",
        "weights 1/1",
    ]
    assert lines[-1] == "warm-up"
    assert (executor.block_size, executor.model.dtype, executor.model.eos_token_ids) == (16, "float32", frozenset({2}))
    executor.close()
    executor.close()


@pytest.mark.parametrize("cache", [CacheConfig(kv_cache_gb=0.0002), CacheConfig(num_blocks=16)])
def test_no_sequence_is_offered_that_the_cache_cannot_hold(models: ModelStore, cache: CacheConfig) -> None:
    executor, lines = build(models.get("qwen3").directory, cache)
    assert executor.model.max_model_len == executor.slabs.num_blocks(0) * 16 == 256
    assert "max_model_len 256 (the KV cache has no room for the model's 512 tokens)" in lines
    executor.close()


def test_each_group_of_layers_has_its_attention(models: ModelStore) -> None:
    directory = models.get("qwen3-some-windows").directory
    executor, lines = build(directory, CacheConfig(num_blocks=4), attention_backend="torch")
    assert len(executor._plan.attentions) == len(executor.layout.groups) == 2
    assert sum(line.startswith("attention of ") and line.endswith(": torch") for line in lines) == 2
    executor.close()


def test_an_attention_backend_that_was_asked_for_and_refuses_ends_the_start(models: ModelStore) -> None:
    with pytest.raises(StartupError, match=r"^--attention-backend triton: needs a GPU$"):
        build(models.get("llama").directory, CacheConfig(), attention_backend="triton")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("tried to allocate 2 GiB"), "no room for captured steps: .*--max-graph-tokens .*2 GiB"),
        (RuntimeError("CUDA error: an illegal access"), "cannot be captured on cpu: CUDA error"),
    ],
)
def test_a_capture_that_fails_ends_the_start_with_words(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, error: RuntimeError, words: str
) -> None:
    def fail_to_capture(*arguments: object, **settings: object) -> NoReturn:
        raise error

    monkeypatch.setattr("pd_cluster.worker.device_executor.captures_steps", lambda *arguments: True)
    monkeypatch.setattr("pd_cluster.worker.device_executor.choose_step_products", lambda *arguments: None)
    monkeypatch.setattr("pd_cluster.worker.device_executor.capture_steps", fail_to_capture)
    with pytest.raises(StartupError, match=words):
        build(models.get("llama").directory, CacheConfig(num_blocks=4))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_close_to_float32(models: ModelStore, dtype: str) -> None:
    directory = models.get("llama").directory
    prompt = [3, 5, 7, 11, 13]
    logprobs = []
    for name in ("float32", dtype):
        driver = Driver(make_executor(directory, dtype=name))
        assert driver.executor.cache.tensors[0].dtype == getattr(torch, name)
        generation = driver.add(prompt)
        driver.step()
        logprobs.append(generation.tokens[0].token_id)
        driver.leave()
    assert logprobs[0] == logprobs[1]


@pytest.mark.parametrize("max_len", [2, 16, 17])
def test_a_context_of_a_block_or_less_starts(models: ModelStore, max_len: int) -> None:
    driver = Driver(make_executor(models.get("qwen3").directory, max_model_len=max_len))
    generation = driver.add([4] * (max_len - 1))
    driver.step()
    assert len(generation.tokens) == 1


def test_the_largest_step_fits_the_context(models: ModelStore) -> None:
    """What measures a GPU's memory at start: the step's budget may be more than one sequence can have."""
    executor = make_executor(models.get("qwen3").directory, max_model_len=64, max_num_seqs=1)
    cache = executor._cache
    loaded = executor.sleep()
    loaded._run_largest_step(cache)
    assert loaded._plan.model.max_model_len == 64


def test_dummy_weights_follow_the_seed(models: ModelStore, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models.get("qwen3").directory / "config.json").read_text())
    outputs, prints = [], []
    for seed in (1, 1, 2):
        executor = make_executor(tmp_path, load_format="dummy", seed=seed)
        driver = Driver(executor)
        driver.add([4, 5, 6, 7])
        outputs.append(driver.run())
        prints.append(executor.model.fingerprint)
    assert outputs[0] == outputs[1] != outputs[2]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("options", "cache", "message"),
    [
        ({"max_model_len": 513}, CacheConfig(num_blocks=9), "exceeds the model's own limit of 512"),
        ({"max_model_len": 1}, CacheConfig(num_blocks=9), "no room for a prompt and an output token"),
        ({"max_model_len": -5}, CacheConfig(num_blocks=9), "no room for a prompt and an output token"),
        ({}, CacheConfig(num_blocks=9, block_size=24), "not a multiple of 16"),
        ({}, CacheConfig(kv_cache_gb=1e-6), "room for 0 blocks"),
        ({"max_model_len": 257}, CacheConfig(kv_cache_gb=0.0002), "the KV cache has room for 256 tokens"),
        ({}, CacheConfig(num_blocks=10**12), "cannot allocate"),
    ],
)
def test_impossible_settings_are_refused(
    models: ModelStore, options: dict[str, Any], cache: CacheConfig, message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        build(models.get("qwen3").directory, cache, **options)


def test_a_model_that_does_not_fit_is_refused(models: ModelStore, tmp_path: Path) -> None:
    config = json.loads((models.get("qwen3").directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 10**15}))
    with pytest.raises(StartupError, match="weights of Qwen3ForCausalLM do not fit on cpu"):
        make_executor(tmp_path, load_format="dummy")


@pytest.mark.parametrize("place", ["fill_at_random", "finish_loading"])
def test_a_model_that_fits_only_until_it_is_loaded_is_refused(
    models: ModelStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(model_loading if place == "fill_at_random" else Decoder, place, fail)
    with pytest.raises(StartupError, match="no room on cpu to load the weights of Qwen3ForCausalLM: tried to alloc"):
        make_executor(models.get("qwen3").directory, load_format="dummy")


def test_packed_experts_in_float16_are_refused(models: ModelStore) -> None:
    directory = models.get("gpt-oss-mxfp4").directory
    with pytest.raises(StartupError, match=r"^dtype float16 cannot hold mxfp4 weights; choose bfloat16 or float32$"):
        make_executor(directory, dtype="float16")
    assert make_executor(directory, dtype="bfloat16").model.dtype == "bfloat16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(models: ModelStore) -> None:
    with pytest.raises(StartupError, match="torch finds no CUDA device"):
        make_executor(models.get("qwen3").directory, device="cuda")


def test_a_worker_needs_no_transformers() -> None:
    """Importing it costs 0.8 s, and the engine process starts without."""
    code = "import sys, pd_cluster.worker.device_executor; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=READY_DEADLINE_S, check=False).returncode == 0


def test_the_step_that_is_measured_has_the_whole_budget(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 tokens, nine sequences have 56 or 57."""
    executor, batches = make_executor(models.get("qwen3").directory, max_num_seqs=9), list[Batch]()
    launch = executor._runner.launch

    def recorded(batch: Batch, graph: StepSize | None = None) -> PendingStep:
        batches.append(batch)
        return launch(batch)

    monkeypatch.setattr(executor._runner, "launch", recorded)
    run_largest_step(executor._runner, 512, 9, executor.model.max_model_len)
    assert [batch.num_tokens for batch in batches] == [512]
    assert len(batches[0].chunks) == 9
    executor.close()
