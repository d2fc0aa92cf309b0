# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Products of experts' weights in MXFP4 as a checkpoint has them, on any GPU and in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    import torch

    from pd_kernels.triton_pairs import SortedRows
    from pd_kernels.values import Gates
    from pd_kernels.weight_forms import PackedWeight

_OUTPUTS = 64  # of a tile
_NAN: tl.constexpr = tl.constexpr(255)  # the scale of NaN


@triton.jit
def _twice(code):
    """Twice the number of a code of e2m1."""
    number = code & 7
    number = tl.where(number < 2, number, (2 + number % 2) << tl.maximum(number // 2 - 1, 0))
    return tl.where(code < 8, number, -number).to(tl.float32)


@triton.jit
def _take_mxfp4(blocks, scales, line, inside, group, num_groups, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr):
    """float32 [OUTPUTS, 32 * GROUPS] of the lines, from the group on."""
    byte, groups = tl.arange(0, 16 * GROUPS), tl.arange(0, GROUPS)
    at = line.to(tl.int64)[:, None] * num_groups + group
    known = inside[:, None] & (group + byte // 16 < num_groups)[None, :]
    codes = tl.load(blocks + at * 16 + byte[None, :], mask=known, other=0).to(tl.int32)
    known = inside[:, None] & (group + groups < num_groups)[None, :]
    scale = tl.load(scales + at + groups[None, :], mask=known, other=127).to(tl.int32)
    # 2 ** (scale - 128). The two least are subnormal
    bits = tl.where(scale < 2, 1 << (21 + tl.minimum(scale, 1)), (scale - 1) << 23)
    factor = tl.where(scale == _NAN, float("nan"), bits.to(tl.float32, bitcast=True))
    numbers = tl.interleave(_twice(codes & 15), _twice(codes >> 4)).reshape(OUTPUTS, GROUPS, 32)
    return (numbers * factor[:, :, None]).reshape(OUTPUTS, 32 * GROUPS)


@triton.jit(do_not_specialize=["num_tiles", "num_pairs"])
def _mxfp4_kernel(
    blocks, scales, bias, x, out, order, tiles, num_tiles, num_pairs, num_lines, num_groups, limit, alpha,
    GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED: activations, in the order of the rows; else results, in the order of the pairs."""
    others_may_start(EARLY)
    wait_for_others(EARLY)
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    row = tl.load(tiles + num_tiles + tile) + tl.arange(0, ROWS)
    is_row = row < tl.load(tiles + 2 * num_tiles + tile)
    output, column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, 32 * GROUPS)
    inside, line, num_inputs = output < num_lines, expert * num_lines + output, num_groups * 32
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for group in range(0, num_groups, GROUPS):
        place = group * 32 + column
        known = is_row[:, None] & (place < num_inputs)[None, :]
        rows = tl.load(x + row.to(tl.int64)[:, None] * num_inputs + place[None, :], mask=known, other=0.0)
        weight = _take_mxfp4(blocks, scales, line, inside, group, num_groups, OUTPUTS, GROUPS).to(rows.dtype)
        sums = tl.dot(weight, tl.trans(rows), sums, input_precision="ieee")
    sums += tl.load(bias + line, mask=inside, other=0.0)[:, None]
    dtype = out.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(sums.to(dtype).to(tl.float32).reshape(OUTPUTS // 2, 2, ROWS), (0, 2, 1)))
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
        sums, num_lines = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate))), num_lines // 2
        output, to_row = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2), row
    else:
        to_row = tl.load(order + row, mask=is_row, other=0)
    at = out + to_row.to(tl.int64)[:, None] * num_lines + output[None, :]
    tl.store(at, tl.trans(sums).to(dtype), mask=is_row[:, None] & (output < num_lines)[None, :])


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """An ExpertProduct."""

    weight: PackedWeight
    bias: torch.Tensor

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[2]

    @staticmethod
    def tile_rows(num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """See ExpertProduct."""
        mean = num_tokens * num_chosen / num_experts
        return 16 if mean <= 16 else 32 if mean <= 32 else 64

    @staticmethod
    def num_parts(num_tiles: int) -> int:
        """See ExpertProduct. Results are not split."""
        return 0

    def multiply(self, rows: SortedRows, out: torch.Tensor, scores: torch.Tensor, size: int, gates: Gates) -> None:
        """See ExpertProduct."""
        _, num_lines, num_inputs = self.weight.shape
        num_tiles, early = rows.tiles.shape[1], launches_early(out.device)
        _mxfp4_kernel[(cdiv(num_lines, _OUTPUTS), num_tiles)](
            self.weight.blocks, self.weight.scales, self.bias, rows.x, out, rows.order, rows.tiles, num_tiles,
            scores.numel(), num_lines, num_inputs // 32, *(gates or (0.0, 0.0)), gates is not None, size,
            _OUTPUTS, 2, early, num_warps=4, **early_options(early),
        )  # fmt: skip
