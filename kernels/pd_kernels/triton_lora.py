# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Adapters of a step's rows: shrink (x A^T) and expand (B of that), a program for each tile of rows with one slot.

The inputs are cut into splits, so that few tiles keep the device busy; the expand adds the splits' sums in their order.
There are no atomics: a row's numbers depend on the number of the step's rows alone. Ranks that an adapter does not have
are not read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from pd_kernels.lora import FEW
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.lora import AdapterMatrices, AdapterRows

STEP = 128  # inputs of a row that a program multiplies at once
FEW_SPLITS, SPLITS = 8, 2  # of the inputs, for few rows and for many
FEW_COLUMNS, COLUMNS = 128, 256  # outputs of a program (8B on one H200, ranks 16 and 64)


@triton.jit(do_not_specialize=["num_pieces", "num_rows", "eps", "start", "num_places"])
def _shrink(
    x, x_stride, squares, num_pieces, num_rows, eps, memory, slot_size, ranks, start, low, order, tiles, num_places,
    HALF: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """low[split, place, ranks of all parts] = the split's part of x A^T, a block of ranks."""
    tile, split, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        num_ranks = tl.multiple_of(tl.load(ranks + slot), 16).to(tl.int64)
        part, rank = column // (RANKS // BLOCK), column % (RANKS // BLOCK) * BLOCK + tl.arange(0, BLOCK)
        if column % (RANKS // BLOCK) * BLOCK < num_ranks:
            place = first + tl.arange(0, ROWS)
            row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
            a = memory + slot.to(tl.int64) * slot_size + (start.to(tl.int64) + part * K) * num_ranks
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            SPAN: tl.constexpr = (K + SPLITS * STEP - 1) // (SPLITS * STEP) * STEP
            for begin in range(0, SPAN, STEP):
                at = split * SPAN + begin + tl.arange(0, STEP)
                rows = tl.load(
                    x + row[:, None] * x_stride + at[None, :],
                    mask=(place < end)[:, None] & (at < K)[None, :],
                    other=0.0,
                )
                lines = tl.load(
                    a + rank[:, None] * K + at[None, :], mask=(rank < num_ranks)[:, None] & (at < K)[None, :], other=0.0
                )
                sums = tl.dot(rows, tl.trans(lines), sums, input_precision="ieee")
            if HALF:  # the division of the norm, as products of few rows do it
                square = tl.zeros([ROWS], tl.float32)
                for piece in range(num_pieces):
                    square += tl.load(squares + piece * num_rows + row, mask=place < end, other=0.0)
                sums *= tl.rsqrt(square / K + eps)[:, None]
            target = low + (split * num_places + place)[:, None] * (PARTS * RANKS) + (part * RANKS + rank)[None, :]
            tl.store(target, sums, mask=(place < end)[:, None])


@triton.jit(do_not_specialize=["start", "num_places", "second", "third", "outputs", "second_block", "third_block"])
def _expand(
    y, y_stride, memory, slot_size, ranks, start, low, order, tiles, num_places, second, third, outputs, second_block,
    third_block, K: tl.constexpr, PARTS: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """y += low B^T in the tile's rows. Parts begin at outputs 0, `second` and `third`, and have blocks of their own."""
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile)
    if slot >= 0:
        first, end = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
        num_ranks = tl.multiple_of(tl.load(ranks + slot), 16).to(tl.int64)
        part = (block >= second_block).to(tl.int32) + (block >= third_block).to(tl.int32)
        begin = tl.where(part == 0, 0, tl.where(part == 1, second, third))
        stop = tl.where(part == 0, second, tl.where(part == 1, third, outputs))
        own = block - tl.where(part == 0, 0, tl.where(part == 1, second_block, third_block))
        column, place = begin + own * COLUMNS + tl.arange(0, COLUMNS), first + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < end, other=0).to(tl.int64)
        b = memory + slot.to(tl.int64) * slot_size + (start.to(tl.int64) + PARTS * K + column[:, None]) * num_ranks
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first_rank in range(0, num_ranks.to(tl.int32), BLOCK):
            rank = first_rank + tl.arange(0, BLOCK)
            is_low, sums = (place < end)[:, None] & (rank < num_ranks)[None, :], tl.zeros([ROWS, BLOCK], tl.float32)
            for split in range(SPLITS):
                at = (split * num_places + place)[:, None] * (PARTS * RANKS) + (part * RANKS + rank)[None, :]
                sums += tl.load(low + at, mask=is_low, other=0.0)
            lines = tl.load(b + rank[None, :], mask=(column < stop)[:, None] & (rank < num_ranks)[None, :], other=0.0)
            product = tl.dot(sums.to(lines.dtype), tl.trans(lines), product, input_precision="ieee")
        target, mask = y + row[:, None] * y_stride + column[None, :], (place < end)[:, None] & (column < stop)[None, :]
        before = tl.load(target, mask=mask, other=0.0)
        tl.store(target, (before.to(tl.float32) + product).to(before.dtype), mask=mask)


def shrink(x: torch.Tensor | HalfNormed, matrices: AdapterMatrices, rows: AdapterRows) -> torch.Tensor:
    """See `lora.shrink`. -> float32 [splits, places, parts * ranks of a slot]."""
    squares, eps = (x.squares, x.eps) if isinstance(x, HalfNormed) else (matrices.ranks, 0.0)
    is_half, x = isinstance(x, HalfNormed), x.x if isinstance(x, HalfNormed) else x
    splits, sizes = FEW_SPLITS if len(x) <= FEW else SPLITS, _sizes(matrices, rows)
    num_ranks = matrices.num_parts * matrices.max_rank
    low = torch.empty(splits, len(rows.order), num_ranks, dtype=torch.float32, device=x.device)
    _shrink[len(rows.tiles), splits, num_ranks // sizes["BLOCK"]](
        x,
        x.stride(0),
        squares,
        len(squares),
        len(x),
        eps,
        *_arguments(low, matrices, rows),
        HALF=is_half,
        **sizes,
        STEP=STEP,
        SPLITS=splits,
        num_warps=4,
        num_stages=3,
    )
    return low


def expand(low: torch.Tensor, y: torch.Tensor, matrices: AdapterMatrices, rows: AdapterRows) -> None:
    """See `lora.expand`."""
    columns, bounds = FEW_COLUMNS if len(y) <= FEW else COLUMNS, matrices.bounds
    blocks = [triton.cdiv(end - start, columns) for start, end in pairwise(bounds)]
    second, third = (*bounds[1:], bounds[-1], bounds[-1])[:2]
    _expand[len(rows.tiles), sum(blocks)](
        y, y.stride(0), *_arguments(low, matrices, rows), second, third, bounds[-1], blocks[0], sum(blocks[:2]),
        **_sizes(matrices, rows), COLUMNS=columns, SPLITS=len(low), num_warps=4,
    )  # fmt: skip


def _arguments(low: torch.Tensor, matrices: AdapterMatrices, rows: AdapterRows) -> tuple[Any, ...]:
    memory = matrices.memory
    of_step = low, rows.order, rows.tiles, len(rows.order)
    return memory, memory.shape[1], matrices.ranks, matrices.start, *of_step


def _sizes(matrices: AdapterMatrices, rows: AdapterRows) -> dict[str, int]:
    ranks = matrices.max_rank
    block = next(size for size in (64, 32, 16) if not ranks % size)
    return {"K": matrices.num_inputs, "PARTS": matrices.num_parts, "RANKS": ranks, "BLOCK": block, "ROWS": rows.most}
