"""The GPU table's arithmetic, and the engine that it measures, on CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pd_cluster
from benchmarks.__main__ import main
from benchmarks.ceilings import Ceilings, ModelCosts
from benchmarks.gpu import SHAPES, GpuRow, Measured
from benchmarks.offline import OfflineEngine
from pd_cluster.config import CacheConfig, HandoffConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.registry import resolve_spec
from pd_cluster.protocol.sampling_params import SamplingParams

CEILINGS = Ceilings(read=4.2e12, copy=4.3e12, matrix=790e12)


def costs_of(name: str, tmp_path: Path) -> ModelCosts:
    return ModelCosts(resolve_spec(tmp_path, json.loads(json.dumps(SHAPES[name].config))))


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


def test_the_offline_engine_counts_every_token() -> None:
    config = NodeConfig(
        model=ModelConfig(
            model=str(Path(pd_cluster.__file__).parent / "demo_model"), device="cpu", dtype="float32", num_threads=1
        ),
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
