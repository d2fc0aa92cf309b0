# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of quantized rows with quantized weights, by the fastest of three ways.

Up to 64 rows `gluon_quantized_product` is fastest where it runs, for many rows cuBLASLt. The kernel in this file
multiplies numbers of rows between these, and all on other GPUs.

The matrix unit of Hopper adds products of float8 with fewer than 14 bits after the point, so the kernel adds its sums
over 128 inputs in float32: the result's relative error is 2e-4, and 3e-3 where the unit adds all inputs (4,096 to
14,336 inputs, one H200). cuBLASLt is asked for the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.launch_sizes import cdiv, next_power_of_2, num_processors
from pd_kernels.quantized import BLOCK, QuantizedRows
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.quantized import QuantizedWeight

logger = logging.getLogger(__name__)
_BLOCK: tl.constexpr = tl.constexpr(BLOCK)
_OUTPUTS, _STAGES = 64, 5  # of a tile, of its inputs
_MOST_IN_RING = 64  # rows
_TILE = 128  # rows and outputs of a tile of cuBLASLt
_LIBRARY_ROWS = 64  # cuBLASLt refused 257 rows in blocks; 64, 128, 256 and 8,192 ran (CUDA 13, one H200)
_MOST_ROWS = 256  # from here on cuBLASLt is faster for every shape


@dataclass(frozen=True, slots=True)
class QuantizedTiling:
    """Sizes of the kernel's tiles; the defaults of `quantized_tiling` were chosen by measurement."""

    rows: int
    split: int  # programs that share the inputs of a tile


@triton.jit(do_not_specialize=["num_rows", "group_stride"])
def _product_kernel(
    x_tiles, weight_tiles, x_scales, weight_scales, out, parts, arrived,
    num_rows, num_outputs, num_inputs, row_stride, group_stride,
    SPLIT: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
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
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for group in tl.range(begin, end, num_stages=STAGES):
        weights = weight_tiles.load([across * OUTPUTS, group * _BLOCK])
        products = tl.dot(weights, tl.trans(x_tiles.load([down * ROWS, group * _BLOCK])))
        if BLOCKS:
            following = tl.minimum(group + 1, num_groups - 1)
            next_scale = tl.load(x_scale_at + following * group_stride) * tl.load(weight_scale_at + following)
            sums += products * scale[None, :]
            scale = next_scale
        else:
            sums += products
    if not BLOCKS:
        weight_scale = tl.load(weight_scales + tl.minimum(output, num_outputs - 1))
        sums *= weight_scale[:, None] * tl.load(x_scale_at)[None, :]
    SIZE: tl.constexpr = OUTPUTS * ROWS
    is_last = True
    if SPLIT > 1:
        tile_at = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
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
        at = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
        inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
        tl.store(at, sums.to(out.dtype.element_ty), mask=inside)


def quantized_tiling(num_rows: int, num_outputs: int, num_inputs: int, num_processors: int) -> QuantizedTiling:
    """Tiling for 228 KiB of shared memory per multiprocessor."""
    rows, num_groups, split = min(max(16, next_power_of_2(num_rows)), 64), cdiv(num_inputs, BLOCK), 1
    num_tiles = cdiv(num_rows, rows) * cdiv(num_outputs, _OUTPUTS)
    while num_tiles * split <= num_processors and num_groups >= 4 * split:
        split *= 2
    while cdiv(num_groups, split) * (split - 1) >= num_groups:  # a program would have no inputs
        split //= 2
    return QuantizedTiling(rows, split)


def quantized_product(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """See reference.quantized_product. Use it on one stream at a time.

    Raises ValueError if the rows are not of the weight's size, or a row is not a multiple of 16 bytes.
    """
    (num_rows, num_inputs), num_outputs, device = rows.values.shape, weight.shape[0], weight.device
    if num_inputs != weight.shape[1] or num_inputs % 16 or rows.group != weight.group:
        raise ValueError(f"rows {num_rows, num_inputs} in groups of {rows.group} do not fit {tuple(weight.shape)}")
    if not num_rows:
        return rows.values.new_empty((0, num_outputs), dtype=dtype)
    if num_rows <= _MOST_IN_RING and (in_ring := _ring(device)) is not None:
        return in_ring(rows, weight, dtype, _counters(device))
    # cuBLASLt does not split the inputs of few tiles: 128 rows by [4096, 14336] take it 38 us, the kernel 25
    num_tiles = cdiv(num_rows, _TILE) * cdiv(num_outputs, _TILE)
    is_many = num_rows > _MOST_ROWS or 2 * num_tiles > num_processors(device)
    if is_many and dtype is torch.bfloat16 and _library_takes(weight):
        return _by_library(rows, weight, dtype)
    return multiply(rows, weight, dtype, _counters(device))


@cache
def _ring(device: torch.device) -> Callable[..., torch.Tensor] | None:
    try:
        from pd_kernels.gluon_quantized_product import multiply_in_ring, runs_on
    except Exception as error:  # Gluon is experimental: in another version its decorators may raise anything
        logger.warning("no ring of weights: %s", error)
        return None
    return multiply_in_ring if runs_on(device) else None


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros for `multiply`, which leaves zeros. Only tiles with a split have one, at most 2 on a multiprocessor."""
    return torch.zeros(2 * num_processors(device), dtype=torch.int32, device=device)


def _library_takes(weight: QuantizedWeight) -> bool:
    """Whether torch has cuBLASLt's product for this GPU and weight. It reads scales of blocks in units of 16 bytes."""
    num_outputs, num_inputs = weight.shape
    unit = 4 * BLOCK if weight.is_blocks else 16
    return num_inputs % unit == 0 and num_outputs % 16 == 0 and _has_library(weight.device)


@cache
def _has_library(device: torch.device) -> bool:
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and hasattr(F, "scaled_mm")


def _by_library(rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    kinds = F.ScalingType
    x_kind, kind = (
        (kinds.BlockWise1x128, kinds.BlockWise128x128) if weight.is_blocks else (kinds.RowWise, kinds.RowWise)
    )
    num_rows = len(rows.values)
    if weight.is_blocks and num_rows % _LIBRARY_ROWS:
        rows = padded(rows, _LIBRARY_ROWS)
    scales = rows.scales if rows.scales.stride(0) == 1 else rows.scales.t().contiguous().t()
    product = F.scaled_mm(
        rows.values, weight.values.t(), scales, x_kind, weight.scales.t(), kind, output_dtype=dtype,
        use_fast_accum=False,
    )  # fmt: skip
    return product[:num_rows]


def padded(rows: QuantizedRows, multiple: int) -> QuantizedRows:
    """`rows` with rows of zeros after them, so that their number is a multiple of `multiple`."""
    extra = -len(rows.values) % multiple
    values = F.pad(rows.values.view(torch.uint8), (0, 0, 0, extra)).view(rows.values.dtype)
    return QuantizedRows(values, F.pad(rows.scales.t(), (0, extra)).t(), rows.group)


def multiply(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    arrived: torch.Tensor,
    tiling: QuantizedTiling | None = None,
) -> torch.Tensor:
    """See `quantized_product`; for 1 row or more. `arrived`: zeros [tiles with a split] int32, zeros afterwards."""
    x, early = rows.values, launches_early(rows.values.device)
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    tiling = tiling or quantized_tiling(num_rows, num_outputs, num_inputs, num_processors(x.device))
    num_tiles = cdiv(num_rows, tiling.rows) * cdiv(num_outputs, _OUTPUTS)
    out = x.new_empty((num_rows, num_outputs), dtype=dtype)
    num_parts = num_tiles * tiling.split if tiling.split > 1 else 0
    parts = x.new_empty(num_parts * _OUTPUTS * tiling.rows, dtype=torch.float32)
    _product_kernel[(num_tiles, tiling.split)](
        TensorDescriptor.from_tensor(x, [tiling.rows, BLOCK]),
        TensorDescriptor.from_tensor(weight.values, [_OUTPUTS, BLOCK]),
        rows.scales, weight.scales, out, parts, arrived, num_rows, num_outputs, num_inputs, *rows.scales.stride(),
        tiling.split, weight.is_blocks, tiling.rows, _OUTPUTS, _STAGES, early,
        num_warps=4, **early_options(early),
    )  # fmt: skip
    return out
