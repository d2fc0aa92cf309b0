"""Whole steps as graphs, beside the same steps run as they are. Here a graph is called, not replayed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, decode_sizes, step_sizes
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.draw_places import DrawVariant
from pd_cluster.worker.sampler import Sampled, sample
from pd_kernels.backends import TORCH, Kernels
from pd_kernels.values import StepSize
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.repeated_graphs import Repeater, near_sizes, reference_attentions, step_graphs, with_graphs
from tests.worker.tables import table
from tests.worker.test_few_rows import FEW_ROWS

if TYPE_CHECKING:
    from pathlib import Path

DECODES, SIZES = decode_sizes(6), near_sizes(28, 6)
LENGTHS = (5, 16, 40, 31, 64, 1, 2)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_replayed_decodes_sample_the_same(models: ModelStore, name: str) -> None:
    wanted = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=14, temperature=0.9, top_k=30, logprobs=1),
        SamplingParams(max_tokens=12, temperature=0.0),
        SamplingParams(max_tokens=7, frequency_penalty=0.8),
        SamplingParams(max_tokens=18, temperature=0.0),
    ]
    outputs, replayed = [], list[StepSize]()
    for is_padded in (False, True):
        executor = make_executor(models.get(name).directory)
        if is_padded:
            replayed = with_graphs(executor, DECODES).replayed
        driver = Driver(executor)
        for seed, (prompt, params) in enumerate(
            zip(random_prompts((5, 16, 40, 31, 64), VOCAB_SIZE), wanted, strict=True)
        ):
            driver.add(prompt, params, seed)
        outputs.append(driver.run())
        executor.close()
    assert outputs[0] == outputs[1]
    assert {size.num_seqs for size in replayed} == {6, 4, 2, 1}  # five, then fewer and fewer


def test_graphs_draw_whatever_they_can(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that draw beside greedy ones and padding. A row with a limit leads to a second graph.

    A list of biases that is too long for a graph leads to launches.
    """
    outputs: list[object] = []
    long_list = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(range(VOCAB_SIZE), 1.0), stop_token_ids=(9,))
    monkeypatch.setattr("pd_cluster.worker.logits_stages.token_lists.LONG_LIST", VOCAB_SIZE - 1)
    for is_replayed in (False, True):
        executor, calls = make_executor(models.get("qwen3").directory), list[int]()

        def counted(logits: torch.Tensor, *rest: Any, calls: list[int] = calls) -> Sampled:
            calls.append(len(logits))
            return sample(logits, *rest)

        driver = Driver(executor)
        for seed, prompt in enumerate(random_prompts((5, 16, 40), VOCAB_SIZE)):
            driver.add(prompt, SamplingParams(max_tokens=9, temperature=0.6 * seed), seed)
        driver.step()
        drawn = list[DrawVariant]()
        if is_replayed:
            drawn = with_graphs(executor, DECODES).drawn
            monkeypatch.setattr("pd_cluster.worker.sampler.sample", counted)
        for _ in range(3):
            driver.step()
        driver.add(random_prompts([9], VOCAB_SIZE)[0], SamplingParams(max_tokens=2, top_k=5), 7)
        driver.step()
        driver.step()
        assert calls == [4] * is_replayed, "its prompt, which no graph has room for"
        assert drawn == [DrawVariant()] * is_replayed
        driver.add(random_prompts([9], VOCAB_SIZE)[0], long_list, 7)
        outputs.append(driver.run())
        assert calls == [4, 4, 4, 4] * is_replayed, "its prompt and two tokens"
        assert drawn == [DrawVariant()] * is_replayed
        executor.close()
    assert outputs[0] == outputs[1]


def serve(executor: DeviceExecutor, budget: int) -> list[list[int]]:
    driver = Driver(executor, budget=budget)
    for seed, prompt in enumerate(random_prompts(LENGTHS, VOCAB_SIZE)):
        logprobs = 1 if seed > 4 else None  # before those come, graphs draw by themselves
        driver.add(prompt, SamplingParams(max_tokens=6 + seed, temperature=0.7 * (seed % 2), logprobs=logprobs), seed)
    outputs = driver.run()
    executor.close()
    return outputs


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("mistral-window", TORCH), ("qwen2", TORCH), ("qwen3", FEW_ROWS), ("qwen3-some-windows", FEW_ROWS),
        pytest.param("qwen3", TORCH, marks=pytest.mark.slow),
        pytest.param("qwen3-some-windows", TORCH, marks=pytest.mark.slow),
        pytest.param("mistral-window", FEW_ROWS, marks=pytest.mark.slow),
        pytest.param("qwen2", FEW_ROWS, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "few-rows" if value is FEW_ROWS else "usual",
)  # fmt: skip
def test_replayed_steps_sample_the_same(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, name: str, kernels: Kernels
) -> None:
    """Prompts in chunks, decodes between them, and steps larger than the largest size."""
    monkeypatch.setattr("pd_cluster.worker.device_plan.select_kernels", lambda device: kernels)
    directory = models.get(name).directory
    replayed: list[StepSize] = []
    for budget in (24, 40):
        executor = make_executor(directory)
        noted = with_graphs(executor, SIZES).replayed
        assert serve(executor, budget) == serve(make_executor(directory), budget)
        replayed += noted
    assert {(size.num_tokens, size.has_decodes) for size in replayed} >= {(16, True), (28, True)}


def test_prompts_alone_have_sizes_of_their_own(models: ModelStore) -> None:
    executor, plain = (make_executor(models.get("qwen3").directory) for _ in range(2))
    replayed = with_graphs(executor, SIZES).replayed
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
        replayed = with_graphs(executor, SIZES).replayed if is_replayed else []
        starts = (
            SequenceStart(0, tuple(first), 20, table((0, 1)), GREEDY, 0),
            SequenceStart(1, tuple(second), 50, table((2, 3, 4, 5)), GREEDY, 0),
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


@pytest.mark.parametrize(("num_steps_before", "size"), [(0, StepSize(28, 6, 6, has_decodes=False)), (1, DECODES[-1])])
def test_padding_touches_no_live_block(models: ModelStore, num_steps_before: int, size: StepSize) -> None:
    executor = make_executor(models.get("qwen3").directory, num_blocks=8)
    repeated = with_graphs(executor, [DECODES[-1], *SIZES])
    driver = Driver(executor)
    driver.add(random_prompts([20], VOCAB_SIZE)[0], GREEDY)
    for _ in range(num_steps_before):
        driver.step()
    executor._cache.tensors[0][executor.slabs.num_blocks(0)] = 0  # the recording has padded too
    before = executor._cache.tensors[0].clone()
    driver.step()
    changed = (executor._cache.tensors[0] != before).flatten(1).any(1).nonzero()[:, 0].tolist()
    blocks = driver.sequences[0].blocks[num_steps_before:]
    assert changed == sorted([*blocks, executor.slabs.num_blocks(0)])
    assert repeated.replayed[-1] == size
    assert executor.cache.tensors[0].shape[0] == executor.slabs.num_blocks(0), "others do not see the padding block"
    executor.close()


def test_no_room_leaves_the_largest(models: ModelStore) -> None:
    """Decodes alone are captured first."""
    executor = make_executor(models.get("qwen3").directory)
    decode, chunk = SequenceChunk(0, 9, 1, num_samples=1), SequenceChunk(0, 0, 3)
    prompts, beside_decodes = (StepSize(28, 6, 6, has_decodes) for has_decodes in (False, True))
    for sizes, room, serving in (
        (DECODES, 2, {decode: DECODES[2], chunk: None}),
        (SIZES, 2, {decode: beside_decodes, chunk: prompts}),
        (SIZES + DECODES, 3, {decode: DECODES[1], chunk: None}),
        (SIZES + DECODES, 5, {decode: DECODES[0], chunk: prompts}),
    ):
        repeated = with_graphs(executor, sizes, room)
        assert {one: GraphSizes(repeated.graphs.sizes).choose((one,)) for one in serving} == serving
        assert repeated.lines[0] == f"no memory for {len(sizes) - room} of {len(sizes)} graphs of steps"
        assert len(repeated.lines) == 2
    assert repeated.lines[1].startswith("4 graphs of up to 6 decodes and 1 of steps with prompts, up to 28 tokens, in")
    executor.close()


def test_only_graphs_of_decodes_keep_logits_of_their_own(models: ModelStore) -> None:
    """A step of decodes copies no logits; graphs of steps with prompts are too many to keep some each."""
    executor = make_executor(models.get("qwen3").directory)
    graphs = with_graphs(executor, DECODES + SIZES).graphs
    places = {size: graph.outputs.logits.data_ptr() for size, graph in graphs._graphs.items()}
    assert len({places[size] for size in DECODES}) == len(DECODES)
    assert len({places[size] for size in SIZES} - {places[size] for size in DECODES}) == 1
    executor.close()


def test_far_sizes_are_captured_where_they_differ_in_every_group(models: ModelStore) -> None:
    executor = make_executor(models.get("qwen3-some-windows").directory)
    sizes = step_sizes(16, 4)
    assert {size.is_far for size in sizes} == {False, True}
    lines = list[str]()
    for differ, count in (((True, True), 4), ((True, False), 2), ((False, True), 2), ((False, False), 2)):
        groups = zip(reference_attentions(executor), differ, strict=True)
        steps = step_graphs(executor, [replace(attention, differs=differs) for attention, differs in groups])
        steps.capture(sizes, Repeater(100), lines.append)
        assert len(steps.sizes) == count
        assert f" {count} of steps with prompts" in lines[-1]
    executor.close()


def cuda_executor(directory: Path, max_graph_tokens: int, **options: Any) -> DeviceExecutor:
    """`options` go to ModelConfig."""
    config = NodeConfig(
        model=ModelConfig(model=str(directory), device="cuda", dtype="bfloat16", max_model_len=512, **options),
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
            SequenceStart(i, tuple(prompt), len(prompt), table((2 * i, 2 * i + 1)), GREEDY, i)
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
