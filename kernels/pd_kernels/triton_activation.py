# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The elementwise part of SwiGLU, with two reads and one write per output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others


@triton.jit
def _silu_and_mul_kernel(x, out, size, x_stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)  # the definition rounds here
    tl.store(out + row * size + column, (gated * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul. `x` [T, 2 * size], unit last stride -> [T, size]. Raises ValueError."""
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"x must be [T, 2 * size] with unit last stride, not {tuple(x.shape)}")
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if num_rows:
        block = min(triton.next_power_of_2(size), 1024)  # 8 elements a thread: 16-byte accesses
        early = launches_early(x.device)
        _silu_and_mul_kernel[(num_rows, triton.cdiv(size, block))](
            x, out, size, x.stride(0), block, early, num_warps=4, **early_options(early)
        )
    return out
