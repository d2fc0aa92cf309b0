# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of few quantized rows with a quantized weight, on Hopper GPUs.

No weights move from the end of one kernel to the first tile of the next, and that time is lost. A weight in float8 is
read in half the time of one in bfloat16, so the loss counts twice. Here one warp fills a ring of shared memory with
weights before it waits for the kernels ahead. Two programs of a multiprocessor hold 160 KiB of them, 21 MB on the whole
device, which are read while rows are normed, activated and quantized: the products of a layer of the 8B shape and the
kernels between them take 68 us for one row, and 79 by `triton_quantized_product` (one H200; reading takes 51).

The weights are the left operand: the few rows are the matrix unit's narrow side. The unit adds products of float8 with
fewer than 14 bits after the point, so its sums over 128 inputs are scaled and added in float32.
"""

from __future__ import annotations

import logging
from functools import cache

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pd_kernels.launch_sizes import cdiv, next_power_of_2, num_processors
from pd_kernels.quantized import BLOCK, QuantizedRows, QuantizedWeight

logger = logging.getLogger(__name__)
MOST_ROWS = 64
_LAYOUT = gl.NVMMASharedLayout(128, 8, rank=2)  # of all operands; Gluon takes 5 us to make one
OUTPUTS = 64  # of a tile
STAGES = {16: 10, 32: 8, 64: 5}  # of the ring, by the rows of a tile: 100 KiB, so that two programs fit
_BLOCK: gl.constexpr = gl.constexpr(BLOCK)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, later ones
REGISTERS = 120  # of a thread: two programs of 8 warps fit


@gluon.jit
def _bring(
    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, tile, begin, num_turns,
    STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
):  # fmt: skip
    num_early = gl.minimum(num_turns, STAGES)
    for turn in range(0, num_early):
        full, place = is_full.index(turn), (begin + turn) * _BLOCK
        mbarrier.expect(full, (OUTPUTS + ROWS) * _BLOCK)  # bytes, including those outside the matrices
        tma.async_copy_global_to_shared(weight_tiles, [tile * OUTPUTS, place], full, weight_ring.index(turn))
    gdc_wait()
    for turn in range(0, num_early):
        place = (begin + turn) * _BLOCK
        tma.async_copy_global_to_shared(x_tiles, [0, place], is_full.index(turn), x_ring.index(turn))
    for turn in range(num_early, num_turns):
        stage, place = turn % STAGES, (begin + turn) * _BLOCK
        full = is_full.index(stage)
        mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full, (OUTPUTS + ROWS) * _BLOCK)
        tma.async_copy_global_to_shared(weight_tiles, [tile * OUTPUTS, place], full, weight_ring.index(stage))
        tma.async_copy_global_to_shared(x_tiles, [0, place], full, x_ring.index(stage))


@gluon.jit
def _multiply(
    x_ring, weight_ring, is_full, is_free, scale_place, x_scales, weight_scales, out, parts, arrived, tile, begin,
    num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, SHARE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, ROWS, 32])
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    line, row = gl.arange(0, OUTPUTS, gl.SliceLayout(1, layout)), gl.arange(0, ROWS, columns)
    weight_scale_at = weight_scales + tile * OUTPUTS // _BLOCK * num_groups + begin  # a tile is in one row of blocks
    gdc_wait()
    if BLOCKS:
        wide: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
        group = gl.arange(0, SHARE, gl.SliceLayout(1, wide))
        of_row = gl.arange(0, ROWS, gl.SliceLayout(0, wide))
        at = x_scales + of_row[None, :] * row_stride + (begin + group)[:, None] * group_stride
        known = (group < num_turns)[:, None] & (of_row < num_rows)[None, :]
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scale_place._reinterpret(gl.float32, [SHARE, ROWS], plain).store(gl.load(at, mask=known, other=0.0))
        _barrier()
        weight_scale = gl.load(weight_scale_at)
    sums = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    for turn in range(0, num_turns):
        stage = turn % STAGES
        mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
        products = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
        rows = x_ring.index(stage).permute((1, 0))
        products = warpgroup_mma(weight_ring.index(stage), rows, products, use_acc=False, is_async=True)
        if BLOCKS:
            scale = scale_place.index(turn).load(columns) * weight_scale
            weight_scale = gl.load(weight_scale_at + gl.minimum(turn + 1, num_turns - 1))
        products = warpgroup_mma_wait(0, deps=[products])
        _barrier()  # all warps have read the stage
        mbarrier.arrive(is_free.index(stage), count=1)
        if BLOCKS:
            sums += products * scale[None, :]
        else:
            sums += products
    if not BLOCKS:
        known_output = gl.minimum(tile * OUTPUTS + line, num_outputs - 1)
        scale = gl.load(x_scales + gl.minimum(row, num_rows - 1) * row_stride)
        sums *= gl.load(weight_scales + known_output)[:, None] * scale[None, :]
    is_last = True
    if SPLIT > 1:
        SIZE: gl.constexpr = OUTPUTS * ROWS
        part_at = parts + tile.to(gl.int64) * SPLIT * SIZE + line[:, None] * ROWS + row[None, :]
        gl.store(part_at + gl.program_id(1) * SIZE, sums)
        _barrier()  # the whole part is written before its arrival is counted
        is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            sums = gl.load(part_at, cache_modifier=".cg")
            for part in gl.static_range(1, SPLIT):  # in this order, whatever the programs' timing
                sums += gl.load(part_at + part * SIZE, cache_modifier=".cg")
            gl.store(arrived + tile, 0)  # for the next launch
    if is_last:
        store: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])  # neighbours store neighbouring outputs
        output = tile * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, store))[:, None]
        to_row = gl.arange(0, ROWS, gl.SliceLayout(0, store))[None, :]
        result = gl.convert_layout(sums.to(out.dtype.element_ty), store)
        gl.store(out + to_row * num_outputs + output, result, mask=(to_row < num_rows) & (output < num_outputs))


@gluon.jit(do_not_specialize=["num_rows"])
def _ring_kernel(
    x_tiles, weight_tiles, x_scales, weight_scales, out, parts, arrived, num_rows, num_outputs, num_inputs,
    row_stride, group_stride,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, SHARE: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    weight_ring = gl.allocate_shared_memory(weight_tiles.dtype, [STAGES, OUTPUTS, _BLOCK], plain)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, _BLOCK], plain)
    scale_place = gl.allocate_shared_memory(
        gl.float32, [SHARE if BLOCKS else 1, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=1)
    fence_async_shared()
    tile, num_groups = gl.program_id(0), gl.cdiv(num_inputs, _BLOCK)
    share = gl.cdiv(num_groups, SPLIT)
    begin = gl.program_id(1) * share
    num_turns = gl.minimum(share, num_groups - begin)
    gl.warp_specialize(
        [
            (_multiply, (
                x_ring, weight_ring, is_full, is_free, scale_place, x_scales, weight_scales, out, parts, arrived, tile,
                begin, num_turns, num_rows, num_outputs, num_groups, row_stride, group_stride,
                STAGES, SPLIT, SHARE, ROWS, OUTPUTS, BLOCKS,
            )),
            (_bring, (
                x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, tile, begin, num_turns,
                STAGES, ROWS, OUTPUTS,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


def ring_split(num_rows: int, num_outputs: int, num_inputs: int, num_processors: int) -> int:
    """The programs that share the inputs of a tile; chosen by measurement."""
    num_tiles, num_groups, split = cdiv(num_outputs, OUTPUTS), cdiv(num_inputs, BLOCK), 1
    most = num_processors * (2 if num_rows <= 16 else 1)
    while num_tiles * split * 2 <= most and num_groups >= 4 * split:
        split *= 2
    while cdiv(num_groups, split) * (split - 1) >= num_groups:  # a program would have no inputs
        split //= 2
    return split


def multiply_in_ring(
    rows: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype, arrived: torch.Tensor, split: int | None = None
) -> torch.Tensor:
    """See triton_quantized_product.multiply; for 1 to 64 rows. Use it on one stream at a time."""
    x, num_outputs = rows.values, weight.shape[0]
    (num_rows, num_inputs), padded = x.shape, max(16, next_power_of_2(len(x)))
    split = split or ring_split(num_rows, num_outputs, num_inputs, num_processors(x.device))
    num_tiles = cdiv(num_outputs, OUTPUTS)
    out = x.new_empty((num_rows, num_outputs), dtype=dtype)
    parts = x.new_empty(num_tiles * split * OUTPUTS * padded if split > 1 else 0, dtype=torch.float32)
    share = next_power_of_2(cdiv(cdiv(num_inputs, BLOCK), split))
    _ring_kernel[(num_tiles, split)](
        TensorDescriptor.from_tensor(x, [padded, BLOCK], _LAYOUT),
        TensorDescriptor.from_tensor(weight.values, [OUTPUTS, BLOCK], _LAYOUT),
        rows.scales, weight.scales, out, parts, arrived, num_rows, num_outputs, num_inputs, *rows.scales.stride(),
        STAGES[padded], split, share, padded, OUTPUTS, weight.is_blocks,
        num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
    )  # fmt: skip
    return out


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel compiles and runs on the device.

    The answer is cached: every product asks, and a failed compilation takes as long each time.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    values = torch.zeros(OUTPUTS, BLOCK, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.ones(OUTPUTS, 1, dtype=torch.float32, device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        rows, weight = QuantizedRows(values[:1], scales[:1], BLOCK), QuantizedWeight(values, scales, False)
        multiply_in_ring(rows, weight, torch.bfloat16, arrived)
    except Exception:  # Gluon is experimental: another version's compiler may raise anything
        logger.warning("no ring of weights", exc_info=True)
        return False
    return True
