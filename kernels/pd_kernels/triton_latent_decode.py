# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Absorbed attention over latent keys (MLA): the queries of a sequence's last tokens see the cache of latent rows.

All heads share one row [latent | rope] a token, and its latent is also the value. So a tile of rows is read once, for
keys and values, and for all heads of several queries. The work is divided as in `triton_draft_attention`: a pair is a
sequence with up to QUERIES of its queries, and some of the heads if these are more than a tile takes.

Products have the cache's tokens as rows and (query, head) as columns. A warpgroup multiplies 64 rows at least: 64
tokens are there, and 16 heads alone would leave three quarters of it empty. The sums are transposed, [rank, columns].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.decode_tiling import DecodeTiling
from pd_kernels.launch_sizes import next_power_of_2, num_processors
from pd_kernels.triton_decode import LOG2_E, MERGED, merged_parts, plan_shares
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_new_token import ask_for

if TYPE_CHECKING:
    from pd_kernels.latent import LatentRows

_COLUMNS = 32  # most (query, head) of a pair: two programs of a multiprocessor then have room for a tile each
_LEAST_SEQS = 256  # as in `triton_draft_attention`


@triton.jit
def _attend_latents(
    q, turned, position, cache, table, start, stop, length, block_stride, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Means [RANK, COLUMNS] of latents over tokens [start, stop), and log2 of the sums of exponentials, of each column.

    A column that sees none of them gets some mean, which its logarithm gives no weight beside any part that it sees.
    """
    WIDTH: tl.constexpr = RANK + ROPE
    BYTES: tl.constexpr = WIDTH * (cache.dtype.element_ty.primitive_bitwidth // 8)
    top = tl.full([COLUMNS], -1e30, tl.float32)
    totals = tl.zeros([TILE, COLUMNS], tl.float32)  # summed at the end: warps exchange maxima alone
    sums = tl.zeros([RANK, COLUMNS], tl.float32)
    block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
    for begin in tl.range(start, stop, TILE, num_stages=1):
        token = begin + tl.arange(0, TILE)
        there = token < length
        place = block * block_stride + (begin % BLOCK_SIZE + tl.arange(0, TILE)) * WIDTH
        if BLOCK_SIZE % TILE != 0:
            blocks = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            place = blocks * block_stride + token % BLOCK_SIZE * WIDTH
        rows = cache + place[:, None]
        latent = tl.load(rows + tl.arange(0, RANK)[None, :], mask=there[:, None], other=0.0)
        rope = tl.load(rows + RANK + tl.arange(0, ROPE)[None, :], mask=there[:, None], other=0.0)
        block = tl.load(table + (begin + TILE) // BLOCK_SIZE, mask=begin + TILE < stop, other=0).to(tl.int64)
        if EARLY and BLOCK_SIZE % TILE == 0 and BYTES % 16 == 0:  # the next tile comes to the L2 cache meanwhile
            following = cache + block * block_stride + (begin + TILE) % BLOCK_SIZE * WIDTH
            ask_for(following.to(tl.int64), (tl.minimum(tl.minimum(stop, length) - begin, 2 * TILE) - TILE) * BYTES)
        scores = tl.dot(rope, turned, input_precision=PRECISION)
        scores = tl.dot(latent, q, scores, input_precision=PRECISION) * scale
        scores = tl.where(token[:, None] <= position[None, :], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - higher[None, :])
        shrink = tl.exp2(top - higher)
        totals = totals * shrink[None, :] + weights
        sums = tl.dot(tl.trans(latent), weights.to(q.dtype), sums * shrink[None, :], input_precision=PRECISION)
        top = higher
    total = tl.sum(totals, 0)
    return sums / total[None, :], top + tl.log2(total)


@triton.jit
def _clear_padding(
    out, query_starts, seq_lens, num_seqs, num_tokens, NUM_HEADS: tl.constexpr, RANK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Set outputs to 0: those of sequences of length 0, and those after the last sequence's. Programs share them."""
    zeros = tl.zeros([RANK], out.dtype.element_ty)
    for seq in range(tl.program_id(0), num_seqs + 1, PROGRAMS):
        first = tl.load(query_starts + seq)
        end = num_tokens
        if seq < num_seqs:
            end = tl.where(tl.load(seq_lens + seq) > 0, first, tl.load(query_starts + seq + 1))
        rows = out + first.to(tl.int64) * NUM_HEADS * RANK + tl.arange(0, RANK)
        for number in range((end - first) * NUM_HEADS):
            tl.store(rows + number * RANK, zeros)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride"])
def _latent_kernel(
    q_latent, q_rope, cache, block_tables, seq_lens, query_starts, ends, arrived, out, parts, part_logs,
    num_seqs, num_tokens, latent_stride, latent_head_stride, rope_stride, rope_head_stride, table_stride, block_stride,
    scale,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
    MERGED: tl.constexpr, PRECISION: tl.constexpr, SETUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUPS of GROUP heads. See `_draft_kernel`, where a group is a KV head, for the shares and the parts."""
    NUM_HEADS: tl.constexpr = GROUPS * GROUP
    MEMBERS: tl.constexpr = QUERIES * GROUP
    others_may_start(EARLY)
    program = tl.program_id(0)
    line = tl.load(ends + tl.arange(0, SEQS), mask=tl.arange(0, SEQS) < num_seqs, other=0)
    share = tl.load(ends + num_seqs)
    unit = program * share
    stop = tl.minimum(unit + share, tl.max(line, 0) * GROUPS)
    column, c, r = tl.arange(0, COLUMNS), tl.arange(0, RANK)[:, None], tl.arange(0, ROPE)[:, None]
    wait_for_others(EARLY)
    while unit < stop:
        over = (line <= unit // GROUPS) & (tl.arange(0, SEQS) < num_seqs)  # sequences that end before the unit
        seq = tl.sum(over.to(tl.int32), 0).to(tl.int64)
        before = tl.max(tl.where(over, line, 0), 0)
        length, query_start = tl.load(seq_lens + seq), tl.load(query_starts + seq)
        num_queries = tl.load(query_starts + seq + 1) - query_start
        num_pairs = (num_queries + QUERIES - 1) // QUERIES  # of a group
        units = (tl.min(tl.where(over | (line == 0), 2147483647, line), 0) - before) // num_pairs  # of a pair
        pair = (unit - before * GROUPS) // units
        start = before * GROUPS + pair * units
        group, first_query = pair // num_pairs, pair % num_pairs * QUERIES
        tiles, first = units - SETUP, unit - start
        count = tl.minimum(tiles - first, stop - unit)
        if count > 0:
            number = first_query + column // GROUP
            inside = (column < MEMBERS) & (number < num_queries)
            head = group * GROUP + column % GROUP
            token = (query_start + number).to(tl.int64)
            latent_at = token * latent_stride + head * latent_head_stride
            rope_at = token * rope_stride + head * rope_head_stride
            q = tl.load(q_latent + latent_at[None, :] + c, mask=inside[None, :], other=0.0)
            turned = tl.load(q_rope + rope_at[None, :] + r, mask=inside[None, :], other=0.0)
            mean, log = _attend_latents(
                q, turned, length - num_queries + number, cache, block_tables + seq * table_stride, first * TILE,
                (first + count) * TILE, length, block_stride, scale,
                RANK, ROPE, BLOCK_SIZE, TILE, COLUMNS, PRECISION, EARLY,
            )  # fmt: skip
            target = out + (token * NUM_HEADS + head) * RANK
            if count == tiles:
                tl.store(target[None, :] + c, mean.to(out.dtype.element_ty), mask=inside[None, :])
            else:
                slot = (2 * program + (first == 0).to(tl.int32)) * MEMBERS + column
                tl.store(parts + slot[None, :] * RANK + c, mean, mask=inside[None, :])
                tl.store(part_logs + slot, log, mask=inside)
                first_program, last_program = start // share, (start + tiles - 1) // share
                counter = arrived + (query_start + first_query) * GROUPS + group
                tl.debug_barrier()  # the whole part is written before its arrival is counted
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
                    num_members = tl.minimum(num_queries - first_query, QUERIES) * GROUP
                    merged = merged_parts(
                        parts, part_logs, first_program, last_program, num_members, MEMBERS, RANK, RANK, COLUMNS, MERGED
                    )  # fmt: skip
                    place = target[:, None] + tl.arange(0, RANK)[None, :]
                    tl.store(place, merged.to(out.dtype.element_ty), mask=inside[:, None])
                    tl.store(counter, 0)  # for the next layer
        unit = start + units
    _clear_padding(out, query_starts, seq_lens, num_seqs, num_tokens, NUM_HEADS, RANK, PROGRAMS)


def latent_tiling(dtype: torch.dtype) -> DecodeTiling:
    """Tiling for a GPU with 228 KiB of shared memory per multiprocessor.

    One program multiplies while the other one of its multiprocessor waits for its tile.
    """
    tile = 16 if dtype is torch.float32 else 64
    return DecodeTiling(tile, num_warps=4, num_stages=1, programs_per_processor=2)


def head_groups(num_heads: int) -> int:
    """Equal groups of heads, each of at most as many as a tile has columns."""
    return next(count for count in range(1, num_heads + 1) if num_heads % count == 0 and num_heads // count <= _COLUMNS)


def latent_decode(
    query_latent: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, rows: LatentRows, scale: float,
    tiling: DecodeTiling,
) -> torch.Tensor:  # fmt: skip
    """See LatentOps.decode. Rows that see no token give zeros: equal rows choose equal experts, so padding reads few.

    Plans the step in three launches when it has no plan.
    """
    (num_rows, num_heads, rank), rope = query_latent.shape, query_rope.shape[2]
    groups, num_seqs, device = head_groups(num_heads), len(rows.lens), cache.device
    group = num_heads // groups
    queries = 1 if rows.is_plain else _COLUMNS // group
    columns, seqs = max(next_power_of_2(queries * group), 16), max(next_power_of_2(num_seqs), _LEAST_SEQS)
    if not rows.plans:
        ends = plan_shares(rows.lens, groups, 0, tiling, seqs, rows.starts, queries)
        rows.plans.append((ends, torch.zeros((num_rows, groups), dtype=torch.int32, device=device)))
    ends, arrived = rows.plans[0]
    programs = tiling.programs_per_processor * num_processors(device)
    parts = torch.empty((2 * programs * queries * group, rank), dtype=torch.float32, device=device)
    part_logs = torch.empty(len(parts), dtype=torch.float32, device=device)
    out = query_latent.new_empty(num_rows, num_heads, rank)
    early = launches_early(device)
    _latent_kernel[(programs,)](
        query_latent, query_rope, cache, rows.block_tables, rows.lens, rows.starts, ends, arrived, out, parts,
        part_logs, num_seqs, num_rows, *query_latent.stride()[:2], *query_rope.stride()[:2],
        rows.block_tables.stride(0), cache.stride(0), scale * LOG2_E,
        groups, group, rank, rope, cache.shape[1], queries, tiling.tile, seqs, columns, programs,
        max(MERGED // (columns * rank), 1), "ieee" if cache.dtype is torch.float32 else "tf32", tiling.setup, early,
        num_warps=tiling.num_warps, **early_options(early),
    )  # fmt: skip
    return out
