# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""One tile of a sequence's keys and values in decode attention: read from the paged cache, and added to a softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from pd_kernels.triton_fp8 import split_pairs


@triton.jit
def pair_in_cache(key_cache, value_cache, block_tables, seq, head, table_stride, head_stride):
    """Where the keys and the values of a head begin, and the sequence's row of the block table.

    Of an FP8 cache `value_cache` points to pairs of numbers; strides are in numbers.
    """
    keys = key_cache + head.to(tl.int64) * head_stride
    values = value_cache + head.to(tl.int64) * head_stride
    if key_cache.dtype.element_ty == tl.float8e4nv:
        values = value_cache + head.to(tl.int64) * (head_stride // 2)
    return keys, values, block_tables + seq * table_stride


@triton.jit
def lowest_seen(length, WINDOW: tl.constexpr):
    """The first token that the last one of `length` attends to."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    return lowest


@triton.jit
def load_tile(
    keys, values, table, begin, length, lowest, block_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Keys and values [TILE, COLUMNS] of one head from token `begin` on, and which of the tokens are seen.

    Of an FP8 cache `values` points to pairs of numbers, and the tile has half of the columns.
    """
    HAS_PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    column = tl.arange(0, COLUMNS)
    position = begin + tl.arange(0, TILE)
    seen = position < length
    if WINDOW > 0:
        seen = seen & (position >= lowest)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
        place = block * block_stride + (begin % BLOCK_SIZE + tl.arange(0, TILE)) * SIZE
    else:
        blocks = tl.load(table + position // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        place = blocks * block_stride + position % BLOCK_SIZE * SIZE
    mask = seen[:, None] & (column < SIZE)[None, :]
    k = tl.load(keys + place[:, None] + column[None, :], mask=mask, other=0.0)
    if HAS_PAIRS:
        pair = tl.arange(0, COLUMNS // 2)
        paired = seen[:, None] & (pair < SIZE // 2)[None, :]
        v = tl.load(values + (place // 2)[:, None] + pair[None, :], mask=paired, other=0)
    else:
        v = tl.load(values + place[:, None] + column[None, :], mask=mask, other=0.0)
    return k, v, seen


@triton.jit
def add_tile(q, k, v, seen, top, total, sums, odd, scale, HAS_PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """The softmax with the tokens that are `seen`: highest score, sum of exponentials, weighted sums of values.

    `seen`: [1, TILE], or of each row. With HAS_PAIRS `sums` has the even columns, `odd` the others.
    """
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, -1e30)
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(weights, 1)
    if HAS_PAIRS:
        v, v_odd = split_pairs(v)
        odd = odd * shrink[:, None] + tl.dot(weights.to(q.dtype), v_odd.to(q.dtype), input_precision=PRECISION)
    sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
    return higher, total, sums, odd


@triton.jit
def add_sink(sinks, head, is_there, top, total, sums, odd):
    """The softmax with one more key, without a value, of the score `sinks[head]`, in rows where it `is_there`.

    Of several parts of a softmax one has the sink: then their merge needs no more than their logarithms.
    """
    score = tl.load(sinks + head, mask=is_there, other=-1e30).to(tl.float32) * 1.4426950408889634  # to base 2
    higher = tl.maximum(top, score)
    shrink = tl.exp2(top - higher)
    return higher, total * shrink + tl.exp2(score - higher), sums * shrink[:, None], odd * shrink[:, None]


@triton.jit
def mean_of(top, total, sums, odd, HAS_PAIRS: tl.constexpr):
    """The weighted mean of values, and log2 of the sum of exponentials."""
    if HAS_PAIRS:
        sums = tl.interleave(sums, odd)
    return sums / total[:, None], top + tl.log2(total)
