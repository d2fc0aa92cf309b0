# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Gumbel-max and argmax in one pass over the logits, with the reference's random bits.

A row's vocabulary is cut into pieces of one program each; a second launch takes the best of the pieces. The hash is
integer arithmetic, so its bits are those of `sampling.random_bits`; logarithms may differ in the last bit from the
library's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.sampling import lowest_kept, scaled

if TYPE_CHECKING:
    from pd_kernels.draws import Draws

_PIECE = 4096
_ROUNDING = 2.0**-22  # the kernel's quotient of the lowest logit that is kept may be so much smaller than torch's


@triton.jit
def _mix_64(x):
    """splitmix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log1p(x):
    """log(1 + x) for -1 < x <= 0 in float32: exact for small x, where 1 + x would lose its digits (Kahan)."""
    y = 1.0 + x
    off = y - 1.0
    corrected = tl.log(y) * (x / tl.where(off == 0, 1.0, off))
    return tl.where(off == 0, x, corrected)


@triton.jit
def gumbel_noise(seed, position, token):
    """sampling._exponential(random_bits(...)).log(): minus this is Gumbel noise. `token` int32 [W] -> float32 [W]."""
    key = _mix_64(_mix_64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = token.to(tl.uint32) * 0x9E3779B1 + low
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) ^ high
    bits = (bits ^ (bits >> 15)) * 0x735A2D97
    bits = bits ^ (bits >> 15)
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2 ** -31
    return tl.log(-_log1p(-tl.minimum(uniform, 1 - 5.960464477539063e-08)))  # 1 - 2 ** -24


@triton.jit
def _divide(x, y, reciprocal):
    """x / y, rounded as torch rounds it, without the branches of div_rn: `reciprocal` is 1 / y, rounded (Markstein).

    NaN for infinite x. Where a fused product is none, as in Triton's interpreter, the last bit may be wrong.
    """
    quotient = x * reciprocal
    return tl.fma(tl.fma(-quotient, y, x), reciprocal, quotient)


@triton.jit(do_not_specialize=["is_limited"])
def _best_of_piece_kernel(
    logits, temperatures, seeds, positions, floors, is_limited, best, best_token, vocab_size, stride, num_pieces,
    DRAW: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    value = tl.load(logits + row * stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    if DRAW:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            value = _divide(value, temperature, tl.div_rn(1.0, temperature))
            floor = tl.load(floors + row, mask=is_limited != 0, other=float("-inf"))
            noise = gumbel_noise(tl.load(seeds + row), tl.load(positions + row), token)
            value = tl.where(value < floor, float("-inf"), value - noise)
    value = tl.where(value == value, value, float("-inf"))  # NaN has no order: padding could win over it
    winner, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_pieces + piece, winner)
    tl.store(best_token + row * num_pieces + piece, piece * PIECE + index)


@triton.jit
def _best_of_row_kernel(best, best_token, out, num_pieces, PIECES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    value = tl.load(best + row * num_pieces + piece, mask=piece < num_pieces, other=float("-inf"))
    _, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(best_token + row * num_pieces + index).to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Per row of `logits` [R, V], the first of the greatest. -> int64 [R], always in [0, V): NaN counts least."""
    return _best(logits, None)


def draw(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """See sampling.draw. Logits of rows without limits are read once, in their own type."""
    if len(draws.temperature) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits, {len(draws.temperature)} that draw")
    return _best(logits, draws)


def _best(logits: torch.Tensor, draws: Draws | None) -> torch.Tensor:
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [rows, vocabulary] with unit last stride, not {tuple(logits.shape)}")
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    num_pieces = triton.cdiv(vocab_size, _PIECE)
    best = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_pieces), dtype=torch.int32, device=logits.device)
    temperature, seeds, positions, floors = best, out, out, None  # places that nobody looks at
    if draws is not None:
        temperature, seeds, positions, floors = draws.temperature, draws.seeds, draws.positions, _floors(logits, draws)
    is_limited = floors is not None
    _best_of_piece_kernel[(num_rows, num_pieces)](
        logits, temperature, seeds, positions, floors if is_limited else best, int(is_limited), best, tokens,
        vocab_size, logits.stride(0), num_pieces, draws is not None, _PIECE, num_warps=8,
    )  # fmt: skip
    _best_of_row_kernel[(num_rows,)](best, tokens, out, num_pieces, triton.next_power_of_2(num_pieces), num_warps=1)
    return out


def _floors(logits: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    """What a row's logits over its temperature must reach to be drawn, float32 [R]; None: nothing, in any row."""
    limits = draws.limits
    if limits is None:
        return None
    floors = torch.full_like(draws.temperature, -torch.inf)
    lowest = lowest_kept(scaled(logits, draws, limits.rows), limits.top_k, limits.top_p, limits.min_p)
    floors[limits.rows] = lowest - lowest.abs() * _ROUNDING
    return floors
