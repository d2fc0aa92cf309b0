"""The demo model in float32 gives transformers' tokens on the same device: a GPU where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from pd_cluster.protocol.sampling_params import SamplingParams
from tests.worker.conftest import SavedModel
from tests.worker.driver import Driver, make_executor, random_prompts

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_TOKENS = 16
LENGTHS = (1, 15, 64, 65, 300) if DEVICE == "cpu" else (1, 15, 64, 65, 300, 1000, 3900)
pytestmark = [pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.slow]  # on a CPU test_model_parity has the model


@pytest.fixture(scope="module")
def saved(demo_directory: Path) -> SavedModel:
    assert torch.get_float32_matmul_precision() == "highest", "TensorFloat-32 is no reference"
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_directory, dtype=torch.float32)
    return SavedModel(demo_directory, model.to(DEVICE).eval())


@pytest.mark.parametrize(("block_size", "budget"), [(16, 48), (64, 512)])
def test_greedy_tokens_equal_transformers(saved: SavedModel, block_size: int, budget: int) -> None:
    """All prompts at once, whole or in chunks beside decodes; then all again, out of the first ones' blocks."""
    prompts = random_prompts(LENGTHS, 3000)
    expected = [saved.generate(prompt, NUM_TOKENS) for prompt in prompts]
    executor = make_executor("", device=DEVICE, block_size=block_size, num_blocks=20_000 // block_size)
    driver, params = Driver(executor, budget), SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    firsts = [driver.add(prompt, params) for prompt in prompts]
    assert driver.run() == expected
    seconds = [driver.add(first.prompt, params, prefix_of=first) for first in firsts]
    assert seconds[-1].computed >= LENGTHS[-1] - block_size
    assert driver.run() == expected * 2
    executor.close()
