# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Absorbed attention over latent keys (MLA): the queries of a sequence's last tokens see the cache of latent rows.

All heads share one row [latent | rope] a token, and its latent is also the value. So a tile of rows is read once, for
keys and values, and for all heads of several queries. The work is divided as in `triton_draft_attention`: a pair is a
sequence with up to QUERIES of its queries, and some of the heads if these are more than a tile takes.

Products have (query, head) as rows and the cache's tokens as columns. With the cache's tokens as rows, as wide as a
warpgroup's product, no tile came while another was multiplied: 16 heads of 128 sequences took 124 us (an H200).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.decode_tiling import DecodeTiling
from pd_kernels.launch_sizes import next_power_of_2, num_processors
from pd_kernels.triton_decode import LOG2_E, MERGED, merged_parts, plan_shares
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

if TYPE_CHECKING:
    from pd_kernels.latent import LatentRows

_ROWS = 32  # most (query, head) of a pair: sums of more, of 512 numbers each, do not fit into registers
# Groups of all sequences up to which a group is so small that its parts are merged at once: one program merges them.
# 20 heads on an H200, us a layer of 1 / 8 / 32 / 128 / 256 sequences of 1k: 32 / 48 / 56 / 93 / 113 in one group, 16 /
# 21 / 36 / 79 / 170 in two
_MOST_PAIRS = 256
_ALONE = 4  # most heads of a group of one sequence: 20 of 1k take 13 us, in two groups 16; of 8k 31 and 54
_MERGED_ALONE = 2 * MERGED  # of such groups: 16 heads 13 us a layer, with MERGED 15; one group of 16 heads 20 and 16
# Most parts of such a group, which so many programs can share: with 15 a group of 128k tokens would have 63 or 78 tiles
# a program, more than one group of all heads, by calculation; none above 32k was measured
_PARTS_ALONE = 64
_LEAST_SEQS = 256  # as in `triton_draft_attention`


@triton.jit
def _attend_latents(
    q, turned, position, cache, table, start, stop, length, block_stride, scale,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Means [ROWS, RANK] of latents over tokens [start, stop), and log2 of the sums of exponentials, of each row.

    A row that sees none of them gets some mean, which its logarithm gives no weight beside any part that it sees.
    """
    WIDTH: tl.constexpr = RANK + ROPE
    top = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, RANK], tl.float32)
    for begin in tl.range(start, stop, TILE, num_stages=STAGES):
        token = begin + tl.arange(0, TILE)
        there = token < length
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(table + begin // BLOCK_SIZE).to(tl.int64)
            place = block * block_stride + (begin % BLOCK_SIZE + tl.arange(0, TILE)) * WIDTH
        else:
            blocks = tl.load(table + token // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            place = blocks * block_stride + token % BLOCK_SIZE * WIDTH
        at = cache + place[:, None]
        latent = tl.load(at + tl.arange(0, RANK)[None, :], mask=there[:, None], other=0.0)
        rope = tl.load(at + RANK + tl.arange(0, ROPE)[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(rope), scores, input_precision=PRECISION) * scale
        scores = tl.where(token[None, :] <= position[:, None], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(latent.dtype), latent, sums * shrink[:, None], input_precision=PRECISION)
        top = higher
    return sums / total[:, None], top + tl.log2(total)


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
    QUERIES: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, WRITTEN: tl.constexpr,
    PROGRAMS: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SETUP: tl.constexpr,
    EARLY: tl.constexpr,
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
    row, c, r = tl.arange(0, ROWS), tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
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
            number = first_query + row // GROUP
            inside = (row < MEMBERS) & (number < num_queries)
            head = group * GROUP + row % GROUP
            token = (query_start + number).to(tl.int64)
            latent_at = token * latent_stride + head * latent_head_stride
            rope_at = token * rope_stride + head * rope_head_stride
            q = tl.load(q_latent + latent_at[:, None] + c, mask=inside[:, None], other=0.0)
            turned = tl.load(q_rope + rope_at[:, None] + r, mask=inside[:, None], other=0.0)
            mean, log = _attend_latents(
                q, turned, length - num_queries + number, cache, block_tables + seq * table_stride, first * TILE,
                (first + count) * TILE, length, block_stride, scale,
                RANK, ROPE, BLOCK_SIZE, TILE, ROWS, PRECISION, STAGES,
            )  # fmt: skip
            target = out + (token * NUM_HEADS + head)[:, None] * RANK + c
            if count == tiles:
                tl.store(target, mean.to(out.dtype.element_ty), mask=inside[:, None])
            else:
                slot = (2 * program + (first == 0).to(tl.int32)) * MEMBERS + row
                tl.store(parts + slot[:, None] * RANK + c, mean, mask=inside[:, None])
                tl.store(part_logs + slot, log, mask=inside)
                first_program, last_program = start // share, (start + tiles - 1) // share
                counter = arrived + (query_start + first_query) * GROUPS + group
                tl.debug_barrier()  # the whole part is written before its arrival is counted
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
                    num_members = tl.minimum(num_queries - first_query, QUERIES) * GROUP
                    merged = merged_parts(
                        parts, part_logs, first_program, last_program, num_members, MEMBERS, RANK, RANK, WRITTEN,
                        MERGED,
                    )  # fmt: skip
                    member = tl.arange(0, WRITTEN)
                    tokens = (query_start + first_query + member // GROUP).to(tl.int64)
                    whole = out + (tokens * NUM_HEADS + group * GROUP + member % GROUP)[:, None] * RANK + c
                    tl.store(whole, merged.to(out.dtype.element_ty), mask=(member < num_members)[:, None])
                    tl.store(counter, 0)  # for the next layer
        unit = start + units
    _clear_padding(out, query_starts, seq_lens, num_seqs, num_tokens, NUM_HEADS, RANK, PROGRAMS)


def latent_tiling(dtype: torch.dtype) -> DecodeTiling:
    """Tiling for a GPU with 228 KiB of shared memory per multiprocessor.

    Chosen on an H200, us a layer of 1k: 16 heads of 128 / 256 sequences 63 / 88, with drafts of three tokens 101 for
    128; with tiles of 32 tokens 64 / 111 and 153, with eight warps 60 / 117 and 157. With a `setup` of 2 / 3 / 5 / 8
    the 128 take 57 / 62 / 66 / 69 us; if their lengths are drawn, 59 / 62 / 66 / 69.
    """
    tile = 16 if dtype is torch.float32 else 64
    return DecodeTiling(tile, num_warps=4, num_stages=2, programs_per_processor=2, setup=2)


def head_groups(num_heads: int, num_seqs: int, rank: int) -> int:
    """Equal groups of heads, each of at most as many as a pair has rows, for so many sequences with a query each."""

    def of(most: int) -> int:
        return next(count for count in range(1, num_heads + 1) if num_heads % count == 0 and num_heads // count <= most)

    for most in (_ALONE, 2 * _ALONE) if num_seqs == 1 else ():
        if num_heads // of(most) > 2 or of(most) == 1:  # 7 heads have no smaller group that is worth reading a cache
            return of(most)
    groups = of(min(MERGED // rank, _ROWS))
    return groups if num_seqs * groups <= _MOST_PAIRS else of(_ROWS)


def latent_decode(
    query_latent: torch.Tensor, query_rope: torch.Tensor, cache: torch.Tensor, rows: LatentRows, scale: float,
    tiling: DecodeTiling,
) -> torch.Tensor:  # fmt: skip
    """See LatentOps.decode. Rows that see no token give zeros: equal rows choose equal experts, so padding reads few.

    Plans the step in three launches when it has no plan.
    """
    (num_rows, num_heads, rank), rope = query_latent.shape, query_rope.shape[2]
    num_seqs, device = len(rows.lens), cache.device
    # Pairs of drafts have several queries: 20 heads of 128 sequences with four each take 217 us, in two groups 236
    groups = head_groups(num_heads, num_seqs if rows.is_plain else _MOST_PAIRS + 1, rank)
    group = num_heads // groups
    queries = 1 if rows.is_plain else _ROWS // group
    written, seqs = next_power_of_2(queries * group), max(next_power_of_2(num_seqs), _LEAST_SEQS)
    is_alone = rows.is_plain and num_seqs == 1 and group <= _ALONE
    tiling = replace(tiling, parts=_PARTS_ALONE) if is_alone else tiling
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
        groups, group, rank, rope, cache.shape[1], queries, tiling.tile, seqs, max(written, 16), written, programs,
        max((_MERGED_ALONE if is_alone else MERGED) // (written * rank), 1),
        "ieee" if cache.dtype is torch.float32 else "tf32", tiling.num_stages, tiling.setup, early,
        num_warps=tiling.num_warps, **early_options(early),
    )  # fmt: skip
    return out
