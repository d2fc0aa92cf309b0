"""The host side of a step's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.host_buffer import HostBuffer
from tests.worker.tables import table

if TYPE_CHECKING:
    import pytest

    from tests.worker.conftest import ModelStore


def test_on_a_cpu_nothing_is_copied() -> None:
    host_buffer = HostBuffer(torch.device("cpu"), 1 << 10)
    for _ in range(2):
        host_buffer.begin()
        fields = host_buffer.take_first(10)
        assert not fields.any(), "of the step before nothing is left"
        fields[:] = np.arange(10)
        host_buffer.flush()
        assert host_buffer.first(10).data_ptr() == fields.ctypes.data
        assert torch.equal(host_buffer.first(10), torch.arange(10))
    array = np.array([1.5, 2.5], np.float32)
    assert host_buffer.move(array).data_ptr() == array.ctypes.data


def test_it_holds_a_step_of_as_many_sequences_as_there_may_be(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes and a chunk, drawn within limits: both sets of block tables, none of a round width."""
    config = NodeConfig(
        model=ModelConfig(model=str(models.get("qwen3").directory), device="cpu", max_model_len=272),
        cache=CacheConfig(num_blocks=17, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=24, max_num_batched_tokens=30),
    )
    executor, sizes = DeviceExecutor.started(config, lambda _: None), list[int]()
    params = SamplingParams(max_tokens=1, top_k=5, top_p=0.9)
    lengths = [1] * 23 + [7]
    starts = tuple(SequenceStart(i, (9,) * 272, 272, table(tuple(range(17))), params, i) for i in range(24))
    chunks = tuple(SequenceChunk(i, 272 - size, size, num_samples=1) for i, size in enumerate(lengths))
    move = HostBuffer.move

    def counted(host_buffer: HostBuffer, array: np.ndarray[Any, Any]) -> torch.Tensor:
        sizes.append(-(-array.nbytes // 16) * 16)
        return move(host_buffer, array)

    monkeypatch.setattr(HostBuffer, "move", counted)
    rows, host_buffer = executor._runner.rows, executor._runner.host_buffer
    rows.apply(Batch(0, starts))
    monkeypatch.setattr(rows, "_move", host_buffer.move)
    monkeypatch.setattr(rows._sampling, "_move", host_buffer.move)
    assert rows.build(chunks).tail is not None
    late = 2 * 24 * 8  # had their tokens been on the device only
    assert 24 * 32 * 8 < sum(sizes) + late <= host_buffer._num_bytes
    executor.close()
