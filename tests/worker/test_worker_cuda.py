"""The worker on a GPU against the worker on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, BlockCopies, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_kernels import sampling
from tests.shallow_model import shallow_model
from tests.worker.conftest import MODELS, VOCAB_SIZE, ModelStore
from tests.worker.driver import Driver, make_executor, poison, random_prompts
from tests.worker.test_side_copies import run_tier

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (1, 15, 16, 17, 70, 40)


def cuda_executor(model: Path | str, *, speculation: str = "none", **options: Any) -> DeviceExecutor:
    config = NodeConfig(
        model=ModelConfig(model=str(model), device="cuda", **{"dtype": "float32", **options}),
        cache=CacheConfig(num_blocks=256, block_size=16, swap_gb=0.001),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, speculation=speculation),
    )
    return DeviceExecutor.started(config, lambda _: None)


@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_tokens_equal_the_cpus(models: ModelStore, name: str) -> None:
    saved, outputs = models.get(name), []
    for executor in (make_executor(saved.directory), cuda_executor(saved.directory)):
        driver = Driver(executor, budget=23)
        for prompt in random_prompts(LENGTHS, VOCAB_SIZE):
            driver.add(prompt)
        outputs.append(driver.run())
    assert outputs[0] == outputs[1]


def test_steps_with_experts_are_captured(models: ModelStore) -> None:
    executors = [cuda_executor(models.get(name).directory) for name in ("mixtral", "mistral-window")]
    assert all(executor._graph_sizes.sizes for executor in executors)


def test_seeded_tokens_equal_the_cpus(models: ModelStore) -> None:
    directory, outputs = models.get("qwen3").directory, []
    wanted = [
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=12, temperature=1.3, top_k=30, frequency_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=12, top_p=0.7, repetition_penalty=1.2),
        SamplingParams(max_tokens=12, min_p=0.02, logit_bias={5: 3.0}, min_tokens=4),
    ]
    for executor in (make_executor(directory), cuda_executor(directory)):
        driver = Driver(executor)
        for seed, params in enumerate(wanted):
            driver.add(random_prompts([30], VOCAB_SIZE)[0], params, seed)
        outputs.append(driver.run())
    assert outputs[0] == outputs[1]


def test_blocks_that_were_saved_and_loaded_beside_steps_serve() -> None:
    """Those of the host that are not written are NaN."""
    executor = cuda_executor(shallow_model())
    host = executor._cache.host
    assert all(tensor.is_pinned() for tensor in host.tensors)
    for tensor in host.tensors:
        poison(tensor)
    assert run_tier(executor) == run_tier(make_executor(shallow_model()))
    executor.close()
    assert host.tensors == ()


def test_random_bits_equal_the_cpus() -> None:
    seeds = torch.tensor([0, 1, -5, 2**63 - 1, -(2**63)])
    positions, tokens = torch.tensor([0, 7, 100_000, 1, 2]), torch.arange(150_000, dtype=torch.int32)
    on_gpu = sampling.random_bits(seeds.cuda(), positions.cuda(), tokens.cuda())
    assert torch.equal(sampling.random_bits(seeds, positions, tokens), on_gpu.cpu())


def ids_in(executor: DeviceExecutor, slab: int) -> tuple[int, ...]:
    """A block of each group, in slabs that no other group uses. One group has one slab: there it is the block."""
    per_slab = executor.slabs.per_slab
    if len(per_slab) == 1:
        return (slab,)
    return tuple((slab + 10 * group) * count for group, count in enumerate(per_slab))


def tables(*blocks: tuple[int, ...]) -> tuple[NewBlocks, ...]:
    return tuple(NewBlocks(group, 0, ids) for group, ids in enumerate(zip(*blocks, strict=True)))


@pytest.mark.parametrize(("name", "num_groups"), [("llama", 1), ("gemma3", 2)])
def test_steps_launched_ahead_and_swaps(models: ModelStore, name: str, num_groups: int) -> None:
    """Swaps move the same blocks of every KV group. Under Gemma's windows the first tokens are out of sight."""
    executor = cuda_executor(models.get(name).directory)
    assert len(executor.cache.tensors) == num_groups
    params = SamplingParams(max_tokens=10, temperature=0.9, frequency_penalty=0.8)
    prompt = random_prompts([20], VOCAB_SIZE)[0]
    driver = Driver(executor)
    driver.add(prompt, params)
    expected = driver.run()[0]
    used, later = ([ids_in(executor, first) for first in slabs] for slabs in ((3, 4), (9, 8)))  # by block, then group
    start = SequenceStart(0, tuple(prompt), 20, tables(*used), params, 0)
    batches = [Batch(0, (start,), (SequenceChunk(0, 0, 20, num_samples=1),))]
    batches += [Batch(step, (), (SequenceChunk(0, 19 + step, 1, num_samples=1),)) for step in range(1, 6)]
    pending = [executor.launch(batch) for batch in batches]
    tokens = [step.result().samples[0][0].token_id for step in pending]
    assert tokens == expected[:6]
    held = [[tensor[ids[group]].clone() for ids in used] for group, tensor in enumerate(executor.cache.tensors)]
    out = tuple((group, ids[group], 1 - at) for group in range(num_groups) for at, ids in enumerate(used))
    executor.launch(Batch(6, departures=(0,), copies=BlockCopies(swap_out=out))).result()
    for tensor in executor.cache.tensors:
        tensor.fill_(torch.nan)
    back = SequenceStart(0, (*prompt, *tokens), 20, tables(*later), params, 0)
    chunk = SequenceChunk(0, 25, 1, num_samples=1)
    into = tuple((group, 1 - at, ids[group]) for group in range(num_groups) for at, ids in enumerate(later))
    samples = executor.launch(Batch(7, (back,), (chunk,), copies=BlockCopies(swap_in=into))).result().samples
    assert samples[0][0].token_id == expected[6]
    for group, tensor in enumerate(executor.cache.tensors):
        (first, second), blocks = (ids[group] for ids in later), held[group]
        assert torch.equal(tensor[first], blocks[0])
        assert torch.equal(tensor[second, ..., : 25 - 16, :], blocks[1][..., : 25 - 16, :]), "before the new token"
    executor.close()


@pytest.mark.parametrize("cache", [CacheConfig(gpu_memory_utilization=0.3), CacheConfig(gpu_share=0.3)])
def test_the_cache_takes_the_share_of_memory_that_is_asked_for(models: ModelStore, cache: CacheConfig) -> None:
    config = NodeConfig(model=ModelConfig(model=str(models.get("qwen3").directory), device="cuda"), cache=cache)
    executor = DeviceExecutor.started(config, lambda _: None)
    assert executor.block_size == 64
    limits = executor.config.scheduler
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 2048), "on a GPU of 80 GB or more"
    free, total = torch.cuda.mem_get_info()
    assert 0.25 < 1 - free / total < 0.31
    executor.close()
