# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""From the rows of tokens to the rows of their pairs (token, expert), quantized, and from there to weighted sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.quantized import BLOCK
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_norm import pieces_of_squares, root_mean_square
from pd_kernels.triton_pairs import own_expert
from pd_kernels.triton_quantize import empty_rows, group_place, group_tiling, store_quantized
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    import torch

    from pd_kernels.quantized import QuantizedRows
    from pd_kernels.triton_pairs import OwnPairs


@triton.jit
def _spread_kernel(
    x, rows_of_pairs, values, scales, chosen, num_rows, size, x_stride, row_stride, group_stride, first_own, num_own,
    NUM_CHOSEN: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    token, group, line = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS, tl.arange(0, GROUPS)
    rows, _, columns, inside = group_place(token, group, line, tl.num_programs(0), size, WIDTH, GROUPS)
    value = tl.load(x + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        row = tl.load(rows_of_pairs + pair).to(tl.int64)
        if PART:  # after the last row nothing is stored
            row = tl.where(own_expert(tl.load(chosen + pair), first_own, num_own, PART) < 0, num_rows, row)
        store_quantized(
            value, values, scales, row, group, line, num_rows, size, row_stride, group_stride, WIDTH, GROUPS
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    results, rows_of_pairs, scores, out, chosen, num_tokens, size, first_own, num_own,
    NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, PLACED: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_others(EARLY)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        row = tl.load(rows_of_pairs + pair).to(tl.int64) if PLACED else pair
        inside = column < size
        if PART:  # other ranks add the results of other experts
            is_own = own_expert(tl.load(chosen + pair), first_own, num_own, PART) >= 0
            inside, row = inside & is_own, tl.where(is_own, row, 0)
        result = tl.load(results + row * size + column, mask=inside, other=0.0)
        total += tl.load(scores + pair) * result.to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _sorted_kernel(
    x, order, squares, out, num_tokens, size, x_stride, num_squares, eps,
    NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, SQUARES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_others(EARLY)
    # The order of other ranks' pairs is undefined
    token = tl.minimum(tl.maximum(tl.load(order + row) // NUM_CHOSEN, 0), num_tokens - 1)
    value = tl.load(x + token.to(tl.int64) * x_stride + column, mask=column < size, other=0.0)
    if SQUARES > 0:
        pieces = pieces_of_squares(squares, num_squares, token + tl.arange(0, 1), num_tokens, SQUARES)
        value = (value.to(tl.float32) / root_mean_square(pieces, size, eps)).to(value.dtype)
    tl.store(out + row * size + column, value, mask=column < size)


def sorted_rows(x: torch.Tensor | HalfNormed, order: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """The rows of `x` [T, size], after the division, in the order of their pairs: see SortedPairs.

    Rows of pairs that are left out may be of any token.
    """
    squares, eps = (order[:0], 0.0) if not isinstance(x, HalfNormed) else (x.squares, x.eps)
    x = x.x if isinstance(x, HalfNormed) else x
    (num_tokens, size), early = x.shape, launches_early(x.device)
    out, columns = x.new_empty((len(order), size)), min(next_power_of_2(size), 1024)
    _sorted_kernel[(len(order), cdiv(size, columns))](
        x, order, squares, out, num_tokens, size, x.stride(0), len(squares), eps, num_chosen, columns,
        next_power_of_2(len(squares)) if len(squares) else 0, early, num_warps=4, **early_options(early),
    )  # fmt: skip
    return out


def spread(
    x: torch.Tensor, rows_of_pairs: torch.Tensor, num_chosen: int, num_rows: int, own: OwnPairs | None = None
) -> QuantizedRows:
    """Quantize `x` [T, in] in groups of 128, and copy each token to the rows of its pairs, or of its `own` ones.

    `rows_of_pairs`: int32 [T * num_chosen], see PlacedPairs. Other rows of the `num_rows` are undefined.
    """
    num_tokens, size = x.shape
    rows, early = empty_rows(num_rows, size, BLOCK, x.device), launches_early(x.device)
    width, groups = group_tiling(size, BLOCK)
    chosen, *experts = (rows_of_pairs, 0, 0) if own is None else (own.chosen, own.first, own.num_own)
    _spread_kernel[(num_tokens, cdiv(size, width * groups))](
        x, rows_of_pairs, rows.values, rows.scales, chosen, num_rows, size, x.stride(0), *rows.scales.stride(),
        *experts, num_chosen, width, groups, own is not None, early,
        num_warps=max(width * groups // 512, 1), **early_options(early),
    )  # fmt: skip
    return rows


def sum_pairs(
    results: torch.Tensor, scores: torch.Tensor, rows_of_pairs: torch.Tensor | None = None, own: OwnPairs | None = None
) -> torch.Tensor:
    """The sum of each token's results, weighted with `scores` [T, k], in the order of its choices.

    `results`: [T * k, size], or [rows, size] with `rows_of_pairs` (see `spread`). `own`: add up these pairs only.
    """
    (num_tokens, num_chosen), size = scores.shape, results.shape[1]
    out, early = results.new_empty((num_tokens, size)), launches_early(results.device)
    columns = min(next_power_of_2(size), 2048)
    chosen, *experts = (scores, 0, 0) if own is None else (own.chosen, own.first, own.num_own)
    _sum_kernel[(num_tokens, cdiv(size, columns))](
        results, scores if rows_of_pairs is None else rows_of_pairs, scores, out, chosen, num_tokens, size,
        *experts, num_chosen, columns, rows_of_pairs is not None, own is not None, early,
        num_warps=4, **early_options(early),
    )  # fmt: skip
    return out
