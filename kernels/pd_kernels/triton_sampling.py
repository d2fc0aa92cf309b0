# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Gumbel-max and argmax in one pass over the logits, with the reference's random bits.

A row's vocabulary is cut into pieces, one per program; a second launch takes the best of the pieces. The hash is
integer arithmetic, so its bits are those of `sampling.random_bits`. Arithmetic limits a draw's speed, so scores are in
units of log2, like the device's own logarithm: logit * (log2(e) / temperature) - log2(E * log2(e)), with the
reference's exponential variate E.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda.libdevice import fast_log2f

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.sampling import check_slice
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_limits import floors as lowest_drawn
from pd_kernels.triton_masks import load_logits, mask_arguments

if TYPE_CHECKING:
    from pd_kernels.values import Draws

_PIECE, _TILE = 4096, 2048  # tokens of a program; tokens at a time


@triton.jit
def _mix_64(x):
    """splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def draw_key(seed, position):
    """The key of a row's hash, for `hash_token`: its low 32 bits, and its high 32 bits h as h ^ (h >> 15).

    The second round of sampling.random_bits xors h and then shifts the result. In this form of h, that shift is done
    once per row and not once per token.
    """
    key = _mix_64(_mix_64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    high = (key >> 32).to(tl.uint32)
    return key.to(tl.uint32), high ^ (high >> 15)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """log2 to 2^-22 (PTX ISA, lg2.approx); in Triton's interpreter, numpy's."""
    if FAST:
        return fast_log2f(x)
    return tl.log2(x)


@triton.jit
def hash_token(low, high, token):
    """The low 31 bits of sampling.random_bits. `low`, `high`: of draw_key; `token` int32 [W] -> int32 [W]."""
    bits = token.to(tl.uint32) * 0x9E3779B1 + low
    bits = (bits ^ (bits >> 16)) * 0x21F0AAAD
    bits = (bits ^ (bits >> 15) ^ high) * 0x735A2D97
    return ((bits ^ (bits >> 15)) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def noise_of(bits, FAST: tl.constexpr):
    """log2(sampling._exponential(bits) * log2(e)), with an absolute or relative error of 1.2e-6.

    Its negative is Gumbel noise in units of log2, up to a constant. -log2(1 - u) is a polynomial for u < 1/4, to 4e-8
    of it (a weighted least-squares fit). So small u, which decide the draw, keep their precision; a logarithm of 1 - u
    would lose it.
    """
    uniform = tl.fma(bits.to(tl.float32), 4.656612873077393e-10, 2.3283064365386963e-10)  # 2 ** -31, 2 ** -32
    near = tl.fma(uniform, 0.4902183413505554, 0.20762422680854797)
    near = tl.fma(uniform, near, 0.3719276189804077)
    near = tl.fma(uniform, near, 0.4802103042602539)
    near = tl.fma(uniform, near, 0.7213627099990845)
    near = uniform * tl.fma(uniform, near, 1.4426950216293335)
    far = -_log2(tl.maximum(1.0 - uniform, 5.960464477539063e-08), FAST)  # 2 ** -24
    return _log2(tl.where(uniform < 0.25, near, far), FAST)


@triton.jit(do_not_specialize=["temperatures", "seeds", "positions", "floors", "is_limited", "first_id", "num_words"])
def _best_of_piece_kernel(
    logits, temperatures, seeds, positions, floors, is_limited, best, best_token, vocab_size, first_id, stride,
    num_pieces, masks, mask_of_row, num_words, HAS_MASKS: tl.constexpr,
    DRAW: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = piece * PIECE + tl.arange(0, TILE)
    top, chosen = tl.full([TILE], float("-inf"), tl.float32), first
    temperature, factor, low, high = 0.0, 0.0, 0, 0
    if DRAW:
        temperature = tl.load(temperatures + row)
        factor = 1.4426950408889634 / tl.where(temperature > 0, temperature, 1.0)
        low, high = draw_key(tl.load(seeds + row), tl.load(positions + row))
    wait_for_others(EARLY)
    for tile in tl.static_range(PIECE // TILE):
        token = first + tile * TILE
        value = load_logits(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
        if DRAW and temperature > 0:
            score = tl.fma(value, factor, -noise_of(hash_token(low, high, first_id + token), FAST))
            if is_limited != 0:
                score = tl.where(value < tl.load(floors + row), float("-inf"), score)
            value = score
        better = value > top  # false for NaN; of equal values the first stays
        top, chosen = tl.where(better, value, top), tl.where(better, token, chosen)
    winner = tl.max(top, 0)
    tl.store(best + row * num_pieces + piece, winner)
    tl.store(best_token + row * num_pieces + piece, first_id + tl.min(tl.where(top == winner, chosen, 2147483647), 0))


@triton.jit
def _best_of_row_kernel(best, best_token, scores, out, num_pieces, PIECES: tl.constexpr, EARLY: tl.constexpr):
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    value = tl.load(best + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    score, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(scores + row, score)
    tl.store(out + row, tl.load(best_token + row * num_pieces + index).to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The token with the greatest logit in each row of `logits` [R, V], the first one of equals. -> int64 [R].

    The result is always in [0, V): NaN ranks last. Raises ValueError unless the last stride of `logits` is 1.
    """
    return _best(logits, None, 0)[1]


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See sampling.draw. Logits of rows without limits are read once, in their own dtype. Raises ValueError."""
    return _best(logits, draws, 0)[1]


def best(logits: torch.Tensor, draws: Draws | None, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See sampling.best. Scores of drawn rows are in units of log2. Raises ValueError."""
    check_slice(draws)
    return _best(logits, draws, first_id)


def _best(logits: torch.Tensor, draws: Draws | None, first_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best score of each row, and its token id. `first_id`: the token id of the first column."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [rows, vocabulary] with unit last stride, not {tuple(logits.shape)}")
    if draws is not None and len(draws.temperature) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits, {len(draws.temperature)} rows of draws")
    num_rows, vocab_size = logits.shape
    scores = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return scores, out
    num_pieces = cdiv(vocab_size, _PIECE)
    tops = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    temperature, seeds, positions, floors = scores, out, out, None  # placeholders; the kernel does not read them
    if draws is not None:
        temperature, seeds, positions = draws.temperature, draws.seeds, draws.positions
        floors = lowest_drawn(logits, draws)
    is_limited, early = floors is not None, launches_early(logits.device)
    _best_of_piece_kernel[(num_rows, num_pieces)](
        logits, temperature, seeds, positions, floors if is_limited else scores, int(is_limited), tops, tokens,
        vocab_size, first_id, logits.stride(0), num_pieces, *mask_arguments(draws, out),
        draws is not None, _PIECE, _TILE, logits.is_cuda, early, num_warps=4, **early_options(early),
    )  # fmt: skip
    pieces = next_power_of_2(num_pieces)
    _best_of_row_kernel[(num_rows,)](
        tops, tokens, scores, out, num_pieces, pieces, early, num_warps=1, **early_options(early)
    )
    return scores, out
