# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The elementwise part of SwiGLU, with two reads and one write per output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_quantize import columns_of, empty_rows, store_quantized

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows


@triton.jit(do_not_specialize=["num_rows"])
def _silu_and_mul_kernel(
    x, out, scales, num_rows, size, x_stride, row_stride, group_stride,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    gated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # the definition rounds here
    gated = (gated * up).to(dtype)
    if GROUPS > 0:
        store_quantized(
            gated.to(tl.float32)[None, :], out, scales, row + tl.zeros([1], tl.int64), column, num_rows, size,
            row_stride, group_stride, 1, BLOCK, GROUPS,
        )  # fmt: skip
    else:
        tl.store(out + row * size + column, gated, mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul. `x` [T, 2 * size], unit last stride -> [T, size]. Raises ValueError."""
    num_rows, size = _check(x)
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), 1024)  # 8 elements a thread: 16-byte accesses
        early = launches_early(x.device)
        _silu_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
            x, out, out, num_rows, size, x.stride(0), 0, 0, block, 0, early, num_warps=4, **early_options(early)
        )
    return out


def silu_and_mul_quantized(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.silu_and_mul_quantized. `x` [T, 2 * size], unit last stride. Raises ValueError."""
    num_rows, size = _check(x)
    rows = empty_rows(num_rows, size, group, x.device)
    if num_rows:
        block, groups = columns_of(size, group)
        early = launches_early(x.device)
        _silu_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
            x, rows.values, rows.scales, num_rows, size, x.stride(0), *rows.scales.stride(), block, groups, early,
            num_warps=min(max(block // 256, 1), 16), **early_options(early),
        )  # fmt: skip
    return rows


def _check(x: torch.Tensor) -> tuple[int, int]:
    """The number of rows and of outputs."""
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"x must be [T, 2 * size] with unit last stride, not {tuple(x.shape)}")
    return x.shape[0], x.shape[1] // 2
