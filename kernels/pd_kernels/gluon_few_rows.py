# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of few rows with a quantized weight on Hopper GPUs, with the meaning of `triton_matmul`.

A weight in float8 is read in half the time of one in bfloat16, so what is lost between kernels counts twice. One warp
fills a ring of shared memory with weights before it waits for the kernels ahead: two programs of a multiprocessor hold
128 KiB of weights, 17 MB on the whole device, when the rows arrive. Two groups of four warps take the stages of the
ring in turn, widen the weights to the rows' type in registers and multiply. One group alone is bound by its latency.
"""

from __future__ import annotations

from dataclasses import dataclass

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

from pd_kernels.quantized import QuantizedWeight
from pd_kernels.values import HalfNormed

OUTPUTS, INPUTS = 64, 128  # of a tile


@gluon.jit
def _bring_weights(tiles, ring, full, tile, place, num_outputs, OUTPUTS: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        width: gl.constexpr = OUTPUTS // 2
        tma.async_copy_global_to_shared(tiles, [tile * width, place], full, ring.slice(0, width))
        tma.async_copy_global_to_shared(tiles, [num_outputs + tile * width, place], full, ring.slice(width, width))
    else:
        tma.async_copy_global_to_shared(tiles, [tile * OUTPUTS, place], full, ring)


@gluon.jit
def _bring(
    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, tile, begin, end, num_outputs,
    STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    num_bytes: gl.constexpr = (OUTPUTS + 2 * ROWS) * INPUTS
    num_turns = gl.cdiv(end - begin, INPUTS)
    num_early = gl.minimum(num_turns, STAGES)
    for turn in range(0, num_early):
        mbarrier.expect(is_full.index(turn), num_bytes)
        _bring_weights(
            weight_tiles, weight_ring.index(turn), is_full.index(turn), tile, begin + turn * INPUTS, num_outputs,
            OUTPUTS, GATED,
        )  # fmt: skip
    gdc_wait()
    for turn in range(0, num_early):
        tma.async_copy_global_to_shared(x_tiles, [0, begin + turn * INPUTS], is_full.index(turn), x_ring.index(turn))
    for turn in range(num_early, num_turns):
        stage, place = turn % STAGES, begin + turn * INPUTS
        full = is_full.index(stage)
        mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full, num_bytes)
        _bring_weights(weight_tiles, weight_ring.index(stage), full, tile, place, num_outputs, OUTPUTS, GATED)
        tma.async_copy_global_to_shared(x_tiles, [0, place], full, x_ring.index(stage))


@gluon.jit
def _sum(
    x_ring, weight_ring, is_full, is_free, scales, sums_of, tile, begin, end, num_outputs, num_inputs,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr, GATED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Multiply every GROUPS-th stage, and leave the sums in shared memory."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, ROWS, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    dtype: gl.constexpr = x_ring.dtype
    num_turns = gl.cdiv(end - begin, INPUTS)
    if BLOCKS:
        width: gl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
        line = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout))
        row = gl.minimum(tile * width + line % width, num_outputs - 1) + line // width * num_outputs
        scale_at = scales + row // 128 * gl.cdiv(num_inputs, 128) + begin // 128
        scale = gl.load(scale_at + gl.minimum(GROUP, num_turns - 1))
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for turn in range(GROUP, num_turns, GROUPS):
        stage = turn % STAGES
        if BLOCKS:
            following = gl.load(scale_at + gl.minimum(turn + GROUPS, num_turns - 1))
        mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
        weights = weight_ring.index(stage).load(left).to(gl.float16).to(gl.float32).to(dtype)
        rows = x_ring.index(stage).permute((1, 0))
        if BLOCKS:
            part = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
            part = warpgroup_mma(weights, rows, part, use_acc=False, is_async=True)
            part, weights = warpgroup_mma_wait(0, deps=[part, weights])
            sums += part * scale[:, None]
            scale = following
        else:
            sums = warpgroup_mma(weights, rows, sums, is_async=True)
            sums, weights = warpgroup_mma_wait(0, deps=[sums, weights])
        gl.thread_barrier()  # all warps have read the stage
        mbarrier.arrive(is_free.index(stage), count=1)
    sums_of.index(GROUP).store(sums)
    gl.thread_barrier()


@gluon.jit
def _help(
    x_ring, weight_ring, is_full, is_free, scales, sums_of, is_summed, tile, begin, end, num_outputs, num_inputs,
    GROUP: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr, GATED: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    _sum(
        x_ring, weight_ring, is_full, is_free, scales, sums_of, tile, begin, end, num_outputs, num_inputs,
        GROUP, GROUPS, STAGES, ROWS, OUTPUTS, INPUTS, GATED, BLOCKS,
    )  # fmt: skip
    mbarrier.arrive(is_summed, count=1)


@gluon.jit
def _half(
    sums_of, parts, scales, bias, divisor, half_at, tile, num_outputs,
    HALF: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCKS: gl.constexpr, DIVIDES: gl.constexpr, BIAS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The sum over all groups or programs of one half of a tile, [WIDTH, ROWS]."""
    if SPLIT > 1:
        size: gl.constexpr = OUTPUTS * ROWS
        result = gl.load(parts + half_at, cache_modifier=".cg")
        for part in gl.static_range(1, SPLIT):
            result += gl.load(parts + part * size + half_at, cache_modifier=".cg")
    else:
        result = sums_of.index(0).slice(HALF * WIDTH, WIDTH).load(layout)
        for group in gl.static_range(1, GROUPS):
            result += sums_of.index(group).slice(HALF * WIDTH, WIDTH).load(layout)
    column = tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, layout))
    known = column < num_outputs
    column += HALF * num_outputs
    if not BLOCKS:
        result *= gl.load(scales + column, mask=known, other=0.0)[:, None]
    if DIVIDES:
        result = result / divisor[None, :]
    if BIAS:
        result += gl.load(bias + column, mask=known, other=0.0).to(gl.float32)[:, None]
    return result


@gluon.jit
def _sum_and_finish(
    x_ring, weight_ring, is_full, is_free, scales, sums_of, is_summed, bias, out, parts, arrived, residual, gain,
    left_squares, squares, tile, program, begin, end, num_rows, num_outputs, num_inputs, num_squares, eps,
    SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr, GATED: gl.constexpr, ADDS: gl.constexpr, DIVIDES: gl.constexpr, SQUARES: gl.constexpr,
    BLOCKS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Multiply as the first group, then turn the sums of all groups into the output. See triton_matmul._finish."""
    HALVES: gl.constexpr = 2 if GATED else 1
    WIDTH: gl.constexpr = OUTPUTS // HALVES
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WIDTH // 32, 128 // WIDTH], [0, 1])
    line, row = gl.arange(0, WIDTH, gl.SliceLayout(1, layout)), gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    column = tile * WIDTH + line
    inside = (column < num_outputs)[:, None] & (row < num_rows)[None, :]
    at = row[None, :] * num_outputs + column[:, None]
    gdc_wait()
    divisor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, layout))
    if ADDS:
        gains = gl.load(gain + column, mask=column < num_outputs, other=0.0)
        old = gl.load(residual + at, mask=inside, other=0.0)
    if DIVIDES:
        tall: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
        piece = gl.arange(0, SQUARES, gl.SliceLayout(1, tall))
        each = gl.arange(0, ROWS, gl.SliceLayout(0, tall))
        known = (piece < num_squares)[:, None] & (each < num_rows)[None, :]
        total = gl.sum(gl.load(squares + piece[:, None] * num_rows + each[None, :], mask=known, other=0.0), 0)
        divisor = gl.convert_layout(gl.sqrt(total / num_inputs + eps), gl.SliceLayout(0, layout))
    _sum(
        x_ring, weight_ring, is_full, is_free, scales, sums_of, tile, begin, end, num_outputs, num_inputs,
        0, GROUPS, STAGES, ROWS, OUTPUTS, INPUTS, GATED, BLOCKS,
    )  # fmt: skip
    mbarrier.wait(is_summed, 0)
    half_at = line[:, None] * ROWS + row[None, :]
    size: gl.constexpr = OUTPUTS * ROWS
    parts += tile.to(gl.int64) * SPLIT * size
    is_last = True
    if SPLIT > 1:
        for half in gl.static_range(HALVES):
            mine = sums_of.index(0).slice(half * WIDTH, WIDTH).load(layout)
            for group in gl.static_range(1, GROUPS):
                mine += sums_of.index(group).slice(half * WIDTH, WIDTH).load(layout)
            gl.store(parts + program * size + half * WIDTH * ROWS + half_at, mine)
        gl.thread_barrier()  # the whole part is written before its arrival is counted
        is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if is_last:
        dtype: gl.constexpr = out.dtype.element_ty
        result = _half(
            sums_of, parts, scales, bias, divisor, half_at, tile, num_outputs,
            0, SPLIT, GROUPS, ROWS, OUTPUTS, WIDTH, BLOCKS, DIVIDES, BIAS, layout,
        )  # fmt: skip
        if GATED:
            up = _half(
                sums_of, parts, scales, bias, divisor, half_at + WIDTH * ROWS, tile, num_outputs,
                1, SPLIT, GROUPS, ROWS, OUTPUTS, WIDTH, BLOCKS, DIVIDES, BIAS, layout,
            )  # fmt: skip
            gate = result.to(dtype).to(gl.float32)
            result = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
        if ADDS:
            total = (old.to(gl.float32) + result.to(dtype).to(gl.float32)).to(dtype)
            gl.store(residual + at, total, mask=inside)
            total = gl.where(inside, total.to(gl.float32), 0.0)
            gl.store(left_squares + tile * num_rows + row, gl.sum(total * total, 0), mask=row < num_rows)
            result = total * gains.to(gl.float32)[:, None]
        gl.store(out + at, result.to(dtype), mask=inside)
        if SPLIT > 1:
            gl.store(arrived + tile, 0)  # for the next launch


@gluon.jit(do_not_specialize=["num_rows", "num_squares"])
def _few_rows_kernel(
    x_tiles, weight_tiles, scales, bias, out, parts, arrived, residual, gain, left_squares, squares,
    num_rows, num_outputs, num_inputs, num_squares, eps,
    SPLIT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr, GATED: gl.constexpr, ADDS: gl.constexpr, DIVIDES: gl.constexpr, SQUARES: gl.constexpr,
    BLOCKS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    weight_ring = gl.allocate_shared_memory(
        weight_tiles.dtype, [STAGES, OUTPUTS, INPUTS], gl.NVMMASharedLayout(128, 8, rank=2)
    )
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, INPUTS], gl.NVMMASharedLayout(128, 16, rank=2))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    sums_of = gl.allocate_shared_memory(gl.float32, [GROUPS, OUTPUTS, ROWS], plain)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=1)
    mbarrier.init(is_summed, count=GROUPS - 1)
    fence_async_shared()
    tile, program = gl.program_id(0), gl.program_id(1)
    share = gl.cdiv(gl.cdiv(num_inputs, INPUTS), SPLIT) * INPUTS
    begin = program * share
    end = gl.minimum(begin + share, num_inputs)
    gl.warp_specialize(
        [
            (_sum_and_finish, (
                x_ring, weight_ring, is_full, is_free, scales, sums_of, is_summed, bias, out, parts, arrived, residual,
                gain, left_squares, squares, tile, program, begin, end, num_rows, num_outputs, num_inputs, num_squares,
                eps, SPLIT, GROUPS, STAGES, ROWS, OUTPUTS, INPUTS, GATED, ADDS, DIVIDES, SQUARES, BLOCKS, BIAS,
            )),
            (_help, (
                x_ring, weight_ring, is_full, is_free, scales, sums_of, is_summed, tile, begin, end, num_outputs,
                num_inputs, 1, GROUPS, STAGES, ROWS, OUTPUTS, INPUTS, GATED, BLOCKS,
            )),
            (_bring, (
                x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, tile, begin, end, num_outputs,
                STAGES, ROWS, OUTPUTS, INPUTS, GATED,
            )),
        ],
        [4, 1],
        [104, 24],
    )  # fmt: skip


def run_product(rows, weight, out, arrived, split, gated, bias=None, normed=None, addition=None, stages=8):
    """Launch."""
    (num_rows, num_inputs), halves = rows.shape, 2 if gated else 1
    num_outputs, width = out.shape[1], OUTPUTS // halves
    padded, num_tiles = max(16, triton.next_power_of_2(num_rows)), triton.cdiv(num_outputs, width)
    parts = torch.empty(num_tiles * split * OUTPUTS * padded if split > 1 else 1, dtype=torch.float32, device=rows.device)
    residual, gain, left_squares = (out, out, parts) if addition is None else addition
    squares, eps = (parts[:1], 0.0) if normed is None else (normed.squares, normed.eps)
    _few_rows_kernel[(num_tiles, split)](
        TensorDescriptor.from_tensor(rows, [padded, INPUTS], gl.NVMMASharedLayout(128, 16, rank=2)),
        TensorDescriptor.from_tensor(weight.values, [width, INPUTS], gl.NVMMASharedLayout(128, 8, rank=2)),
        weight.scales, rows if bias is None else bias, out, parts, arrived, residual, gain, left_squares, squares,
        num_rows, num_outputs, num_inputs, len(squares), eps,
        split, 2, stages, padded, OUTPUTS, INPUTS, gated, addition is not None, normed is not None,
        triton.next_power_of_2(max(len(squares), 1)), weight.is_blocks, bias is not None,
        num_warps=4, maxnreg=80, launch_pdl=True,
    )  # fmt: skip
