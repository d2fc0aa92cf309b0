# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""RMSNorm, alone and fused with the residual sum before it. A kernel reads and writes each tensor once.

Rounding follows `reference`: the normed value is rounded to the weight's dtype before the weight multiplies it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.quantized import RowsTwice
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_quantize import empty_rows, store_quantized

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows

_TILE = 4096  # elements a program holds: one row of a large model, many heads of a small tensor


@triton.jit
def pieces_of_squares(squares, num_squares, row, num_rows, SQUARES: tl.constexpr):
    """The squares [SQUARES, rows] of the rows `row` of a HalfNormed. SQUARES: `num_squares` or more."""
    piece = tl.arange(0, SQUARES)[:, None]
    inside = (piece < num_squares) & (row < num_rows)[None, :]
    return tl.load(squares + piece * num_rows + row[None, :], mask=inside, other=0.0)


@triton.jit
def root_mean_square(pieces, size, eps):
    """What rows of a HalfNormed must be divided by. A program loads the pieces early and needs this late."""
    return tl.sqrt(tl.sum(pieces, 0) / size + eps)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, out, num_rows, num_heads, token_stride, head_stride, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    source = x + (row // num_heads * token_stride + row % num_heads * head_stride)[:, None] + column[None, :]
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    normed = (value * scale[:, None]).to(weight.dtype.element_ty).to(tl.float32) * gain[None, :]
    tl.store(out + row[:, None] * SIZE + column[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added_and_normed(
    x, residual, weight, row, column, num_rows, part_stride, x_stride, residual_stride, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of `x` to `residual`, in place. -> the norm, float32 [rows, columns]."""
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    x_at = x + row[:, None] * x_stride + column[None, :]
    residual_at = residual + row[:, None] * residual_stride + column[None, :]
    gain = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    dtype = residual.dtype.element_ty
    old = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        added += tl.load(x_at + part * part_stride, mask=inside, other=0.0)
    total = (added.to(dtype).to(tl.float32) + old).to(dtype)
    tl.store(residual_at, total, mask=inside)
    value = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
    return (value * scale[:, None]).to(weight.dtype.element_ty).to(tl.float32) * gain[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    x, residual, weight, out, num_rows, part_stride, x_stride, residual_stride, out_stride, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    normed = _added_and_normed(
        x, residual, weight, row, column, num_rows, part_stride, x_stride, residual_stride, eps, PARTS, SIZE, EARLY
    )  # fmt: skip
    inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_quantized_kernel(
    x, residual, weight, out, values, scales, num_rows, part_stride, x_stride, residual_stride, row_stride,
    group_stride, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    PLAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Also writes the norm as it is to contiguous `out`, if PLAIN."""
    others_may_start(EARLY)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = first + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    normed = _added_and_normed(
        x, residual, weight, row, column, num_rows, part_stride, x_stride, residual_stride, eps, PARTS, SIZE, EARLY
    )  # fmt: skip
    normed = normed.to(residual.dtype.element_ty)
    WIDTH: tl.constexpr = COLUMNS // GROUPS
    groups, line = tl.reshape(normed.to(tl.float32), [ROWS * GROUPS, WIDTH]), tl.arange(0, ROWS * GROUPS)
    store_quantized(
        groups, values, scales, first, 0, line, num_rows, SIZE, row_stride, group_stride, WIDTH, GROUPS
    )  # fmt: skip
    if PLAIN:
        inside = (row < num_rows)[:, None] & (column < SIZE)[None, :]
        tl.store(out + row[:, None] * SIZE + column[None, :], normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm. `x` [T, size] or [T, heads, size], unit last stride. -> contiguous. Raises ValueError."""
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"x must be [T, size] or [T, heads, size] with unit last stride, not {tuple(x.shape)}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size, num_heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    if num_rows:
        columns, rows, num_warps = _shape(size, num_rows)
        early = launches_early(x.device)
        head_stride = x.stride(1) if x.dim() == 3 else 0
        _rms_norm_kernel[(cdiv(num_rows, rows),)](
            x, weight, out, num_rows, num_heads, x.stride(0), head_stride, eps, size, columns, rows,
            early, num_warps=num_warps, **early_options(early),
        )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm. Last strides must be 1. Raises ValueError.

    The sum overwrites `residual`. The norm overwrites `x`, except for `x` in parts: then the norm is a new tensor.
    """
    _check(x, residual)
    out = x if x.dim() == 2 else torch.empty_like(residual)
    num_rows, size = residual.shape
    if num_rows:
        parts, part_stride, columns, rows, num_warps = _shape_of_sum(x, num_rows, size)
        early = launches_early(x.device)
        _add_rms_norm_kernel[(cdiv(num_rows, rows),)](
            x, residual, weight, out, num_rows, part_stride, x.stride(-2), residual.stride(0), out.stride(0), eps,
            parts, size, columns, rows, early, num_warps=num_warps, **early_options(early),
        )  # fmt: skip
    return out, residual


def add_rms_norm_quantized(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[QuantizedRows, torch.Tensor]:
    """See reference.add_rms_norm_quantized. Last strides must be 1. Overwrites `residual`. Raises ValueError."""
    _check(x, residual)
    rows = empty_rows(residual.shape[0], residual.shape[1], group, residual.device)
    _add_quantized(x, residual, weight, eps, None, rows)
    return rows, residual


def add_rms_norm_twice(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: int
) -> tuple[RowsTwice, torch.Tensor]:
    """`add_rms_norm_quantized` that returns the norm too, as it was before."""
    _check(x, residual)
    rows = empty_rows(residual.shape[0], residual.shape[1], group, residual.device)
    out = torch.empty_like(residual)
    _add_quantized(x, residual, weight, eps, out, rows)
    return RowsTwice(out, rows), residual


def _check(x: torch.Tensor, residual: torch.Tensor) -> None:
    if x.shape[-2:] != residual.shape or x.stride(-1) != 1 or residual.stride(1) != 1 or x.dim() not in (2, 3):
        raise ValueError(f"x and residual must be [T, size] with unit last stride, not {x.shape} and {residual.shape}")
    if x.dtype != (residual.dtype if x.dim() == 2 else torch.float32):
        raise ValueError(f"x is {x.dtype}, the residual {residual.dtype}")


def _add_quantized(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    rows: QuantizedRows,
) -> None:
    """Write the sum to `residual`, and its norm to `rows` and to `out`, if that is not None."""
    num_rows, size = residual.shape
    if not num_rows:
        return
    parts, part_stride, columns, rows_of_program, num_warps = _shape_of_sum(x, num_rows, size)
    groups = 1 if rows.group >= size else columns // rows.group
    early = launches_early(x.device)
    _add_rms_norm_quantized_kernel[(cdiv(num_rows, rows_of_program),)](
        x, residual, weight, residual if out is None else out, rows.values, rows.scales, num_rows, part_stride,
        x.stride(-2), residual.stride(0), *rows.scales.stride(), eps, parts, size, columns, rows_of_program, groups,
        out is not None, early, num_warps=num_warps, **early_options(early),
    )  # fmt: skip


def _shape_of_sum(x: torch.Tensor, num_rows: int, size: int) -> tuple[int, int, int, int, int]:
    """Parts of `x` and their stride, then `_shape`."""
    columns, rows, num_warps = _shape(size, num_rows)
    if x.dim() == 2:
        return 1, 0, columns, rows, num_warps
    if len(x) > 4:  # as many parts as a token has experts: each thread would load 128 numbers
        num_warps = min(4 * num_warps, 16)
    return len(x), x.stride(0), columns, rows, num_warps


def _shape(size: int, num_rows: int) -> tuple[int, int, int]:
    """Columns, rows and warps of a program: 16 elements a thread, fewer rows while the device is not full."""
    columns = next_power_of_2(size)
    rows = max(min(_TILE // columns, next_power_of_2(cdiv(num_rows, 512))), 1)
    return columns, rows, min(max(rows * columns // 512, 1), 16)
