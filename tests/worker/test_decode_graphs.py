"""Buckets and padding of steps, with functions that are called again in place of graphs that are replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.captured_steps import ReplayOutputs
from pd_cluster.worker.cuda_graphs.decode_graphs import DecodeGraphs
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, bucket_sizes, decode_sizes
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.sampler import Sampled, sample
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts, use_graphs
from tests.worker.reference_attention import reference_attentions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.cuda_graphs.recorder import Outputs
    from pd_kernels.values import StepSize

SIZES = decode_sizes(6)


class Repeater:
    """Records by calling again, into the same tensors."""

    free_bytes = 0

    def __init__(self, room: int) -> None:
        self.room = room
        self.replays: list[int] = []  # rows of each

    def has_room(self) -> bool:
        self.room -= 1
        return self.room >= 0

    def __call__(self, run: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        outputs = run()

        def replay() -> None:
            places = tensors_of(outputs)
            self.replays.append(len(places[0]))
            for place, value in zip(places, tensors_of(run()), strict=True):
                place.copy_(value)

        return replay, outputs


def tensors_of(outputs: object) -> list[torch.Tensor]:
    assert isinstance(outputs, ReplayOutputs)
    return [outputs.logits, outputs.token_ids]


def with_graphs(
    executor: DeviceExecutor, sizes: list[StepSize], room: int = 100
) -> tuple[Repeater, DecodeGraphs, list[str]]:
    """Give the executor's runner graphs that are none."""
    runner, repeater, lines = executor._runner, Repeater(room), list[str]()
    attentions = reference_attentions(executor)
    graphs = DecodeGraphs(
        executor._model, executor._cache, runner.rows, runner.host_buffer, executor._kernels, attentions
    )
    graphs.capture(sizes, repeater, lines.append)
    use_graphs(executor, graphs)
    return repeater, graphs, lines


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_padded_steps_sample_the_same(models: ModelStore, name: str) -> None:
    wanted = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=14, temperature=0.9, top_k=30, logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=7, frequency_penalty=0.8),
        SamplingParams(max_tokens=18, temperature=0.0),
    ]
    outputs, repeaters = [], []
    for is_padded in (False, True):
        executor = make_executor(models.get(name).directory)
        if is_padded:
            repeaters.append(with_graphs(executor, SIZES)[0])
        driver = Driver(executor)
        for seed, (prompt, params) in enumerate(
            zip(random_prompts((5, 16, 40, 31, 64), VOCAB_SIZE), wanted, strict=True)
        ):
            driver.add(prompt, params, seed)
        outputs.append(driver.run())
        executor.close()
    assert outputs[0] == outputs[1]
    assert set(repeaters[0].replays) == {6, 4, 2, 1}  # five, then fewer and fewer


def test_what_temperature_and_seed_say_is_drawn_by_the_graph(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that draw beside greedy ones and padding; once a row comes that asks for more, others draw for all."""
    outputs: list[object] = []
    for is_replayed in (False, True):
        executor, calls = make_executor(models.get("qwen3").directory), list[int]()

        def counted(logits: torch.Tensor, *rest: Any, calls: list[int] = calls) -> Sampled:
            calls.append(len(logits))
            return sample(logits, *rest)

        driver = Driver(executor)
        for seed, prompt in enumerate(random_prompts((5, 16, 40), VOCAB_SIZE)):
            driver.add(prompt, SamplingParams(max_tokens=9, temperature=0.6 * seed), seed)
        driver.step()
        if is_replayed:
            with_graphs(executor, SIZES)
            monkeypatch.setattr("pd_cluster.worker.model_runner.sample", counted)
        for _ in range(3):
            driver.step()
        driver.add(random_prompts([9], VOCAB_SIZE)[0], SamplingParams(max_tokens=3, top_k=5), 7)
        outputs.append(driver.run())
        assert calls == [4, 4, 4] * is_replayed, "its prompt and two tokens"
        executor.close()
    assert outputs[0] == outputs[1]


def test_padding_touches_no_live_block(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory, num_blocks=8)
    with_graphs(executor, SIZES[-1:])
    driver = Driver(executor)
    driver.add(random_prompts([20], VOCAB_SIZE)[0], SamplingParams(max_tokens=2, temperature=0.0))
    driver.step()
    executor._cache.tensors[0][executor.num_blocks] = 0  # the recording has padded too
    before = executor._cache.tensors[0].clone()
    driver.step()
    changed = (executor._cache.tensors[0] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted([driver.sequences[0].blocks[1], executor.num_blocks])
    assert executor.cache.tensors[0].shape[0] == executor.num_blocks, "others do not see the padding block"
    executor.close()


def test_which_steps_are_replayed(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory)
    _, graphs, lines = with_graphs(executor, SIZES)

    def decode(seq_id: int) -> SequenceChunk:
        return SequenceChunk(seq_id, 9, 1, num_samples=1)

    choose = GraphSizes(graphs.sizes).choose
    found = [choose(tuple(map(decode, range(count)))) for count in range(8)]
    assert found == [None, *(SIZES[at] for at in (0, 1, 2, 2, 3, 3)), None]
    assert choose((decode(0), SequenceChunk(1, 0, 5, num_samples=1))) is None
    assert choose((decode(0), SequenceChunk(1, 0, 1))) is None  # one token in the middle of a prompt
    assert choose((decode(0), SequenceChunk(1, 9, 1, num_samples=2))) is None
    assert lines[-1].startswith("4 decode graphs up to 6 sequences")
    executor.close()


def test_no_room_leaves_the_largest(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory)
    _, graphs, lines = with_graphs(executor, SIZES, room=2)
    assert GraphSizes(graphs.sizes).choose((SequenceChunk(0, 9, 1, num_samples=1),)) == SIZES[2]
    assert lines == [lines[0], lines[1]]
    assert "fewer than 4" in lines[0]
    executor.close()


def test_bucket_sizes() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    assert bucket_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert bucket_sizes(256)[-3:] == [224, 240, 256]


def test_host_buffer_on_cpu_copies_nothing_but_what_is_first() -> None:
    host_buffer = HostBuffer(torch.device("cpu"), 1 << 10)
    host_buffer.begin()
    fields = np.arange(10).reshape(5, 2)
    assert host_buffer.move_first(fields).data_ptr() == host_buffer.first(5, 2).data_ptr()
    assert torch.equal(host_buffer.first(5, 2), torch.arange(10).view(5, 2))
    array = np.array([1.5, 2.5], np.float32)
    assert host_buffer.move(array).data_ptr() == array.ctypes.data


def test_host_buffer_holds_a_step_of_as_many_sequences_as_there_may_be(
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
    starts = tuple(SequenceStart(i, (9,) * 272, 272, tuple(range(17)), params, i) for i in range(24))
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
