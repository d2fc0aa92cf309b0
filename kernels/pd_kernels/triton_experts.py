# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Mixtures of experts: two products for the pairs (token, expert), then each token's weighted sum.

A program computes some outputs of a tile: of pairs with the same expert. Weights are the left operand, as in
triton_matmul, and rows are gathered. SwiGLU is done at the end of the first product. Every pair has its own rows in
between, so nothing is added in an order that depends on time.

Up to FEW tokens are not sorted. The rows of a tile are all tokens: the matrix unit takes no fewer. The tiles are the
pairs, and only the first pair of an expert has work. So two launches fewer come before the first weight.

On a Hopper GPU, `gluon_experts` multiplies many rows with weights in blocks of float8.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels.expert_tiling import FEW, ExpertTiling, experts_tiling
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.quantized import BLOCK, QuantizedRows, QuantizedWeight, RowsTwice
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_norm import pieces_of_squares, root_mean_square
from pd_kernels.triton_pair_rows import sum_pairs
from pd_kernels.triton_pairs import OwnPairs, own_expert, sort_pairs
from pd_kernels.triton_quantize import empty_rows, quantize, quantized_by, scales_of
from pd_kernels.values import FEW_ROWS, HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_kernels.quantized import Weight
    from pd_kernels.values import ExpertPart

logger = logging.getLogger(__name__)

# Kinds of weights. _TILES: weights in blocks, and all of a program's gates, ups or outputs are in one row of blocks
_PLAIN, _CHANNELS, _BLOCKS, _TILES = (tl.constexpr(kind) for kind in range(4))
_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_MOST_IN_PARTS = FEW_ROWS[1]  # tokens; more float32 parts leave the L2 cache too early
_MANY = 64  # mean pairs of an expert from which tiles of `gluon_experts` are full enough (1,024 tokens: 257 us for 299)


@triton.jit
def _tile(
    chosen, order, tiles, num_tokens, num_tiles, first_own, num_own,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, SORTED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The expert of the program's tile, -1 if it has no work, and the pairs of its rows, -1 for a row without one."""
    tile, row = tl.program_id(1), tl.arange(0, ROWS)
    if SORTED:
        expert = tl.load(tiles + tile)
        place = tl.load(tiles + num_tiles + tile) + row
        end = tl.load(tiles + 2 * num_tiles + tile)
        pair = tl.load(order + place, mask=(place < end) & (expert >= 0), other=-1)
    else:
        expert = tl.load(chosen + tile).to(tl.int32)
        choice = tl.arange(0, CHOSEN)[None, :]
        at = row[:, None] * NUM_CHOSEN + choice
        others = tl.load(chosen + at, mask=(row < num_tokens)[:, None] & (choice < NUM_CHOSEN), other=-1)
        none: tl.constexpr = ROWS * NUM_CHOSEN
        pair = tl.min(tl.where(others == expert, at, none), 1)
        expert = tl.where(tl.min(pair, 0) < tile, -1, own_expert(expert, first_own, num_own, PART))
        pair = tl.where(pair < none, pair, -1)
    return expert, pair


@triton.jit
def _scales_at(scales, expert, line, num_lines, num_groups, KIND: tl.constexpr):
    """Addresses of the first scales of lines of an expert's weight."""
    line = tl.minimum(line, num_lines - 1)
    if KIND == _TILES:
        line = tl.min(line, 0)
    if KIND == _CHANNELS:
        return scales + expert * num_lines + line
    return scales + (expert * tl.cdiv(num_lines, 128) + line // 128) * num_groups


@triton.jit
def _product(sums, weight, rows, KIND: tl.constexpr):
    """The product; of weights that are not quantized, added to `sums`.

    Other products are added later: the matrix unit's own sums of float8 have 14 bits.
    """
    if KIND == _PLAIN:
        product = tl.dot(weight, tl.trans(rows), sums, input_precision="ieee")
    else:
        product = tl.dot(weight, tl.trans(rows))
    return product


@triton.jit
def _add(sums, product, scales_at, row_scales_at, group, group_stride, KIND: tl.constexpr):
    """`sums` plus what `_product` returned, times the scales of blocks."""
    if KIND == _PLAIN:
        sums = product
    else:
        if KIND == _TILES:
            product *= (tl.load(scales_at + group) * tl.load(row_scales_at + group * group_stride))[None, :]
        if KIND == _BLOCKS:
            product *= tl.load(scales_at + group)[:, None] * tl.load(row_scales_at + group * group_stride)[None, :]
        sums += product
    return sums


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "group_stride", "out_stride", "num_squares"])
def _gate_up_kernel(
    weight_tiles, scales, x, row_scales, squares, out, out_scales, chosen, order, tiles, num_tokens, num_tiles,
    first_own, num_own, num_outputs, num_inputs, x_stride, row_stride, group_stride, out_stride, num_squares, eps,
    KIND: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, SORTED: tl.constexpr, PART: tl.constexpr, SQUARES: tl.constexpr, DTYPE: tl.constexpr,
    QUANTIZES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SwiGLU of x times gates and ups, [pairs, num_outputs]. QUANTIZES: OUTPUTS numbers share a scale."""
    wait_for_others(EARLY)
    others_may_start(EARLY)  # so these others may read the choice of experts at once
    expert, pair = _tile(
        chosen, order, tiles, num_tokens, num_tiles, first_own, num_own, NUM_CHOSEN, CHOSEN, ROWS, SORTED, PART
    )
    if expert < 0:
        return
    output, column, token = tl.program_id(0) * OUTPUTS, tl.arange(0, INPUTS), tl.maximum(pair, 0) // NUM_CHOSEN
    gate_at, num_groups = expert * 2 * num_outputs + output, tl.cdiv(num_inputs, 128)
    rows_at = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
    row_scales += token.to(tl.int64) * row_stride
    pieces = 0.0
    if SQUARES > 0:
        pieces = pieces_of_squares(squares, num_squares, token, num_tokens, SQUARES)
    line = output + tl.arange(0, OUTPUTS)
    gate_scales = _scales_at(scales, expert, line, 2 * num_outputs, num_groups, KIND)
    up_scales = _scales_at(scales, expert, line + num_outputs, 2 * num_outputs, num_groups, KIND)
    gates, ups = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    for place in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        inside = (pair >= 0)[:, None] & (place + column < num_inputs)[None, :]
        rows, group = tl.load(rows_at + place, mask=inside, other=0.0), place // 128
        gate = _product(gates, weight_tiles.load([gate_at, place]), rows, KIND)
        up = _product(ups, weight_tiles.load([gate_at + num_outputs, place]), rows, KIND)
        gates = _add(gates, gate, gate_scales, row_scales, group, group_stride, KIND)
        ups = _add(ups, up, up_scales, row_scales, group, group_stride, KIND)
    if KIND == _CHANNELS:
        scale = tl.load(row_scales)[None, :]
        gates, ups = gates * tl.load(gate_scales)[:, None] * scale, ups * tl.load(up_scales)[:, None] * scale
    if SQUARES > 0:
        divisor = root_mean_square(pieces, num_inputs, eps)[None, :]
        gates, ups = gates / divisor, ups / divisor
    gates, ups = gates.to(DTYPE).to(tl.float32), ups.to(DTYPE).to(tl.float32)
    result = ((gates / (1.0 + tl.exp(-gates))).to(DTYPE).to(tl.float32) * ups).to(DTYPE)
    if QUANTIZES:
        wide = result.to(tl.float32)
        scale = scales_of(wide, 0)
        result = quantized_by(wide, scale, 0).to(out.dtype.element_ty)
        tl.store(out_scales + tl.program_id(0) * out_stride + pair, scale, mask=pair >= 0)
    at = pair[:, None].to(tl.int64) * num_outputs + line[None, :]
    tl.store(out + at, tl.trans(result), mask=(pair >= 0)[:, None] & (line < num_outputs)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "group_stride"])
def _down_kernel(
    weight_tiles, scales, x, row_scales, scores, out, chosen, order, tiles, num_tokens, num_tiles, first_own, num_own,
    num_outputs, num_inputs, row_stride, group_stride,
    KIND: tl.constexpr, NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, SORTED: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr,
    QUANTIZES: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`x` [pairs, num_inputs] -> `out` [T, NUM_CHOSEN, num_outputs]; PARTS: [NUM_CHOSEN, T, num_outputs], weighted.

    QUANTIZES: `x` is not quantized yet. INPUTS numbers share a scale. For kind _TILES.
    """
    others_may_start(EARLY)
    expert, pair = _tile(
        chosen, order, tiles, num_tokens, num_tiles, first_own, num_own, NUM_CHOSEN, CHOSEN, ROWS, SORTED, PART
    )
    if expert < 0:
        if PART:  # perhaps no program of this rank has work, and later launches count on those before this one
            wait_for_others(EARLY)
        return
    output, column, known = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, INPUTS), pair >= 0
    x += tl.maximum(pair, 0).to(tl.int64)[:, None] * num_inputs
    row_scales += tl.maximum(pair, 0).to(tl.int64) * row_stride
    scales = _scales_at(scales, expert, output, num_outputs, tl.cdiv(num_inputs, 128), KIND)
    score = 1.0
    if PARTS:
        score = tl.load(scores + pair, mask=known, other=0.0)[:, None]
    wait_for_others(EARLY)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for place in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        inside = known[:, None] & (place + column < num_inputs)[None, :]
        rows = tl.load(x + place + column[None, :], mask=inside, other=0.0)
        weight = weight_tiles.load([expert * num_outputs + tl.program_id(0) * OUTPUTS, place])
        if QUANTIZES:
            wide = rows.to(tl.float32)
            scale = scales_of(wide, 1)
            rows = quantized_by(wide, scale, 1).to(weight.dtype)
            product = _product(sums, weight, rows, KIND)
            sums += product * (tl.load(scales + place // 128) * scale)[None, :]
        else:
            product = _product(sums, weight, rows, KIND)
            sums = _add(sums, product, scales, row_scales, place // 128, group_stride, KIND)
    if KIND == _CHANNELS:
        sums *= tl.load(scales)[:, None] * tl.load(row_scales)[None, :]
    result, line = tl.trans(sums).to(DTYPE), pair
    if PARTS:
        result = result.to(tl.float32) * score
        line = pair % NUM_CHOSEN * num_tokens + pair // NUM_CHOSEN
    at = line[:, None].to(tl.int64) * num_outputs + output[None, :]
    tl.store(out + at, result, mask=known[:, None] & (output < num_outputs)[None, :])


def experts(
    x: torch.Tensor | HalfNormed | RowsTwice,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    part: ExpertPart | None = None,
) -> torch.Tensor:
    """See backends.MixExperts. Raises ValueError unless rows of the weights are multiples of 16 bytes."""
    quantized, x = (x.quantized, x.plain) if isinstance(x, RowsTwice) else (None, x)
    normed, x = (x, x.x) if isinstance(x, HalfNormed) else (None, x)
    (num_tokens, hidden), num_experts, size, num_chosen = x.shape, gate_up.shape[0], down.shape[2], chosen.shape[1]
    if not num_tokens:
        return torch.empty_like(x)
    scores, chosen, early = scores.contiguous(), chosen.contiguous(), launches_early(x.device)
    itemsize = 1 if isinstance(gate_up, QuantizedWeight) else gate_up.element_size()
    if hidden * itemsize % 16 or size * itemsize % 16:
        raise ValueError(f"rows of {hidden} and {size} weights of {itemsize} bytes are not multiples of 16 bytes")
    num_all = num_experts if part is None else part.num_experts
    own = None if part is None else OwnPairs(chosen, part.first, num_experts)
    if num_tokens * num_chosen >= _MANY * num_all and (in_tiles := _in_tiles(x, gate_up, down)) is not None:
        return in_tiles(x, scores, chosen, gate_up, down, part=part)
    first, second = experts_tiling(num_tokens, num_chosen, num_all, itemsize)
    order, tiles, num_tiles, is_sorted = chosen, chosen, chosen.numel(), num_tokens > FEW
    if is_sorted:
        pairs = sort_pairs(chosen, num_experts, first.rows, own=own)
        order, tiles, num_tiles = pairs.order, pairs.tiles, pairs.tiles.shape[1]
    places = chosen, order, tiles, num_tokens, num_tiles, *((0, 0) if own is None else (own.first, own.num_own))
    is_parts = num_tokens <= _MOST_IN_PARTS and part is None  # the ranks' sum needs one part of each rank
    step = _Step(places, num_tiles, num_chosen, is_sorted, part is not None, is_parts, early)
    rows = x if quantized is None else quantized
    in_first, in_second = _quantizes(gate_up, down, first, second, is_sorted)
    activated: torch.Tensor | QuantizedRows
    if in_first:
        activated = empty_rows(chosen.numel(), size, BLOCK, x.device)
    else:
        activated = x.new_empty((chosen.numel(), size))
    _multiply_gate_up(rows, normed, gate_up, activated, x.dtype, step, first)
    shape = (num_chosen, num_tokens, hidden) if is_parts else (num_tokens, num_chosen, hidden)
    results = torch.empty(shape, dtype=scores.dtype if is_parts else x.dtype, device=x.device)
    _multiply_down(activated, down, scores, results, x.dtype, step, second, in_second)
    return results if is_parts else sum_pairs(results.view(-1, hidden), scores, own=own)


class _Step(NamedTuple):
    """What both products of a step have."""

    places: tuple[Any, ...]  # arguments of `_tile`
    num_tiles: int
    num_chosen: int
    is_sorted: bool
    is_part: bool
    is_parts: bool
    early: bool

    @property
    def choices(self) -> tuple[int, int]:
        """NUM_CHOSEN and CHOSEN."""
        return self.num_chosen, next_power_of_2(self.num_chosen)


def _multiply_gate_up(
    x: torch.Tensor | QuantizedRows,
    normed: HalfNormed | None,
    weight: Weight,
    out: torch.Tensor | QuantizedRows,
    dtype: torch.dtype,
    step: _Step,
    tiling: ExpertTiling,
) -> None:
    """Fill `out` [pairs, size] with activations."""
    hidden, size = weight.shape[2], weight.shape[1] // 2
    values, scales, rows, row_scales, strides, kind = _operands(x, weight, size, tiling.outputs)
    num_squares, squares, eps = 0, scales, 0.0
    if normed is not None:
        num_squares, squares, eps = len(normed.squares), normed.squares, normed.eps
    is_quantized, to, to_scales, stride = False, out, out, 0
    if isinstance(out, QuantizedRows):
        is_quantized, to, to_scales, stride = True, out.values, out.scales, out.scales.stride(1)
    _gate_up_kernel[(cdiv(size, tiling.outputs), step.num_tiles)](
        TensorDescriptor.from_tensor(values.view(-1, hidden), [tiling.outputs, tiling.inputs]), scales, rows,
        row_scales, squares, to, to_scales, *step.places, size, hidden, rows.stride(0), *strides, stride, num_squares,
        eps, kind, *step.choices, tiling.rows, tiling.outputs, tiling.inputs, step.is_sorted, step.is_part,
        next_power_of_2(num_squares) if num_squares else 0, _DTYPES[dtype], is_quantized, tiling.num_stages,
        step.early, num_warps=tiling.num_warps, **early_options(step.early),
    )  # fmt: skip


def _multiply_down(
    x: torch.Tensor | QuantizedRows,
    weight: Weight,
    scores: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    step: _Step,
    tiling: ExpertTiling,
    quantizes: bool,
) -> None:
    """Fill `out` with results, or with float32 parts. `quantizes`: the kernel quantizes `x` itself."""
    hidden, size = weight.shape[1:]
    values, scales, rows, row_scales, strides, kind = _operands(x, weight, hidden, tiling.outputs, quantizes)
    _down_kernel[(cdiv(hidden, tiling.outputs), step.num_tiles)](
        TensorDescriptor.from_tensor(values.view(-1, size), [tiling.outputs, tiling.inputs]), scales, rows,
        row_scales, scores, out, *step.places, hidden, size, *strides, kind, *step.choices, tiling.rows,
        tiling.outputs, tiling.inputs, step.is_sorted, step.is_part, step.is_parts, _DTYPES[dtype], quantizes,
        tiling.num_stages, step.early, num_warps=tiling.num_warps,
        **early_options(step.early),
    )  # fmt: skip


def _quantizes(
    gate_up: Weight, down: Weight, first: ExpertTiling, second: ExpertTiling, is_sorted: bool
) -> tuple[bool, bool]:
    """Whether activations are quantized by the program that computes them, or by those that read them.

    A program that computes 128 numbers has a whole group. Few tokens have more programs, of 64 each; then those of the
    second product quantize the few rows that they read, each for itself. Either is a launch less.
    """
    if not (isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight) and down.is_blocks):
        return False, False
    if _kind(gate_up, down.shape[2], first.outputs) == _TILES.value and first.outputs == BLOCK:
        return True, False
    return False, not is_sorted and _kind(down, down.shape[1], second.outputs) == _TILES.value


def _in_tiles(x: torch.Tensor, gate_up: Weight, down: Weight) -> Callable[..., torch.Tensor] | None:
    if not isinstance(gate_up, QuantizedWeight) or not isinstance(down, QuantizedWeight) or not gate_up.is_blocks:
        return None
    propose = _for_many()
    return None if propose is None or x.dtype is not torch.bfloat16 else propose(gate_up, down)


@cache
def _for_many() -> Callable[[QuantizedWeight, QuantizedWeight], Callable[..., torch.Tensor] | None] | None:
    try:
        from pd_kernels.gluon_experts import propose_experts
    except Exception as error:  # Gluon is experimental: in another version its decorators may raise anything
        logger.warning("no float8 experts of many rows: %s", error)
        return None
    return propose_experts


def _operands(
    x: torch.Tensor | QuantizedRows, weight: Weight, size: int, outputs: int, stays_plain: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...], int]:
    """The weight's values and scales, `x` as the weight needs it, its scales and their strides, the kind of weight.

    `stays_plain`: the kernel quantizes `x`. `size`, `outputs`: gates, ups or outputs of an expert, and of a program.
    """
    if not isinstance(weight, QuantizedWeight):
        assert isinstance(x, torch.Tensor)
        return weight, weight, x, x, (0, 0), _PLAIN.value
    kind = _kind(weight, size, outputs)
    if stays_plain:
        assert isinstance(x, torch.Tensor)
        return weight.values, weight.scales, x, x, (0, 0), kind
    rows = quantize(x, weight.group) if isinstance(x, torch.Tensor) else x
    return weight.values, weight.scales, rows.values, rows.scales, rows.scales.stride(), kind


def _kind(weight: QuantizedWeight, size: int, outputs: int) -> int:
    if weight.is_blocks and size % outputs == 0 and outputs in (64, BLOCK):
        return int(_TILES.value)
    return int((_BLOCKS if weight.is_blocks else _CHANNELS).value)
