# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of many rows with experts' weights in blocks of float8, on Hopper GPUs.

The rows of an expert are one after the other, from a multiple of ROWS on (`triton_pairs.place_pairs`), so the memory
accelerator copies them. One warp copies rows and weights of the next tiles into a ring of shared memory. Two groups of
four warps multiply them: each group multiplies half of a tile's rows by all of its 256 outputs.

The matrix unit adds products of float8 with fewer than 14 bits after the point. So a group multiplies 128 inputs by
128 outputs, adds the scaled result to its sums in float32, and goes on with the other 128 outputs. Meanwhile the matrix
unit works for the other group. The sums of 256 outputs and the product of 128 are all that the registers hold.

The kernel needs Triton's Gluon. Gluon makes the synchronization of warps explicit and does not run in the interpreter.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
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

from pd_kernels.launch_sizes import cdiv, num_processors
from pd_kernels.quantized import BLOCK, LEAST, MOST, QuantizedRows, QuantizedWeight
from pd_kernels.triton_pair_rows import spread, sum_pairs
from pd_kernels.triton_pairs import OwnPairs, place_pairs
from pd_kernels.triton_quantize import empty_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.values import ExpertPart

    GatedExperts = Callable[[QuantizedRows, QuantizedWeight, torch.Tensor], QuantizedRows]
    DownExperts = Callable[[QuantizedRows, QuantizedWeight, torch.Tensor], torch.Tensor]

logger = logging.getLogger(__name__)
ROWS = 128  # of a tile, which has 2 * BLOCK outputs
STAGES = 4  # of the ring: 192 KiB in all
# By the bytes of a number; Gluon takes 5 us to make one
_LAYOUTS = {size: gl.NVMMASharedLayout(128, 8 * size, rank=2) for size in (1, 2)}
_BLOCK: gl.constexpr = gl.constexpr(BLOCK)
_LEAST: gl.constexpr = gl.constexpr(LEAST)
_MOST: gl.constexpr = gl.constexpr(MOST)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, later ones


@gluon.jit
def _lines(expert, across, num_outputs, GATED: gl.constexpr):
    """The first lines of a tile's two blocks of the weights: outputs, or gates and ups."""
    if GATED:
        left = expert * 2 * num_outputs + across * _BLOCK
        right = left + num_outputs
    else:
        left = expert * num_outputs + across * 2 * _BLOCK
        right = left + _BLOCK
    return left, right


@gluon.jit
def _bring(
    x_tiles, weight_tiles, experts, x_ring, weight_ring, is_full, is_free, num_tiles, num_across, num_outputs,
    num_groups, GATED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    turn = 0
    for tile in range(gl.program_id(0), num_tiles * num_across, gl.num_programs(0)):
        down, across = tile // num_across, tile % num_across
        expert = gl.load(experts + down)
        if expert >= 0:
            left, right = _lines(expert, across, num_outputs, GATED)
            for group in range(0, num_groups):
                stage, place = turn % STAGES, group * _BLOCK
                full, weight = is_full.index(stage), weight_ring.index(stage)
                mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
                mbarrier.expect(full, (ROWS + 2 * _BLOCK) * _BLOCK)
                tma.async_copy_global_to_shared(x_tiles, [down * ROWS, place], full, x_ring.index(stage))
                tma.async_copy_global_to_shared(weight_tiles, [left, place], full, weight.slice(0, _BLOCK))
                tma.async_copy_global_to_shared(weight_tiles, [right, place], full, weight.slice(_BLOCK, _BLOCK))
                turn += 1


@gluon.jit
def _store(out_tiles, out_place, values, row, column):
    """Store a tile when the last one has left its place in shared memory."""
    tma.store_wait(0)
    _barrier()
    out_place.store(values)
    fence_async_shared()
    tma.async_copy_shared_to_global(out_tiles, [row, column], out_place)


@gluon.jit
def _finish(
    lefts, rights, out_tiles, out_place, out_scales, row, rows, across, num_rows, GATED: gl.constexpr,
):  # fmt: skip
    """Store a group's sums; of gates and ups: activated and quantized, rounded where separate functions round."""
    if GATED:
        gates, ups = lefts.to(gl.bfloat16).to(gl.float32), rights.to(gl.bfloat16).to(gl.float32)
        gated = (gates / (1.0 + gl.exp(-gates))).to(gl.bfloat16).to(gl.float32) * ups
        gated = gated.to(gl.bfloat16).to(gl.float32)
        scale = gl.div_rn(gl.maximum(gl.max(gl.abs(gated), 1), _LEAST), _MOST)
        gl.store(out_scales + across * num_rows + row + rows, scale)
        scaled = gated * gl.div_rn(1.0, scale)[:, None]
        scaled = gl.minimum(gl.maximum(scaled, -_MOST), _MOST)
        _store(out_tiles, out_place, scaled.to(out_place.dtype), row, across * _BLOCK)
    else:
        _store(out_tiles, out_place, lefts.to(out_place.dtype), row, across * 2 * _BLOCK)
        _store(out_tiles, out_place, rights.to(out_place.dtype), row, across * 2 * _BLOCK + _BLOCK)


@gluon.jit
def _multiply(
    out_tiles, experts, x_scales, weight_scales, out_scales, x_ring, weight_ring, out_places, is_full, is_free,
    num_tiles, num_across, num_rows, num_outputs, num_groups,
    GROUP: gl.constexpr, GATED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    half: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, _BLOCK, 32])
    rows = gl.arange(0, half, gl.SliceLayout(1, layout))
    none = gl.zeros([half, _BLOCK], gl.float32, layout)
    out_place = out_places.index(GROUP)
    turn = 0
    for tile in range(gl.program_id(0), num_tiles * num_across, gl.num_programs(0)):
        down, across = tile // num_across, tile % num_across
        expert = gl.load(experts + down)
        if expert >= 0:
            left, right = _lines(expert, across, num_outputs, GATED)
            left_at = weight_scales + left // _BLOCK * num_groups
            right_at = weight_scales + right // _BLOCK * num_groups
            row = down * ROWS + GROUP * half
            scale_at = x_scales + row + rows
            scale, left_scale, right_scale = gl.load(scale_at), gl.load(left_at), gl.load(right_at)
            lefts, rights, product = none, none, none
            for group in range(0, num_groups):
                stage, following = turn % STAGES, gl.minimum(group + 1, num_groups - 1)
                x, weight = x_ring.index(stage).slice(GROUP * half, half), weight_ring.index(stage)
                mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
                lines = weight.slice(0, _BLOCK).permute((1, 0))
                product = warpgroup_mma(x, lines, product, use_acc=False, is_async=True)
                # Loaded here and used in the next turn
                next_scale = gl.load(scale_at + following * num_rows)
                next_left, next_right = gl.load(left_at + following), gl.load(right_at + following)
                product = warpgroup_mma_wait(0, deps=[product])
                lefts += product * (scale * left_scale)[:, None]
                lefts = warpgroup_mma_wait(0, deps=[lefts])
                lines = weight.slice(_BLOCK, _BLOCK).permute((1, 0))
                product = warpgroup_mma(x, lines, product, use_acc=False, is_async=True)
                product = warpgroup_mma_wait(0, deps=[product])
                _barrier()  # all warps of the group have read the stage
                mbarrier.arrive(is_free.index(stage), count=1)
                rights += product * (scale * right_scale)[:, None]
                scale, left_scale, right_scale = next_scale, next_left, next_right
                turn += 1
            _finish(lefts, rights, out_tiles, out_place, out_scales, row, rows, across, num_rows, GATED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_tiles"])
def _experts_kernel(
    x_tiles, weight_tiles, out_tiles, experts, x_scales, weight_scales, out_scales, num_tiles, num_rows, num_outputs,
    num_inputs, GATED: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """`num_outputs`: of the result; there are as many gates, and as many ups."""
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    out_layout: gl.constexpr = gl.NVMMASharedLayout(128, out_tiles.dtype.primitive_bitwidth, rank=2)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, _BLOCK], plain)
    weight_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, 2 * _BLOCK, _BLOCK], plain)
    out_places = gl.allocate_shared_memory(out_tiles.dtype, [2, ROWS // 2, _BLOCK], out_layout)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=2)  # both groups have read it
    fence_async_shared()
    num_groups = num_inputs // _BLOCK
    num_across = num_outputs // _BLOCK if GATED else num_outputs // (2 * _BLOCK)
    gl.warp_specialize(
        [
            (_multiply, (
                out_tiles, experts, x_scales, weight_scales, out_scales, x_ring, weight_ring, out_places, is_full,
                is_free, num_tiles, num_across, num_rows, num_outputs, num_groups, 0, GATED, STAGES, ROWS,
            )),
            (_multiply, (
                out_tiles, experts, x_scales, weight_scales, out_scales, x_ring, weight_ring, out_places, is_full,
                is_free, num_tiles, num_across, num_rows, num_outputs, num_groups, 1, GATED, STAGES, ROWS,
            )),
            (_bring, (
                x_tiles, weight_tiles, experts, x_ring, weight_ring, is_full, is_free, num_tiles, num_across,
                num_outputs, num_groups, GATED, STAGES, ROWS,
            )),
        ],
        [4, 1],  # warps of the second and the third function; the first function has the warps of the launch
        [240, 24],  # registers of a thread in the second and the third function
    )  # fmt: skip


def gated_experts(rows: QuantizedRows, weight: QuantizedWeight, experts: torch.Tensor) -> QuantizedRows:
    """SwiGLU of the product with gates and ups [E, 2 * size, hidden], in bfloat16, then quantized.

    `rows` [tiles * ROWS, hidden]; `experts` int32 [tiles]: each tile's expert, or -1, and the results of such a tile
    are undefined. See `propose_experts` for the sizes.
    """
    size = weight.shape[1] // 2
    out = empty_rows(len(rows.values), size, BLOCK, rows.values.device)
    _launch(rows, weight, experts, out.values, out.scales, is_gated=True)
    return out


def down_experts(rows: QuantizedRows, weight: QuantizedWeight, experts: torch.Tensor) -> torch.Tensor:
    """The product with downs [E, hidden, size] in bfloat16, [tiles * ROWS, hidden]. See `gated_experts`."""
    out = rows.values.new_empty((len(rows.values), weight.shape[1]), dtype=torch.bfloat16)
    _launch(rows, weight, experts, out, rows.scales, is_gated=False)
    return out


def _launch(
    rows: QuantizedRows,
    weight: QuantizedWeight,
    experts: torch.Tensor,
    out: torch.Tensor,
    out_scales: torch.Tensor,
    *,
    is_gated: bool,
) -> None:
    (num_rows, num_inputs), num_outputs = rows.values.shape, out.shape[1]
    num_tiles = len(experts) * cdiv(num_outputs, BLOCK if is_gated else 2 * BLOCK)
    _experts_kernel[(min(num_tiles, num_processors(out.device)),)](
        TensorDescriptor.from_tensor(rows.values, [ROWS, BLOCK], _LAYOUTS[1]),
        TensorDescriptor.from_tensor(weight.values.view(-1, num_inputs), [BLOCK, BLOCK], _LAYOUTS[1]),
        TensorDescriptor.from_tensor(out, [ROWS // 2, BLOCK], _LAYOUTS[out.element_size()]),
        experts, rows.scales, weight.scales, out_scales, len(experts), num_rows, num_outputs, num_inputs,
        is_gated, STAGES, ROWS, num_warps=4, maxnreg=168,
    )  # fmt: skip


def experts(
    x: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    *,
    part: ExpertPart | None = None,
    products: tuple[GatedExperts, DownExperts] = (gated_experts, down_experts),
) -> torch.Tensor:
    """See backends.MixExperts; for weights that `propose_experts` takes. `products`: others in tests."""
    scores, chosen, num_chosen = scores.contiguous(), chosen.contiguous(), chosen.shape[1]
    own = None if part is None else OwnPairs(chosen, part.first, gate_up.shape[0])
    placed = place_pairs(chosen, gate_up.shape[0], ROWS, own=own)
    rows = spread(x, placed.rows, num_chosen, len(placed.experts) * ROWS, own)
    activated = products[0](rows, gate_up, placed.experts)
    return sum_pairs(products[1](activated, down, placed.experts), scores, placed.rows, own)


def propose_experts(gate_up: QuantizedWeight, down: QuantizedWeight) -> Callable[..., torch.Tensor] | None:
    """`experts`, if the kernel takes weights in blocks of these sizes and the device runs it."""
    hidden, size = down.shape[1:]
    return experts if hidden % (2 * BLOCK) == 0 and size % BLOCK == 0 and _runs_on(down.device) else None


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether the kernels compile and run on the device.

    The answer is cached: every mixture asks, and a failed compilation takes as long each time.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    values = torch.zeros(1, 2 * BLOCK, 2 * BLOCK, dtype=torch.float8_e4m3fn, device=device)
    weight = QuantizedWeight(values, torch.ones(1, 2, 2, device=device), True)
    rows = QuantizedRows(values[0, :ROWS], torch.ones(2, ROWS, device=device).t(), BLOCK)
    expert = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        gated_experts(rows, weight, expert)
        down_experts(rows, weight, expert)
    except Exception:  # Gluon is experimental: another version's compiler may raise anything
        logger.warning("no float8 experts of many rows", exc_info=True)
        return False
    return True
