# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The rows of few pairs (token, expert), sorted by expert, in one launch.

`triton_pairs` counts, places and then copies: three launches, of some 4 us each where little is done. Here a program
counts for itself the pairs before its own one, and copies one row. Another program cuts the tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_norm import pieces_of_squares, root_mean_square
from pd_kernels.triton_pairs import SortedRows, own_expert
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.triton_pairs import OwnPairs

MOST_PAIRS = 1024  # each program reads the experts of all pairs


@triton.jit
def _cut(
    mine, known, tiles, num_tiles,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the tiles of all experts. See SortedPairs."""
    expert, place = tl.arange(0, EXPERTS), tl.arange(0, PAIRS)
    total = tl.histogram(mine, EXPERTS, mask=known)
    end, needed = tl.cumsum(total, 0), tl.cdiv(total, ROWS)
    last = tl.cumsum(needed, 0)
    for index in range(tl.max(needed, 0)):
        tile, first = last - needed + index, end - total + index * ROWS
        tl.store(tiles + tile, expert, mask=index < needed)
        tl.store(tiles + num_tiles + tile, first, mask=index < needed)
        tl.store(tiles + 2 * num_tiles + tile, tl.minimum(first + ROWS, end), mask=index < needed)
    for tile in range(tl.max(last, 0), num_tiles, PAIRS):
        tl.store(tiles + tile + place, -1, mask=tile + place < num_tiles)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_squares"])
def _sort_rows_kernel(
    x, chosen, squares, out, order, tiles, num_pairs, num_tiles, size, x_stride, first_own, num_own, num_squares, eps,
    NUM_CHOSEN: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    PART: tl.constexpr, SQUARES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program p copies the row of pair p, the last one cuts the tiles. PART: other ranks' pairs come last."""
    others_may_start(EARLY)
    own, pair, column = tl.program_id(0), tl.arange(0, PAIRS), tl.arange(0, COLUMNS)
    known, inside = pair < num_pairs, (column < size) & (own < num_pairs)
    token = own // NUM_CHOSEN
    wait_for_others(EARLY)
    value = tl.load(x + token.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
    expert = tl.load(chosen + pair, mask=known, other=0).to(tl.int32)
    expert = own_expert(expert, first_own, num_own, PART)
    known = known & (expert >= 0)
    if own == num_pairs:
        _cut(expert, known, tiles, num_tiles, ROWS, EXPERTS, PAIRS)
    else:
        expert = tl.where(known, expert, EXPERTS)
        mine = tl.sum(tl.where(pair == own, expert, 0), 0)
        is_before = (expert < mine) | ((expert == mine) & (pair < own))
        row = tl.sum(tl.where(is_before & (pair < num_pairs), 1, 0), 0)
        if SQUARES > 0:
            pieces = pieces_of_squares(
                squares, num_squares, token + tl.arange(0, 1), num_pairs // NUM_CHOSEN, SQUARES
            )  # fmt: skip
            value = (value.to(tl.float32) / root_mean_square(pieces, size, eps)).to(value.dtype)
        tl.store(order + row, own)
        tl.store(out + row.to(tl.int64) * size + column, value, mask=inside)


def sort_rows(
    x: torch.Tensor | HalfNormed, chosen: torch.Tensor, num_experts: int, rows: int, own: OwnPairs | None = None
) -> SortedRows:
    """The rows of `x` [T, size], after the division, by expert, in tiles of up to `rows`: see SortedPairs.

    `chosen`: int64 [T, k], contiguous, of 1 to MOST_PAIRS pairs. `own`: only these pairs are in tiles, and experts
    are numbered from the first of these on. Raises ValueError.
    """
    normed, x = (x, x.x) if isinstance(x, HalfNormed) else (None, x)
    (num_tokens, num_chosen), size, early = chosen.shape, x.shape[1], launches_early(x.device)
    num_pairs = num_tokens * num_chosen
    if not 0 < num_pairs <= MOST_PAIRS or x.stride(1) != 1 or len(x) != num_tokens:
        raise ValueError(f"{num_pairs} pairs of rows {tuple(x.shape)}, in steps of {x.stride()}")
    order = chosen.new_empty(num_pairs, dtype=torch.int32)
    tiles = order.new_empty((3, num_pairs // rows + min(num_experts, num_pairs)))
    squares, eps = (order[:0], 0.0) if normed is None else (normed.squares, normed.eps)
    out, columns = x.new_empty((num_pairs, size)), next_power_of_2(size)
    _sort_rows_kernel[(num_pairs + 1,)](
        x, chosen, squares, out, order, tiles, num_pairs, tiles.shape[1], size, x.stride(0),
        *((0, 0) if own is None else (own.first, own.num_own)), len(squares), eps,
        num_chosen, rows, next_power_of_2(num_experts), max(16, next_power_of_2(num_pairs)), columns,
        own is not None, next_power_of_2(len(squares)) if len(squares) else 0, early,
        num_warps=4, **early_options(early),
    )  # fmt: skip
    return SortedRows(out, order, tiles)
