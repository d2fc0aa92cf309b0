# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The choice of experts. One kernel multiplies tokens with the router, another chooses the experts of a token.

A prefill node and a decode node must choose the same experts. So a token's products do not depend on the number of
tokens: inputs are summed in pieces of _PIECE, always by the same instruction. Four pieces are added in their order,
then the sums of four. Few tokens: a program multiplies one piece, which it reads before it waits; many tokens: four.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels import torch_experts
from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_norm import pieces_of_squares, root_mean_square
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from pd_kernels.values import Routing

_PIECE = 64  # inputs
_FEW = 256  # tokens: the products of more take longer to write in pieces than to compute one after the other
_MANY = 1024  # tokens from which larger tiles still fill the device, and read less
_TINY = torch_experts.TINY
# What the bias is added to
_NOTHING, _SCORES, _PRODUCTS = (tl.constexpr(what) for what in range(3))


@triton.jit
def _piece(matrix, row, known, stride, column, num_columns):
    """Some columns of some rows."""
    inside = known[:, None] & (column < num_columns)[None, :]
    return tl.load(matrix + row[:, None].to(tl.int64) * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _multiply(weight, rows):
    """float32 `weight` times `rows`, as precise as float32: the weight is the sum of three bfloat16, of 8 bits each."""
    if rows.dtype == tl.bfloat16:
        high = weight.to(tl.bfloat16)
        weight -= high.to(tl.float32)
        middle = weight.to(tl.bfloat16)
        low = (weight - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(middle, tl.trans(rows), tl.dot(low, tl.trans(rows)))
        return tl.dot(high, tl.trans(rows), sums)
    return tl.dot(weight, tl.trans(rows.to(tl.float32)), input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_tokens"])
def _products_kernel(
    x, router, products, num_tokens, x_stride, num_inputs, num_experts, width,
    PIECES: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`products` [programs that share the inputs, T, width]; PIECES: of a program. Pieces after the inputs are 0."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.program_id(2) * PIECES * PIECE + tl.arange(0, PIECE)
    known = expert < num_experts
    weight = _piece(router, expert, known, num_inputs, column, num_inputs)
    wait_for_others(EARLY)
    others_may_start(EARLY)
    rows = _piece(x, row, row < num_tokens, x_stride, column, num_inputs)
    sums = _multiply(weight, rows)
    for _ in range(1, PIECES):
        column += PIECE
        weight = _piece(router, expert, known, num_inputs, column, num_inputs)
        rows = _piece(x, row, row < num_tokens, x_stride, column, num_inputs)
        sums += _multiply(weight, rows)
    at = (tl.program_id(2) * num_tokens + row[:, None]).to(tl.int64) * width + expert[None, :]
    tl.store(products + at, tl.trans(sums), mask=(row < num_tokens)[:, None] & known[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_squares"])
def _choose_kernel(
    products, bias, squares, scores, chosen, num_tokens, num_inputs, num_experts, width, num_squares, eps, factor,
    SUMS: tl.constexpr, PIECES: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    IS_SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
    SQUARES: tl.constexpr, TINY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """SHARED: experts of all tokens. GATED: products have one more column, that of the shared expert's gate."""
    others_may_start(EARLY)
    row, expert = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, EXPERTS)
    known = (expert < num_experts)[None, :]
    inside = (row < num_tokens)[:, None] & known
    row_at = products + row.to(tl.int64) * width
    at = row_at[:, None] + expert[None, :]
    biases = 0.0
    if BIAS != _NOTHING:
        biases = tl.load(bias + expert, mask=expert < num_experts, other=0.0)[None, :]
    wait_for_others(EARLY)
    product = tl.zeros([ROWS, EXPERTS], tl.float32)
    for _ in tl.static_range(SUMS):
        four = tl.zeros([ROWS, EXPERTS], tl.float32)
        for _ in tl.static_range(PIECES):
            four += tl.load(at, mask=inside, other=0.0)
            at += num_tokens.to(tl.int64) * width
        product += four
    gate = tl.zeros([ROWS], tl.float32)
    if GATED:
        at = row_at + num_experts
        for _ in tl.static_range(SUMS):
            of_four = tl.zeros([ROWS], tl.float32)
            for _ in tl.static_range(PIECES):
                of_four += tl.load(at, mask=row < num_tokens, other=0.0)
                at += num_tokens.to(tl.int64) * width
            gate += of_four
    if SQUARES > 0:
        pieces = pieces_of_squares(squares, num_squares, row, num_tokens, SQUARES)
        divisor = root_mean_square(pieces, num_inputs, eps)
        product, gate = product / divisor[:, None], gate / divisor
    if BIAS == _PRODUCTS:
        product += biases
    if IS_SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-product))
    else:
        product = tl.where(known, product, -float("inf"))
        score = tl.exp(product - tl.max(product, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    rank = tl.where(known, score + biases if BIAS == _SCORES else score, -float("inf"))
    place = tl.arange(0, CHOSEN)[None, :]
    kept = tl.zeros([ROWS, CHOSEN], tl.float32)
    experts = tl.zeros([ROWS, CHOSEN], tl.int32)
    for index in tl.static_range(NUM_CHOSEN):
        value, best = tl.max(rank, 1, return_indices=True)  # the lowest of equal ones; NaN: any
        best = tl.minimum(best, num_experts - 1)[:, None]
        is_best = expert[None, :] == best
        if BIAS == _SCORES:
            value = tl.sum(tl.where(is_best, score, 0.0), 1)
        kept = tl.where(place == index, value[:, None], kept)
        experts = tl.where(place == index, best, experts)
        rank = tl.where(is_best, -float("inf"), rank)
    if NORMALIZED:
        kept = kept / tl.maximum(tl.sum(kept, 1), TINY)[:, None]
    kept = kept * factor
    if SHARED:
        weight = 1.0 / (1.0 + tl.exp(-gate)) if GATED else tl.full([ROWS], 1.0, tl.float32)
        kept = tl.where(place >= NUM_CHOSEN, weight[:, None], kept)
        experts = tl.where(place >= NUM_CHOSEN, num_experts + place - NUM_CHOSEN, experts)
    at = row[:, None].to(tl.int64) * (NUM_CHOSEN + SHARED) + place
    inside = (row < num_tokens)[:, None] & (place < NUM_CHOSEN + SHARED)
    tl.store(scores + at, kept, mask=inside)
    tl.store(chosen + at, experts.to(tl.int64), mask=inside)


def route(
    x: torch.Tensor | HalfNormed, router: torch.Tensor, bias: torch.Tensor | None, routing: Routing, few: int = _FEW
) -> tuple[torch.Tensor, torch.Tensor]:
    """See backends.RouteTokens. `router` is float32. Groups of experts are chosen by torch. Raises ValueError.

    `few`: tokens up to which a program multiplies one piece.
    """
    if routing.num_groups > 1:
        return torch_experts.route(x, router, bias, routing)
    normed, x = (x, x.x) if isinstance(x, HalfNormed) else (None, x)
    (num_tokens, num_inputs), num_lines, early = x.shape, len(router), launches_early(x.device)
    if router.dtype is not torch.float32 or router.shape[1] != num_inputs or x.stride(1) != 1:
        raise ValueError(f"{router.dtype} {tuple(router.shape)} is not a float32 router of {num_inputs} inputs")
    scores = x.new_empty((num_tokens, routing.num_scores), dtype=torch.float32)
    chosen = torch.empty_like(scores, dtype=torch.int64)
    if not num_tokens:
        return scores, chosen
    num_experts = num_lines - routing.shared_gated
    sums, experts = cdiv(num_inputs, 4 * _PIECE), next_power_of_2(num_experts)
    pieces, share = (4, 1) if num_tokens <= few else (1, 4)
    # A program has 64 experts, as many as Hopper's matrix unit multiplies at once
    rows, height, num_warps = max(16, min(64, next_power_of_2(num_tokens))), 64, 4
    if num_tokens > _MANY:
        rows, height, num_warps = 128, max(64, min(128, experts)), 8
    width = 16 * cdiv(num_lines, 16)  # so that rows are aligned
    products = x.new_empty((sums * pieces, num_tokens, width), dtype=torch.float32)
    _products_kernel[(cdiv(num_tokens, rows), cdiv(num_lines, height), sums * pieces)](
        x, router, products, num_tokens, x.stride(0), num_inputs, num_lines, width, share, rows, height, _PIECE, early,
        num_warps=num_warps, **early_options(early),
    )  # fmt: skip
    added = _NOTHING if bias is None else _PRODUCTS if routing.biases_products else _SCORES
    rows = max(1, min(512 // experts, next_power_of_2(cdiv(num_tokens, 512))))
    squares, eps = (products[0, :0], 0.0) if normed is None else (normed.squares, normed.eps)
    _choose_kernel[(cdiv(num_tokens, rows),)](
        products, router if bias is None else bias, squares, scores, chosen, num_tokens, num_inputs, num_experts,
        width, len(squares), eps, routing.factor, sums, pieces, routing.num_chosen,
        next_power_of_2(routing.num_scores), experts, rows, routing.is_sigmoid, routing.normalized, added.value,
        routing.num_shared, routing.shared_gated,
        next_power_of_2(len(squares)) if len(squares) else 0, _TINY, early, num_warps=1, **early_options(early),
    )  # fmt: skip
    return scores, chosen
