"""bfloat16 logits beside transformers' in both precisions: on a GPU of an 8B model's shape, on a CPU of a tiny one's.

The reference is transformers' own model with the same random weights, computed in float32. The yardstick is how far
transformers in bfloat16 is from that: ours may be TIMES as far, as a root mean square over the vocabulary and at the
worst logit. Where the reference's best token leads by more than that allows for, ours is the same token.

Query weights are scaled so that attention looks at few tokens: plain random ones average over thousands, and the test
would miss a block that is absent. A test of the yardstick takes one away.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.models.registry import build_model
from pd_cluster.models.weights import fill_at_random
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_kernels.selection import select_kernels
from tests.worker.driver import Driver, Generation, random_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd_cluster.models.model import Model

logger = logging.getLogger(__name__)

TIMES = 2.0
NUM_TOKENS = 3  # generated after each prompt: the first by a prefill, the others by decodes
TINY = {**CONFIGS["8b"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
SEED = 5
SHARPNESS = 2.5  # standard deviation of attention's scores


@dataclass(frozen=True)
class Case:
    """What is compared, and how large."""

    config: dict[str, Any]
    device: str
    block_size: int
    lengths: tuple[int, ...]  # of prompts
    budgets: tuple[int, ...]  # tokens of a step: one that takes every prompt whole, ones that cut it


CASES = {
    "tiny": Case(TINY, "cpu", 16, (1, 15, 16, 17, 64, 65, 250), (512, 48)),
    "8b": Case(CONFIGS["8b"], "cuda", 64, (1, 15, 64, 65, 1000, 4096, 8000), (8192, 1536)),
}


@dataclass(frozen=True)
class Bench:
    """Our executor and both references, of the same weights."""

    case: Case
    executor: DeviceExecutor
    short: Any  # transformers, bfloat16
    exact: Any  # transformers, float32
    known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def references(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """transformers' logits in bfloat16 and in float32 of what follows the last ids: float32 [NUM_TOKENS, V]."""
        if tuple(ids) not in self.known:
            assert torch.get_float32_matmul_precision() == "highest", "TensorFloat-32 is no reference"
            self.known[tuple(ids)] = self._logits(self.short, ids), self._logits(self.exact, ids)
        return self.known[tuple(ids)]

    def _logits(self, model: Any, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            inputs = torch.tensor([ids], device=self.case.device)
            logits: torch.Tensor = model(inputs, use_cache=False, logits_to_keep=NUM_TOKENS).logits[0]
        return logits.float()


@pytest.fixture(
    scope="module",
    params=[
        "tiny",
        pytest.param(
            "8b",
            marks=[
                pytest.mark.gpu,
                pytest.mark.timeout(400),
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    case = CASES[request.param]
    if case.device == "cuda" and torch.cuda.get_device_properties(0).total_memory < 120e9:
        pytest.skip("the model and its references take 100 GB")
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(case.config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_cluster.worker.model_loading.fill_at_random", fill)
        executor = make_executor(case, directory)
    yield Bench(case, executor, *references(executor, case))
    executor.close()


def make_executor(case: Case, directory: Path) -> DeviceExecutor:
    longest = max(case.lengths) + NUM_TOKENS
    num_blocks = 2 * (longest // case.block_size + 2)  # of two sequences that share nothing
    config = NodeConfig(
        model=ModelConfig(
            model=str(directory), load_format="dummy", dtype="bfloat16", device=case.device, max_model_len=longest,
            seed=SEED,
        ),
        cache=CacheConfig(num_blocks=num_blocks, block_size=case.block_size),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=max(case.budgets)),
    )  # fmt: skip
    return DeviceExecutor.started(config, lambda _: None)


def fill(model: Model, seed: int) -> None:
    fill_at_random(model, seed)
    plain = model.slots["model.layers.0.self_attn.q_proj.weight"].tensor.float().var().item() * model.spec.hidden_size
    for name, slot in model.slots.items():
        if name.endswith("q_proj.weight"):
            slot.tensor.mul_(SHARPNESS / plain)


def references(executor: DeviceExecutor, case: Case) -> tuple[Any, Any]:
    """transformers' model in bfloat16 and in float32, with the weights that the executor drew."""
    from transformers import LlamaConfig, LlamaForCausalLM

    device = torch.device(case.device)
    twin = build_model(executor.model.spec, select_kernels(device), 16, torch.bfloat16, device)
    fill(twin, SEED)
    config, models = LlamaConfig(**case.config), []
    for dtype in (torch.bfloat16, torch.float32):
        with device:
            model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
        model.load_state_dict({name: slot.tensor for name, slot in twin.slots.items()})
        models.append(model)
    return models[0], models[1]


def ours(
    executor: DeviceExecutor, budget: int, prompts: list[list[int]], *, twice: bool
) -> list[tuple[list[int], torch.Tensor]]:
    """Each prompt with what we generate, but the last token, and the logits float32 [NUM_TOKENS, V] that chose it.

    `twice`: of a second sequence, which finds the blocks of a first one with the same prompt.
    """
    found, params = [], SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    for prompt in prompts:
        driver = Driver(executor, budget)
        generation = driver.add(prompt, params)
        if twice:
            driver.run()
            generation = driver.add(prompt, params, prefix_of=generation)
            assert generation.computed == (len(prompt) - 1) // executor.block_size * executor.block_size
        logits = follow(executor, driver, generation)
        found.append((generation.all_ids[:-1], logits))
    return found


def follow(executor: DeviceExecutor, driver: Driver, generation: Generation) -> torch.Tensor:
    """Run to the end. Logits float32 [NUM_TOKENS, V]."""
    seen: list[torch.Tensor] = []
    executor.watch_logits(lambda logits: seen.append(logits.float().clone()))
    driver.run()
    executor.watch_logits(None)
    logits = torch.cat(seen)
    assert logits.argmax(-1).tolist() == [token.token_id for token in generation.tokens]
    return logits


def distance(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root mean square over everything, and the worst logit."""
    difference = (found - exact).abs()
    return difference.square().mean().sqrt().item(), difference.max().item()


@pytest.mark.parametrize("way", ["whole", "chunked", "cached prefix"])
def test_bfloat16_logits_are_as_near_to_float32_as_transformers(bench: Bench, way: str) -> None:
    case = bench.case
    budget = case.budgets[1] if way == "chunked" else case.budgets[0]
    prompts = random_prompts(case.lengths, case.config["vocab_size"])
    for ids, logits in ours(bench.executor, budget, prompts, twice=way == "cached prefix"):
        short, exact = bench.references(ids)
        (mean, worst), (mean_limit, worst_limit) = distance(logits, exact), distance(short, exact)
        size = exact.square().mean().sqrt().item()
        report = (
            f"{way}, prompt of {len(ids) - NUM_TOKENS + 1}: rms {mean:.2e} (transformers {mean_limit:.2e}, "
            f"of {size:.2e}), worst {worst:.2e} ({worst_limit:.2e})"
        )
        logger.info(report)
        assert mean <= TIMES * mean_limit, report
        assert worst <= TIMES * worst_limit, report
        best = exact.topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > 2 * TIMES * worst_limit
        assert torch.equal(logits.argmax(-1)[clear], best.indices[clear, 0]), report


def test_a_block_that_is_missing_is_farther_away(bench: Bench) -> None:
    """So the comparison above would see it."""
    case, executor = bench.case, bench.executor
    prompt = random_prompts(case.lengths, case.config["vocab_size"])[-3]  # of 4 or 15 whole blocks
    driver, params = Driver(executor, case.budgets[0]), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    first = driver.add(prompt, params)
    driver.run()
    executor.cache.tensors[0][first.blocks[1]] = 0
    second = driver.add(prompt, params, prefix_of=first)
    logits = follow(executor, driver, second)
    short, exact = bench.references(second.all_ids[:-1])
    assert distance(logits, exact)[0] > TIMES * distance(short, exact)[0]
