# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Paged decode attention of few sequences: SPLITS programs share each (sequence, KV head), and all of them merge.

At one sequence a step is bound by latency, not by reading. So before a program waits for the QKV product it reads its
first tile of keys and values, which are older. It takes every SPLITS-th tile, writes its part, waits until all parts of
the pair are there, and merges 1 / SPLITS of the outputs. In `triton_decode` the last program merges a pair alone, which
takes 4 of its 11 us (H200, 1,000 tokens, 4 KV heads); here a launch takes 6.4.

A program waits for others of its launch. So all of them must run at once: there are at most as many as multiprocessors.
They start before any later kernel may, and earlier kernels end without them.

Arrivals are counted without a reset between launches. A launch adds SPLITS, a power of two, to each counter.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.fp8_cache import FP8
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start
from pd_kernels.triton_fp8 import beside_fp8
from pd_kernels.triton_kv_tile import add_sink, add_tile, load_tile, lowest_seen, mean_of, pair_in_cache
from pd_kernels.triton_new_token import one_token, take_new_token

if TYPE_CHECKING:
    from pd_kernels.decode_tiling import DecodeTiling
    from pd_kernels.values import KeysValues, NewTokens

_LOG2_E = 1.4426950408889634
_NUM_WARPS = 4
# The interpreter runs programs one after the other: there the last one merges for all
_ALL_MERGE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _merge_slice(
    parts, part_logs, target, pair, index,
    NUM_OUTPUTS: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Merge the parts of SLICE of a pair's outputs. One layout for all numbers: none pass through shared memory."""
    output = index * SLICE + tl.arange(0, SLICE)
    part = pair * SPLITS + tl.arange(0, SPLITS)[:, None]
    mask = (output < NUM_OUTPUTS)[None, :] & (part >= 0)
    at = part * (NUM_OUTPUTS // SIZE) + output[None, :] // SIZE
    log = tl.load(part_logs + at, mask=mask, other=-1e30, cache_modifier=".cg")
    mean = tl.load(parts + part * NUM_OUTPUTS + output[None, :], mask=mask, other=0.0, cache_modifier=".cg")
    weight = tl.exp2(log - tl.max(log, 0)[None, :])
    merged = tl.sum(weight * mean, 0) / tl.sum(weight, 0)
    tl.store(target + output, merged.to(target.dtype.element_ty), mask=output < NUM_OUTPUTS)


# `arrived` lies after other counters: a multiple of 16 bytes in steps of some numbers of sequences only
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["arrived"])
def _split_kernel(
    heads, query_norm, key_norm, cos, sin, slot_mapping, key_cache, value_cache, block_tables, seq_lens, arrived, out,
    parts, part_logs, sinks, heads_stride, table_stride, block_stride, head_stride, scale, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
    SLICE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    HAS_PAIRS: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    NUM_SUMS: tl.constexpr = COLUMNS // 2 if HAS_PAIRS else COLUMNS
    NUM_OUTPUTS: tl.constexpr = GROUP * SIZE
    others_may_start(EARLY)
    split, pair = tl.program_id(0), tl.program_id(1)
    seq, head = (pair // NUM_KV_HEADS).to(tl.int64), pair % NUM_KV_HEADS
    length = tl.load(seq_lens + seq)
    num_stored = length - 1
    lowest = lowest_seen(length, WINDOW)
    keys, values, table = pair_in_cache(key_cache, value_cache, block_tables, seq, head, table_stride, head_stride)
    begin = (lowest // TILE + split) * TILE
    first = tl.maximum(tl.minimum(begin, num_stored), 0)  # a program without a tile sees no token of this one
    k, v, seen = load_tile(
        keys, values, table, first, num_stored, lowest, block_stride, SIZE, BLOCK_SIZE, WINDOW, TILE, COLUMNS
    )  # fmt: skip
    is_last = (split == SPLITS - 1) & (length > 0)
    q, key, value = take_new_token(
        heads, query_norm, key_norm, cos, sin, slot_mapping, key_cache, value_cache, seq, head, is_last,
        heads_stride, block_stride, head_stride, eps,
        NUM_KV_HEADS, GROUP, SIZE, BLOCK_SIZE, ROWS, COLUMNS, ROTARY, NORM, EARLY,
    )  # fmt: skip
    top, total, sums, odd = one_token(q, key, value, is_last, scale, ROWS, NUM_SUMS, HAS_PAIRS)
    if SINKS:
        member = tl.arange(0, ROWS)
        has_sink = (member < GROUP) & is_last
        top, total, sums, odd = add_sink(sinks, head * GROUP + member, has_sink, top, total, sums, odd)
    if HAS_PAIRS:
        q = beside_fp8(q)
    top, total, sums, odd = add_tile(q, k, v, seen[None, :], top, total, sums, odd, scale, HAS_PAIRS, PRECISION)
    for at in tl.range(begin + SPLITS * TILE, num_stored, SPLITS * TILE, num_stages=STAGES):
        k, v, seen = load_tile(
            keys, values, table, at, num_stored, lowest, block_stride, SIZE, BLOCK_SIZE, WINDOW, TILE, COLUMNS
        )  # fmt: skip
        top, total, sums, odd = add_tile(q, k, v, seen[None, :], top, total, sums, odd, scale, HAS_PAIRS, PRECISION)
    mean, log = mean_of(top, total, sums, odd, HAS_PAIRS)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    part = (pair * SPLITS + split) * GROUP
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    tl.store(parts + part * SIZE + row[:, None] * SIZE + column[None, :], mean, mask=inside)
    tl.store(part_logs + part + row, log, mask=row < GROUP)
    tl.debug_barrier()  # the whole part is written before its arrival is counted
    target, counter = out + pair.to(tl.int64) * NUM_OUTPUTS, arrived + pair
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    goal = (before | (SPLITS - 1)) + 1  # of this launch; the difference is right beyond 2^31, too
    if _ALL_MERGE:
        while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") - goal < 0:
            pass
        _merge_slice(parts, part_logs, target, pair, split, NUM_OUTPUTS, SIZE, SPLITS, SLICE)
    elif before + 1 == goal:
        for index in range(SPLITS):
            _merge_slice(parts, part_logs, target, pair, index, NUM_OUTPUTS, SIZE, SPLITS, SLICE)


def split_attention(
    heads: torch.Tensor,
    new: NewTokens,
    cache: KeysValues,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    arrived: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    tiling: DecodeTiling,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute reference.norm_rope_write and then reference.decode_attention into contiguous `out` [S, H, D].

    `arrived`: int32 [S * num_kv_heads], zeros before the first launch of a step; no other function may use it.
    """
    num_seqs, num_heads, size = out.shape
    key_cache, value_cache = cache
    num_kv_heads, block_size = key_cache.shape[1:3]
    group, splits, early = num_heads // num_kv_heads, tiling.splits, launches_early(heads.device)
    parts = torch.empty((num_seqs * num_kv_heads * splits * group, size), dtype=torch.float32, device=heads.device)
    part_logs = torch.empty(len(parts), dtype=torch.float32, device=heads.device)
    if value_cache.dtype is FP8:
        value_cache = value_cache.view(torch.int16)  # pairs; strides are still in numbers
    norms = new.norms
    query_norm, key_norm, eps = (heads, heads, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
    _split_kernel[(splits, num_seqs * num_kv_heads)](
        heads, query_norm, key_norm, new.cos, new.sin, new.slot_mapping, key_cache, value_cache, block_tables,
        seq_lens, arrived, out, parts, part_logs, heads if sinks is None else sinks,
        heads.stride(0), block_tables.stride(0), key_cache.stride(0), key_cache.stride(1), scale * _LOG2_E, eps,
        num_kv_heads, group, size, block_size, window, tiling.tile,
        max(next_power_of_2(group), 16), max(next_power_of_2(size), 16), splits,
        next_power_of_2(cdiv(group * size, splits)),
        "ieee" if heads.dtype is torch.float32 else "tf32", tiling.num_stages, 2 * new.cos.shape[1],
        norms is not None, sinks is not None, early,
        num_warps=_NUM_WARPS, **early_options(early),
    )  # fmt: skip
