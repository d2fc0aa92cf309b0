# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Latent attention in Triton, and one kernel for the work before it: norm, rotations and the write of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.latent import LatentPlan
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_latent_decode import latent_decode, latent_tiling
from pd_kernels.triton_latent_prefill import AbsorbedRun, expanded_prefill, plan_chunks

if TYPE_CHECKING:
    import torch

    from pd_kernels.decode_tiling import DecodeTiling
    from pd_kernels.latent import LatentChunks, LatentRows, NewLatents

_HEADS = 16  # most heads of one program


@triton.jit
def _rotated(at, cos, sin, mask, HALF: tl.constexpr):
    """Both halves of rotated numbers at the pointers `at` [rows, HALF] of their first halves."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype = at.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _latent_rows_kernel(
    query, keys, norm, cos, sin, slot_mapping, cache, own, query_stride, head_stride, keys_stride, block_stride, eps,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (token, 0) writes the token's row, the others rotate TILE heads each. Rounding: see `triton_rotary`."""
    others_may_start(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, c = tl.arange(0, HALF), tl.arange(0, RANK)
    cosine = tl.load(cos + token * HALF + pair).to(tl.float32)[None, :]
    sine = tl.load(sin + token * HALF + pair).to(tl.float32)[None, :]
    slot = tl.load(slot_mapping + token)
    wait_for_others(EARLY)  # angles, slots and weights are older than the launches that are early
    if part > 0:
        head = (part - 1) * TILE + tl.arange(0, TILE)
        at = query + token * query_stride + (head * head_stride + NOPE)[:, None] + pair[None, :]
        mask = (head < NUM_HEADS)[:, None] & (pair >= 0)[None, :]
        first, second = _rotated(at, cosine, sine, mask, HALF)
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)
    else:
        gains, written = tl.load(norm + c), (pair >= 0)[None, :] & (slot >= 0)
        latent = tl.load(keys + token * keys_stride + c).to(tl.float32)
        scale = tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
        normed = ((latent * scale).to(gains.dtype).to(tl.float32) * gains.to(tl.float32)).to(cache.dtype.element_ty)
        key = keys + token * keys_stride + RANK + pair[None, :]
        low, high = _rotated(key, cosine, sine, (pair >= 0)[None, :], HALF)
        row = own + token * (RANK + 2 * HALF)
        tl.store(row + c, normed)
        tl.store(row + RANK + pair[None, :], low)
        tl.store(row + RANK + HALF + pair[None, :], high)
        place = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (RANK + 2 * HALF)
        tl.store(place + c, normed, mask=(c >= 0) & (slot >= 0))
        tl.store(place + RANK + pair[None, :], low, mask=written)
        tl.store(place + RANK + HALF + pair[None, :], high, mask=written)


@dataclass(slots=True)
class TritonLatent:
    """The LatentOps of TritonLatentBackend. A measurement may replace the tiling."""

    tiling: DecodeTiling
    captures: bool = True

    @classmethod
    def of(cls, dtype: torch.dtype) -> TritonLatent:
        """With the tiling for a GPU with 228 KiB of shared memory per multiprocessor."""
        return cls(latent_tiling(dtype))

    def norm_rope_write(
        self, query: torch.Tensor, keys: torch.Tensor, new: NewLatents, cache: torch.Tensor
    ) -> torch.Tensor:
        """See LatentOps. A token with a negative slot (padding of a CUDA graph) is not stored."""
        (num_tokens, num_heads, size), (rank, half), early = query.shape, (len(new.norm), new.cos.shape[1]), False
        own = keys.new_empty(num_tokens, rank + 2 * half)
        if num_tokens:
            early, tile = launches_early(keys.device), min(next_power_of_2(num_heads), _HEADS)
            _latent_rows_kernel[(num_tokens, 1 + cdiv(num_heads, tile))](
                query, keys, new.norm, new.cos, new.sin, new.slot_mapping, cache, own, *query.stride()[:2],
                keys.stride(0), cache.stride(0), new.eps, num_heads, size - 2 * half, rank, half, cache.shape[1], tile,
                early, num_warps=4, **early_options(early),
            )  # fmt: skip
        return own

    def decode(
        self, query_latent: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, rows: LatentRows, scale: float
    ) -> torch.Tensor:
        """See LatentOps."""
        return latent_decode(query_latent, query_rope, cache, rows, scale, self.tiling)

    def prefill(
        self, query: torch.Tensor, own: torch.Tensor, expand: torch.Tensor, cache: torch.Tensor, chunks: LatentChunks,
        scale: float, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """See LatentOps."""
        if not chunks.plans:
            (_, num_heads, size), value = query.shape, out.shape[2]
            chunks.plans.append(plan_chunks(chunks.packed, num_heads, size + value, cache.shape[1], query.dtype))
        for run in chunks.plans[0]:
            tokens = slice(run.first, run.end)
            if isinstance(run, AbsorbedRun):
                plan = LatentPlan(self, run.rows, None)
                out[tokens] = plan.run(query[tokens], own[tokens], expand, cache, scale)
            else:
                expanded_prefill(query[tokens], own[tokens], expand, cache, run, scale, out[tokens])
