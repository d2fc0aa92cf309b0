# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The quantization of rows to float8, alone. Norms and activations end with the same function, `store_quantized`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedRows
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

_MOST: tl.constexpr = tl.constexpr(MOST)
_LEAST: tl.constexpr = tl.constexpr(LEAST)
_GROUPS = 8  # of a program, for groups smaller than a row


@triton.jit
def _rounded(scaled):
    """The value of e4m3fn nearest to each number of at most MOST, ties to even.

    The conversion then is exact. Triton's interpreter does not round conversions to float8 correctly.
    """
    power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 0.015625) * 1572864.0  # 2^-6: the least normal number; 1.5 * 2^20: leaves 3 bits after it
    return tl.minimum(tl.maximum(scaled + magic - magic, -_MOST), _MOST)


@triton.jit
def scales_of(x, AXIS: tl.constexpr):
    """The scales of groups of float32 numbers, which lie along the axis."""
    return tl.div_rn(tl.maximum(tl.max(tl.abs(x), AXIS), _LEAST), _MOST)


@triton.jit
def quantized_by(x, scale, AXIS: tl.constexpr):
    """Numbers of float8, still as float32: `x` by the groups' scales."""
    return _rounded(x * tl.expand_dims(tl.div_rn(1.0, scale), AXIS))


@triton.jit
def group_place(row, group, line, num_rows, size, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Rows [LINES], groups [LINES], columns [LINES, WIDTH], and which of these are in a matrix [num_rows, size].

    A line is a group of WIDTH columns, and a row has GROUPS lines. `row`, `group`: the place of the first line.
    """
    rows, groups = row + line // GROUPS, group + line % GROUPS
    columns = groups[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return rows, groups, columns, (rows < num_rows)[:, None] & (columns < size)


@triton.jit
def store_quantized(x, values, scales, row, group, line, num_rows, size, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Quantize the groups `x` float32 [LINES, WIDTH], which are 0 outside the matrix, and store them.

    `row`, `group`, `line`, WIDTH, GROUPS: see `group_place`. The strides are those of `scales`.
    """
    rows, groups, columns, inside = group_place(row, group, line, num_rows, size, WIDTH, GROUPS)
    scale = scales_of(x, 1)
    scaled = quantized_by(x, scale, 1)
    tl.store(values + rows[:, None] * size + columns, scaled.to(values.dtype.element_ty), mask=inside)
    known = (rows < num_rows) & (groups * WIDTH < size)
    tl.store(scales + rows * row_stride + groups * group_stride, scale, mask=known)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_kernel(
    x, values, scales, num_rows, size, x_stride, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row, group, line = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS, tl.arange(0, GROUPS)
    rows, _, columns, inside = group_place(row, group, line, num_rows, size, WIDTH, GROUPS)
    value = tl.load(x + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    store_quantized(
        value, values, scales, row, group, line, num_rows, size, row_stride, group_stride, WIDTH, GROUPS
    )  # fmt: skip


def empty_rows(num_rows: int, size: int, group: int, device: torch.device) -> QuantizedRows:
    """Quantized rows to be written. The scales of a group are adjacent: a product reads those of many rows at once.

    Raises ValueError if `group` is neither 128 nor all of a row.
    """
    if group != BLOCK and group < size:
        raise ValueError(f"{group} inputs of {size} share a scale; supported are {BLOCK}, and all")
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty((cdiv(size, group), num_rows), dtype=torch.float32, device=device)
    return QuantizedRows(values, scales.t(), group)


def group_tiling(size: int, group: int) -> tuple[int, int]:
    """The columns of a group, and the groups of a program."""
    if group >= size:
        return next_power_of_2(size), 1
    return BLOCK, min(next_power_of_2(cdiv(size, BLOCK)), _GROUPS)


def quantize(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.quantize. `x` [T, in], unit last stride; `group`: 128, or at least `in`. Raises ValueError."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be [T, in] with unit last stride, not {tuple(x.shape)}")
    num_rows, size = x.shape
    rows = empty_rows(num_rows, size, group, x.device)
    if num_rows:
        width, groups = group_tiling(size, group)
        early = launches_early(x.device)
        _quantize_kernel[(num_rows, cdiv(size, width * groups))](
            x, rows.values, rows.scales, num_rows, size, x.stride(0), *rows.scales.stride(), width, groups, early,
            num_warps=min(max(width * groups // 512, 1), 16), **early_options(early),
        )  # fmt: skip
    return rows
