# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Variable-length causal attention of prefill chunks over the paged cache, one launch for all chunks of a step.

A program has the query rows of some tokens and one KV head, with all query heads of the group: so K and V are read once
for the group, and a chunk of few tokens still fills the matrix unit. It reads the keys with an online softmax
(arXiv 2205.14135): under a window first the tiles that only some rows see, then those that all rows see, without a
mask, then the diagonal. Unmasked tiles come through the tensor memory accelerator if a cache block holds whole tiles.
Programs with the most keys start first. When there are too few programs for the GPU, as in a short chunk after a long
prefix, several programs share each tile's keys, and a second launch merges their parts. When there are many,
another kernel may compute them with the same plan (`LargeTiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.chunk_tiles import cut_chunks
from pd_kernels.launch_sizes import next_power_of_2
from pd_kernels.triton_kv_tile import add_sink
from pd_kernels.values import PrefillTiling

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.values import KeysValues, PackedSequences

_LOG2_E = 1.4426950408889634
_SHARED_KEYS = 1024  # a tile with fewer keys belongs to one program
_FAR_KEYS = 4096  # from here on a chunk's tiles have nearly equal numbers of keys
_MOST_PARTS = 16  # the merge reads parts one after the other
_MERGED_ROWS = 16  # rows that one program merges


@triton.jit
def _attend_tiles(
    q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, stop, lowest, length,
    block_stride, scale, NUM_KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over tokens [start, stop). Without MASKED every row sees all of them.

    No row sees a token before `lowest`. Such tokens are not loaded: their blocks may be gone.
    """
    column = tl.arange(0, COLUMNS)
    for begin in tl.range(start, stop, KEYS, num_stages=STAGES):
        token = begin + tl.arange(0, KEYS)
        if DESCRIPTORS and not MASKED:
            block = tl.load(table + begin // BLOCK_SIZE)
            k = tl.reshape(key_tiles.load([block, head, begin % BLOCK_SIZE, 0]), [KEYS, COLUMNS])
            v = tl.reshape(value_tiles.load([block, head, begin % BLOCK_SIZE, 0]), [KEYS, COLUMNS])
        else:
            present = token < length
            if MASKED and WINDOW > 0:
                present = present & (token >= lowest)
            if BLOCK_SIZE % KEYS == 0:
                block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
                place = block * block_stride + (begin % BLOCK_SIZE + tl.arange(0, KEYS)) * SIZE
            else:
                blocks = tl.load(table + token // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
                place = blocks * block_stride + token % BLOCK_SIZE * SIZE
            mask = present[:, None] & (column < SIZE)[None, :]
            k = tl.load(keys + place[:, None] + column[None, :], mask=mask, other=0.0)
            v = tl.load(values + place[:, None] + column[None, :], mask=mask, other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # they may be e4m3
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            seen = token[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        if MASKED:  # in a row that has seen no key yet, the difference of two huge numbers may not be 0
            weights = tl.where(seen, weights, 0.0)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        top = higher
    return top, total, sums


@triton.jit
def _store_part(
    parts, top, total, sums, present, num_tiles, NUM_KV_HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Store a program's part for `_merge_kernel`.

    `parts` has the sums of all programs, then the highest scores of all, then the sums of weights of all.
    """
    head, tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at_row = ((tile * num_parts + part) * NUM_KV_HEADS + head) * ROWS + row
    all_rows = num_tiles * num_parts * NUM_KV_HEADS * ROWS
    tl.store(parts + at_row[:, None] * COLUMNS + column[None, :], sums, mask=present[:, None])
    tl.store(parts + all_rows * COLUMNS + at_row, top, mask=present)
    tl.store(parts + all_rows * (COLUMNS + 1) + at_row, total, mask=present)


# Numbers that change from step to step are not specialized on: a variant costs a second or two to compile
@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def _prefill_kernel(
    query, key_tiles, value_tiles, key_cache, value_cache, block_tables, query_starts, seq_lens, tiles, out, parts,
    sinks, num_tiles, query_stride, table_stride, block_stride, head_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, DESCRIPTORS: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + num_tiles + tile)  # of the chunk's tokens
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    query_start, length = tl.load(query_starts + seq), tl.load(seq_lens + seq)
    num_queries = tl.load(query_starts + seq + 1) - query_start
    num_tokens: tl.constexpr = ROWS // GROUP
    token = first + row // GROUP
    present = (row < num_tokens * GROUP) & (token < num_queries)
    inside = present[:, None] & (column < SIZE)[None, :]
    at = (head * GROUP + row % GROUP)[:, None] * SIZE + column[None, :]
    query_row = (query_start + token).to(tl.int64)[:, None]
    q = tl.load(query + query_row * query_stride + at, mask=inside, other=0.0)
    low = length - num_queries + first  # position of the first row; the last is below `high`
    high = tl.minimum(low + num_tokens, length)
    position = length - num_queries + token
    table = block_tables + seq * table_stride
    keys, values = key_cache + head.to(tl.int64) * head_stride, value_cache + head.to(tl.int64) * head_stride
    top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SINKS:
        has_sink = present & (tl.program_id(2) == 0)
        top, total, sums, _ = add_sink(sinks, head * GROUP + row % GROUP, has_sink, top, total, sums, sums)
    start, diagonal, lowest = 0, (low + 1) // KEYS * KEYS, 0
    if SPLIT:
        share = tl.cdiv(tl.cdiv(high, KEYS), tl.num_programs(2)) * KEYS
        start = tl.program_id(2) * share
        high = tl.minimum(high, start + share)
        diagonal = tl.minimum(tl.maximum(diagonal, start), high)
    if WINDOW > 0:
        lowest = tl.maximum(low - WINDOW + 1, 0)
        start = lowest // KEYS * KEYS
        diagonal = tl.maximum(diagonal, start)
        everyone = tl.minimum((tl.maximum(high - WINDOW, 0) + KEYS - 1) // KEYS * KEYS, diagonal)
        top, total, sums = _attend_tiles(
            q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, everyone, lowest,
            length, block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, 1,
            True, DESCRIPTORS,
        )  # fmt: skip
        start = everyone
    top, total, sums = _attend_tiles(
        q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, start, diagonal, lowest,
        length, block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, STAGES,
        False, DESCRIPTORS,
    )  # fmt: skip
    top, total, sums = _attend_tiles(
        q, position, top, total, sums, key_tiles, value_tiles, keys, values, table, head, diagonal, high, lowest,
        length, block_stride, scale, NUM_KV_HEADS, SIZE, BLOCK_SIZE, WINDOW, KEYS, COLUMNS, PRECISION, 1,
        True, DESCRIPTORS,
    )  # fmt: skip
    if SPLIT:
        _store_part(parts, top, total, sums, present, num_tiles, NUM_KV_HEADS, ROWS, COLUMNS)
    else:
        total = tl.where(total > 0, total, 1.0)  # captured steps have padding tiles
        mean = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + query_row * (NUM_KV_HEADS * GROUP * SIZE) + at, mean, mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "num_parts"])
def _merge_kernel(
    parts, query_starts, tiles, out, num_tiles, num_parts, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge MERGED rows of one tile and KV head: the parts' sums, weighted by their rows' highest scores."""
    head, tile = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tiles + tile).to(tl.int64)
    row, column = tl.program_id(2) * MERGED + tl.arange(0, MERGED), tl.arange(0, COLUMNS)
    token = tl.load(tiles + num_tiles + tile) + row // GROUP
    query_start = tl.load(query_starts + seq)
    inside = (row < ROWS // GROUP * GROUP) & (token < tl.load(query_starts + seq + 1) - query_start)
    top = tl.full([MERGED], -1e30, tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    sums = tl.zeros([MERGED, COLUMNS], tl.float32)
    all_rows = num_tiles * num_parts * NUM_KV_HEADS * ROWS
    for part in range(num_parts):
        at_row = ((tile * num_parts + part) * NUM_KV_HEADS + head) * ROWS + row
        part_top = tl.load(parts + all_rows * COLUMNS + at_row, mask=inside, other=0.0)
        higher = tl.maximum(top, part_top)
        shrink, weight = tl.exp2(top - higher), tl.exp2(part_top - higher)
        part_total = tl.load(parts + all_rows * (COLUMNS + 1) + at_row, mask=inside, other=1.0)
        total = total * shrink + part_total * weight
        part_sums = tl.load(parts + at_row[:, None] * COLUMNS + column[None, :], mask=inside[:, None], other=0.0)
        sums = sums * shrink[:, None] + part_sums * weight[:, None]
        top = higher
    where = (query_start + token).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + row % GROUP
    mean = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + where[:, None] * SIZE + column[None, :], mean, mask=inside[:, None] & (column < SIZE)[None, :])


class LargeTiles(Protocol):
    """Another kernel for large tiles: 128 rows, not shared, in a group without a window."""

    def takes(self, query: torch.Tensor, tiling: PrefillTiling) -> bool:
        """Whether the kernel computes tiles of this tiling, for queries with this alignment and these strides."""

    def launch(
        self,
        query: torch.Tensor,
        cache: KeysValues,
        packed: PackedSequences,
        tiles: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """See `prefill_attention`."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The data that the layers of one step share."""

    tiling: PrefillTiling
    tiles: torch.Tensor  # int32 [2, n]: each program's sequence and first token of its chunk, most keys first
    parts: torch.Tensor  # float32: parts of shared tiles, reused by each layer; else empty
    large_tiles: LargeTiles | None
    launches: list[Any] = field(default_factory=list)  # kernels compiled for the first layer


def plan_prefill(
    packed: PackedSequences,
    shape: AttentionShape,
    tiling: PrefillTiling,
    device: torch.device,
    large_tiles: LargeTiles | None,
) -> PrefillPlan:
    """Cut the chunks of a step into tiles, and move the tiles to the device without waiting.

    A tile must have a row for each query head of a KV head.
    """
    num_tokens = tiling.rows // shape.heads_per_kv_head
    tiles = cut_chunks(packed.host_query_lens, packed.host_seq_lens, packed.num_decodes, num_tokens)
    on_device = torch.from_numpy(tiles.astype(np.int32)).to(device, non_blocking=True)
    return PrefillPlan(tiling, on_device, room_for_parts(shape, tiling, tiles.shape[1], device), large_tiles)


def room_for_parts(shape: AttentionShape, tiling: PrefillTiling, num_tiles: int, device: torch.device) -> torch.Tensor:
    """An uninitialized workspace for the parts of shared tiles, float32 [n]; empty if no tile is shared.

    Each layer of the step reuses the workspace.
    """
    num_rows = num_tiles * tiling.parts * shape.num_kv_heads * tiling.rows if tiling.parts > 1 else 0
    return torch.empty(num_rows * (_columns(shape.head_dim) + 2), dtype=torch.float32, device=device)


def prefill_tiling(
    dtype: torch.dtype, head_dim: int, num_rows: int, num_keys: int, num_processors: int, has_large: bool = False
) -> PrefillTiling:
    """The tiling for a GPU with 228 KiB of shared memory per multiprocessor.

    `num_rows`: query tokens times query heads. `num_keys`: keys of the longest sequence, 0 under a window. `has_large`:
    a LargeTiles computes large tiles that are not shared; one program per multiprocessor is enough for it.
    """
    if dtype is torch.float32:
        return PrefillTiling(rows=32, keys=16, num_warps=4, num_stages=1, descriptors=False)
    if head_dim > 128:
        return PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=2)
    # With 128 registers two programs share a multiprocessor: the softmax of one overlaps the products of the other.
    # On an H200 at head_dim 128 that gives 500 TFLOP/s; the compiler's own choice, 168 registers, gives 356
    large = PrefillTiling(rows=128, keys=64, num_warps=8, num_stages=2, max_registers=128)
    small = PrefillTiling(rows=64, keys=64, num_warps=4, num_stages=2, max_registers=168)
    num_tiles = -(-num_rows // large.rows)
    is_far = num_keys >= _FAR_KEYS
    if has_large and 10 * num_tiles >= 7 * num_processors:
        return large
    if num_tiles <= num_processors // 4:
        parts = min(num_processors // num_tiles, num_keys // 256, _MOST_PARTS)
        if parts > 1 and num_keys >= _SHARED_KEYS:
            return replace(small, parts=parts)
    elif num_tiles <= num_processors:
        parts = min(2 * num_processors // num_tiles, num_keys // 512)
        if parts > 2 or (parts == 2 and is_far):
            return replace(large, parts=parts)
    # At most two large tiles per multiprocessor: all run at once, and without a prefix the longest ends last, alone
    if num_tiles <= 2 * num_processors and not (is_far and 2 * num_tiles >= 3 * num_processors):
        return small
    return large


def unshared_if_many(
    tiling: PrefillTiling, packed: PackedSequences, shape: AttentionShape, num_processors: int
) -> PrefillTiling:
    """Returns the tiling without shared tiles if the step has a tile for every multiprocessor, else `tiling`.

    Many short chunks have many tiles, most of them nearly empty. They fill the GPU without sharing, and sharing costs
    memory.
    """
    if tiling.parts == 1:
        return tiling
    tokens = tiling.rows // shape.heads_per_kv_head
    num_tiles = int((-(-packed.host_query_lens[packed.num_decodes :] // tokens)).sum())
    return replace(tiling, parts=1) if num_tiles * shape.num_kv_heads >= num_processors else tiling


def prefill_attention(
    query: torch.Tensor,
    cache: KeysValues,
    packed: PackedSequences,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute reference.prefill_attention for the sequences from `packed.num_decodes` on, into their rows of `out`.

    `query`, `out`: [T, H, D] of the whole step. `plan`: of `plan_prefill` for as many heads and the same window.
    """
    tiling, tiles = plan.tiling, plan.tiles
    if plan.large_tiles is not None and plan.large_tiles.takes(query, tiling):
        plan.large_tiles.launch(query, cache, packed, tiles, out, scale, sinks)
        return
    num_heads, size = query.shape[1:]
    key_cache, value_cache = cache
    num_kv_heads, block_size = key_cache.shape[1:3]
    group, columns, num_tiles = num_heads // num_kv_heads, _columns(size), tiles.shape[1]
    descriptors = tiling.descriptors and block_size % tiling.keys == 0
    key_tiles: torch.Tensor | TensorDescriptor = key_cache
    value_tiles: torch.Tensor | TensorDescriptor = value_cache
    if descriptors:
        key_tiles, value_tiles = (_descriptor(part, tiling.keys, columns) for part in cache)
    split = tiling.parts > 1
    calls: list[tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int | None]]] = [(
        _prefill_kernel, (num_kv_heads, num_tiles, tiling.parts),
        (
            query, key_tiles, value_tiles, key_cache, value_cache, packed.block_tables, packed.query_starts,
            packed.seq_lens, tiles, out, plan.parts if split else out,
            query if sinks is None else sinks, num_tiles, query.stride(0), packed.block_tables.stride(0),
            key_cache.stride(0), key_cache.stride(1), scale * _LOG2_E, num_kv_heads, group, size, block_size, window,
            tiling.rows, tiling.keys, columns, "ieee" if query.dtype is torch.float32 else "tf32", tiling.num_stages,
            descriptors, split, sinks is not None,
        ),
        {"num_warps": tiling.num_warps, "maxnreg": tiling.max_registers},
    )]  # fmt: skip
    if split:
        merged = min(tiling.rows, _MERGED_ROWS)
        calls.append((
            _merge_kernel, (num_kv_heads, num_tiles, tiling.rows // merged),
            (
                plan.parts, packed.query_starts, tiles, out, num_tiles, tiling.parts, num_kv_heads, group, size,
                tiling.rows, columns, merged,
            ),
            {"num_warps": 4},
        ))  # fmt: skip
    _launch(calls, plan.launches)


def _launch(
    calls: list[tuple[Any, tuple[int, int, int], tuple[Any, ...], dict[str, int | None]]], launches: list[Any]
) -> None:
    """Launch each kernel on its grid. `launches`: kernels compiled for another layer; only pointers differ.

    The search for the compiled kernel from the arguments costs the host 15 us per launch. The pointers of all layers
    have the same alignment, so the compiled kernel is the same.
    """
    if launches:
        for compiled, (_, grid, arguments, _) in zip(launches, calls, strict=True):
            compiled[grid](*arguments)
        return
    found = [kernel[grid](*arguments, **options) for kernel, grid, arguments, options in calls]
    if found[0] is not None:  # the interpreter does not compile
        launches.extend(found)


def _columns(size: int) -> int:
    return max(next_power_of_2(size), 16)


def _descriptor(cache: torch.Tensor, keys: int, columns: int) -> TensorDescriptor:
    """A layer's view in pieces of `keys` tokens of one head."""
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, keys, columns])
