# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Matrix products of few rows. Such a product takes as long as reading its weight once.

A program computes OUTPUTS outputs of all rows. If there would be too few programs, several programs share the inputs of
these outputs. The weights are the left operand: their tiles go from the tensor memory accelerator to the matrix unit
without passing through registers, and the few rows are the unit's narrow side.

No weights move from the end of one kernel to the first tile of the next, and that time is lost. So

- a program is launched early and holds the first HEAD columns of its weights in registers before it waits for the
  kernels ahead of it; it multiplies these columns last;
- the work between two products is done at the end of the first or of the second: gate and up halves share a tile
  (GATED); a product adds itself to the residual (ADDS) and leaves the norm of the sum half done, without the division
  by the root mean square; the next product divides its result (DIVIDES).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.launch_sizes import cdiv, next_power_of_2, num_processors
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.quantized import Weight


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """Sizes of the kernel's tiles; the defaults of `matmul_tiling` were chosen by measurement."""

    outputs: int  # outputs of a program; gates and ups both count
    inputs: int  # inputs of a tile
    head: int  # inputs that a program reads ahead, a multiple of `inputs`; 0: none
    split: int  # programs that share the inputs
    num_warps: int
    num_stages: int


@triton.jit
def _bits(pointer):
    """The values as integers, so that they wait in registers after the load.

    Values that a product takes unchanged would wait in shared memory. Shared memory has room for them or for the next
    kernel's programs, not for both.
    """
    return pointer.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _awaited(sums, num_rows):
    """Returns `sums` unchanged, and makes the program wait for them.

    Two joined tiles go through registers. Triton 3.6 loads the next pair into these registers while the matrix unit may
    still read them, unless other code uses the sums. This function uses the sums in a way that Triton cannot remove.
    """
    return tl.where(num_rows > 0, sums, 0.0)


@triton.jit
def _sum_parts(parts, tile_at, split, SIZE: tl.constexpr):
    """The sum of a tile's parts over all programs.

    The parts are added in the order of their inputs, so that the programs' timing does not change the sum.
    """
    total = tl.load(parts + tile_at, cache_modifier=".cg")
    for part in range(1, split):
        total += tl.load(parts + part * SIZE + tile_at, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    sums, divisor, old, gain, bias, out, residual, squares, tile, num_rows, num_outputs,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr, DIVIDES: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Turn a program's sums into its output, rounded where the separate functions round."""
    dtype = out.dtype.element_ty
    column, row = tile * WIDTH + tl.arange(0, WIDTH), tl.arange(0, ROWS)
    known = column < num_outputs
    inside = known[:, None] & (row < num_rows)[None, :]
    at = row[None, :] * num_outputs + column[:, None]
    if DIVIDES:
        sums = sums / divisor[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, WIDTH, ROWS]), [1, 2, 0]))
        if BIAS:
            gate += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + num_outputs + column, mask=known, other=0.0).to(tl.float32)[:, None]
        gate = gate.to(dtype).to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    else:
        result = sums
        if BIAS:
            result += tl.load(bias + column, mask=known, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        total = (old.to(tl.float32) + result.to(dtype).to(tl.float32)).to(dtype)
        tl.store(residual + at, total, mask=inside)
        total = tl.where(inside, total.to(tl.float32), 0.0)
        tl.store(squares + tile * num_rows + row, tl.sum(total * total, 0), mask=row < num_rows)
        result = total * gain.to(tl.float32)[:, None]
    tl.store(out + at, result.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "split", "num_squares"])
def _linear_kernel(
    x_tiles, weight_tiles, x, weight, bias, out, parts, arrived, residual, gain, left_squares, squares,
    num_rows, num_outputs, num_inputs, x_stride, split, num_squares, eps,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, HEAD: tl.constexpr,
    GATED: tl.constexpr, ADDS: tl.constexpr, DIVIDES: tl.constexpr, SQUARES: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    tile, part = tl.program_id(0), tl.program_id(1)
    HALVES: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = OUTPUTS // HALVES
    share = tl.cdiv(tl.cdiv(num_inputs, INPUTS), split) * INPUTS
    begin = part * share
    end = tl.minimum(begin + share, num_inputs)
    line, row = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    if HEAD > 0:
        ahead = begin + tl.arange(0, HEAD)
        output = tile * WIDTH + line % WIDTH
        head_at = (output + line // WIDTH * num_outputs).to(tl.int64)[:, None] * num_inputs + ahead[None, :]
        head = tl.load(_bits(weight) + head_at, mask=(output < num_outputs)[:, None] & (ahead < end)[None, :], other=0)
    column, gains, old, parts_of_squares = tile * WIDTH + tl.arange(0, WIDTH), 0.0, 0.0, 0.0
    if ADDS:
        gains = tl.load(gain + column, mask=column < num_outputs, other=0.0)
    wait_for_others(EARLY)
    # Loaded before the loop and used after it, so that nothing delays the first tiles
    if ADDS:
        inside = (column < num_outputs)[:, None] & (row < num_rows)[None, :]
        old = tl.load(residual + row[None, :] * num_outputs + column[:, None], mask=inside, other=0.0)
    if DIVIDES:
        piece = tl.arange(0, SQUARES)[:, None]
        known = (piece < num_squares) & (row < num_rows)[None, :]
        parts_of_squares = tl.load(squares + piece * num_rows + row[None, :], mask=known, other=0.0)
    if HEAD > 0:
        known = (row < num_rows)[None, :] & (ahead < end)[:, None]
        x_head = tl.load(_bits(x) + row[None, :] * x_stride + ahead[:, None], mask=known, other=0)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for place in tl.range(begin + HEAD, end, INPUTS, num_stages=STAGES):
        w = tl.reshape(weight_tiles.load([0, tile * WIDTH, place]), [OUTPUTS, INPUTS])
        sums = tl.dot(w, tl.trans(x_tiles.load([0, place])), sums)
        if GATED:
            sums = _awaited(sums, num_rows)
    if HEAD > 0:
        dtype = weight.dtype.element_ty
        sums = tl.dot(head.to(dtype, bitcast=True), x_head.to(dtype, bitcast=True), sums)
    divisor = 1.0
    if DIVIDES:
        divisor = tl.sqrt(tl.sum(parts_of_squares, 0) / num_inputs + eps)
    if SPLIT:
        SIZE: tl.constexpr = OUTPUTS * ROWS
        tile_at = line[:, None] * ROWS + row[None, :]
        parts += tile.to(tl.int64) * split * SIZE
        tl.store(parts + part * SIZE + tile_at, sums)
        tl.debug_barrier()  # the whole part is written before its arrival is counted
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == split - 1:
            _finish(
                _sum_parts(parts, tile_at, split, SIZE), divisor, old, gains, bias, out, residual, left_squares, tile,
                num_rows, num_outputs, ROWS, WIDTH, GATED, ADDS, DIVIDES, BIAS,
            )  # fmt: skip
            tl.store(arrived + tile, 0)  # for the next launch
    else:
        _finish(
            sums, divisor, old, gains, bias, out, residual, left_squares, tile,
            num_rows, num_outputs, ROWS, WIDTH, GATED, ADDS, DIVIDES, BIAS,
        )  # fmt: skip


def matmul_tiling(num_outputs: int, num_inputs: int, num_rows: int, num_processors: int) -> MatmulTiling:
    """Tiling for 2-byte weights and 228 KiB of shared memory per multiprocessor. `num_outputs`: before gating.

    Two programs fit a multiprocessor, so that the next kernel's programs start before this kernel's have ended.
    """
    outputs, inputs, split = 64, 128, 1
    num_tiles, num_steps = cdiv(num_outputs, outputs), cdiv(num_inputs, inputs)
    while num_tiles * split * 2 <= num_processors and num_steps >= 8 * split:
        split *= 2
    # Most programs of the LM head start when others end: reading ahead gains nothing there, room for more does, except
    # in a large model with few rows. A step of 32 rows takes 30 us less at 0.6B, 24 at 8B
    if num_tiles > 8 * num_processors and (num_rows > 16 or num_inputs < 4096):
        return MatmulTiling(outputs, inputs, 0, split, num_warps=4, num_stages=3)
    if num_rows <= 16:
        return MatmulTiling(outputs, inputs, 512, split, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return MatmulTiling(outputs, inputs, 256, split, num_warps=4, num_stages=5)
    return MatmulTiling(outputs, inputs, 128, split, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class FewRowsLinear:
    """The FewRows of Triton. Use it on one stream at a time."""

    weight: torch.Tensor  # [out, in], contiguous; gated: gates, then ups
    bias: torch.Tensor | None
    gated: bool
    arrived: torch.Tensor  # int32 [tiles]: programs that have written their part; 0 between launches
    max_rows: int  # 64 at most
    tiling: MatmulTiling | None = None  # None: the default

    @classmethod
    def of(cls, weight: Weight, bias: torch.Tensor | None, gated: bool) -> FewRowsLinear | None:
        """See backends.MakeFewRows.

        None for float16: a residual times a norm's weight may overflow before the division. None for quantized weights.
        """
        if not isinstance(weight, torch.Tensor):
            return None
        if weight.dtype is not torch.bfloat16 or weight.shape[1] % 8 or not launches_early(weight.device):
            return None
        # Only tiles with split inputs have a counter, and then there are fewer tiles than multiprocessors
        arrived = torch.zeros(num_processors(weight.device), dtype=torch.int32, device=weight.device)
        # With 48 and 64 rows a step of the 8B shape gains 2 percent by this kernel and 4 by cuBLASLt's best (one H200);
        # at 0.6B, where the time between products counts more, 6 by this kernel
        return cls(weight, bias, gated, arrived, 64 if weight.shape[1] < 4096 else 32)

    def __call__(self, x: torch.Tensor | HalfNormed) -> torch.Tensor:
        """See FewRows. Raises ValueError if the size, dtype or alignment of `x` is not supported."""
        normed, rows = (x, x.x) if isinstance(x, HalfNormed) else (None, x)
        num_outputs = len(self.weight) // (2 if self.gated else 1)
        out = torch.empty((len(rows), num_outputs), dtype=rows.dtype, device=rows.device)
        self._launch(rows, out, normed=normed)
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, eps: float) -> HalfNormed:
        """See FewRows. Raises ValueError as a call does, and for a gated weight or a residual of another shape."""
        if residual.shape != (len(x), len(self.weight)) or not residual.is_contiguous() or self.gated:
            raise ValueError(f"a product of {len(self.weight)} outputs cannot be added to {tuple(residual.shape)}")
        num_tiles = cdiv(len(self.weight), self._tiling_of(len(x)).outputs)
        squares = torch.empty((num_tiles, len(x)), dtype=torch.float32, device=x.device)
        out = torch.empty_like(residual)
        self._launch(x, out, addition=(residual, norm, squares))
        return HalfNormed(out, squares, eps)

    def _tiling_of(self, num_rows: int) -> MatmulTiling:
        num_outputs, num_inputs = self.weight.shape
        return self.tiling or matmul_tiling(num_outputs, num_inputs, num_rows, len(self.arrived))

    def _check(self, x: torch.Tensor) -> None:
        num_rows, num_inputs = x.shape
        if num_rows > self.max_rows or num_inputs != self.weight.shape[1] or x.dtype != self.weight.dtype:
            raise ValueError(f"{x.dtype} {tuple(x.shape)} is not up to {self.max_rows} rows for {self.weight.shape}")
        if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16 or self.weight.data_ptr() % 16:
            raise ValueError("rows must be contiguous and aligned to 16 bytes")

    def _launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        normed: HalfNormed | None = None,
        addition: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`addition`: the residual, its norm's weight, the output of the sums of squares. Raises ValueError."""
        self._check(x)
        (num_rows, num_inputs), halves, tiling = x.shape, 2 if self.gated else 1, self._tiling_of(len(x))
        num_outputs, width = out.shape[1], tiling.outputs // halves
        rows, num_tiles = max(16, next_power_of_2(num_rows)), cdiv(num_outputs, width)
        num_parts = num_tiles * tiling.split if tiling.split > 1 else 0
        parts = torch.empty(num_parts * tiling.outputs * rows, dtype=torch.float32, device=x.device)
        weight, bias = self.weight, self.weight if self.bias is None else self.bias
        weight_tiles = weight.view(halves, num_outputs, num_inputs)
        residual, gain, left_squares = (out, out, parts) if addition is None else addition
        squares, eps = (parts[:1], 0.0) if normed is None else (normed.squares, normed.eps)
        early = launches_early(x.device)
        _linear_kernel[(num_tiles, tiling.split)](
            TensorDescriptor.from_tensor(x, [rows, tiling.inputs]),
            TensorDescriptor.from_tensor(weight_tiles, [halves, width, tiling.inputs]),
            x, weight, bias, out, parts, self.arrived, residual, gain, left_squares, squares,
            num_rows, num_outputs, num_inputs, x.stride(0), tiling.split, len(squares), eps,
            tiling.split > 1, rows, tiling.outputs, tiling.inputs, tiling.head, self.gated, addition is not None,
            normed is not None, next_power_of_2(max(len(squares), 1)), self.bias is not None, tiling.num_stages,
            early, num_warps=tiling.num_warps, **early_options(early),
        )  # fmt: skip
