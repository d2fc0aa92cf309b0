# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Elementwise parts of SwiGLU and of attention with output gates, with two reads and one write per output."""

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
def _weighed(gate, x, dtype: tl.constexpr):
    weight = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(dtype).to(tl.float32)  # the definition rounds here
    return (x.to(tl.float32) * weight).to(dtype)


@triton.jit
def _of_gate(gate, other, dtype: tl.constexpr, SIGMOID: tl.constexpr):
    if SIGMOID:
        result = _weighed(gate, other, dtype)
    else:
        result = _gated(gate, other, dtype)
    return result


@triton.jit
def _plain_kernel(
    gate, other, out, size, gate_stride, other_stride,
    BLOCK: tl.constexpr, SIGMOID: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    others = tl.load(other + row * other_stride + column, mask=inside, other=0.0)
    tl.store(out + row * size + column, _of_gate(gates, others, out.dtype.element_ty, SIGMOID), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_kernel(
    gate, other, values, scales, num_rows, size, gate_stride, other_stride, row_stride, group_stride,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIGMOID: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row, group, line = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS, tl.arange(0, GROUPS)
    rows, _, columns, inside = group_place(row, group, line, num_rows, size, WIDTH, GROUPS)
    gates = tl.load(gate + rows[:, None] * gate_stride + columns, mask=inside, other=0.0)
    others = tl.load(other + rows[:, None] * other_stride + columns, mask=inside, other=0.0)
    gated = _of_gate(gates, others, gate.dtype.element_ty, SIGMOID).to(tl.float32)
    store_quantized(
        gated, values, scales, row, group, line, num_rows, size, row_stride, group_stride, WIDTH, GROUPS
    )  # fmt: skip


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul. `x` [T, 2 * size], unit last stride -> [T, size]. Raises ValueError."""
    return _plain(*_halves(x), is_sigmoid=False)


def silu_and_mul_quantized(x: torch.Tensor, group: int) -> QuantizedRows:
    """See reference.silu_and_mul_quantized. `x` [T, 2 * size], unit last stride. Raises ValueError."""
    return _quantized(*_halves(x), group, is_sigmoid=False)


def sigmoid_and_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See reference.sigmoid_and_mul. Last strides are 1. Raises ValueError."""
    _check(x, gate)
    return _plain(gate, x, is_sigmoid=True)


def sigmoid_and_mul_quantized(x: torch.Tensor, gate: torch.Tensor, group: int) -> QuantizedRows:
    """`sigmoid_and_mul`, then `quantize`."""
    _check(x, gate)
    return _quantized(gate, x, group, is_sigmoid=True)


def _plain(gate: torch.Tensor, other: torch.Tensor, *, is_sigmoid: bool) -> torch.Tensor:
    num_rows, size = gate.shape
    out = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    if num_rows:
        block = min(next_power_of_2(size), 1024)  # 8 elements a thread: 16-byte accesses
        early = launches_early(gate.device)
        _plain_kernel[(num_rows, cdiv(size, block))](
            gate, other, out, size, gate.stride(0), other.stride(0), block, is_sigmoid, early,
            num_warps=4, **early_options(early),
        )  # fmt: skip
    return out


def _quantized(gate: torch.Tensor, other: torch.Tensor, group: int, *, is_sigmoid: bool) -> QuantizedRows:
    num_rows, size = gate.shape
    rows = empty_rows(num_rows, size, group, gate.device)
    if num_rows:
        width, groups = group_tiling(size, group)
        early = launches_early(gate.device)
        _quantized_kernel[(num_rows, cdiv(size, width * groups))](
            gate, other, rows.values, rows.scales, num_rows, size, gate.stride(0), other.stride(0),
            *rows.scales.stride(), width, groups, is_sigmoid, early,
            num_warps=min(max(width * groups // 256, 1), 32), **early_options(early),
        )  # fmt: skip
    return rows


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and ups."""
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 2:
        raise ValueError(f"x must be [T, 2 * size] with unit last stride, not {tuple(x.shape)}")
    size = x.shape[1] // 2
    return x[:, :size], x[:, size:]


def _check(x: torch.Tensor, gate: torch.Tensor) -> None:
    if x.dim() != 2 or x.shape != gate.shape or (x.stride(1), gate.stride(1)) != (1, 1):
        raise ValueError(f"rows {tuple(x.shape)} and gates {tuple(gate.shape)} must be [T, size] with unit last stride")
