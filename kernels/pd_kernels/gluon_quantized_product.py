# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of up to a few hundred quantized rows with a quantized weight, on Hopper GPUs.

No weights move from the end of one kernel to the first tile of the next, and that time is lost. A weight in float8 is
read in half the time of one in bfloat16, so the loss counts twice. Here one warp fills a ring of shared memory with
weights before it waits for the kernels ahead, and two programs of a multiprocessor hold up to 160 KiB of them: 21 MB on
the whole device, which are read while rows are normed, activated and quantized.

The matrix unit adds products of float8 with fewer than 14 bits behind the point, so its sums over 128 inputs are scaled
and added in float32.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pd_kernels.quantized import BLOCK

if TYPE_CHECKING:
    from pd_kernels.quantized import QuantizedRows, QuantizedWeight

logger = logging.getLogger(__name__)
_BLOCK: gl.constexpr = gl.constexpr(BLOCK)
_LINES: gl.constexpr = gl.constexpr(64)  # of the left operand that a group of four warps multiplies


@dataclass(frozen=True, slots=True)
class RingTiling:
    """Sizes of the kernel's tiles; the defaults of `ring_tiling` were chosen by measurement."""

    rows: int
    outputs: int
    num_stages: int
    split: int  # programs that share the inputs of a tile
    rows_left: bool  # the rows are the left operand

    @property
    def groups(self) -> int:
        """Groups of four warps that multiply."""
        return (self.rows if self.rows_left else self.outputs) // 64


@gluon.jit
def _bring(
    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, down, across, begin, num_turns,
    STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    num_early = gl.minimum(num_turns, STAGES)
    for turn in range(0, num_early):
        full = is_full.index(turn)
        mbarrier.expect(full, (OUTPUTS + ROWS) * _BLOCK)  # bytes, including those outside the matrices
        place = (begin + turn) * _BLOCK
        tma.async_copy_global_to_shared(weight_tiles, [across * OUTPUTS, place], full, weight_ring.index(turn))
    gdc_wait()
    for turn in range(0, num_early):
        place = (begin + turn) * _BLOCK
        tma.async_copy_global_to_shared(x_tiles, [down * ROWS, place], is_full.index(turn), x_ring.index(turn))
    for turn in range(num_early, num_turns):
        stage, place = turn % STAGES, (begin + turn) * _BLOCK
        full = is_full.index(stage)
        mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full, (OUTPUTS + ROWS) * _BLOCK)
        tma.async_copy_global_to_shared(weight_tiles, [across * OUTPUTS, place], full, weight_ring.index(stage))
        tma.async_copy_global_to_shared(x_tiles, [down * ROWS, place], full, x_ring.index(stage))


@gluon.jit
def _multiply(
    x_ring, weight_ring, is_full, is_free, x_scales, weight_scales, out, parts, arrived, down, across, tile, begin,
    num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, BLOCKS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = OUTPUTS if LEFT else ROWS  # columns of the right operand
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, WIDTH, 32])
    lines: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    line, column = GROUP * _LINES + gl.arange(0, _LINES, lines), gl.arange(0, WIDTH, columns)
    row = gl.minimum(down * ROWS + (line if LEFT else column), num_rows - 1)
    x_scale_at = x_scales + row * row_stride + begin * group_stride
    weight_scale_at = weight_scales + across * OUTPUTS // _BLOCK * num_groups + begin  # a tile is in one row of blocks
    gdc_wait()
    scale = gl.load(x_scale_at)
    if BLOCKS:
        scale *= gl.load(weight_scale_at)
    sums = gl.zeros([_LINES, WIDTH], gl.float32, layout)
    for turn in range(0, num_turns):
        stage = turn % STAGES
        mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
        nothing = gl.zeros([_LINES, WIDTH], gl.float32, layout)
        if LEFT:
            left, right = x_ring.index(stage).slice(GROUP * _LINES, _LINES), weight_ring.index(stage)
        else:
            left, right = weight_ring.index(stage).slice(GROUP * _LINES, _LINES), x_ring.index(stage)
        products = warpgroup_mma(left, right.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if BLOCKS:
            following = gl.minimum(turn + 1, num_turns - 1)
            next_scale = gl.load(x_scale_at + following * group_stride) * gl.load(weight_scale_at + following)
        products = warpgroup_mma_wait(0, deps=[products])
        gl.thread_barrier()  # all warps have read the stage
        mbarrier.arrive(is_free.index(stage), count=1)
        if BLOCKS:
            sums += products * (scale[:, None] if LEFT else scale[None, :])
            scale = next_scale
        else:
            sums += products
    if not BLOCKS:
        output = gl.minimum(across * OUTPUTS + (column if LEFT else line), num_outputs - 1)
        weight_scale = gl.load(weight_scales + output)
        if LEFT:
            sums *= scale[:, None] * weight_scale[None, :]
        else:
            sums *= weight_scale[:, None] * scale[None, :]
    is_last = True
    if SPLIT > 1:
        SIZE: gl.constexpr = _LINES * WIDTH
        number = tile * GROUPS + GROUP
        at = parts + number.to(gl.int64) * SPLIT * SIZE + (line - GROUP * _LINES)[:, None] * WIDTH + column[None, :]
        gl.store(at + gl.program_id(1) * SIZE, sums)
        gl.thread_barrier()  # the whole part is written before its arrival is counted
        is_last = gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            # In the order of the inputs, whatever the programs' timing; few sums at once, so that registers hold them
            sums = gl.load(at, cache_modifier=".cg")
            if WIDTH <= 32:
                for part in gl.static_range(1, SPLIT):
                    sums += gl.load(at + part * SIZE, cache_modifier=".cg")
            else:
                for part in range(1, SPLIT):
                    sums += gl.load(at + part * SIZE, cache_modifier=".cg")
            gl.store(arrived + number, 0)  # for the next launch
    if is_last:
        # Neighbours in a warp store neighbouring outputs
        store: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]) if LEFT else gl.BlockedLayout(
            [2, 1], [32, 1], [1, 4], [0, 1]
        )
        result = gl.convert_layout(sums.to(out.dtype.element_ty), store)
        first = GROUP * _LINES + gl.arange(0, _LINES, gl.SliceLayout(1, store))
        second = gl.arange(0, WIDTH, gl.SliceLayout(0, store))
        if LEFT:
            to_row, to_output = (down * ROWS + first)[:, None], (across * OUTPUTS + second)[None, :]
        else:
            to_row, to_output = (down * ROWS + second)[None, :], (across * OUTPUTS + first)[:, None]
        inside = (to_row < num_rows) & (to_output < num_outputs)
        gl.store(out + to_row.to(gl.int64) * num_outputs + to_output, result, mask=inside)


@gluon.jit(do_not_specialize=["num_rows"])
def _ring_kernel(
    x_tiles, weight_tiles, x_scales, weight_scales, out, parts, arrived, num_rows, num_outputs, num_inputs,
    row_stride, group_stride,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    BLOCKS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    weight_ring = gl.allocate_shared_memory(weight_tiles.dtype, [STAGES, OUTPUTS, _BLOCK], plain)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, _BLOCK], plain)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=GROUPS)
    fence_async_shared()
    # Tiles with the same weights are neighbours, so that all but one read them from the L2 cache
    tile, num_down, num_groups = gl.program_id(0), gl.cdiv(num_rows, ROWS), gl.cdiv(num_inputs, _BLOCK)
    down, across = tile % num_down, tile // num_down
    share = gl.cdiv(num_groups, SPLIT)
    begin = gl.program_id(1) * share
    num_turns = gl.minimum(share, num_groups - begin)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, weight_ring, is_full, is_free, x_scales, weight_scales, out, parts, arrived, down, across, tile,
                    begin, num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
                    0, GROUPS, STAGES, SPLIT, ROWS, OUTPUTS, BLOCKS, LEFT,
                )),
                (_bring, (
                    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, down, across, begin, num_turns,
                    STAGES, ROWS, OUTPUTS,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    x_ring, weight_ring, is_full, is_free, x_scales, weight_scales, out, parts, arrived, down, across, tile,
                    begin, num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
                    0, GROUPS, STAGES, SPLIT, ROWS, OUTPUTS, BLOCKS, LEFT,
                )),
                (_multiply, (
                    x_ring, weight_ring, is_full, is_free, x_scales, weight_scales, out, parts, arrived, down, across, tile,
                    begin, num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
                    1, GROUPS, STAGES, SPLIT, ROWS, OUTPUTS, BLOCKS, LEFT,
                )),
                (_bring, (
                    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, down, across, begin, num_turns,
                    STAGES, ROWS, OUTPUTS,
                )),
            ],
            [4, 1],
            [104 if ROWS <= 64 else 208, 24],
        )  # fmt: skip


def ring_tiling(num_rows: int, num_outputs: int, num_inputs: int, num_processors: int) -> RingTiling:
    """Tiling for 228 KiB of shared memory per multiprocessor."""
    rows = min(max(16, triton.next_power_of_2(num_rows)), 128)
    outputs, num_stages = {16: (64, 10), 32: (64, 8), 64: (64, 6), 128: (128, 6)}[rows]
    programs = num_processors * (1 if rows > 64 else 2)
    num_tiles, split = triton.cdiv(num_rows, rows) * triton.cdiv(num_outputs, outputs), 1
    while num_tiles * split * 2 <= programs and triton.cdiv(num_inputs, BLOCK) >= 4 * split:
        split *= 2
    return RingTiling(rows, outputs, num_stages, split, rows > 64)


def multiply_in_ring(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    arrived: torch.Tensor,
    tiling: RingTiling,
) -> torch.Tensor:
    """See triton_quantized_product.multiply."""
    x, num_outputs = rows.values, weight.shape[0]
    num_rows, num_inputs = x.shape
    out = x.new_empty((num_rows, num_outputs), dtype=dtype)
    num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_outputs, tiling.outputs)
    num_parts = num_tiles * tiling.split if tiling.split > 1 else 0
    parts = x.new_empty(num_parts * tiling.outputs * tiling.rows, dtype=torch.float32)
    plain = gl.NVMMASharedLayout(128, 8, rank=2)
    registers = 168 if tiling.rows > 64 else 80 if tiling.groups > 1 else 120
    _ring_kernel[(num_tiles, tiling.split)](
        TensorDescriptor.from_tensor(x, [tiling.rows, BLOCK], plain),
        TensorDescriptor.from_tensor(weight.values, [tiling.outputs, BLOCK], plain),
        rows.scales, weight.scales, out, parts, arrived, num_rows, num_outputs, num_inputs, *rows.scales.stride(),
        tiling.groups, tiling.num_stages, tiling.split, tiling.rows, tiling.outputs, weight.is_blocks,
        tiling.rows_left, num_warps=4, maxnreg=registers, launch_pdl=True,
    )  # fmt: skip
    return out
