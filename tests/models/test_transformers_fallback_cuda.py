"""transformers' modules over the paged cache on a GPU: its attention backends, its dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pd_cluster.protocol.sampling_params import SamplingParams
from tests.models.test_transformers_fallback import LENGTHS, VOCAB_SIZE, save_family
from tests.worker.driver import Driver, Generation, make_executor, random_prompts
from tests.worker.watched_executor import WatchedExecutor

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def served(directory: Path, dtype: str) -> tuple[list[Generation], list[torch.Tensor]]:
    """The generations of prompts in chunks of at most 23 tokens, and the logits of each."""
    executor = make_executor(directory, model_impl="transformers", device="cuda", dtype=dtype)
    watched = WatchedExecutor(executor)
    driver = Driver(watched, budget=23)  # type: ignore[arg-type]
    for prompt in random_prompts(LENGTHS, VOCAB_SIZE):
        driver.add(prompt, SamplingParams(max_tokens=8, temperature=0.0))
    driver.run()
    executor.close()
    return driver.sequences, [torch.stack(watched.logits[index]).float() for index in range(len(LENGTHS))]


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "deepseek_v3", "olmo3", "qwen3_moe", "phi3-longrope"])
def test_logits_equal_transformers_on_cpu(tmp_path: Path, name: str) -> None:
    """In float32. Kernels may multiply in TF32, which rounds by 1e-3."""
    model = save_family(name, tmp_path)
    for generation, found in zip(*served(tmp_path, "float32"), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([generation.all_ids]), use_cache=False).logits[0]
        expected = logits[len(generation.prompt) - 1 : -1]
        assert (found.cpu() - expected).abs().max() < 2e-2 * expected.std()


@pytest.mark.parametrize("name", ["gemma2", "olmo3", "gpt2"])
def test_bfloat16_is_as_exact_as_under_transformers(tmp_path: Path, name: str) -> None:
    model = save_family(name, tmp_path)
    ours, theirs = 0.0, 0.0
    generations, found = served(tmp_path, "bfloat16")
    rounded = save_family(name, tmp_path).to("cuda", torch.bfloat16)
    for generation, logits in zip(generations, found, strict=True):
        ids, rows = torch.tensor([generation.all_ids]), slice(len(generation.prompt) - 1, -1)
        with torch.inference_mode():
            exact = model(ids, use_cache=False).logits[0, rows]
            other = rounded(ids.cuda(), use_cache=False).logits[0, rows].float().cpu()
        ours += (logits.cpu() - exact).square().sum().item()
        theirs += (other - exact).square().sum().item()
    assert ours < 1.5 * theirs
