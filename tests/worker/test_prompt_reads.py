"""Every family tells of a prompt what transformers computes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.worker.conftest import VOCAB_SIZE, ModelStore
from tests.worker.driver import make_executor, random_prompts
from tests.worker.reads import check_read, read_prompt

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "name", ["llama-mha-linear-rope-tied", "qwen3-some-windows", "qwen3-experts", "gemma3", "gpt-oss", "moonlight"]
)
def test_reads_equal_transformers(models: ModelStore, name: str) -> None:
    saved = models.get(name)
    executor = make_executor(saved.directory)
    for prompt in random_prompts((1, 2, 24, 70), VOCAB_SIZE):
        with torch.inference_mode():
            found = saved.model(torch.tensor([prompt]), output_hidden_states=True)
        check_read(*read_prompt(executor, prompt), prompt, found.logits[0], found.hidden_states[-1][0, -1])
    executor.close()


@pytest.mark.long
def test_long_prompts_leave_memory_where_it_was(demo_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,100 tokens in steps of 512: no product of the head has more rows than the largest step samples from."""
    executor = make_executor(demo_directory, num_blocks=80)
    rows: list[int] = []
    logits = executor._weights.model.logits

    def note_rows(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(executor._weights.model, "logits", note_rows)
    (prompt,) = random_prompts([1100], 3000)
    entries, _ = read_prompt(executor, prompt, chunk=511)
    executor.close()
    assert len(entries) == 1099
    assert max(rows) <= 32, "16 sequences may sample twice as many rows in a step (SAMPLES_PER_SEQ)"
