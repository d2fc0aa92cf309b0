"""Reads one prompt in chunks with a worker alone, and compares what it tells with another source."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pd_cluster.protocol.prompt_outputs import PromptOutputs, PromptPart, PromptToken
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from tests.worker.driver import GREEDY, SlabPools

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pd_cluster.worker.executor import Executor

ASKED = PromptOutputs(logprobs=2, pooled=True, logits_of=(4, 9))


def read_prompt(executor: Executor, prompt: Sequence[int], chunk: int = 23) -> tuple[list[PromptToken], PromptPart]:
    """(all entries, what the last step told). Another sequence decodes beside it, and samples in each step."""
    entries: list[PromptToken] = []
    num_blocks = -(-len(prompt) // executor.block_size)
    pools = SlabPools(executor.slabs, 0)
    starts: tuple[SequenceStart, ...] = (
        SequenceStart(8, tuple(prompt), len(prompt), pools.tables(num_blocks), GREEDY, 0, outputs=ASKED),
        SequenceStart(9, (5,), 1, pools.tables(3), GREEDY, 0),
    )
    last = PromptPart()
    for step, first in enumerate(range(0, len(prompt), chunk)):
        one = SequenceChunk(8, first, min(chunk, len(prompt) - first), reads=True)
        result = executor.launch(Batch(step, starts, (SequenceChunk(9, step, 1, num_samples=1), one))).result()
        last, starts = result.prompts[8], ()
        assert last.start == first + 1
        assert set(result.samples) == {9}
        entries += last.entries
    executor.launch(Batch(99, departures=(8, 9))).result()
    return entries, last


def check_read(
    entries: Sequence[PromptToken], last: PromptPart, prompt: Sequence[int], logits: torch.Tensor, hidden: torch.Tensor
) -> None:
    """`logits` [T, V] and the last `hidden` state after the norm [hidden_size], of another source."""
    rows = logits.float().log_softmax(-1)
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    own = [float(rows[position, token_id]) for position, token_id in enumerate(prompt[1:])]
    assert [entry.logprob for entry in entries] == pytest.approx(own, abs=2e-4)
    for row, entry in zip(rows, entries, strict=False):
        assert [one.logprob for one in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=2e-4)
    assert last.logits == pytest.approx([float(logits[-1, token_id]) for token_id in ASKED.logits_of], abs=2e-3)
    assert np.frombuffer(last.pooled, "<f4") == pytest.approx(hidden.float().numpy(), abs=2e-3)
