# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Logprobs with one read of the logits, in two launches of fixed shape.

A program takes the sum and the k best tokens of a piece of a row; a program per row merges its pieces in a fixed order.
torch.topk takes 140 us for 64 rows of 128,256 float32 (H200), and a float32 copy of the softmax as long again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

_PIECE = 4096  # tokens of a program
_LOG2_E = tl.constexpr(1.4426950408889634)
_NONE = tl.constexpr(2147483647)  # more than any token id


@triton.jit
def _take_best(value, token):
    """The greatest `value` and its token, the first of equals; and `value` and `token` without it."""
    best = tl.max(value, 0)
    chosen = tl.min(tl.where(value == best, token, _NONE), 0)
    taken = token == chosen
    return best, chosen, tl.where(taken, float("-inf"), value), tl.where(taken, _NONE, token)


@triton.jit
def _best_of_piece_kernel(
    logits, tops, sums, best, ids, vocab_size, stride, K: tl.constexpr, PIECE: tl.constexpr, EARLY: tl.constexpr
):
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    token = tl.where(token < vocab_size, token, _NONE)
    at = row * tl.num_programs(1) + piece
    top = tl.max(value, 0)
    tl.store(tops + at, top)
    tl.store(sums + at, tl.sum(tl.exp2((value - tl.where(top > float("-inf"), top, 0.0)) * _LOG2_E), 0))
    value = tl.where(value == value, value, float("-inf"))
    for rank in range(K):
        greatest, chosen, value, token = _take_best(value, token)
        tl.store(best + at * K + rank, greatest)
        tl.store(ids + at * K + rank, chosen)


@triton.jit
def _best_of_row_kernel(
    logits, tops, sums, best, ids, token_ids, chosen, best_out, ids_out, stride, num_pieces,
    K: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    top = tl.load(tops + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    total = tl.load(sums + row * num_pieces + piece, mask=piece < num_pieces, other=0.0)
    greatest = tl.max(top, 0)
    rest = tl.log2(tl.sum(total * tl.exp2((top - greatest) * _LOG2_E), 0)) * 0.6931471805599453
    logit = tl.load(logits + row * stride + tl.load(token_ids + row)).to(tl.float32)
    tl.store(chosen + row, logit - greatest - rest)
    at = tl.arange(0, WIDTH)
    value = tl.load(best + row * num_pieces * K + at, mask=at < num_pieces * K, other=float("-inf"))
    token = tl.load(ids + row * num_pieces * K + at, mask=at < num_pieces * K, other=_NONE)
    for rank in range(K):
        best_left, token_of_best, value, token = _take_best(value, token)
        tl.store(best_out + row * K + rank, best_left - greatest - rest)
        tl.store(ids_out + row * K + rank, token_of_best.to(tl.int64))


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See logprobs.logprobs; of equal tokens the first come first. Never waits for the device.

    Raises ValueError if `k` is more than V.
    """
    num_rows, vocab_size = logits.shape
    if k > vocab_size:
        raise ValueError(f"the {k} best of {vocab_size} tokens")
    pieces, early, device = cdiv(vocab_size, _PIECE), launches_early(logits.device), logits.device
    # One by one: kernels are compiled for tensors that begin at multiples of 16 bytes
    tops, sums = (torch.empty((num_rows, pieces), dtype=torch.float32, device=device) for _ in range(2))
    best = torch.empty((num_rows, pieces, k), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, pieces, k), dtype=torch.int32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    best_out = torch.empty((num_rows, k), dtype=torch.float32, device=device)
    ids_out = torch.empty((num_rows, k), dtype=torch.int64, device=device)
    options, stride = early_options(early), logits.stride(0)
    _best_of_piece_kernel[(num_rows, pieces)](
        logits, tops, sums, best, ids, vocab_size, stride, k, _PIECE, early, num_warps=4, **options
    )
    _best_of_row_kernel[(num_rows,)](
        logits, tops, sums, best, ids, token_ids, chosen, best_out, ids_out, stride, pieces, k,
        next_power_of_2(max(pieces * k, 1)), next_power_of_2(pieces), early, num_warps=4, **options,
    )  # fmt: skip
    return chosen, ids_out, best_out
