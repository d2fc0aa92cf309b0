"""The GPU table's arithmetic, and the engine that it measures, on CPU."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.ceilings import Ceilings, ModelCosts
from benchmarks.gpu import GpuBench, Measured
from benchmarks.gpu_rows import SHAPES, GpuRow
from benchmarks.kernel_times import KernelInStep, mean_step, text_of
from benchmarks.offline import OfflineEngine
from benchmarks.routing import ExpertsHit, RoutingCounter
from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.registry import resolve_spec
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.shallow_model import shallow_model

CEILINGS = Ceilings(read=4.2e12, copy=4.3e12, matrix=790e12, quantized=1400e12)


def costs_of(name: str, tmp_path: Path) -> ModelCosts:
    """The costs of a shape. Its spec is that of the unquantized model, which has the same sizes."""
    config = {key: value for key, value in SHAPES[name].config.items() if key != "quantization_config"}
    return ModelCosts(resolve_spec(tmp_path, json.loads(json.dumps(config))), SHAPES[name].weight_bytes)


def test_bytes_and_operations_of_the_shapes(tmp_path: Path) -> None:
    large, small = costs_of("8b", tmp_path), costs_of("0.6b", tmp_path)
    assert large.kv_token_bytes == 128 * 1024
    assert large.spec.layer_parameters + 2 * large.head_parameters == pytest.approx(8.03e9, rel=0.001)
    assert small.spec.layer_parameters + small.head_parameters == pytest.approx(0.596e9, rel=0.001)
    # The field note's rooflines, from the same ceilings
    assert large.decode_s(1, 1088, CEILINGS) * 1e3 == pytest.approx(3.5, abs=0.05)
    assert large.decode_s(256, 1088, CEILINGS) * 1e3 == pytest.approx(11.8, abs=0.2)
    assert 64 * 1024 / large.prefill_s([1024] * 64, CEILINGS) == pytest.approx(55_500, rel=0.02)
    assert large.prefill_s([4096], CEILINGS) * 1e3 == pytest.approx(77.9, rel=0.02)
    assert small.decode_s(32, 1088, CEILINGS) * 1e3 == pytest.approx(1.15, rel=0.06)


def test_rooflines_of_a_mixture_count_the_experts_that_are_hit(tmp_path: Path) -> None:
    costs, quantized = costs_of("30b-a3b", tmp_path), costs_of("30b-a3b-fp8", tmp_path)
    assert costs.spec.layer_parameters + 2 * costs.head_parameters == pytest.approx(30.5e9, rel=0.002)
    assert costs.experts_hit(32) == pytest.approx(128 * (1 - (15 / 16) ** 32))
    # The field note's rooflines
    decode_ms = [costs.decode_s(count, 1024, CEILINGS) * 1e3 for count in (1, 8, 32, 64, 128, 256)]
    assert decode_ms == pytest.approx([1.43, 6.20, 13.1, 15.4, 17.2, 20.4], rel=0.02)
    decode_ms = [quantized.decode_s(count, 1024, CEILINGS) * 1e3 for count in (32, 256)]
    assert decode_ms == pytest.approx([7.04, 13.5], rel=0.04)  # the note counts the head in fp8
    assert 64 * 1024 / costs.prefill_s([1024] * 64, CEILINGS) == pytest.approx(135_000, rel=0.05)
    faster = costs.prefill_s([4096], CEILINGS) / quantized.prefill_s([4096], CEILINGS)
    assert 1.2 < faster < 1400 / 790  # attention is in bf16 in both


def test_rooflines_of_packed_experts_and_windows() -> None:
    """By the bandwidth of the data sheet, beside sums by hand."""
    ceilings = Ceilings(read=4.8e12, copy=4.8e12, matrix=989e12)
    for name, expected in {"gpt-oss-20b": [0.78, 2.78, 3.38, 4.13], "gpt-oss-120b": [1.04, 9.02, 14.2, 15.6]}.items():
        costs = ModelCosts(resolve_spec(Path(), CONFIGS[name]), SHAPES[name].weight_bytes)
        found = [costs.decode_s(count, 1024, ceilings) * 1e3 for count in (1, 32, 128, 256)]
        assert found == pytest.approx(expected, rel=0.01)


def test_rooflines_of_states() -> None:
    """As above, beside the field note's."""
    ceilings = Ceilings(read=4.8e12, copy=4.8e12, matrix=989e12, quantized=1979e12)
    expected = {
        "qwen3.6-35b-a3b-fp8": (0.75, 5.78, 11.1, 15.2), "qwen3-next-80b-fp8": (0.83, 9.22, 20.1, 26.1),
        "qwen3.8-27b-fp8": (5.68, 8.10, 15.6, 25.6),
    }  # fmt: skip
    for name, decodes in expected.items():
        costs = ModelCosts(resolve_spec(Path(), CONFIGS[name]), SHAPES[name].weight_bytes)
        found = [costs.decode_s(count, 1024, ceilings) * 1e3 for count in (1, 32, 128, 256)]
        assert found == pytest.approx(decodes, rel=0.04), name


def test_rooflines_of_latents() -> None:
    """As above, beside the field note's."""
    ceilings = Ceilings(read=4.8e12, copy=4.8e12, matrix=790e12, quantized=1580e12)
    expected = {
        "moonlight": (1.08, 6.46, 7.36, 8.21, 171_000), "glm-4.7-flash": (1.50, 11.2, 13.8, 15.3, 113_000),
        "mistral-small-4-fp8": (1.38, 16.2, 25.0, 26.0, 135_000),
    }  # fmt: skip
    for name, (*decodes, prefill) in expected.items():
        costs = ModelCosts(resolve_spec(Path(), CONFIGS[name]), SHAPES[name].weight_bytes)
        found = [costs.decode_s(count, 1024, ceilings) * 1e3 for count in (1, 32, 128, 256)]
        assert found == pytest.approx(decodes, rel=0.01), name
        assert 64 * 1024 / costs.prefill_s([1024] * 64, ceilings) == pytest.approx(prefill, rel=0.01)


def test_so_many_keys_cost_as_much_as_a_token(tmp_path: Path) -> None:
    large, small = costs_of("8b", tmp_path).spec, costs_of("0.6b", tmp_path).spec
    assert (large.keys_per_token, small.keys_per_token) == (5990, 864)
    half = replace(large, windows=(0, 4096) * (large.num_layers // 2))
    assert half.keys_per_token == pytest.approx(2 * large.keys_per_token, abs=1)
    assert replace(large, windows=(4096,) * large.num_layers).keys_per_token == 0


def test_shares_and_gains() -> None:
    time = Measured(GpuRow("decode", 1, 1024, 4.9), (4.0, 5.0, 4.5), 3.0)
    rate = Measured(GpuRow("prefill", 4, 1000, 100.0), (150.0,), 200.0)
    assert (time.value, time.share, time.gain) == (4.5, 3.0 / 4.5, 4.9 / 4.5)
    assert (rate.share, rate.gain) == (0.75, 1.5)
    record = time.record()
    assert record["name"] == "decode ms/step, B = 1, 1024 context"
    assert (record["p50"], record["p90"]) == (4.5, pytest.approx(4.9))
    assert replace(time, roofline=None).share is None


def test_a_row_with_too_few_experts_does_not_count() -> None:
    assert ExpertsHit(109.0, 111.8).is_valid
    few = ExpertsHit(100.0, 111.8)
    assert not few.is_valid
    assert few.text == "100.0 of 111.8: does not count"
    row = Measured(GpuRow("decode", 32, 1024, 4.9), (4.0,), 3.0, few)
    assert row.record()["experts_hit"] == {"counted": 100.0, "expected": 111.8, "is_valid": False}


def test_the_kernels_of_a_step_are_what_more_steps_add() -> None:
    short = [KernelInStep("product", 2, 10.0), KernelInStep("prompt", 1, 50.0)]
    long = [KernelInStep("product", 10, 50.0), KernelInStep("prompt", 1, 50.0), KernelInStep("draw", 4, 4.0)]
    kernels = mean_step(short, long, 4)
    assert kernels == [KernelInStep("product", 2.0, 10.0), KernelInStep("draw", 1.0, 1.0)]
    assert text_of(kernels).splitlines()[0].split() == ["10.0", "us", "90.9%", "2.0", "x", "product"]
    assert text_of([]) == "      1.0 us in 0 kernels\n"


@pytest.mark.long
def test_random_weights_choose_experts_evenly(tmp_path: Path) -> None:
    # The real number of experts and choices. Narrow, so that it takes seconds
    shape = {"hidden_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    narrow = {**CONFIGS["30b-a3b"], **shape, "vocab_size": 4096, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(narrow))
    config = NodeConfig(
        model=ModelConfig(
            model=str(tmp_path), load_format="dummy", device="cpu", dtype="float32", num_threads=1, max_model_len=1024
        ),
        cache=CacheConfig(num_blocks=160),
        scheduler=SchedulerConfig(max_num_seqs=16),
        handoff=HandoffConfig(connector="none"),
    )
    routing = RoutingCounter()
    with routing.installed("cpu"):
        engine = OfflineEngine(config, lambda text: None)
    try:
        bench = GpuBench(engine, ModelCosts(engine.executor.model.spec), CEILINGS, 1, routing, random.Random(0))
        rows = {count: GpuRow("decode", count, 64, None) for count in (1, 16)}
        hits = {count: bench._hit(row, bench._cached_prompts(row)) for count, row in rows.items()}
        assert hits[1] is not None
        assert hits[16] is not None
        assert hits[1].counted == 8
        assert hits[16].counted == pytest.approx(hits[16].expected, rel=0.08)  # few layers: 3% is for 48
        assert routing.num_tokens == 0
    finally:
        engine.close()


def test_the_offline_engine_counts_every_token() -> None:
    config = NodeConfig(
        model=ModelConfig(model=shallow_model(), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=32),
        scheduler=SchedulerConfig(async_scheduling="on"),
        handoff=HandoffConfig(connector="none"),
    )
    engine = OfflineEngine(config, lambda text: None)
    try:
        samplings = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (1, 7, 4)]
        done = engine.generate([[5, 6, 7], [8] * 20, [9]], samplings)
        assert [len(tokens) for tokens in done.tokens] == [1, 7, 4]
        assert done.num_tokens == 12
        assert all(0 < first <= done.seconds for first in done.first_token_s)
        with pytest.raises(RuntimeError, match="InvalidRequest"):
            engine.generate([[]], samplings[:1])
    finally:
        engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_table_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) != 0
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["gpu", "--shapes", "9b"]) != 0
    assert "8b, 0.6b" in capsys.readouterr().err
