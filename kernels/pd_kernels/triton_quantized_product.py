# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of quantized rows with quantized weights: a kernel for up to a few hundred rows, cuBLASLt for more.

The weights are the left operand, as in `triton_matmul`. The matrix unit of Hopper adds products of float8 with fewer
than 14 bits behind the point, so its sums over 128 inputs are added in float32: the result's relative error is 2e-4,
and 3e-3 where the unit adds all inputs (4,096 to 14,336 inputs, one H200). cuBLASLt is asked for the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.quantized import BLOCK
from pd_kernels.triton_decode import num_processors
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows, QuantizedWeight

_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_TILE = 128  # rows and outputs of a tile when there are many rows
_MOST_ROWS = 256  # from here on cuBLASLt is faster for every shape


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    """Sizes of the kernel's tiles; the defaults of `quantized_tiling` were chosen by measurement."""

    rows: int
    outputs: int
    split: int  # programs that share the inputs of a tile
    num_warps: int
    num_stages: int
    rows_left: bool = False  # the rows are the left operand


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_tiles, weight_tiles, x_scales, weight_scales, out, parts, arrived,
    num_rows, num_outputs, num_inputs, row_stride, group_stride,
    SPLIT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    LEFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    # Tiles with the same weights are neighbours, so that all but one read them from the L2 cache
    num_down, part = tl.cdiv(num_rows, ROWS), tl.program_id(1)
    down, across = tl.program_id(0) % num_down, tl.program_id(0) // num_down
    num_groups = tl.cdiv(num_inputs, _BLOCK)
    share = tl.cdiv(num_groups, SPLIT)
    begin, end = part * share, tl.minimum((part + 1) * share, num_groups)
    row, output = down * ROWS + tl.arange(0, ROWS), across * OUTPUTS + tl.arange(0, OUTPUTS)
    x_scale_at = x_scales + tl.minimum(row, num_rows - 1) * row_stride
    if BLOCKS:  # a tile's outputs are in one block
        first = tl.minimum(begin, num_groups - 1)
        weight_scale_at = weight_scales + across * OUTPUTS // _BLOCK * num_groups
        weight_scale = tl.load(weight_scale_at + first)
    wait_for_others(EARLY)
    if BLOCKS:
        scale = tl.load(x_scale_at + first * group_stride) * weight_scale
    sums = tl.zeros([ROWS if LEFT else OUTPUTS, OUTPUTS if LEFT else ROWS], tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        weights = weight_tiles.load([across * OUTPUTS, group * _BLOCK])
        rows = x_tiles.load([down * ROWS, group * _BLOCK])
        products = tl.dot(rows, tl.trans(weights)) if LEFT else tl.dot(weights, tl.trans(rows))
        if BLOCKS:
            following = tl.minimum(group + 1, num_groups - 1)
            next_scale = tl.load(x_scale_at + following * group_stride) * tl.load(weight_scale_at + following)
            sums += products * (scale[:, None] if LEFT else scale[None, :])
            scale = next_scale
        else:
            sums += products
    if not BLOCKS:
        x_scale, weight_scale = tl.load(x_scale_at), tl.load(weight_scales + tl.minimum(output, num_outputs - 1))
        sums *= x_scale[:, None] * weight_scale[None, :] if LEFT else weight_scale[:, None] * x_scale[None, :]
    if LEFT:
        at = out + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
        inside = (row < num_rows)[:, None] & (output < num_outputs)[None, :]
    else:
        at = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
        inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    SIZE: tl.constexpr = OUTPUTS * ROWS
    is_last = True
    if SPLIT > 1:
        line, column = tl.arange(0, sums.shape[0]), tl.arange(0, sums.shape[1])
        tile_at = line[:, None] * sums.shape[1] + column[None, :]
        parts += tl.program_id(0).to(tl.int64) * SPLIT * SIZE
        tl.store(parts + part * SIZE + tile_at, sums)
        tl.debug_barrier()  # the whole part is written before its arrival is counted
        is_last = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            sums = tl.load(parts + tile_at, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):  # in this order, whatever the programs' timing
                sums += tl.load(parts + other * SIZE + tile_at, cache_modifier=".cg")
            tl.store(arrived + tl.program_id(0), 0)  # for the next launch
    if is_last:
        tl.store(at, sums.to(out.dtype.element_ty), mask=inside)


def quantized_tiling(
    num_rows: int, num_outputs: int, num_inputs: int, *, is_blocks: bool, num_processors: int
) -> QuantizedTiling:
    """Tiling for 228 KiB of shared memory per multiprocessor."""
    rows, rows_left = min(max(16, triton.next_power_of_2(num_rows)), 128), False
    if rows <= 16:
        outputs, num_warps, num_stages, fill = 64, 4, 5, 2
    elif rows <= 64 and not is_blocks:
        outputs, num_warps, num_stages, fill = 128, 4, 6, 1
    elif rows <= 64:  # scaling each sum costs more than what several programs of 8 warps cost
        outputs, num_warps, num_stages, fill = 128, 8, 4, 2
    else:  # the scales of 128 rows are few registers of a thread if the rows are the left operand
        outputs, num_warps, num_stages, fill, rows_left = 128, 8, 4, 1, is_blocks
    num_tiles, split = triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs), 1
    while num_tiles * split * 2 <= fill * num_processors and triton.cdiv(num_inputs, BLOCK) >= 4 * split:
        split *= 2
    return QuantizedTiling(rows, outputs, split, num_warps, num_stages, rows_left)


def quantized_product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """See reference.quantized_product. Use it on one stream at a time. Raises ValueError as `multiply` does.

    cuBLASLt multiplies more than 256 rows, and less if the tiles without a split fill half the device. It does not
    split the inputs: of 128 rows by [4096, 14336] it makes 37 us, the kernel 24; of 8,192 rows 1,340 TFLOP/s with
    channels and 1,250 with blocks (one H200).
    """
    num_rows, device = len(rows.values), rows.values.device
    num_tiles = triton.cdiv(num_rows, _TILE) * triton.cdiv(weight.shape[0], _TILE)
    is_many = num_rows > _MOST_ROWS or (num_rows > _TILE // 2 and 2 * num_tiles > num_processors(device))
    if is_many and dtype is torch.bfloat16 and _library_takes(weight):
        return _by_library(rows, weight, dtype)
    return multiply(rows, weight, dtype, _counters(device))


def _library_takes(weight: QuantizedWeight) -> bool:
    """Whether torch has cuBLASLt's product for this GPU and weight. It reads scales of blocks in units of 16 bytes."""
    num_outputs, num_inputs = weight.shape
    unit = 4 * BLOCK if weight.is_blocks else 16
    return num_inputs % unit == 0 and num_outputs % 16 == 0 and _has_library(weight.device)


@cache
def _has_library(device: torch.device) -> bool:
    return device.type == "cuda" and hasattr(F, "scaled_mm") and torch.cuda.get_device_capability(device) == (9, 0)


def _by_library(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    kinds = F.ScalingType
    x_kind, kind = (kinds.BlockWise1x128, kinds.BlockWise128x128) if weight.is_blocks else (kinds.RowWise, kinds.RowWise)
    scales = rows.scales if rows.scales.stride(0) == 1 else rows.scales.t().contiguous().t()
    return F.scaled_mm(
        rows.values, weight.values.t(), scales, x_kind, weight.scales.t(), kind, output_dtype=dtype,
        use_fast_accum=False,
    )  # fmt: skip


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros for `multiply`, which leaves zeros. Only tiles with a split have one, at most 2 on a multiprocessor."""
    return torch.zeros(2 * num_processors(device), dtype=torch.int32, device=device)


def multiply(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    arrived: torch.Tensor,
    tiling: QuantizedTiling | None = None,
) -> torch.Tensor:
    """See reference.quantized_product. `arrived`: int32 zeros [tiles with a split], zeros again afterwards.

    Raises ValueError if the rows are not of the weight's size, or a row is not a multiple of 16 bytes.
    """
    x, early = rows.values, launches_early(rows.values.device)
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    if num_inputs != weight.shape[1] or num_inputs % 16 or rows.group != weight.group:
        raise ValueError(f"rows {tuple(x.shape)} in groups of {rows.group} do not fit {tuple(weight.shape)}")
    out = x.new_empty((num_rows, num_outputs), dtype=dtype)
    if not num_rows:
        return out
    tiling = tiling or quantized_tiling(
        num_rows, num_outputs, num_inputs, is_blocks=weight.is_blocks, num_processors=num_processors(x.device)
    )
    num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
    num_parts = num_tiles * tiling.split if tiling.split > 1 else 0
    parts = x.new_empty(num_parts * tiling.outputs * tiling.rows, dtype=torch.float32)
    _product_kernel[(num_tiles, tiling.split)](
        TensorDescriptor.from_tensor(x, [tiling.rows, BLOCK]),
        TensorDescriptor.from_tensor(weight.values, [tiling.outputs, BLOCK]),
        rows.scales, weight.scales, out, parts, arrived, num_rows, num_outputs, num_inputs, *rows.scales.stride(),
        tiling.split, weight.is_blocks, tiling.rows, tiling.outputs, tiling.num_stages, tiling.rows_left, early,
        num_warps=tiling.num_warps, **early_options(early),
    )  # fmt: skip
    return out
