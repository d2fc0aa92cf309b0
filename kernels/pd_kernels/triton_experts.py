# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Mixtures of experts: two products for the pairs (token, expert), then each token's weighted sum.

A program computes some outputs of a tile: of pairs with the same expert. Weights are the left operand, as in
triton_matmul, and rows are gathered. SwiGLU is done at the end of the first product. Every pair has its own rows in
between, so nothing is added in an order that depends on time.

Up to FEW tokens are not sorted. The rows of a tile are all tokens: the matrix unit takes no fewer. The tiles are the
pairs, and only the first pair of an expert has work. So two launches fewer come before the first weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pd_kernels import torch_experts
from pd_kernels.quantized import QuantizedWeight, Weight
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_pairs import sort_pairs

FEW = 16  # tokens up to which pairs are not sorted


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """Sizes of the tiles of one product; the defaults of `experts_tiling` were chosen by measurement."""

    rows: int  # pairs
    outputs: int  # of a program: gates and as many ups
    inputs: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile(
    chosen,
    order,
    tiles,
    num_tokens,
    num_tiles,
    NUM_CHOSEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    SORTED: tl.constexpr,
):
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
        expert = tl.where(tl.min(pair, 0) < tile, -1, expert)
        pair = tl.where(pair < none, pair, -1)
    return expert, pair


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _gate_up_kernel(
    weight_tiles, x, out, chosen, order, tiles, num_tokens, num_tiles, num_outputs, num_inputs, x_stride,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SORTED: tl.constexpr, JOINED: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SwiGLU of x times gates and ups, [pairs, num_outputs]."""
    wait_for_others(EARLY)
    others_may_start(EARLY)
    expert, pair = _tile(chosen, order, tiles, num_tokens, num_tiles, NUM_CHOSEN, CHOSEN, ROWS, SORTED)
    if expert < 0:
        return
    output, column = tl.program_id(0) * OUTPUTS, tl.arange(0, INPUTS)
    gate_at = expert * 2 * num_outputs + output
    rows_at = x + (tl.maximum(pair, 0) // NUM_CHOSEN).to(tl.int64)[:, None] * x_stride + column[None, :]
    gates, ups = tl.zeros([OUTPUTS, ROWS], tl.float32), tl.zeros([OUTPUTS, ROWS], tl.float32)
    sums = tl.zeros([2 * OUTPUTS, ROWS], tl.float32)
    for place in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        inside = (pair >= 0)[:, None] & (place + column < num_inputs)[None, :]
        rows = tl.trans(tl.load(rows_at + place, mask=inside, other=0.0))
        if JOINED:
            weight = tl.reshape(weight_tiles.load([expert * 2, output, place]), [2 * OUTPUTS, INPUTS])
            sums = tl.dot(weight, rows, sums, input_precision="ieee")
            sums = tl.where(num_tokens > 0, sums, 0.0)  # see triton_matmul._awaited
        else:
            gates = tl.dot(weight_tiles.load([gate_at, place]), rows, gates, input_precision="ieee")
            ups = tl.dot(weight_tiles.load([gate_at + num_outputs, place]), rows, ups, input_precision="ieee")
    if JOINED:
        gates, ups = tl.split(tl.permute(tl.reshape(sums, [2, OUTPUTS, ROWS]), [1, 2, 0]))
    dtype = out.dtype.element_ty
    gates = gates.to(dtype).to(tl.float32)
    result = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32) * ups.to(dtype).to(tl.float32)
    column = output + tl.arange(0, OUTPUTS)
    at = pair[:, None].to(tl.int64) * num_outputs + column[None, :]
    tl.store(out + at, tl.trans(result.to(dtype)), mask=(pair >= 0)[:, None] & (column < num_outputs)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _down_kernel(
    weight_tiles, x, out, chosen, order, tiles, num_tokens, num_tiles, num_outputs, num_inputs,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    SORTED: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`x` [pairs, num_inputs] -> `out` [pairs, num_outputs]."""
    others_may_start(EARLY)
    wait_for_others(EARLY)
    expert, pair = _tile(chosen, order, tiles, num_tokens, num_tiles, NUM_CHOSEN, CHOSEN, ROWS, SORTED)
    if expert < 0:
        return
    output, column = tl.program_id(0) * OUTPUTS, tl.arange(0, INPUTS)
    rows_at = x + tl.maximum(pair, 0).to(tl.int64)[:, None] * num_inputs + column[None, :]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for place in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        inside = (pair >= 0)[:, None] & (place + column < num_inputs)[None, :]
        rows = tl.load(rows_at + place, mask=inside, other=0.0)
        weight = weight_tiles.load([expert * num_outputs + output, place])
        sums = tl.dot(weight, tl.trans(rows), sums, input_precision="ieee")
    column = output + tl.arange(0, OUTPUTS)
    at = pair[:, None].to(tl.int64) * num_outputs + column[None, :]
    inside = (pair >= 0)[:, None] & (column < num_outputs)[None, :]
    tl.store(out + at, tl.trans(sums).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    results, scores, out, num_tokens, size,
    NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    wait_for_others(EARLY)
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        result = tl.load(results + pair * size + column, mask=column < size, other=0.0)
        total += tl.load(scores + pair) * result.to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def experts_tiling(num_tokens: int, num_chosen: int, num_experts: int) -> tuple[ExpertTiling, ExpertTiling]:
    """Tilings of gate-up and down for 2-byte weights and 228 KiB of shared memory per multiprocessor."""
    mean = num_tokens * num_chosen / num_experts  # pairs of an expert
    if num_tokens <= FEW or mean <= 8:
        return ExpertTiling(16, 64, 128, 4, 3), ExpertTiling(16, 64, 128, 4, 4)
    if mean <= 24:
        return ExpertTiling(32, 64, 128, 4, 3), ExpertTiling(32, 128, 128, 4, 3)
    if mean <= 128:
        return ExpertTiling(64, 64, 64, 4, 4), ExpertTiling(64, 128, 64, 4, 4)
    return ExpertTiling(128, 128, 64, 8, 4), ExpertTiling(128, 128, 64, 8, 4)


def experts(x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """See reference.experts. Rows of weights must be multiples of 16 bytes. Raises ValueError."""
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        return torch_experts.experts(x, scores, chosen, gate_up, down)
    (num_tokens, hidden), num_experts, size = x.shape, len(gate_up), down.shape[2]
    num_chosen, early = chosen.shape[1], launches_early(x.device)
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    scores, chosen = scores.contiguous(), chosen.contiguous()
    first, second = experts_tiling(num_tokens, num_chosen, num_experts)
    if x.element_size() > 2:
        first, second = (ExpertTiling(16, 64, 32, 4, 2) for _ in range(2))
    is_sorted = num_tokens > FEW
    if is_sorted:
        pairs = sort_pairs(chosen, num_experts, first.rows)
        order, tiles, num_tiles = pairs.order, pairs.tiles, pairs.tiles.shape[1]
    else:
        order, tiles, num_tiles = chosen, chosen, chosen.numel()
    hidden_rows = torch.empty((chosen.numel(), size), dtype=x.dtype, device=x.device)
    results = torch.empty((chosen.numel(), hidden), dtype=x.dtype, device=x.device)
    joined = first.outputs < 64
    gate_up_tiles = gate_up.view(2 * num_experts, size, hidden) if joined else gate_up.view(-1, hidden)
    box = [2, first.outputs, first.inputs] if joined else [first.outputs, first.inputs]
    padded = triton.next_power_of_2(num_chosen)
    _gate_up_kernel[(triton.cdiv(size, first.outputs), num_tiles)](
        TensorDescriptor.from_tensor(gate_up_tiles, box), x, hidden_rows, chosen, order, tiles, num_tokens, num_tiles,
        size, hidden, x.stride(0), num_chosen, padded, first.rows, first.outputs, first.inputs,
        is_sorted, joined, first.num_stages, early, num_warps=first.num_warps, **early_options(early),
    )  # fmt: skip
    _down_kernel[(triton.cdiv(hidden, second.outputs), num_tiles)](
        TensorDescriptor.from_tensor(down.view(-1, size), [second.outputs, second.inputs]),
        hidden_rows, results, chosen, order, tiles, num_tokens, num_tiles,
        hidden, size, num_chosen, padded, second.rows, second.outputs, second.inputs,
        is_sorted, second.num_stages, early, num_warps=second.num_warps, **early_options(early),
    )  # fmt: skip
    columns = min(triton.next_power_of_2(hidden), 2048)
    _sum_kernel[(num_tokens, triton.cdiv(hidden, columns))](
        results, scores, out, num_tokens, hidden, num_chosen, columns, early, num_warps=4, **early_options(early),
    )  # fmt: skip
    return out
