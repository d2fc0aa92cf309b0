"""Tables that begin at the first block that a group reads, in memory where all other blocks are NaN.

The logits equal those of tables that have the whole sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes
from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import DEAD, Driver, make_executor, random_prompts
from tests.worker.repeated_graphs import near_sizes, with_graphs

if TYPE_CHECKING:
    from pd_cluster.worker.device_executor import DeviceExecutor
from tests.worker.driver import Generation

WINDOWED = ["gemma3", "qwen2-some-windows", "mistral-window", "gpt-oss"]  # one with no layer of the other kind
LENGTHS = [120, 1, 40, 70, 16, 51]


class Logits:
    """The logits of all samples, in the order of the steps."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self.rows: list[torch.Tensor] = []
        executor.watch_logits(lambda logits: self.rows.append(logits.clone()))


def serve(executor: DeviceExecutor, budget: int, frees: bool) -> tuple[list[torch.Tensor], Driver]:
    """Prompts in chunks beside decodes; some come late, and continue what another one has cached."""
    executor.clear()
    logits, driver = Logits(executor), Driver(executor, budget, frees=frees)
    for prompt in random_prompts(LENGTHS[:3], VOCAB_SIZE):
        driver.add(prompt, SamplingParams(max_tokens=20, temperature=0.0))
    first = driver.sequences[0]
    while len(first.tokens) < 5 or first.computed % driver.block_size:
        driver.step()
    for prompt in random_prompts(LENGTHS[3:], VOCAB_SIZE, seed=1):
        driver.add(prompt, SamplingParams(max_tokens=8, temperature=0.0))
    driver.add(
        [*first.all_ids[: first.computed], 5, 9, 11], SamplingParams(max_tokens=5, temperature=0.0), prefix_of=first
    )
    driver.run()
    return logits.rows, driver


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "budget"),
    [
        ("gemma3", "auto", 23), ("gemma3", "fp8", 512),
        pytest.param("qwen2-some-windows", "auto", 23, marks=pytest.mark.slow),
        ("mistral-window", "auto", 512), ("mistral-window", "fp8", 23), ("qwen3", "auto", 512),
        ("gpt-oss", "auto", 23), pytest.param("gpt-oss-mxfp4", "fp8", 512, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_dead_blocks_are_not_read(models: ModelStore, name: str, kv_cache_dtype: str, budget: int) -> None:
    """Chunks that begin in the middle, decodes, both in a step, cache hits, and blocks that change their group.

    Both kinds of groups, alone and beside each other, have chunks and whole prompts, and caches of both dtypes.
    """
    executor = make_executor(models.get(name).directory, num_blocks=60, kv_cache_dtype=kv_cache_dtype)
    expected, _ = serve(executor, budget, frees=False)
    found, driver = serve(executor, budget, frees=True)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert driver.num_freed_early == [0 if group.window == 0 else pytest.approx(30, abs=25) for group in driver.groups]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_block_that_is_read_is_missed(models: ModelStore, name: str) -> None:
    """The test above can fail: one block too many is NaN."""
    executor = make_executor(models.get(name).directory, num_blocks=60)
    logits, driver = Logits(executor), Driver(executor, frees=True)
    generation = driver.add(random_prompts([100], VOCAB_SIZE)[0], SamplingParams(max_tokens=3, temperature=0.0))
    driver.step()
    assert not logits.rows[-1].isnan().any()
    for group in range(len(driver.groups)):
        executor._cache.tensors[group][first_live(generation, group)] = torch.nan
    driver.step()
    assert logits.rows[-1].isnan().any()


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_captured_steps_read_live_blocks_only(models: ModelStore, name: str) -> None:
    """Replays begin blocks, and launched steps read them to their ends. So blocks are cleared before replays, too."""
    executor = make_executor(models.get(name).directory, num_blocks=60)
    repeated = with_graphs(executor, [*decode_sizes(8), *near_sizes(40, 8)])
    executor._runner.rows._mixes_dtypes = True
    expected, _ = serve(executor, 60, frees=False)
    num_replayed = len(repeated.replayed)
    found, _ = serve(executor, 60, frees=True)
    assert 0 < num_replayed < len(expected), "of both kinds"
    assert len(repeated.replayed) == 2 * num_replayed
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def first_live(generation: Generation, group: int) -> int:
    return next(block for block in generation.tables[group] if block != DEAD)
