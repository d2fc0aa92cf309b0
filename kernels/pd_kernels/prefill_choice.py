"""Chooses the backend that computes the attention of prompts, by measurement."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_kernels.gemm_selection import MARGIN
from pd_kernels.values import PackedSequences

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.backends import Kernels
    from pd_kernels.gemm_selection import Measure

TOLERANCE = 2e-2  # largest difference of two backends in bfloat16, on values of O(1)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters on which a compiled kernel is specialized."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The chosen kernels and the reason."""

    kernels: Kernels
    reason: str


def choose_prefill(
    usual: Kernels, propose: Callable[[], Kernels], shape: AttentionShape, num_tokens: int, measure: Measure
) -> PrefillChoice:
    """The faster of two at a prompt of `num_tokens`. `usual` if the other fails or computes something else."""
    try:
        other = propose()
        problem = _Problem.of(shape, num_tokens)
        runs = [problem.planned(kernels) for kernels in (usual, other)]
        difference = (runs[1]() - runs[0]()).abs().max().item()
        if not difference < TOLERANCE:
            raise ValueError(f"{other.name} is off by {difference:.2g}")
        before, after = (measure(partial(_discard, run)) for run in runs)
    except Exception as error:  # another library may raise anything; the usual kernels remain
        return PrefillChoice(usual, f"{usual.name}: {error}")
    kernels = other if after < MARGIN * before else usual
    reason = f"{kernels.name}: {num_tokens} tokens take {usual.name} {before:.3f} ms, {other.name} {after:.3f} ms"
    return PrefillChoice(kernels, reason)


def _discard(run: Callable[[], object]) -> None:
    run()


@dataclass(frozen=True, slots=True)
class _Problem:
    """One prompt in one layer's cache, with blocks in random order."""

    packed: PackedSequences
    query: torch.Tensor
    cache: torch.Tensor  # [num_blocks, num_kv_heads, 2, block_size, head_dim]

    @classmethod
    def of(cls, shape: AttentionShape, num_tokens: int) -> _Problem:
        device, num_blocks = shape.device, -(-num_tokens // shape.block_size)
        generator = torch.Generator(device).manual_seed(0)
        length = np.array([num_tokens])
        packed = PackedSequences(
            num_decodes=0,
            query_starts=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
            block_tables=torch.randperm(num_blocks, generator=generator, device=device).to(torch.int32)[None],
            host_query_lens=length,
            host_seq_lens=length,
        )
        query, cache = (
            torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(shape.dtype)
            for size in (
                (num_tokens, shape.num_heads, shape.head_dim),
                (num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim),
            )
        )
        return cls(packed, query, cache)

    def planned(self, kernels: Kernels) -> Callable[[], torch.Tensor]:
        """A function that computes the layer's attention -> [T, H, D]."""
        views = self.cache[:, :, 0], self.cache[:, :, 1]
        plan = kernels.plan_attention(self.packed, views[0])
        return lambda: plan.run(self.query, *views, self.query.shape[2] ** -0.5)
