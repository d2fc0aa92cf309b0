# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Variable-length causal attention of prefill chunks over the paged cache, one launch for all chunks of a step.

A program has the query rows of some tokens and one KV head: all query heads of the group, so that K and V are read once
for the group and a chunk of few tokens still fills the matrix unit. It walks the keys with an online softmax
(arXiv 2205.14135): first, under a window, the tiles that only some rows see, then those that all rows see, without a
mask, then the diagonal. Unmasked tiles come through the tensor memory accelerator when a cache block holds whole tiles.
Programs with the most keys start first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from pd_kernels.packed import PackedSequences

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the kernel is cut; the defaults of `prefill_tiling` were chosen by measurement."""

    rows: int  # tokens times the group's query heads
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread; None leaves it to the compiler
    descriptors: bool = True  # use the tensor memory accelerator where the layout allows it


@triton.jit
def _attend_tiles(
    q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, stop, length,
    block_stride, scale, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Go on with the online softmax over tokens [start, stop). Without MASKED every row sees all of them."""
    column = tl.arange(0, COLUMNS)
    for begin in tl.range(start, stop, KEYS, num_stages=STAGES):
        token = begin + tl.arange(0, KEYS)
        if DESCRIPTORS and not MASKED:
            tile = tl.load(table + begin // BLOCK_SIZE) * NUM_KV_HEADS + head
            k = tl.reshape(key_tiles.load([tile, begin % BLOCK_SIZE, 0]), [KEYS, COLUMNS])
            v = tl.reshape(value_tiles.load([tile, begin % BLOCK_SIZE, 0]), [KEYS, COLUMNS])
        else:
            present = token < length
            if BLOCK_SIZE % KEYS == 0:
                block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
                place = block * block_stride + (begin % BLOCK_SIZE + tl.arange(0, KEYS)) * SIZE
            else:
                blocks = tl.load(table + token // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
                place = blocks * block_stride + token % BLOCK_SIZE * SIZE
            mask = present[:, None] & (column < SIZE)[None, :]
            k = tl.load(keys + place[:, None] + column[None, :], mask=mask, other=0.0)
            v = tl.load(values + place[:, None] + column[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        if MASKED:  # a row that has seen nothing yet subtracts one huge number from another, which need not give 0
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        top = higher
    return top, total, sums


# Numbers that change from step to step are not specialized on: a variant costs a second or two to compile
@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def _prefill_kernel(
    query, key_tiles, value_tiles, key_cache, value_cache, block_tables, query_starts, seq_lens, tiles, out,
    num_tiles, query_stride, table_stride, block_stride, head_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + num_tiles + tile)  # of the chunk's tokens
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    query_start, length = tl.load(query_starts + seq), tl.load(seq_lens + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    num_tokens: tl.constexpr = ROWS // GROUP
    token = first + row // GROUP
    inside = ((row < num_tokens * GROUP) & (token < num_queries))[:, None] & (column < SIZE)[None, :]
    at = (head * GROUP + row % GROUP)[:, None] * SIZE + column[None, :]
    query_row = (query_start + token).to(tl.int64)[:, None]
    q = tl.load(query + query_row * query_stride + at, mask=inside, other=0.0)
    low = length - num_queries + first  # position of the first row; the last is below `high`
    high = tl.minimum(low + num_tokens, length)
    position = length - num_queries + token
    table = block_tables + seq * table_stride
    keys, values = key_cache + head.to(tl.int64) * head_stride, value_cache + head.to(tl.int64) * head_stride
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    start, diagonal = 0, (low + 1) // KEYS * KEYS
    if WINDOW > 0:
        start = tl.maximum(low - WINDOW + 1, 0) // KEYS * KEYS
        everyone = (tl.maximum(high - WINDOW, 0) + KEYS - 1) // KEYS * KEYS
        diagonal = tl.maximum(diagonal, start)
        everyone = tl.minimum(everyone, diagonal)
        top, total, sums = _attend_tiles(
            q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, everyone, length,
            block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, 1,
            True, DESCRIPTORS,
        )  # fmt: skip
        start = everyone
    top, total, sums = _attend_tiles(
        q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, diagonal, length,
        block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, STAGES,
        False, DESCRIPTORS,
    )  # fmt: skip
    top, total, sums = _attend_tiles(
        q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, diagonal, high, length,
        block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, 1,
        True, DESCRIPTORS,
    )  # fmt: skip
    mean = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + query_row * (NUM_KV_HEADS * GROUP * SIZE) + at, mean, mask=inside)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the layers of one step share."""

    tiling: PrefillTiling
    tiles: torch.Tensor  # int32 [2, n]: each program's sequence and first token of its chunk, most keys first


def plan_prefill(packed: PackedSequences, group: int, tiling: PrefillTiling, device: torch.device) -> PrefillPlan:
    """`group`: query heads per KV head. Raises ValueError when they are more than a tile's rows."""
    if group > tiling.rows:
        raise ValueError(f"{group} query heads share a KV head; this kernel takes at most {tiling.rows}")
    lens = packed.host_query_lens[packed.num_decodes :]
    tokens = tiling.rows // group
    counts = -(-lens // tokens)
    seqs = np.repeat(np.arange(packed.num_decodes, packed.num_seqs), counts)
    firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    num_keys = (packed.host_seq_lens - packed.host_query_lens)[seqs] + firsts
    order = np.argsort(-num_keys, kind="stable")
    tiles = torch.from_numpy(np.stack((seqs[order], firsts[order])).astype(np.int32))
    return PrefillPlan(tiling, tiles.to(device, non_blocking=True))


def prefill_tiling(dtype: torch.dtype, head_dim: int, num_rows: int, num_processors: int) -> PrefillTiling:
    """For a GPU with 228 KiB of shared memory a multiprocessor. `num_rows`: query tokens times query heads."""
    if dtype is torch.float32:
        return PrefillTiling(rows=32, keys=16, num_warps=4, num_stages=1, descriptors=False)
    if head_dim > 128:
        return PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=2)
    if num_rows <= 2 * 128 * num_processors:  # the large tiles would all run at once, the longest alone at the end
        return PrefillTiling(rows=64, keys=64, num_warps=4, num_stages=2, max_registers=168)
    # 128 registers let two programs share a multiprocessor: one's softmax runs under the other's matrix products.
    # On an H200 at head_dim 128 that is 500 TFLOP/s where the compiler's own choice, 168 registers, gives 356
    return PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=2, max_registers=128)


def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    packed: PackedSequences,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
    window: int,
) -> None:
    """See reference.prefill_attention: the sequences from `packed.num_decodes` on, into their rows of `out`.

    `query`, `out` [T, H, D] of the whole step; `plan`: of `plan_prefill` for as many heads.
    """
    tiling, tiles = plan.tiling, plan.tiles
    num_heads, size = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    columns = max(triton.next_power_of_2(size), 16)
    descriptors = tiling.descriptors and block_size % tiling.keys == 0
    key_tiles: torch.Tensor | TensorDescriptor = key_cache
    value_tiles: torch.Tensor | TensorDescriptor = value_cache
    if descriptors:
        key_tiles, value_tiles = (_descriptor(cache, tiling.keys, columns) for cache in (key_cache, value_cache))
    num_tiles = tiles.shape[1]
    _prefill_kernel[(num_kv_heads, num_tiles)](
        query, key_tiles, value_tiles, key_cache, value_cache, packed.block_tables, packed.query_starts,
        packed.seq_lens, tiles, out, num_tiles, query.stride(0), packed.block_tables.stride(0), key_cache.stride(0),
        key_cache.stride(1), scale * _LOG2_E, num_kv_heads, num_heads // num_kv_heads, size, block_size, window,
        tiling.rows, tiling.keys, columns, "ieee" if query.dtype is torch.float32 else "tf32", tiling.num_stages,
        descriptors, num_warps=tiling.num_warps, maxnreg=tiling.max_registers,
    )  # fmt: skip


def _descriptor(cache: torch.Tensor, keys: int, columns: int) -> TensorDescriptor:
    """A layer's view as [num_blocks * num_kv_heads, block_size, head_dim]: stepping a block is stepping all heads."""
    num_blocks, num_kv_heads, block_size, size = cache.shape
    shape, strides = [num_blocks * num_kv_heads, block_size, size], [cache.stride(1), size, 1]
    return TensorDescriptor(cache, shape, strides, [1, keys, columns])
