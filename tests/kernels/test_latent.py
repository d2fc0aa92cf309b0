"""Latent attention beside its definition."""

from __future__ import annotations

import pytest
import torch

from pd_kernels.attention import AttentionShape
from pd_kernels.latent import ABSORBED_QUERIES, MOST_ROWS
from pd_kernels.latent_attention import LatentAttention
from pd_kernels.torch_latent import TorchLatent
from tests.kernels.latent_steps import DIMS, Chunk, LatentStep, attended, make_step

SHAPE = AttentionShape(3, 1, DIMS.width, 16, num_layers=3, dtype=torch.float64, latent=DIMS)
STEPS = {
    "decodes": [Chunk(40, 1), Chunk(0, 1), Chunk(15, 1), Chunk(16, 1), Chunk(700, 1)],
    "drafts": [Chunk(33, 1), Chunk(47, 4), Chunk(0, 3), Chunk(14, 1)],
    "prompts": [Chunk(0, 37), Chunk(0, 1), Chunk(0, 300)],
    "after a prefix": [Chunk(100, 21), Chunk(33, ABSORBED_QUERIES), Chunk(20, ABSORBED_QUERIES - 1), Chunk(16, 4)],
    "mixed": [Chunk(9, 1), Chunk(64, 1), Chunk(20, MOST_ROWS), Chunk(20, MOST_ROWS + 1), Chunk(5, 2)],
}


def run(step: LatentStep) -> torch.Tensor:
    ops = TorchLatent()
    plan = LatentAttention(SHAPE, ops).plan(step.packed)
    query = step.query.clone()
    own = ops.norm_rope_write(query, step.keys, step.new, step.cache)
    return plan.run(query, own, step.expand, step.cache, step.scale)


@pytest.mark.slow_cases
@pytest.mark.parametrize("chunks", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("block_size", [16, 64])
def test_each_kind_of_step_attends_as_defined(chunks: list[Chunk], block_size: int) -> None:
    step = make_step(chunks, block_size=block_size)
    torch.testing.assert_close(run(step), attended(step), rtol=1e-9, atol=1e-9)


def test_long_prefixes_are_expanded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_kernels.torch_latent.PREFIX_PIECE", 48)
    step = make_step([Chunk(130, ABSORBED_QUERIES + 100), Chunk(48, 200)])
    torch.testing.assert_close(run(step), attended(step), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_are_close(dtype: torch.dtype) -> None:
    step = make_step([Chunk(90, 1), Chunk(30, 3), Chunk(40, 60)], dtype=dtype)
    wide = attended(step)
    found = run(step)
    assert found.dtype is dtype
    tolerance = 2e-5 if dtype is torch.float32 else 0.06
    torch.testing.assert_close(found.double(), wide, rtol=0, atol=tolerance * float(wide.std()))


def test_rows_are_written_where_their_tokens_are_and_nowhere_else() -> None:
    step = make_step([Chunk(40, 1), Chunk(3, 20)])
    before = step.cache.isnan().all(-1).sum()
    query = step.query.clone()
    own = TorchLatent().norm_rope_write(query, step.keys, step.new, step.cache)
    torch.testing.assert_close(query, step.rotated)
    torch.testing.assert_close(own, torch.cat((step.rows[0][40:], step.rows[1][3:])))
    slots = step.new.slot_mapping
    assert torch.equal(step.cache[slots // 16, slots % 16], own)
    assert before - step.cache.isnan().all(-1).sum() == 21
