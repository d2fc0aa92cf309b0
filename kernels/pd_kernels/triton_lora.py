# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Adapters of a step's rows: shrink (x A^T) and expand (B of that), a program for each tile of rows with one slot.

The inputs are cut into splits, so that few tiles keep the device busy; the expand adds the splits' sums in their order.
There are no atomics: a row's numbers depend on the number of the step's rows alone. Ranks that an adapter does not have
are not read. The lines of A of all parts are one matrix, so the rows are read once for them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.lora import FEW
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.lora import AdapterMatrices, AdapterRows


ELEMENTS = 8192  # at most, of B and of a tile's outputs, that a program of the expand has at once
COLUMNS = 128  # at most, of these outputs


class LoraTiling(NamedTuple):
    """Sizes of both kernels."""

    step: int  # inputs that a program multiplies at once
    splits: int  # of the inputs, at most
    lines: int  # most lines of A of a program
    stages: int
    blocks: int  # of outputs that a program of the expand adds to, one after another


VERY_FEW = 4  # rows, of which only many splits of the shrink keep the device busy
VERY_FEW_ROWS = LoraTiling(256, 16, 16, 1, 1)
FEW_ROWS = LoraTiling(256, 4, 32, 3, 4)  # up to FEW rows
MANY_ROWS = LoraTiling(64, 2, 64, 4, 8)


def lora_tiling(num_rows: int, max_rank: int) -> LoraTiling:
    """That of a step of so many rows."""
    if num_rows <= VERY_FEW:  # adding many splits of high ranks takes longer than reading lines of B
        return VERY_FEW_ROWS if max_rank <= 16 else VERY_FEW_ROWS._replace(blocks=2)
    return FEW_ROWS if num_rows <= FEW else MANY_ROWS


@triton.jit(do_not_specialize=["num_pieces", "num_rows", "eps", "start", "num_places"])
def _shrink(
    x, x_stride, squares, num_pieces, num_rows, eps, memory, slot_size, ranks, start, low, order, tiles, num_places,
    HALF: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """low[split, place, ranks of all parts] = the split's part of x A^T, a block of ranks."""
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        num_ranks = tl.multiple_of(tl.load(ranks + slot), 16)
        line, place = block * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
        a = memory + slot.to(tl.int64) * slot_size + start.to(tl.int64) * num_ranks
        is_line, a_at = (line < PARTS * num_ranks)[:, None], line.to(tl.int64)[:, None] * K
        if block * BLOCK < PARTS * num_ranks:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            is_row = (place < end)[:, None]
            for begin in tl.range(0, SPAN, STEP, num_stages=STAGES):
                at = split * SPAN + begin + tl.arange(0, STEP)
                rows = tl.load(x + row[:, None] * x_stride + at[None, :], mask=is_row & (at < K)[None, :], other=0.0)
                lines = tl.load(a + a_at + at[None, :], mask=is_line & (at < K)[None, :], other=0.0)
                sums = tl.dot(rows, tl.trans(lines), sums, input_precision="ieee")
            if HALF:  # the division of the norm, as products of few rows do it
                square = tl.zeros([ROWS], tl.float32)
                for piece in range(num_pieces):
                    square += tl.load(squares + piece * num_rows + row, mask=place < end, other=0.0)
                sums *= tl.rsqrt(square / K + eps)[:, None]
            target = low + (split * num_places + place)[:, None] * (PARTS * RANKS) + line[None, :]
            tl.store(target, sums, mask=is_row & (line < PARTS * num_ranks)[None, :])


@triton.jit
def _lines_of(b, column, stop, rank, num_ranks):
    is_line = (column < stop)[:, None] & (rank < num_ranks)[None, :]
    return tl.load(b + column.to(tl.int64)[:, None] * num_ranks + rank[None, :], mask=is_line, other=0)


@triton.jit
def _low_of(
    low, place, end, rank, num_ranks, num_places, part,
    PARTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, SLABS: tl.constexpr,
):  # fmt: skip
    """The sum of a part's splits, [ROWS, BLOCK]: one load, or each split would go through shared memory by itself."""
    split = tl.arange(0, SLABS)[:, None, None]
    at = (split * num_places + place[None, :, None]) * (PARTS * RANKS) + (part * num_ranks + rank)[None, None, :]
    is_low = (split < SPLITS) & (place < end)[None, :, None] & (rank < num_ranks)[None, None, :]
    return tl.sum(tl.load(low + at, mask=is_low, other=0.0), axis=0)


@triton.jit(do_not_specialize=["start", "num_places", "second_block", "third_block"])
def _expand(
    y, y_stride, out, memory, slot_size, ranks, start, low, order, tiles, num_places, second, third, outputs,
    second_block, third_block, K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, SPLITS: tl.constexpr, SLABS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """y += low B^T in the tile's rows. Parts begin at outputs 0, `second` and `third`, and have programs of their own.

    GATED: out = silu_and_mul of that, of all rows, and y stays: the parts are gates and ups.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    LEAST: tl.constexpr = -1 if GATED else 0  # NO_SLOT
    if slot >= LEAST:
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        own = tl.maximum(slot, 0)
        dtype = memory.dtype.element_ty
        num_ranks = tl.where(slot >= 0, tl.multiple_of(tl.load(ranks + own), 16), 0)
        part, own_block, begin, stop = 0, block, 0, second
        if PARTS > 1 and not GATED:
            part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
            begin = tl.where(part == 0, 0, tl.where(part == 1, second, third))
            stop = tl.where(part == 0, second, tl.where(part == 1, third, outputs))
            own_block = block - tl.where(part == 0, 0, tl.where(part == 1, second_block, third_block))
        begin += own_block * (BLOCKS * COLUMNS)
        place, rank = first + tl.arange(0, ROWS), tl.arange(0, BLOCK)
        row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)[:, None]
        b = memory + own.to(tl.int64) * slot_size + (start.to(tl.int64) + PARTS * K) * num_ranks
        sums = _low_of(low, place, end, rank, num_ranks, num_places, part, PARTS, RANKS, SPLITS, SLABS).to(dtype)
        if GATED:
            sums_up = _low_of(low, place, end, rank, num_ranks, num_places, 1, PARTS, RANKS, SPLITS, SLABS).to(dtype)
        for step in tl.range(0, BLOCKS, num_stages=3):
            column = begin + step * COLUMNS + tl.arange(0, COLUMNS)
            mask = (place < end)[:, None] & (column < stop)[None, :]
            target = y + row * y_stride + column[None, :]
            before = tl.load(target, mask=mask, other=0.0)
            lines = _lines_of(b, column, stop, rank, num_ranks)
            total = before.to(tl.float32) + tl.dot(sums, tl.trans(lines), input_precision="ieee")
            if GATED:  # rounded where the separate functions round
                up = tl.load(target + second, mask=mask, other=0.0).to(tl.float32)
                lines = _lines_of(b + second.to(tl.int64) * num_ranks, column, stop, rank, num_ranks)
                up += tl.dot(sums_up, tl.trans(lines), input_precision="ieee")
                gate = total.to(before.dtype).to(tl.float32)
                gated = (gate / (1.0 + tl.exp(-gate))).to(before.dtype).to(tl.float32)
                gated *= up.to(before.dtype).to(tl.float32)
                tl.store(out + row * second + column[None, :], gated.to(before.dtype), mask=mask)
            else:
                tl.store(target, total.to(before.dtype), mask=mask)


def shrink(x: torch.Tensor | HalfNormed, matrices: AdapterMatrices, rows: AdapterRows) -> torch.Tensor:
    """See `lora.shrink`. -> float32 [splits, places, parts * ranks of a slot]."""
    squares, eps = (x.squares, x.eps) if isinstance(x, HalfNormed) else (matrices.ranks, 0.0)
    is_half, x = isinstance(x, HalfNormed), x.x if isinstance(x, HalfNormed) else x
    tiling, num_inputs, parts = lora_tiling(len(x), matrices.max_rank), matrices.num_inputs, matrices.num_parts
    span = cdiv(num_inputs, tiling.splits * tiling.step) * tiling.step
    splits, num_lines = cdiv(num_inputs, span), parts * matrices.max_rank
    block = min(tiling.lines, next_power_of_2(num_lines))
    low = torch.empty(splits, len(rows.order), num_lines, dtype=torch.float32, device=x.device)
    _shrink[len(rows.tiles), splits, cdiv(num_lines, block)](
        x, x.stride(0), squares, len(squares), len(x), eps, *_arguments(low, matrices, rows), is_half, num_inputs,
        parts, matrices.max_rank, block, rows.most, tiling.step, span, tiling.stages, num_warps=4,
    )  # fmt: skip
    return low


def expand(
    low: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, rows: AdapterRows, is_gated: bool = False
) -> torch.Tensor:
    """See `lora.expand`."""
    tiling, bounds = lora_tiling(len(y), matrices.max_rank), matrices.bounds
    out, block = y.new_empty(len(y), bounds[1]) if is_gated else y, next_power_of_2(matrices.max_rank)
    columns = max(16, min(COLUMNS, ELEMENTS // (max(block, rows.most) * (1 + is_gated))))
    second, third = (*bounds[1:], bounds[-1], bounds[-1])[:2]
    parts = pairwise(bounds[:2] if is_gated else bounds)
    programs = [cdiv(end - start, columns * tiling.blocks) for start, end in parts]
    _expand[len(rows.tiles), sum(programs)](
        y, y.stride(0), out, *_arguments(low, matrices, rows), second, third, bounds[-1], programs[0],
        sum(programs[:2]), matrices.num_inputs, matrices.num_parts, matrices.max_rank, block, rows.most, columns,
        tiling.blocks, len(low), next_power_of_2(len(low)), is_gated, num_warps=4,
    )  # fmt: skip
    return out


def _arguments(low: torch.Tensor, matrices: AdapterMatrices, rows: AdapterRows) -> tuple[Any, ...]:
    memory = matrices.memory
    return memory, memory.shape[1], matrices.ranks, matrices.start, low, rows.order, rows.tiles, len(rows.order)
