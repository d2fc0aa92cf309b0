# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of quantized rows with quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.quantized import QuantizedRows, QuantizedWeight
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    rows: int
    outputs: int
    split: int
    num_warps: int
    num_stages: int
    promote: bool = True
    down: int = 8


@triton.jit(do_not_specialize=["num_rows", "split"])
def _product_kernel(
    x_tiles, weight_tiles, out, x_scales, weight_scales, num_rows, num_outputs, num_inputs, x_row_stride, x_group_stride, split,
    BLOCKS: tl.constexpr, PROMOTE: tl.constexpr, DOWN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    num_down, num_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_outputs, OUTPUTS)
    width = DOWN * num_across
    tile = tl.program_id(0)
    first = tile // width * DOWN
    height = tl.minimum(num_down - first, DOWN)
    down, across = first + tile % width % height, tile % width // height
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), split) * INPUTS
    begin = part * share
    end = tl.minimum(begin + share, num_inputs)
    row, output = down * ROWS + tl.arange(0, ROWS), across * OUTPUTS + tl.arange(0, OUTPUTS)
    wait_for_others(EARLY)
    x_scale_at = x_scales + tl.minimum(row, num_rows - 1) * x_row_stride
    num_groups = tl.cdiv(num_inputs, 128)
    weight_scale_at = weight_scales + across * OUTPUTS // 128 * num_groups
    if BLOCKS:
        x_scale = tl.load(x_scale_at + begin // 128 * x_group_stride)
        weight_scale = tl.load(weight_scale_at + begin // 128)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for place in tl.range(begin, end, INPUTS, num_stages=STAGES):
        x = x_tiles.load([down * ROWS, place])
        w = tl.trans(weight_tiles.load([across * OUTPUTS, place]))
        if BLOCKS:
            group = tl.minimum(place // 128 + 1, num_groups - 1)
            next_x, next_weight = tl.load(x_scale_at + group * x_group_stride), tl.load(weight_scale_at + group)
            sums += tl.dot(x, w) * (x_scale * weight_scale)[:, None]
            x_scale, weight_scale = next_x, next_weight
        elif PROMOTE:
            sums += tl.dot(x, w)
        else:
            sums = tl.dot(x, w, sums)
    if not BLOCKS:
        sums *= tl.load(x_scale_at)[:, None] * tl.load(weight_scales + tl.minimum(output, num_outputs - 1))[None, :]
    out += part.to(tl.int64) * num_rows * num_outputs
    inside = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * num_outputs + output[None, :], sums.to(out.dtype.element_ty), mask=inside)


def product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype, t: QuantizedTiling) -> torch.Tensor:
    x = rows.values
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    out = x.new_empty((num_rows, num_outputs), dtype=dtype) if t.split == 1 else x.new_empty((t.split, num_rows, num_outputs), dtype=torch.float32)
    early = launches_early(x.device)
    grid = (triton.cdiv(num_rows, t.rows) * triton.cdiv(num_outputs, t.outputs), t.split)
    _product_kernel[grid](
        TensorDescriptor.from_tensor(x, [t.rows, 128]), TensorDescriptor.from_tensor(weight.values, [t.outputs, 128]), out, rows.scales, weight.scales, num_rows, num_outputs, num_inputs, rows.scales.stride(0), rows.scales.stride(1), t.split,
        weight.is_blocks, t.promote, t.down, t.rows, t.outputs, 128, t.num_stages, early, num_warps=t.num_warps, **early_options(early),
    )  # fmt: skip
    return out
