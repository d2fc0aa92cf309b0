"""Whole steps with prompts as graphs, beside the same steps run as they are. Here a graph is called, not replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.captured_steps import ReplayOutputs
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, step_sizes, token_buckets
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_kernels.backends import TORCH, Kernels
from pd_kernels.values import StepSize
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts, use_graphs
from tests.worker.reference_attention import reference_attentions
from tests.worker.test_decode_graphs import Repeater
from tests.worker.test_few_rows import FEW_ROWS

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.worker.input_batch import ReplayInputs

SIZES = step_sizes(28, 6, with_far=False)
LENGTHS = (5, 16, 40, 31, 64, 1, 2)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def with_steps(
    executor: DeviceExecutor, sizes: list[StepSize], room: int = 100
) -> tuple[list[StepSize], StepGraphs, list[str]]:
    """Give the executor's runner graphs that are none. -> the sizes replayed, the graphs, what they told."""
    runner, lines, replayed = executor._runner, list[str](), list[StepSize]()
    attentions = reference_attentions(executor)
    steps = StepGraphs(executor._model, executor._cache, runner.rows, runner.host_buffer, executor._kernels, attentions)
    steps.capture(sizes, Repeater(room), lines.append)
    use_graphs(executor, steps)
    replay = steps.replay

    def noted(inputs: ReplayInputs, size: StepSize) -> ReplayOutputs:
        replayed.append(size)
        outputs = replay(inputs, size)
        return ReplayOutputs(outputs.logits, outputs.token_ids.clone())  # as the copy to the host does on a device

    steps.replay = noted  # type: ignore[method-assign]
    return replayed, steps, lines


def serve(executor: DeviceExecutor, budget: int) -> list[list[int]]:
    driver = Driver(executor, budget=budget)
    for seed, prompt in enumerate(random_prompts(LENGTHS, VOCAB_SIZE)):
        logprobs = 1 if seed > 4 else None  # before those come, graphs draw by themselves
        driver.add(prompt, SamplingParams(max_tokens=6 + seed, temperature=0.7 * (seed % 2), logprobs=logprobs), seed)
    outputs = driver.run()
    executor.close()
    return outputs


@pytest.mark.parametrize("kernels", [TORCH, FEW_ROWS], ids=["usual", "few-rows"])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "qwen2", "qwen3-some-windows"])
def test_replayed_steps_sample_the_same(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str, kernels: Kernels
) -> None:
    """Prompts in chunks, decodes between them, and steps larger than the largest size."""
    monkeypatch.setattr("pd_cluster.worker.device_executor.select_kernels", lambda device: kernels)
    directory = models.get(name).directory
    replayed: list[StepSize] = []
    for budget in (24, 40):
        executor = make_executor(directory)
        noted = with_steps(executor, SIZES)[0]
        assert serve(executor, budget) == serve(make_executor(directory), budget)
        replayed += noted
    assert {(size.num_tokens, size.has_decodes) for size in replayed} >= {(16, True), (28, True)}


def test_prompts_alone_have_sizes_of_their_own(models: ModelStore) -> None:
    executor, plain = (make_executor(models.get("qwen3").directory) for _ in range(2))
    replayed, _, _ = with_steps(executor, SIZES)
    outputs = []
    for worker in (executor, plain):
        driver = Driver(worker, budget=20)
        for prompt in random_prompts((35, 10), VOCAB_SIZE):
            driver.add(prompt, GREEDY)
        outputs.append(driver.run())
        worker.close()
    assert outputs[0] == outputs[1]
    assert replayed[:2] == [StepSize(28, 6, 6, has_decodes=False)] * 2, "twenty tokens, then fifteen and five"
    assert all(size.has_decodes for size in replayed[2:])


def test_steps_launched_ahead_take_tokens_that_are_on_the_device_only(models: ModelStore) -> None:
    first, second = random_prompts([20, 50], VOCAB_SIZE)
    expected = []
    for is_replayed in (False, True):
        executor = make_executor(models.get("llama").directory)
        replayed = with_steps(executor, SIZES)[0] if is_replayed else []
        starts = (
            SequenceStart(0, tuple(first), 20, (0, 1), GREEDY, 0),
            SequenceStart(1, tuple(second), 50, (2, 3, 4, 5), GREEDY, 0),
        )
        pending = executor.launch(Batch(0, starts[:1], (SequenceChunk(0, 0, 20, num_samples=1),)))
        tokens: list[list[int]] = [[], []]
        for step, (begin, size) in enumerate(((0, 25), (25, 24), (49, 1), (50, 1)), 1):
            chunk = SequenceChunk(1, begin, size, num_samples=int(begin + size >= 50))
            decode = SequenceChunk(0, 19 + step, 1, num_samples=1)
            following = executor.launch(Batch(step, starts[1:] if step == 1 else (), (decode, chunk)))
            for seq_id, sampled in pending.result().samples.items():
                tokens[seq_id] += [token.token_id for token in sampled]
            pending = following
        assert len(replayed) == 5 * is_replayed
        assert pending.result().samples.keys() == {0, 1}
        expected.append(tokens)
        executor.close()
    assert expected[0] == expected[1]


def test_which_size_serves_a_step(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory)
    sizes = [
        StepSize(16, 4, 4, has_decodes=False), StepSize(16, 8, 2, has_decodes=True),
        StepSize(32, 4, 4, has_decodes=False), StepSize(32, 4, 4, has_decodes=False, is_far=True),
        StepSize(32, 8, 2, has_decodes=True), StepSize(32, 20, 2, has_decodes=True),
    ]  # fmt: skip
    _, steps, lines = with_steps(executor, sizes)
    assert lines[-1].startswith("6 graphs of steps with prompts, up to 32 tokens")

    def size_of(*chunks: tuple[int, int], samples: int = 1) -> StepSize | None:
        return GraphSizes(steps.sizes).choose(
            tuple(SequenceChunk(i, begin, count, num_samples=samples) for i, (begin, count) in enumerate(chunks))
        )

    decode = (9, 1)
    assert size_of((0, 16)) == sizes[0]
    assert size_of(decode, (0, 15)) == sizes[1]
    assert size_of((0, 17)) == sizes[2]
    assert size_of((0, 30), decode) == sizes[2], "a token behind a chunk attends as one"
    assert size_of((2000, 17)) == sizes[3]
    assert size_of((2000, 16)) == sizes[0], "fewer tokens before keys"
    assert size_of((2000, 1), (0, 20)) == sizes[4]
    assert size_of(*[decode] * 9, (0, 2)) == sizes[5]
    assert size_of(decode, *[(0, 2)] * 3) is None, "chunks"
    assert size_of(*[decode] * 21) is None, "sequences"
    assert size_of((0, 33)) is None, "tokens"
    assert size_of((0, 16), samples=2) is None
    executor.close()


def test_no_size_serves_steps_that_are_far_smaller(models: ModelStore) -> None:
    """Without memory for smaller sizes, or of more chunks than a step of so few tokens has room for."""
    executor = make_executor(models.get("qwen3").directory)
    largest = StepSize(300, 6, 6, has_decodes=True)
    _, steps, _ = with_steps(executor, [largest, StepSize(16, 4, 4, has_decodes=False)])
    assert GraphSizes(steps.sizes).choose((SequenceChunk(0, 0, 45),)) == largest
    assert GraphSizes(steps.sizes).choose((SequenceChunk(0, 0, 44),)) is None
    assert GraphSizes(steps.sizes).choose(tuple(SequenceChunk(i, 0, 2) for i in range(5))) is None
    executor.close()


def test_padding_touches_no_live_block(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory, num_blocks=8)
    replayed, _, _ = with_steps(executor, SIZES)
    driver = Driver(executor)
    driver.add(random_prompts([20], VOCAB_SIZE)[0], GREEDY)
    executor._cache.tensors[0][executor.num_blocks] = 0  # the recording has padded too
    before = executor._cache.tensors[0].clone()
    driver.step()
    changed = (executor._cache.tensors[0] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    assert changed == sorted([*driver.sequences[0].blocks, executor.num_blocks])
    assert replayed == [StepSize(28, 6, 6, has_decodes=False)]
    executor.close()


def test_no_room_leaves_the_largest(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory)
    _, steps, lines = with_steps(executor, SIZES, room=2)
    assert GraphSizes(steps.sizes).choose((SequenceChunk(0, 0, 3),)) == StepSize(28, 6, 6, has_decodes=False)
    assert lines == [f"no memory for {len(SIZES) - 2} graphs of smaller steps with prompts", lines[1]]
    executor.close()


def test_far_sizes_are_captured_where_they_differ(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3").directory)
    sizes = step_sizes(16, 4, with_far=True)
    assert {size.is_far for size in sizes} == {False, True}
    runner, lines = executor._runner, list[str]()
    for differs, count in ((True, 4), (False, 2)):
        attentions = reference_attentions(executor, differs=differs)
        steps = StepGraphs(
            executor._model, executor._cache, runner.rows, runner.host_buffer, executor._kernels, attentions
        )
        steps.capture(sizes, Repeater(100), lines.append)
        assert lines[-1].startswith(f"{count} graphs")
    executor.close()


def test_token_buckets() -> None:
    assert token_buckets(16) == [16]
    assert token_buckets(700) == [16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 700]
    assert token_buckets(1400)[-4:] == [1024, 1152, 1280, 1400]


def test_step_sizes() -> None:
    assert step_sizes(32, 3, with_far=False) == [
        StepSize(16, 3, 3, has_decodes=False), StepSize(16, 3, 3, has_decodes=True),
        StepSize(32, 3, 3, has_decodes=False), StepSize(32, 3, 3, has_decodes=True),
    ]  # fmt: skip
    largest = [size for size in step_sizes(1024, 256, with_far=False) if size.num_tokens == 1024]
    assert largest == [
        StepSize(1024, 64, 64, has_decodes=False), StepSize(1024, 64, 64, has_decodes=True),
        StepSize(1024, 256, 64, has_decodes=True),
    ]  # fmt: skip
    sizes = [size for size in step_sizes(192, 256, with_far=True) if size.num_tokens == 192]
    assert {(size.num_chunks, size.is_far) for size in sizes} == {(12, False), (6, True)}
    assert all(size.num_chunks <= size.num_seqs <= size.num_tokens for size in step_sizes(1024, 256, with_far=True))


def cuda_executor(directory: Path, max_graph_tokens: int) -> DeviceExecutor:
    config = NodeConfig(
        model=ModelConfig(model=str(directory), device="cuda", dtype="bfloat16", max_model_len=512),
        cache=CacheConfig(num_blocks=170, block_size=64),
        scheduler=SchedulerConfig(
            max_num_seqs=100, max_num_batched_tokens=512, max_graph_tokens=max_graph_tokens, max_graph_batch=4
        ),
    )
    return DeviceExecutor.started(config, lambda _: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_decodes", [0, 3, 40, 80])
def test_logits_of_replayed_steps_on_a_gpu(models: ModelStore, num_decodes: int) -> None:
    """To bfloat16's rounding: other kernels multiply padded steps. Twice, for what a replay might leave behind."""
    logits: list[list[torch.Tensor]] = []
    for max_graph_tokens in (512, 0):
        executor, seen = cuda_executor(models.get("qwen3").directory, max_graph_tokens), list[torch.Tensor]()
        executor.watch_logits(lambda rows, seen=seen: seen.append(rows.double().cpu()))  # type: ignore[misc]
        lengths = [(length, 1) for length in range(2, 2 + num_decodes)] + [(0, 90), (70, 33), (5, 7)]
        prompts = random_prompts([begin + count for begin, count in lengths], VOCAB_SIZE)
        starts = tuple(
            SequenceStart(i, tuple(prompt), len(prompt), (2 * i, 2 * i + 1), GREEDY, i)
            for i, prompt in enumerate(prompts)
        )
        before = tuple(
            SequenceChunk(i, 0, begin) for i, (begin, _) in enumerate(lengths) if begin and i >= len(lengths) - 3
        )
        chunks = tuple(SequenceChunk(i, *length, num_samples=1) for i, length in enumerate(lengths))
        executor.launch(Batch(0, starts, before)).result()
        for step in (1, 2):
            executor.launch(Batch(step, (), chunks)).result()
            executor._runner.rows._num_tokens[:] -= 1  # as if nothing had been sampled
        assert (executor._graph_sizes.choose(chunks) is not None) == bool(max_graph_tokens)
        logits.append(seen)
        executor.close()
    for replayed, launched in zip(*logits, strict=True):
        assert (replayed - launched).norm() <= 5e-2 * launched.norm()
