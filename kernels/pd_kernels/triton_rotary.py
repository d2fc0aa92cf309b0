# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""One kernel for the work between the QKV product and attention: QK norm, RoPE, and the write to the KV cache.

The kernel reads the product once. It writes the rotated queries once, and each key and value once, directly to its
cache block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.checks import check_cache, check_heads
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_fp8 import stored

if TYPE_CHECKING:
    import torch

    from pd_kernels.values import KeysValues, NewTokens

_HEADS = 16  # most heads of one program


@triton.jit
def _square_sum(row, COUNT: tl.constexpr):
    """The sum of the squares of COUNT numbers."""
    total = tl.zeros((1024,), tl.float32)
    for start in range(0, COUNT, 1024):
        at = start + tl.arange(0, 1024)
        x = tl.load(row + at, mask=at < COUNT, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, 0)


@triton.jit
def _rotated(
    first, second, cos, sin, norm, out, source, rows, low, high, mask, inside, eps,
    SIZE: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Both halves [heads, half] of a tile of heads, rotated, and normed before that if wanted. Float32 in and out.

    `low`, `high`: the columns of the halves. `rows`: the heads' places at `source`, where COUNT numbers are normed
    together (NORM = 2), or each head alone. Rounding is that of `reference.rms_norm`, to the dtypes of the pointers
    `norm` and `out`.
    """
    if NORM > 0:
        gain = norm.dtype.element_ty
        dtype = out.dtype.element_ty
        if NORM == 2:
            scale = tl.rsqrt(_square_sum(source, COUNT) / COUNT + eps)
            low_gains = tl.load(norm + rows + low[None, :], mask=mask, other=0.0).to(tl.float32)
            high_gains = tl.load(norm + rows + high[None, :], mask=mask, other=0.0).to(tl.float32)
        else:
            total = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = tl.rsqrt(total / SIZE + eps)[:, None]
            low_gains = tl.load(norm + low, mask=inside, other=0.0).to(tl.float32)[None, :]
            high_gains = tl.load(norm + high, mask=inside, other=0.0).to(tl.float32)[None, :]
        first = ((first * scale).to(gain).to(tl.float32) * low_gains).to(dtype).to(tl.float32)
        second = ((second * scale).to(gain).to(tl.float32) * high_gains).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _norm_rope_write_kernel(
    heads, query_norm, key_norm, cos, sin, query, key_cache, value_cache, slot_mapping,
    heads_stride, block_stride, head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """NORM: 0 for none, 1 for each head alone, 2 for all together. An argument costs the host some 0.7 us a launch."""
    others_may_start(EARLY)
    BITS: tl.constexpr = ROTARY | SIZE  # its lowest one is that of the multiple of 2 that divides both
    ALIGNED: tl.constexpr = 8 if BITS % 16 == 0 else 4 if BITS % 8 == 0 else 2 if BITS % 4 == 0 else 1
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    column = tl.arange(0, HALF)
    inside = column < SIZE // 2
    turns = column < ROTARY // 2
    cosine = tl.load(cos + token * (ROTARY // 2) + column, mask=turns, other=1.0).to(tl.float32)[None, :]
    sine = tl.load(sin + token * (ROTARY // 2) + column, mask=turns, other=0.0).to(tl.float32)[None, :]
    if ROTARY == SIZE:
        low, high = column, column + SIZE // 2
    else:  # dimensions after the rotated ones are pairs, too: with angle 0, so that they stay as they are
        low = tl.max_contiguous(tl.multiple_of(tl.where(turns, column, column + ROTARY // 2), ALIGNED), ALIGNED)
        high = column + tl.where(turns, ROTARY // 2, SIZE // 2)
        high = tl.max_contiguous(tl.multiple_of(high, ALIGNED), ALIGNED)
    query_parts: tl.constexpr = (NUM_HEADS + TILE - 1) // TILE
    source = heads + token * heads_stride
    slot = tl.load(slot_mapping + token)
    wait_for_others(EARLY)  # angles and slots are older than the launches that are early
    if part < query_parts:
        head = part * TILE + tl.arange(0, TILE)
        mask = (head < NUM_HEADS)[:, None] & inside[None, :]
        rows = head[:, None] * SIZE
        first = tl.load(source + rows + low[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + rows + high[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = _rotated(
            first, second, cosine, sine, query_norm, query, source, rows, low, high, mask, inside, eps,
            SIZE, NUM_HEADS * SIZE, NORM,
        )  # fmt: skip
        target = query + token * NUM_HEADS * SIZE + rows
        tl.store(target + low[None, :], first.to(query.dtype.element_ty), mask=mask)
        tl.store(target + high[None, :], second.to(query.dtype.element_ty), mask=mask)
    else:
        head = (part - query_parts) * TILE + tl.arange(0, TILE)
        mask = (head < NUM_KV_HEADS)[:, None] & inside[None, :] & (slot >= 0)
        source += NUM_HEADS * SIZE
        rows = head[:, None] * SIZE
        first = tl.load(source + rows + low[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + rows + high[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = _rotated(
            first, second, cosine, sine, key_norm, query, source, rows, low, high, mask, inside, eps,
            SIZE, NUM_KV_HEADS * SIZE, NORM,
        )  # fmt: skip
        place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SIZE
        to = place + head.to(tl.int64)[:, None] * head_stride
        tl.store(key_cache + to + low[None, :], stored(first.to(query.dtype.element_ty), key_cache), mask=mask)
        tl.store(key_cache + to + high[None, :], stored(second.to(query.dtype.element_ty), key_cache), mask=mask)
        source += NUM_KV_HEADS * SIZE
        value = tl.load(source + rows + low[None, :], mask=mask)
        tl.store(value_cache + to + low[None, :], stored(value, value_cache), mask=mask)
        value = tl.load(source + rows + high[None, :], mask=mask)
        tl.store(value_cache + to + high[None, :], stored(value, value_cache), mask=mask)


def norm_rope_write(heads: torch.Tensor, new: NewTokens, cache: KeysValues) -> torch.Tensor:
    """See reference.norm_rope_write. Raises ValueError.

    A token with a negative slot (padding of a CUDA graph) is not stored.
    """
    check_cache(cache)
    check_heads(heads, new, cache)
    (norms, cos, sin, slot_mapping), (key_cache, value_cache) = new, cache
    _, num_kv_heads, block_size, size = key_cache.shape
    num_tokens, num_heads, rotary = heads.shape[0], heads.shape[1] - 2 * num_kv_heads, 2 * cos.shape[1]
    query = heads.new_empty((num_tokens, num_heads, size))
    if num_tokens:
        early = launches_early(heads.device)
        tile = min(next_power_of_2(max(num_heads, num_kv_heads)), _HEADS)
        grid = (num_tokens, cdiv(num_heads, tile) + cdiv(num_kv_heads, tile))
        query_norm, key_norm = (heads, heads) if norms is None else (norms.query, norms.key)
        eps = 0.0 if norms is None else norms.eps
        _norm_rope_write_kernel[grid](
            heads, query_norm, key_norm, cos, sin, query, key_cache, value_cache, slot_mapping,
            heads.stride(0), key_cache.stride(0), key_cache.stride(1), eps,
            num_heads, num_kv_heads, size, rotary, block_size, next_power_of_2(size // 2),
            tile, 0 if norms is None else norms.query.dim(), early, num_warps=4, **early_options(early),
        )  # fmt: skip
    return query
