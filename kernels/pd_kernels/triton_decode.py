"""Paged decode attention: a step's KV is shared out evenly over a fixed number of programs.

The unit of work is one tile of TILE tokens of one (sequence, KV head). All units of a step stand in one line (sequence
by sequence, head by head, tile by tile) and program p of P takes the p-th equal share of it, as stream-K does for matrix
products (arXiv 2301.03598). So no mix of lengths leaves a multiprocessor idle, and the grid does not depend on lengths:
they are read on the device, nothing waits for the host, and a CUDA graph can replay the launches with other lengths.

A share may begin and end within a (sequence, head) pair. Such parts go to a workspace, each with the logarithm of its
sum of exponentials, and a second launch merges them. A program leaves at most two parts: in slot 0 the one of a pair
that an earlier program began, in slot 1 the one of the pair that it began and did not finish.

The query heads that share a KV head are the rows of one matrix product. Maxima, sums and the workspace are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_MERGED = 16  # parts that a merging program reads at a time


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the kernel is cut; the defaults of `decode_tiling` were chosen by measurement."""

    tile: int  # tokens
    num_warps: int
    num_stages: int
    programs_per_processor: int


@triton.jit
def _plan_kernel(seq_lens, ends, num_seqs, WINDOW: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr):
    """ends[i]: tiles of one head of the sequences 0..i."""
    seq = tl.arange(0, SEQS)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    tiles = (length + TILE - 1) // TILE
    if WINDOW > 0:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    tl.store(ends + seq, tl.cumsum(tiles, 0), mask=seq < num_seqs)


@triton.jit
def _share(ends, num_seqs, NUM_KV_HEADS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Units of one program."""
    units = tl.load(ends + num_seqs - 1) * NUM_KV_HEADS
    return tl.maximum((units + PROGRAMS - 1) // PROGRAMS, 1)


@triton.jit
def _sequence_of(ends, tile, num_seqs, SEQS: tl.constexpr):
    """The sequence that owns the `tile`-th tile of a head: how many end at or before it."""
    seq = tl.arange(0, SEQS)
    end = tl.load(ends + seq, mask=seq < num_seqs, other=2147483647)
    return tl.sum((end <= tile).to(tl.int32), 0)


@triton.jit
def _attend_part(
    q, keys, values, table, start, stop, length, lowest, block_stride, scale,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted mean of one head's values over tokens [start, stop), and log2 of its sum of exponentials."""
    column = tl.arange(0, COLUMNS)
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(start, stop, TILE, num_stages=STAGES):
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
        v = tl.load(values + place[:, None] + column[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    return sums / total[:, None], top + tl.log2(total)


@triton.jit
def _decode_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, ends, out, parts, part_logs,
    num_seqs, query_stride, table_stride, block_stride, head_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    unit = program * _share(ends, num_seqs, NUM_KV_HEADS, PROGRAMS)
    stop = tl.minimum(
        unit + _share(ends, num_seqs, NUM_KV_HEADS, PROGRAMS), tl.load(ends + num_seqs - 1) * NUM_KV_HEADS
    )
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    while unit < stop:
        seq = _sequence_of(ends, unit // NUM_KV_HEADS, num_seqs, SEQS).to(tl.int64)
        before = tl.load(ends + seq - 1, mask=seq > 0, other=0)
        tiles = tl.load(ends + seq) - before
        head = (unit - before * NUM_KV_HEADS) // tiles
        first = unit - before * NUM_KV_HEADS - head * tiles
        count = tl.minimum(tiles - first, stop - unit)
        length = tl.load(seq_lens + seq)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(length - WINDOW, 0)
        start = (lowest // TILE + first) * TILE
        q = tl.load(query + seq * query_stride + head * GROUP * SIZE + at, mask=inside, other=0.0)
        mean, log = _attend_part(
            q, key_cache + head * head_stride, value_cache + head * head_stride, block_tables + seq * table_stride,
            start, start + count * TILE, length, lowest, block_stride, scale,
            SIZE, BLOCK_SIZE, WINDOW, TILE, ROWS, COLUMNS, PRECISION, STAGES,
        )  # fmt: skip
        if count == tiles:
            target = out + (seq * NUM_KV_HEADS + head) * GROUP * SIZE
            tl.store(target + at, mean.to(out.dtype.element_ty), mask=inside)
        else:
            slot = (2 * program + (first == 0).to(tl.int32)) * GROUP
            tl.store(parts + slot * SIZE + at, mean, mask=inside)
            tl.store(part_logs + slot + row, log, mask=row < GROUP)
        unit += count


@triton.jit
def _merge_kernel(
    ends, parts, part_logs, out, num_seqs, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """One query head of one sequence: does nothing unless several programs worked at it. Empty sequences become 0."""
    seq, query_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = column < SIZE
    before = tl.load(ends + seq - 1, mask=seq > 0, other=0)
    tiles = tl.load(ends + seq) - before
    share = _share(ends, num_seqs, NUM_KV_HEADS, PROGRAMS)
    unit = before * NUM_KV_HEADS + query_head // GROUP * tiles
    program, last = unit // share, (unit + tiles - 1) // share
    target = out + (seq * NUM_KV_HEADS * GROUP + query_head) * SIZE + column
    if tiles == 0:
        tl.store(target, tl.zeros([COLUMNS], out.dtype.element_ty), mask=inside)
    elif last > program:
        top = tl.full([MERGED], -1e30, tl.float32)
        total = tl.zeros([MERGED], tl.float32)
        sums = tl.zeros([MERGED, COLUMNS], tl.float32)
        for begin in range(program, last + 1, MERGED):
            other = begin + tl.arange(0, MERGED)
            slot = (2 * other + (other == program).to(tl.int32)) * GROUP + query_head % GROUP
            log = tl.load(part_logs + slot, mask=other <= last, other=-1e30)
            mask = (other <= last)[:, None] & inside[None, :]
            part = tl.load(parts + slot[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
            higher = tl.maximum(top, log)
            total = total * tl.exp2(top - higher) + tl.where(other <= last, tl.exp2(log - higher), 0.0)
            sums = sums * tl.exp2(top - higher)[:, None] + part * tl.exp2(log - higher)[:, None]
            top = higher
        weight = tl.exp2(top - tl.max(top, 0))
        merged = tl.sum(sums * weight[:, None], 0) / tl.sum(total * weight, 0)
        tl.store(target, merged.to(out.dtype.element_ty), mask=inside)


def plan_decode(seq_lens: torch.Tensor, window: int, tile: int) -> torch.Tensor:
    """Where each sequence's tiles of one head end: int32 [S] from `seq_lens` int32 [S]. One launch, no wait."""
    ends = torch.empty_like(seq_lens)
    num_seqs = len(seq_lens)
    _plan_kernel[(1,)](seq_lens, ends, num_seqs, window, tile, triton.next_power_of_2(num_seqs), num_warps=4)
    return ends


def decode_tiling(dtype: torch.dtype, head_dim: int) -> DecodeTiling:
    """For a GPU with 228 KiB of shared memory a multiprocessor."""
    wide = dtype.itemsize * triton.next_power_of_2(head_dim)
    if dtype is torch.float32:
        return DecodeTiling(tile=16, num_warps=4, num_stages=2, programs_per_processor=2)
    return DecodeTiling(tile=64 if wide <= 256 else 32, num_warps=4, num_stages=3, programs_per_processor=2)


def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    window: int,
    tiling: DecodeTiling,
) -> None:
    """See reference.decode_attention; into `out`, whose rows are contiguous.

    `ends`: of `plan_decode` with the same window and tile. A sequence of length 0 (padding) gives zeros.
    """
    num_seqs, num_heads, size = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    programs = tiling.programs_per_processor * num_processors(query.device)
    parts = torch.empty((2 * programs * group, size), dtype=torch.float32, device=query.device)
    part_logs = torch.empty(2 * programs * group, dtype=torch.float32, device=query.device)
    columns = max(triton.next_power_of_2(size), 16)
    precision = "ieee" if query.dtype is torch.float32 else "tf32"
    _decode_kernel[(programs,)](
        query, key_cache, value_cache, block_tables, seq_lens, ends, out, parts, part_logs,
        num_seqs, query.stride(0), block_tables.stride(0), key_cache.stride(0), key_cache.stride(1), scale * _LOG2_E,
        num_kv_heads, group, size, block_size, window, tiling.tile, triton.next_power_of_2(num_seqs),
        max(triton.next_power_of_2(group), 16), columns, programs, precision, tiling.num_stages,
        num_warps=tiling.num_warps,
    )  # fmt: skip
    _merge_kernel[(num_seqs, num_heads)](
        ends, parts, part_logs, out, num_seqs, num_kv_heads, group, size, columns, programs, _MERGED, num_warps=1
    )


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number where Triton's interpreter stands in for one."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
