# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""SwiGLU fused with its product, for many rows on Hopper GPUs. Gates and ups never reach global memory.

With many rows a product runs at the power limit, and every other movement of data takes power from the multiplication.
A program goes from tile to tile. One warp copies the rows and the weights of gates and ups for the next tiles into a
ring of shared memory. Two groups of four warps multiply them: each group multiplies half of the tile's rows by all of
its outputs, and stores its results while the operands of the next tile arrive.

The kernel needs Triton's Gluon. Gluon makes the synchronization of warps explicit and does not run in the interpreter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
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

from pd_kernels.launch_sizes import cdiv, num_processors

logger = logging.getLogger(__name__)
ROWS, OUTPUTS, INPUTS = 128, 128, 64  # of a tile: rows; gates, and as many ups; inputs (128 bytes of a row)
STAGES = 4  # stages of the ring: 192 KiB in all
DOWN = 16  # tiles of a column before the next column, so that their weights are still in the L2 cache
_MULTIPLIERS = 2  # groups of warps
_LAYOUT = gl.NVMMASharedLayout(128, 16, rank=2)  # of all operands; Gluon takes 5 us to make one


@gluon.jit
def _place(tile, num_down, num_across, DOWN: gl.constexpr):
    width = DOWN * num_across
    first = tile // width * DOWN
    height = gl.minimum(num_down - first, DOWN)
    return first + tile % width % height, tile % width // height


@gluon.jit
def _bring(
    x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, num_rows, num_outputs, num_inputs,
    DOWN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    num_down, num_across = gl.cdiv(num_rows, ROWS), gl.cdiv(num_outputs, OUTPUTS)
    turn = 0
    for tile in range(gl.program_id(0), num_down * num_across, gl.num_programs(0)):
        down, across = _place(tile, num_down, num_across, DOWN)
        gate, up = across * OUTPUTS, num_outputs + across * OUTPUTS
        for place in range(0, num_inputs, INPUTS):
            stage = turn % STAGES
            full, weight = is_full.index(stage), weight_ring.index(stage)
            mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(full, (ROWS + 2 * OUTPUTS) * INPUTS * 2)  # bytes, including those outside the matrices
            tma.async_copy_global_to_shared(x_tiles, [down * ROWS, place], full, x_ring.index(stage))
            tma.async_copy_global_to_shared(weight_tiles, [gate, place], full, weight.slice(0, OUTPUTS))
            tma.async_copy_global_to_shared(weight_tiles, [up, place], full, weight.slice(OUTPUTS, OUTPUTS))
            turn += 1


@gluon.jit
def _multiply(
    out_tiles, x_ring, weight_ring, out_places, is_full, is_free, num_rows, num_outputs, num_inputs,
    GROUP: gl.constexpr, DOWN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr,
    INPUTS: gl.constexpr,
):  # fmt: skip
    half: gl.constexpr = ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, 2 * OUTPUTS, 16])
    num_down, num_across = gl.cdiv(num_rows, ROWS), gl.cdiv(num_outputs, OUTPUTS)
    out = out_places.index(GROUP)
    turn = 0
    for tile in range(gl.program_id(0), num_down * num_across, gl.num_programs(0)):
        down, across = _place(tile, num_down, num_across, DOWN)
        sums = gl.zeros([half, 2 * OUTPUTS], gl.float32, layout)
        for place in range(0, num_inputs, INPUTS):
            stage = turn % STAGES
            mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
            weight = weight_ring.index(stage).permute((1, 0))
            sums = warpgroup_mma(x_ring.index(stage).slice(GROUP * half, half), weight, sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])  # the previous turn: its stage has been read
            mbarrier.arrive(is_free.index((turn + STAGES - 1) % STAGES), count=1, pred=place > 0)
            turn += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(is_free.index((turn + STAGES - 1) % STAGES), count=1)
        gate, up = gl.split(gl.permute(gl.reshape(sums, [half, 2, OUTPUTS]), [0, 2, 1]))
        gate = gate.to(out.dtype).to(gl.float32)  # round where the separate functions round
        gated = (gate / (1.0 + gl.exp(-gate))).to(out.dtype).to(gl.float32) * up.to(out.dtype).to(gl.float32)
        tma.store_wait(0)
        out.store(gated.to(out.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_tiles, [down * ROWS + GROUP * half, across * OUTPUTS], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def _gated_kernel(
    x_tiles, weight_tiles, out_tiles, num_rows, num_outputs, num_inputs,
    DOWN: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr,
):  # fmt: skip
    """`num_outputs`: half of the weight's rows."""
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, ROWS, INPUTS], plain)
    weight_ring = gl.allocate_shared_memory(x_tiles.dtype, [STAGES, 2 * OUTPUTS, INPUTS], plain)
    out_places = gl.allocate_shared_memory(x_tiles.dtype, [2, ROWS // 2, OUTPUTS], plain)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=2)  # both groups have read it
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out_tiles, x_ring, weight_ring, out_places, is_full, is_free, num_rows, num_outputs, num_inputs, 0,
                DOWN, STAGES, ROWS, OUTPUTS, INPUTS,
            )),
            (_multiply, (
                out_tiles, x_ring, weight_ring, out_places, is_full, is_free, num_rows, num_outputs, num_inputs, 1,
                DOWN, STAGES, ROWS, OUTPUTS, INPUTS,
            )),
            (_bring, (
                x_tiles, weight_tiles, x_ring, weight_ring, is_full, is_free, num_rows, num_outputs, num_inputs,
                DOWN, STAGES, ROWS, OUTPUTS, INPUTS,
            )),
        ],
        [4, 1],  # warps of the second and the third function; the first function has the warps of the launch
        [240, 24],  # registers of a thread in the second and the third function
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """A gemm_selection.Product that returns silu_and_mul of x weight^T, [M, N / 2].

    It takes any number of rows and is tuned for hundreds.
    """

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`x` [M, K]; `weight` [N, K]: gates, then ups. Both are contiguous, bfloat16 or float16.

        Raises RuntimeError when the kernel does not compile or cannot be launched.
        """
        (num_rows, num_inputs), num_outputs = x.shape, len(weight) // 2
        out = x.new_empty((num_rows, num_outputs))
        num_tiles = cdiv(num_rows, ROWS) * cdiv(num_outputs, OUTPUTS)
        try:
            _gated_kernel[(min(num_tiles, num_processors(x.device)),)](
                TensorDescriptor.from_tensor(x, [ROWS, INPUTS], _LAYOUT),
                TensorDescriptor.from_tensor(weight, [OUTPUTS, INPUTS], _LAYOUT),
                TensorDescriptor.from_tensor(out, [ROWS // _MULTIPLIERS, OUTPUTS], _LAYOUT),
                num_rows, num_outputs, num_inputs, DOWN, STAGES, ROWS, OUTPUTS, INPUTS, num_warps=4, maxnreg=168,
            )  # fmt: skip
        except Exception as error:  # Gluon is experimental: another version's compiler may raise anything
            raise RuntimeError(f"fused SwiGLU: {type(error).__name__}: {error}") from error
        return out


def propose_gated(num_rows: int, weight: torch.Tensor) -> list[GatedProduct]:
    """The GatedProduct for `weight` [N, K], if `num_rows` is more than half a tile.

    Empty if the GPU or the weight does not support the kernel.
    """
    fits = weight.dtype in (torch.bfloat16, torch.float16) and weight.is_contiguous()
    fits = fits and weight.shape[1] % 8 == 0 and len(weight) % 16 == 0  # multiples of 16 bytes, also in halves
    return [GatedProduct()] if fits and num_rows > ROWS // 2 and _runs_on(weight.device) else []


@cache
def _runs_on(device: torch.device) -> bool:
    """Whether the kernel compiles and runs on the device.

    The answer is cached: `propose_gated` asks for each number of rows, and a failed compilation takes as long each
    time.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        x, weight = (torch.zeros(rows, INPUTS, dtype=torch.bfloat16, device=device) for rows in (1, 2 * OUTPUTS))
        GatedProduct()(x, weight)
    except RuntimeError:
        logger.warning("no fused SwiGLU", exc_info=True)
        return False
    return True
