"""One layer's attention leaves the rotation to a plan that can do it, but not in a layer with a tail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.models.paged_attention import PagedAttention
from pd_cluster.models.rope import RopeTable
from pd_kernels.attention import AttentionShape
from pd_kernels.backends import TORCH
from pd_kernels.torch_attention import TorchAttention
from pd_kernels.values import KeysValues, NewTokens, PackedSequences

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionPlan

HEADS, KV_HEADS, SIZE, BLOCK, LENGTHS = 4, 2, 16, 16, np.array([3, 5, 9])


@dataclass(frozen=True)
class RotatingPlan:
    """Rotates by torch's kernel."""

    plan: AttentionPlan
    rotated: list[torch.Tensor] = field(default_factory=list)  # the products that came

    def run(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        scale: float,
        out: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.plan.run(query, cache, scale, out, sinks)

    @property
    def may_rotate(self) -> bool:
        return True

    def run_rotating(
        self, heads: torch.Tensor, new: NewTokens, cache: KeysValues, scale: float, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.rotated.append(heads)
        query = TORCH.norm_rope_write(heads, new, cache)
        return self.run(query, cache, scale, sinks=sinks)


def attended(plan: AttentionPlan, tail: Tail | None, cache: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(3, (HEADS + 2 * KV_HEADS) * SIZE, generator=generator)
    angles = torch.randn(3, SIZE // 2, generator=generator)
    ids = torch.arange(3)
    inputs = ForwardInputs(ids, ids, [ids * BLOCK + torch.from_numpy(LENGTHS) - 1], [plan], tail)
    attention = PagedAttention(TORCH, SIZE, 0, SIZE**-0.5, None)
    rotation, views = RopeTable(angles.cos(), angles.sin()), KeysValues(cache[:, :, 0, 0], cache[:, :, 0, 1])
    return attention(heads, rotation, inputs, views, tail)


def test_a_plan_that_rotates_gets_the_product() -> None:
    ids = torch.arange(4, dtype=torch.int32)
    packed = PackedSequences(
        3, ids, torch.from_numpy(LENGTHS.astype(np.int32)), ids[:3, None], np.ones(3, np.int64), LENGTHS
    )
    usual = TorchAttention(AttentionShape(HEADS, KV_HEADS, SIZE, BLOCK, 1, torch.float32)).plan(packed)
    rotating = RotatingPlan(usual)
    caches = [torch.zeros(3, KV_HEADS, 1, 2, BLOCK, SIZE) for _ in range(3)]
    tail = Tail(torch.tensor([2, 0]), plan=None)
    expected = attended(usual, None, caches[0])
    assert torch.equal(attended(rotating, None, caches[1]), expected)
    assert len(rotating.rotated) == 1
    assert torch.equal(attended(rotating, tail, caches[2]), expected[tail.rows])
    assert len(rotating.rotated) == 1
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])
