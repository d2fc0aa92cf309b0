# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The quantization of rows to float8, alone. Norms and activations end with the same function, `store_quantized`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedRows
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

_MOST: tl.constexpr = tl.constexpr(MOST)
_LEAST: tl.constexpr = tl.constexpr(LEAST)
_COLUMNS = 1024  # of a program, for groups smaller than a row


@triton.jit
def _rounded(scaled):
    """The value of e4m3fn nearest to each number of at most MOST, ties to even.

    The conversion then is exact. Triton's interpreter does not round conversions to float8 correctly.
    """
    power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 0.015625) * 1572864.0  # 2^-6: the least normal number; 1.5 * 2^20: leaves 3 bits behind it
    return tl.minimum(tl.maximum(scaled + magic - magic, -_MOST), _MOST)


@triton.jit
def store_quantized(
    x, values, scales, row, column, num_rows, size, row_stride, group_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantize `x` float32 [ROWS, COLUMNS], which is 0 outside the matrix, in GROUPS groups of columns, and store it.

    `row` [ROWS] int64, `column` [COLUMNS]: places of `x` in the matrix [num_rows, size]; `column` starts with a group.
    The strides are those of `scales`.
    """
    WIDTH: tl.constexpr = COLUMNS // GROUPS
    groups = tl.reshape(x, [ROWS, GROUPS, WIDTH])
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), 2), _LEAST), _MOST)
    scaled = tl.reshape(_rounded(groups * tl.div_rn(1.0, scale)[:, :, None]), [ROWS, COLUMNS])
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    at = values + row[:, None] * size + column[None, :]
    tl.store(at, scaled.to(values.dtype.element_ty), mask=inside)
    group = tl.min(column, 0) // WIDTH + tl.arange(0, GROUPS)
    inside = (row < num_rows)[:, None] & (group < tl.cdiv(size, WIDTH))[None, :]
    tl.store(scales + row[:, None] * row_stride + group[None, :] * group_stride, scale, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x, values, scales, num_rows, size, x_stride, row_stride, group_stride,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < size)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    store_quantized(
        value, values, scales, row, column, num_rows, size, row_stride, group_stride, ROWS, COLUMNS, GROUPS
    )  # fmt: skip


def empty_rows(num_rows: int, size: int, group: int, device: torch.device) -> QuantizedRows:
    """Quantized rows to be written. The scales of a group are adjacent: a product reads those of many rows at once.

    Raises ValueError if `group` is neither 128 nor all of a row.
    """
    if group != BLOCK and group < size:
        raise ValueError(f"{group} inputs of {size} share a scale; supported are {BLOCK}, and all")
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((triton.cdiv(size, group), num_rows), dtype=torch.float32, device=device)
    return QuantizedRows(values, scales.t(), group)


def columns_of(size: int, group: int) -> tuple[int, int]:
    """Columns and groups of a program."""
    if group >= size:
        return triton.next_power_of_2(size), 1
    columns = max(min(triton.next_power_of_2(size), _COLUMNS), BLOCK)
    return columns, columns // BLOCK


def quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.quantize. `x` [T, in], unit last stride; `group`: 128, or at least `in`. Raises ValueError."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [T, in] with unit last stride, not {tuple(x.shape)}")
    num_rows, size = x.shape
    rows = empty_rows(num_rows, size, group, x.device)
    if num_rows:
        columns, groups = columns_of(size, group)
        early = launches_early(x.device)
        _quantize_kernel[(num_rows, triton.cdiv(size, columns))](
            x, rows.values, rows.scales, num_rows, size, x.stride(0), *rows.scales.stride(), columns, 1, groups,
            early, num_warps=min(max(columns // 512, 1), 16), **early_options(early),
        )  # fmt: skip
    return rows
