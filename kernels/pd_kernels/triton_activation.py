# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The elementwise part of SwiGLU, with two reads and one write per output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_quantize import empty_rows, group_place, group_tiling, store_quantized

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows


@triton.jit
def _gated(gate, up, dtype: tl.constexpr):
    gate = gate.to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # the definition rounds here
    return (gated * up.to(tl.float32)).to(dtype)


@triton.jit
def _silu_and_mul_kernel(x, out, size, x_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, _gated(gate, up, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_kernel(
    x, values, scales, num_rows, size, x_stride, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row, group, line = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS, tl.arange(0, GROUPS)
    rows, _, columns, inside = group_place(row, group, line, num_rows, size, WIDTH, GROUPS)
    at = x + rows[:, None] * x_stride + columns
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + size, mask=inside, other=0.0)
    gated = _gated(gate, up, x.dtype.element_ty).to(tl.float32)
    store_quantized(
        gated, values, scales, row, group, line, num_rows, size, row_stride, group_stride, WIDTH, GROUPS
    )  # fmt: skip


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul. `x` [T, 2 * size], unit last stride -> [T, size]. Raises ValueError."""
    num_rows, size = _check(x)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(next_power_of_2(size), 1024)  # 8 elements a thread: 16-byte accesses
        early = launches_early(x.device)
        _silu_and_mul_kernel[(num_rows, cdiv(size, block))](
            x, out, size, x.stride(0), block, early, num_warps=4, **early_options(early)
        )
    return out


def silu_and_mul_quantized(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.silu_and_mul_quantized. `x` [T, 2 * size], unit last stride. Raises ValueError."""
    num_rows, size = _check(x)
    rows = empty_rows(num_rows, size, group, x.device)
    if num_rows:
        width, groups = group_tiling(size, group)
        early = launches_early(x.device)
        _quantized_kernel[(num_rows, cdiv(size, width * groups))](
            x, rows.values, rows.scales, num_rows, size, x.stride(0), *rows.scales.stride(), width, groups, early,
            num_warps=min(max(width * groups // 256, 1), 32), **early_options(early),
        )  # fmt: skip
    return rows


def _check(x: torch.Tensor) -> tuple[int, int]:
    """The number of rows and of outputs."""
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"x must be [T, 2 * size] with unit last stride, not {tuple(x.shape)}")
    return x.shape[0], x.shape[1] // 2
