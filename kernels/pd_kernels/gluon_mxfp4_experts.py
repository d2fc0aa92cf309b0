# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of experts' weights in MXFP4 with rows in bfloat16, on Hopper GPUs.

One warp copies weights, scales and rows of the next tiles into a ring of shared memory. Three groups of four warps
multiply them, each 64 of a tile's outputs. The weights are the matrix unit's left operand, in registers: `mxfp4_tiles`
has put each number where its thread finds it. The few rows are the unit's narrow side.

The rows of an expert are one after the other. A tile reads rows after the last one of its expert too, and leaves their
results out.

The kernel needs Triton's Gluon. Gluon makes the synchronization of warps explicit and does not run in the interpreter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from pd_kernels import mxfp4_tiles
from pd_kernels.gluon_mxfp4_ring import AT_ONCE, FIRST, STAGES, bring, steps_of, tile_of
from pd_kernels.launch_sizes import cdiv, num_processors
from pd_kernels.mxfp4_tiles import (
    KEPT,
    LINES,
    PIECE,
    PIECES,
    ROTATIONS,
    SHARES,
    SHIFTS,
    STEP,
    USED,
    Mxfp4Tiles,
)
from pd_kernels.triton_pairs import SortedRows
from pd_kernels.weight_forms import MXFP4, PackedWeight

if TYPE_CHECKING:
    from pd_kernels.values import Gates

logger = logging.getLogger(__name__)
_VALUES = gl.NVMMASharedLayout(128, 8, rank=2)  # Gluon takes 5 us to make one
_SCALES = gl.NVMMASharedLayout(128, 32, rank=2)
_ROWS = gl.NVMMASharedLayout(128, 16, rank=2)
_PIECE: gl.constexpr = gl.constexpr(PIECE)
_PIECES: gl.constexpr = gl.constexpr(PIECES)
_SHARES: gl.constexpr = gl.constexpr(SHARES)
_FIRST: gl.constexpr = gl.constexpr(FIRST)
_LINES: gl.constexpr = gl.constexpr(LINES)
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.6, later ones
FEW = 8  # rows of a tile up to which warps multiply alone: see `_multiply`
_FEW: gl.constexpr = gl.constexpr(FEW)
REGISTERS, MULTIPLIERS_AND_COPIER = 128, (160, 24)  # of a thread: at the launch, of 16 warps; later


def _unpacking() -> str:
    """PTX: two words, $8 and $9, to 8 pairs of bfloat16, $0 to $7. Four are times $10, the others times $18."""
    lines = [f"lop3.b32 both, $8, $9, {KEPT}, 0xE4;"]  # the bits KEPT of the first, the others of the second
    pair = 0
    for word, rotations in zip(("$8", "$9", "both"), ROTATIONS, strict=True):
        for rotation in rotations:
            # Half of the rotations lose no bit as shifts. A product is a shift of another unit: 297 us for 302
            shift = f"mul.lo.u32 turned, {word}, {1 << rotation};"
            turn = f"shf.l.wrap.b32 turned, {word}, {word}, {rotation};"
            lines += [shift if rotation in SHIFTS else turn, f"and.b32 turned, turned, {USED};"]
            lines += [f"mul.rn.bf16x2 ${pair}, turned, ${10 if pair < 4 else 18};"]
            pair += 1
    return "{.reg .b32 both, turned; " + " ".join(lines) + "}"


_UNPACKING: gl.constexpr = gl.constexpr(_unpacking())
_REGISTERS_USED: gl.constexpr = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 18))


@gluon.jit
def _take_mxfp4(ring, stage, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    """A block of a stage, [64 outputs, 64 inputs], as the left operand of the matrix unit."""
    _x_ring, values, last_values, scales, last_scales, _is_full, _is_free = ring
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    threads: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    if BLOCK < _FIRST:
        words = values.index(stage)._reinterpret(gl.uint8, [_FIRST, 32, 4, 16], plain).index(BLOCK)
        scale_words = scales.index(stage)._reinterpret(gl.int32, [_FIRST, 32], flat).index(BLOCK)
    else:
        words = last_values.index(stage)._reinterpret(gl.uint8, [1, 32, 4, 16], plain).index(0)
        scale_words = last_scales.index(stage)._reinterpret(gl.int32, [_FIRST, 32], flat).index(0)
    words = words.load(threads)
    scale = scale_words.load(gl.SliceLayout(1, gl.SliceLayout(2, threads)))[:, None][:, :, None]
    byte = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, threads)))[None, :][:, None, :]
    scale = scale >> (byte // 8 * 16)
    low, high = (scale & 255) * 0x00800080, (scale >> 8 & 255) * 0x00800080
    low, high = gl.inline_asm_elementwise(
        _UNPACKING, _REGISTERS_USED, [words, low, high], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=8
    )
    both = gl.reshape(gl.join(low, high), [4, 8, 4, 2, 2, 2, 2, 2])
    both = gl.reshape(gl.permute(both, [0, 3, 1, 7, 4, 5, 2, 6]), [_PIECE, 64])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(
    given, ring, sizes, limit, alpha,
    PIECE: gl.constexpr, GATED: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Up to _FEW rows, each warp multiplies alone: a group's product of 8 rows takes longer (326 us for 302).

    Two sums, so that a product does not wait for the one before (293 us for 302). The copies alone take 270 us; with
    half of the products they take 276, without multiplying or without rotating the weights 280.
    """
    out, bias, scores, order, tiles = given
    x_ring, _values, _last_values, _scales, _last_scales, is_full, is_free = ring
    num_tiles, num_across, num_steps, num_outputs, num_rows, num_chosen = sizes
    by_warp: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], instr_shape=[16, 8])
    by_group: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], instr_shape=[16, ROWS, 16])
    layout: gl.constexpr = by_warp if ROWS <= _FEW else by_group
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, by_warp, 2)
    lines = gl.arange(0, _PIECE, gl.SliceLayout(1, layout))
    turn = 0
    gdc_wait()
    for unit in range(gl.program_id(0), num_tiles * num_across * SPLIT, gl.num_programs(0)):
        across, part, expert, first, end = tile_of(unit, tiles, num_tiles, num_across, SPLIT)
        if expert >= 0:
            line = across * _LINES + PIECE * _PIECE
            added = gl.load(bias + expert * num_across * _LINES + line + lines)
            sums = gl.zeros([_PIECE, ROWS], gl.float32, layout)
            others = gl.zeros([_PIECE, ROWS], gl.float32, layout)
            begin, stop = steps_of(part, num_steps, SPLIT)
            for _step in range(begin, stop):
                stage = turn % STAGES
                mbarrier.wait(is_full.index(stage), turn // STAGES & 1)
                if ROWS <= _FEW:
                    for share in gl.static_range(_SHARES):
                        weight = _take_mxfp4(ring, stage, PIECE * _SHARES + share, left)
                        x = x_ring.index(stage * _SHARES + share).permute((1, 0)).load(right)
                        if share % 2 == 0:
                            sums = mma_v2(weight, x, sums)
                        else:
                            others = mma_v2(weight, x, others)
                else:
                    x = x_ring.index(stage * _SHARES).permute((1, 0))
                    first_weight = _take_mxfp4(ring, stage, PIECE * _SHARES, left)
                    sums = warpgroup_mma(first_weight, x, sums, is_async=True)
                    x = x_ring.index(stage * _SHARES + 1).permute((1, 0))
                    second_weight = _take_mxfp4(ring, stage, PIECE * _SHARES + 1, left)
                    sums = warpgroup_mma(second_weight, x, sums, is_async=True)
                    x = x_ring.index(stage * _SHARES + 2).permute((1, 0))
                    third_weight = _take_mxfp4(ring, stage, PIECE * _SHARES + 2, left)
                    sums = warpgroup_mma(third_weight, x, sums, is_async=True)
                    sums, first_weight, second_weight, third_weight = warpgroup_mma_wait(
                        0, deps=[sums, first_weight, second_weight, third_weight]
                    )  # fmt: skip
                _barrier()  # all warps of the group have read the stage
                mbarrier.arrive(is_free.index(stage), count=1)
                turn += 1
            if ROWS <= _FEW:
                sums += others
            if SPLIT > 1:
                added = gl.where(part == 0, added, 0.0)
            sums += added[:, None]
            if GATED:
                _store_gated(out, sums, line // 2, first, end, num_outputs, limit, alpha, ROWS)
            else:
                _store(
                    out, sums, scores, order, line, part, first, end, num_outputs, num_rows, num_chosen,
                    PARTS, SPLIT, ROWS,
                )  # fmt: skip


@gluon.jit
def _store_gated(out, sums, line, first, end, num_outputs, limit, alpha, ROWS: gl.constexpr):
    """Eight gates, their ups and so on -> activations, [rows, num_outputs]."""
    dtype: gl.constexpr = out.dtype.element_ty
    pairs = gl.permute(gl.reshape(sums, [4, 2, 8, ROWS]), [0, 2, 3, 1])
    gate, up = gl.split(pairs)
    gate, up = gl.reshape(gate, [_PIECE // 2, ROWS]), gl.reshape(up, [_PIECE // 2, ROWS])
    gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)  # round where the separate functions round
    gate, up = gl.minimum(gate, limit), gl.minimum(gl.maximum(up, -limit), limit)
    value = (up + 1.0) * (gate / (1.0 + gl.exp(-alpha * gate)))
    store: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    value = gl.convert_layout(value.to(dtype), store)
    output = line + gl.arange(0, _PIECE // 2, gl.SliceLayout(1, store))[:, None]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(0, store))[None, :]
    gl.store(out + row.to(gl.int64) * num_outputs + output, value, mask=(row < end) & (output < num_outputs))


@gluon.jit
def _store(
    out, sums, scores, order, line, part, first, end, num_outputs, num_rows, num_chosen,
    PARTS: gl.constexpr, SPLIT: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Results [T * k, num_outputs]; PARTS: times scores, [SPLIT * k, T, num_outputs]."""
    in_float32: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    in_bfloat16: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    store: gl.constexpr = in_float32 if PARTS else in_bfloat16
    if SPLIT == 1:  # rounded first: half as much shared memory on the way
        value = gl.convert_layout(sums.to(gl.bfloat16), store).to(gl.float32)
    else:
        value = gl.convert_layout(sums, store)
    output = line + gl.arange(0, _PIECE, gl.SliceLayout(1, store))[:, None]
    row = first + gl.arange(0, ROWS, gl.SliceLayout(0, store))
    pair = gl.load(order + row, mask=row < end, other=0)
    to_row = pair
    if PARTS:
        value *= gl.load(scores + pair)[None, :]
        num_tokens = num_rows // num_chosen
        to_row = (part * num_chosen + pair % num_chosen) * num_tokens + pair // num_chosen
    at = out + to_row.to(gl.int64)[None, :] * num_outputs + output
    gl.store(at, value.to(out.dtype.element_ty), mask=(row < end)[None, :] & (output < num_outputs))


@gluon.jit(do_not_specialize=["num_tiles", "num_rows"])
def _experts_kernel(
    row_tiles, value_tiles, last_value_tiles, scale_tiles, out, bias, scores, order, tiles,
    num_tiles, num_across, num_steps, num_outputs, num_rows, num_chosen, limit, alpha,
    GATED: gl.constexpr, PARTS: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    ROWS: gl.constexpr, AT_ONCE: gl.constexpr, MORE: gl.constexpr, LESS: gl.constexpr,
):  # fmt: skip
    """`num_outputs`: of the result, without those that fill the last tile."""
    values_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    scales_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    rows_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    values = gl.allocate_shared_memory(gl.uint8, [STAGES, _FIRST * 16, 128], values_layout)
    last_values = gl.allocate_shared_memory(gl.uint8, [STAGES, 16, 128], values_layout)
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, _FIRST, 32], scales_layout)
    last_scales = gl.allocate_shared_memory(gl.int32, [STAGES, _FIRST, 32], scales_layout)
    x_ring = gl.allocate_shared_memory(row_tiles.dtype, [STAGES * _SHARES, ROWS, 64], rows_layout)
    is_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    is_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(is_full.index(stage), count=1)
        mbarrier.init(is_free.index(stage), count=_PIECES)  # all groups have read it
    fence_async_shared()
    given = out, bias, scores, order, tiles
    ring = x_ring, values, last_values, scales, last_scales, is_full, is_free
    sizes = num_tiles, num_across, num_steps, num_outputs, num_rows, num_chosen
    brought = row_tiles, value_tiles, last_value_tiles, scale_tiles, tiles
    gl.warp_specialize(
        [
            (_multiply, (given, ring, sizes, limit, alpha, 0, GATED, PARTS, SPLIT, STAGES, ROWS)),
            (_multiply, (given, ring, sizes, limit, alpha, 1, GATED, PARTS, SPLIT, STAGES, ROWS)),
            (_multiply, (given, ring, sizes, limit, alpha, 2, GATED, PARTS, SPLIT, STAGES, ROWS)),
            (bring, (brought, ring, sizes, not GATED, SPLIT, STAGES, ROWS, AT_ONCE)),
        ],
        [4, 4, 1],  # warps of all but the first function, which has the warps of the launch
        [MORE, MORE, LESS],  # registers of a thread in these
    )


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """An ExpertProduct."""

    tiles: Mxfp4Tiles
    bias: torch.Tensor  # float32 [E, tiles across * LINES], in the order of the tiles
    num_inputs: int
    num_outputs: int  # of the result

    @classmethod
    def of(cls, weight: PackedWeight, bias: torch.Tensor, is_gated: bool) -> TiledProduct:
        """A weight that `fits`, put into tiles, and its bias in bfloat16."""
        _, num_outputs, num_inputs = weight.shape
        tiles = mxfp4_tiles.in_tiles(weight, is_gated=is_gated)
        bias = mxfp4_tiles.in_order(bias, is_gated=is_gated)
        return cls(tiles, bias, num_inputs, num_outputs // 2 if is_gated else num_outputs)

    def tile_rows(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """See ExpertProduct."""
        mean = num_tokens * num_chosen / num_experts
        most = ((4, 8), (8, 16), (20, 32), (100 if num_tokens > 64 else mean, 64))  # an expert is chosen once a token
        return next((rows for bound, rows in most if mean <= bound), 128)

    def num_parts(self, num_tiles: int) -> int:
        """See ExpertProduct."""
        return 2 if num_tiles * cdiv(self.num_outputs, LINES) <= 4 * num_processors(self.bias.device) else 1

    def multiply(self, rows: SortedRows, out: torch.Tensor, scores: torch.Tensor, size: int, gates: Gates) -> None:
        """See ExpertProduct."""
        num_across, num_steps, num_chosen = self.bias.shape[1] // LINES, cdiv(self.num_inputs, STEP), scores.shape[1]
        num_tiles, (limit, alpha) = rows.tiles.shape[1], gates or (0.0, 0.0)
        split = out.shape[0] // num_chosen if out.dim() == 3 else 1
        _experts_kernel[(min(num_tiles * num_across * split, num_processors(out.device)),)](
            TensorDescriptor.from_tensor(rows.x, [AT_ONCE[size], 64], _ROWS),
            TensorDescriptor.from_tensor(self.tiles.values, [FIRST * 16, 128], _VALUES),
            TensorDescriptor.from_tensor(self.tiles.values, [16, 128], _VALUES),
            TensorDescriptor.from_tensor(self.tiles.scales, [FIRST, 32], _SCALES),
            out, self.bias, scores, rows.order, rows.tiles, num_tiles, num_across, num_steps, self.num_outputs,
            scores.numel(), num_chosen, limit, alpha, gates is not None, out.dim() == 3, split,
            STAGES[size], size, AT_ONCE[size], *MULTIPLIERS_AND_COPIER, num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
        )  # fmt: skip


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel compiles and runs on the device.

    The answer is cached: every layer asks, and a failed compilation takes as long each time.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    blocks, scales = (torch.zeros(1, 16, 1, *size, dtype=torch.uint8, device=device) for size in ((16,), ()))
    bias, x = (torch.zeros(1, size, dtype=torch.bfloat16, device=device) for size in (16, 32))
    order, tiles = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0], [[0], [0], [1]]))
    try:
        for size, gates in ((8, None), (128, (7.0, 1.0))):
            product = TiledProduct.of(PackedWeight(MXFP4, blocks, scales), bias, gates is not None)
            out = x.new_empty((1, product.num_outputs))
            product.multiply(SortedRows(x, order, tiles), out, torch.ones(1, 1, device=device), size, gates)
    except Exception:  # Gluon is experimental: another version's compiler may raise anything
        logger.warning("no MXFP4 experts of registers", exc_info=True)
        return False
    return True
