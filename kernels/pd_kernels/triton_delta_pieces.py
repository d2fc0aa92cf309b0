# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The gated delta rule of prompts, in pieces of 64 tokens. Two launches, no atomics: equal inputs give equal bits.

With decays G_i from the piece's begin to its token i, lengths' inverses r, and the state S before the piece (Yang et
al., arXiv 2412.06464, section 3.3, with one triangular inverse for both of its terms):

    T = (I + strictly lower part of (beta_i r_i r_j exp(G_i - G_j) k_i.k_j))^-1 diag(beta)
    U = T (V - diag(exp(G) r) K S)          the changes that the piece's tokens make
    result_i = scale r_i exp(G_i) S^T q_i + sum over j <= i of scale r_i r_j exp(G_i - G_j) (q_i.k_j) U_j
    S = exp(G_64) S + K^T diag(r exp(G_64 - G)) U

The first launch has a program for each piece and head, and writes both triangles. The second has a program for a part
of the values of each head of each sequence, which goes through its pieces with S in registers. S, the residuals and U
are left operands of the matrix unit, transposed, which it takes from registers: nothing of the chain passes shared
memory. Operands have the dtype of keys, sums are float32; keys and queries are multiplied as they come, divided after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from pd_kernels.state import PIECE
from pd_kernels.triton_pieces import prompts_of, sequence_of, tokens_of

if TYPE_CHECKING:
    from pd_kernels.state import StatePlan


class PiecesTile(NamedTuple):
    """How the launches are cut."""

    values: int  # of a program of the second
    num_warps: int
    num_stages: int
    triangle_warps: int
    precision: str  # of the first's products of float32


PIECES_TILE = PiecesTile(64, 4, 2, 4, "tf32")
"""tf32 moves T by 1.1e-4 to 1.1e-3 of its norm, for random to nearly equal keys; rounding T to bfloat16 moves it by
3.5e-4 to 1e-3. With tf32x3 the first kernel spills 2 KiB of registers.
"""


@triton.jit
def _rows(x, row, inside, stride, first, SIZE: tl.constexpr):
    """[rows, SIZE], zeros where no token is."""
    return tl.load(
        x + row[:, None] * stride + first + tl.arange(0, SIZE)[None, :], mask=inside[:, None], other=0.0
    )  # fmt: skip


@triton.jit
def _over_lengths(rows, eps):
    """1 / the length of each row."""
    wide = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + eps)


@triton.jit
def _joined(inverse, lower, row, column, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of diagonal blocks of 2 BLOCK, from those of BLOCK."""
    below = (row // BLOCK == column // BLOCK + 1) & (row // BLOCK % 2 == 1)
    part = tl.dot(inverse, tl.where(below, lower, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(part, inverse, input_precision=PRECISION)


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangle. SIZE is 4 BLOCK.

    Blocks on the diagonal row by row, all at once; then twice, blocks of two: B^-1 of [[A, 0], [C, B]] times C A^-1.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    own = row // BLOCK == column // BLOCK
    blocks = tl.sum(tl.reshape(tl.where(own, lower, 0.0), [4, BLOCK, 4, BLOCK]), 2)
    line, entry = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    found = tl.where(line == entry, 1.0, tl.zeros([4, BLOCK, BLOCK], tl.float32))
    for i in range(1, BLOCK):
        of_row = tl.sum(tl.where(line == i, blocks, 0.0), 1)
        known = tl.sum(of_row[:, :, None] * found, 1)
        found = tl.where(line == i, found - known[:, None, :], found)
    wide = tl.reshape(tl.broadcast_to(found[:, :, None, :], [4, BLOCK, 4, BLOCK]), [SIZE, SIZE])
    inverse = tl.where(own, wide, 0.0)
    inverse = _joined(inverse, lower, row, column, BLOCK, PRECISION)
    return _joined(inverse, lower, row, column, 2 * BLOCK, PRECISION)


@triton.jit(do_not_specialize=["num_seqs"])
def _triangles_kernel(
    q, k, g, beta, starts, positions, piece_starts, begin, triangles, factors, num_seqs, num_heads, ratio, scale, eps,
    q_stride, k_stride, KEYS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write T and the factors of results, [2, SIZE, SIZE], and four factors of each token [4, SIZE].

    `begin`: the first piece that has a place there.
    """
    head, piece = tl.program_id(0), tl.load(begin) + tl.program_id(1)
    if piece >= tl.load(piece_starts + num_seqs):
        return
    sequence = sequence_of(piece_starts, num_seqs, piece)
    if tl.load(starts + sequence + 1) - tl.load(starts + sequence) == 1:
        return
    base, low, high = tokens_of(starts, positions, piece_starts, sequence, piece, SIZE)
    at = tl.arange(0, SIZE)
    row = base + at
    inside = (row >= low) & (row < high)
    place = (tl.program_id(1) * num_heads + head).to(tl.int64)
    tile = triangles + place * 2 * SIZE * SIZE + at[:, None] * SIZE + at[None, :]
    keys = _rows(k, row, inside, k_stride, head // ratio * KEYS, KEYS)
    part = tl.load(beta + row * num_heads + head, mask=inside, other=0.0)
    sums = tl.cumsum(tl.load(g + row * num_heads + head, mask=inside, other=0.0), 0)
    of_key = _over_lengths(keys, eps)
    seen, before = at[:, None] >= at[None, :], at[:, None] > at[None, :]
    decay = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], float("-inf"))) * of_key[None, :]
    queries = _rows(q, row, inside, q_stride, head // ratio * KEYS, KEYS)
    of_query = _over_lengths(queries, eps) * scale
    results = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decay * of_query[:, None]
    tl.store(tile + SIZE * SIZE, results.to(triangles.dtype.element_ty))
    total, decays = tl.sum(tl.where(at == SIZE - 1, sums, 0.0), 0), tl.exp(sums)
    factor = factors + place * 4 * SIZE + at
    tl.store(factor, decays * of_key)
    tl.store(factor + SIZE, tl.exp(total - sums) * of_key)
    tl.store(factor + 2 * SIZE, decays * of_query)
    tl.store(factor + 3 * SIZE, tl.zeros([SIZE], tl.float32) + tl.exp(total))
    lower = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decay * (of_key * part)[:, None]
    inverse = _inverse(tl.where(before, lower, 0.0), SIZE, SIZE // 4, PRECISION)
    tl.store(tile, (inverse * part[None, :]).to(triangles.dtype.element_ty))


@triton.jit(do_not_specialize=["num_seqs"])
def _states_kernel(
    q, k, v, recurrent, sources, slots, starts, positions, piece_starts, begin, saves, triangles, factors, out,
    num_seqs, num_heads, ratio, q_stride, k_stride, v_stride, slot_stride, head_stride,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PART: tl.constexpr, SIZE: tl.constexpr, SAVES: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`begin`: the first sequence, and the first piece that has a place in `triangles`."""
    away = tl.load(begin)
    head, sequence = tl.program_id(0) // (VALUES // PART), away + tl.program_id(1)
    if sequence >= num_seqs:
        return
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1)
    if end - start <= 1:
        return
    source, slot = tl.load(sources + sequence).to(tl.int64), tl.load(slots + sequence).to(tl.int64)
    position, first = tl.load(positions + sequence), tl.load(piece_starts + sequence)
    at, key = tl.arange(0, SIZE), tl.arange(0, KEYS)
    value = tl.program_id(0) % (VALUES // PART) * PART + tl.arange(0, PART)
    place = recurrent + head * head_stride.to(tl.int64) + key[None, :] * VALUES + value[:, None]
    state = tl.zeros([PART, KEYS], tl.float32)
    if source >= 0:
        state = tl.load(place + source * slot_stride)
    base = start - position % SIZE
    for piece in tl.range(first, tl.load(piece_starts + sequence + 1), num_stages=STAGES):
        row = base + (piece - first) * SIZE + at
        inside = (row >= start) & (row < end)
        keys = _rows(k, row, inside, k_stride, head // ratio * KEYS, KEYS)
        queries = _rows(q, row, inside, q_stride, head // ratio * KEYS, KEYS)
        values_at = v + row[None, :] * v_stride + head * VALUES + value[:, None]
        values = tl.load(values_at, mask=inside[None, :], other=0.0).to(tl.float32)
        held = ((piece - away) * num_heads + head).to(tl.int64)
        tile = triangles + held * 2 * SIZE * SIZE + at[:, None] * SIZE + at[None, :]
        inverse, seen = tl.load(tile), tl.load(tile + SIZE * SIZE)
        factor = factors + held * 4 * SIZE + at
        of_old, of_new, of_result = tl.load(factor), tl.load(factor + SIZE), tl.load(factor + 2 * SIZE)
        old = state.to(k.dtype.element_ty)
        values -= tl.dot(old, tl.trans(keys), input_precision=PRECISION) * of_old[None, :]
        changes = tl.dot(values.to(k.dtype.element_ty), tl.trans(inverse), input_precision=PRECISION)
        results = tl.dot(old, tl.trans(queries), input_precision=PRECISION) * of_result[None, :]
        results = tl.dot(changes.to(k.dtype.element_ty), tl.trans(seen), results, input_precision=PRECISION)
        state *= tl.load(factors + held * 4 * SIZE + 3 * SIZE)
        state = tl.dot((changes * of_new[None, :]).to(k.dtype.element_ty), keys, state, input_precision=PRECISION)
        out_at = out + (row * num_heads + head)[None, :] * VALUES + value[:, None]
        tl.store(out_at, results.to(out.dtype.element_ty), mask=inside[None, :])
        if SAVES:
            saved = tl.load(saves + piece).to(tl.int64)
            if saved >= 0:
                tl.store(place + saved * slot_stride, state)
    tl.store(place + slot * slot_stride, state)


def mix_pieces(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    recurrent: torch.Tensor,
    plan: StatePlan,
    scale: float,
    eps: float,
    out: torch.Tensor,
    tile: PiecesTile = PIECES_TILE,
) -> None:
    """Fill the rows of `out` of the sequences that have several tokens. `g`, `beta` and `out` are contiguous.

    See StateOps.
    """
    num_heads, num_keys, num_values = recurrent.shape[1:]
    ratio, part = v.shape[1] // k.shape[1], min(tile.values, num_values)
    begin, num_prompts, num_pieces = prompts_of(plan, len(v))
    triangles = torch.empty((num_pieces, num_heads, 2, PIECE, PIECE), dtype=k.dtype, device=k.device)
    factors = torch.empty((num_pieces, num_heads, 4, PIECE), dtype=torch.float32, device=k.device)
    saves, is_wide = plan.saves, k.dtype is torch.float32  # two stages of it exceed a multiprocessor's shared memory
    precision, stages = ("ieee", 1) if is_wide else (tile.precision, tile.num_stages)
    where, num_seqs = (plan.starts, plan.positions, plan.piece_starts, begin), len(plan.slots)
    _triangles_kernel[(num_heads, num_pieces)](
        q, k, g, beta, *where, triangles, factors, num_seqs, num_heads, ratio, scale, eps,
        q.stride(0), k.stride(0), num_keys, PIECE, precision, num_warps=tile.triangle_warps,
    )  # fmt: skip
    _states_kernel[(num_heads * num_values // part, num_prompts)](
        q, k, v, recurrent, plan.sources, plan.slots, *where, plan.sources if saves is None else saves, triangles,
        factors, out, num_seqs, num_heads, ratio, q.stride(0), k.stride(0), v.stride(0), *recurrent.stride()[:2],
        num_keys, num_values, part, PIECE, saves is not None, stages, precision, num_warps=tile.num_warps,
    )  # fmt: skip
