# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Attention of decodes with drafts: a sequence's last tokens are queries, and see the cache up to their own places.

The work is divided as in `triton_decode`. There a pair is a (sequence, KV head); here it is that with up to QUERIES of
the sequence's queries: their heads are the rows of one matrix product. A sequence with more has several such pairs,
each of which reads its keys. So a step may have any numbers of queries, and QUERIES decides no more than the time.
There is one QUERIES for all steps of a group: with 64 rows a warpgroup multiplies, and empty rows cost less than the
instructions of fewer rows (8B, a layer, one H200: 32 decodes of 8 tokens take 37 us with 64 rows, 39 with 32 and 82
with 16, and 128 of 2 take 133, 147 and 142; 128 plain decodes take 128).

The keys and values of the step's own tokens are in the cache: another launch has written them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.fp8_cache import FP8
from pd_kernels.launch_sizes import next_power_of_2, num_processors
from pd_kernels.triton_decode import LOG2_E, MERGED, merged_parts, plan_shares
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_fp8 import beside_fp8
from pd_kernels.triton_kv_tile import add_sink, add_tile, load_tile, lowest_seen, mean_of, pair_in_cache
from pd_kernels.triton_new_token import no_tokens

if TYPE_CHECKING:
    from pd_kernels.attention import AttentionShape
    from pd_kernels.decode_tiling import DecodeTiling
    from pd_kernels.values import KeysValues

_LEAST_SEQS = 256  # room for sequences in the kernel: fewer would be a kernel more, and a second at start


@triton.jit
def _attend_queries(
    q, position, keys, values, table, start, stop, length, lowest, block_stride, scale, sinks, head, has_sink,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Mean of one head's values over tokens [start, stop), and log2 of its sum of exponentials, of each row.

    A row that sees none of them gets some mean, which its logarithm gives no weight beside any part that it sees.
    """
    HAS_PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    top, total, sums, odd = no_tokens(ROWS, COLUMNS // 2 if HAS_PAIRS else COLUMNS)
    if SINKS:
        top, total, sums, odd = add_sink(sinks, head, (head >= 0) & has_sink, top, total, sums, odd)
    for begin in tl.range(start, stop, TILE, num_stages=STAGES):
        k, v, _ = load_tile(
            keys, values, table, begin, length, lowest, block_stride, SIZE, BLOCK_SIZE, WINDOW, TILE, COLUMNS
        )  # fmt: skip
        token = (begin + tl.arange(0, TILE))[None, :]
        seen = token <= position[:, None]
        if WINDOW > 0:
            seen = seen & (token > position[:, None] - WINDOW)
        top, total, sums, odd = add_tile(q, k, v, seen, top, total, sums, odd, scale, HAS_PAIRS, PRECISION)
    return mean_of(top, total, sums, odd, HAS_PAIRS)


@triton.jit
def _clear_padding(
    out, query_starts, num_seqs, num_tokens, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Set the outputs after the last sequence's to 0: equal rows choose equal experts, so padding reads few of them."""
    column = tl.arange(0, COLUMNS)
    zeros = tl.zeros([COLUMNS], out.dtype.element_ty)
    for token in range(tl.load(query_starts + num_seqs) + tl.program_id(0), num_tokens, PROGRAMS):
        for head in range(NUM_HEADS):
            tl.store(out + (token * NUM_HEADS + head) * SIZE + column, zeros, mask=column < SIZE)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride"])
def _draft_kernel(
    query, key_cache, value_cache, block_tables, seq_lens, query_starts, ends, arrived, out, parts, part_logs, sinks,
    num_seqs, num_tokens, query_stride, table_stride, block_stride, head_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SETUP: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    MEMBERS: tl.constexpr = QUERIES * GROUP
    others_may_start(EARLY)
    program = tl.program_id(0)
    line = tl.load(ends + tl.arange(0, SEQS), mask=tl.arange(0, SEQS) < num_seqs, other=0)
    share = tl.load(ends + num_seqs)
    unit = program * share
    stop = tl.minimum(unit + share, tl.max(line, 0) * NUM_KV_HEADS)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    wait_for_others(EARLY)
    while unit < stop:
        over = (line <= unit // NUM_KV_HEADS) & (tl.arange(0, SEQS) < num_seqs)  # sequences that end before the unit
        seq = tl.sum(over.to(tl.int32), 0).to(tl.int64)
        before = tl.max(tl.where(over, line, 0), 0)
        length, query_start = tl.load(seq_lens + seq), tl.load(query_starts + seq)
        num_queries = tl.load(query_starts + seq + 1) - query_start
        num_pairs = (num_queries + QUERIES - 1) // QUERIES  # of a head
        units = (tl.min(tl.where(over | (line == 0), 2147483647, line), 0) - before) // num_pairs  # of a pair
        pair = (unit - before * NUM_KV_HEADS) // units
        start = before * NUM_KV_HEADS + pair * units
        head, first_query = pair // num_pairs, pair % num_pairs * QUERIES
        tiles, first = units - SETUP, unit - start
        count = tl.minimum(tiles - first, stop - unit)
        if count > 0:
            lowest = lowest_seen(length - num_queries + 1, WINDOW)
            begin = (lowest // TILE + first) * TILE
            keys, values, table = pair_in_cache(
                key_cache, value_cache, block_tables, seq, head, table_stride, head_stride
            )  # fmt: skip
            number = first_query + row // GROUP
            inside = ((row < MEMBERS) & (number < num_queries))[:, None] & (column < SIZE)[None, :]
            own_head = head * GROUP + row % GROUP
            token = (query_start + number).to(tl.int64)
            at = token * query_stride + own_head * SIZE
            q = tl.load(query + at[:, None] + column[None, :], mask=inside, other=0.0)
            if key_cache.dtype.element_ty == tl.float8e4nv:
                q = beside_fp8(q)
            mean, log = _attend_queries(
                q, length - num_queries + number, keys, values, table, begin, begin + count * TILE, length, lowest,
                block_stride, scale, sinks, own_head, first + count == tiles,
                SIZE, BLOCK_SIZE, WINDOW, TILE, ROWS, COLUMNS, PRECISION, STAGES, SINKS,
            )  # fmt: skip
            target = out + (token * NUM_HEADS + own_head)[:, None] * SIZE + column[None, :]
            if count == tiles:
                tl.store(target, mean.to(out.dtype.element_ty), mask=inside)
            else:
                slot = (2 * program + (first == 0).to(tl.int32)) * MEMBERS + row
                tl.store(parts + slot[:, None] * SIZE + column[None, :], mean, mask=inside)
                tl.store(part_logs + slot, log, mask=(row < MEMBERS) & (number < num_queries))
                first_program, last_program = start // share, (start + tiles - 1) // share
                counter = arrived + (query_start + first_query) * NUM_KV_HEADS + head
                tl.debug_barrier()  # the whole part is written before its arrival is counted
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
                    num_members = tl.minimum(num_queries - first_query, QUERIES) * GROUP
                    merged = merged_parts(
                        parts, part_logs, first_program, last_program, num_members, MEMBERS, SIZE, COLUMNS, ROWS, MERGED
                    )  # fmt: skip
                    tl.store(target, merged.to(out.dtype.element_ty), mask=inside)
                    tl.store(counter, 0)  # for the next layer
        unit = start + units
    _clear_padding(out, query_starts, num_seqs, num_tokens, NUM_HEADS, SIZE, COLUMNS, PROGRAMS)


@dataclass(frozen=True, slots=True)
class DraftAttentionPlan:
    """The data that the layers of one step share. Use it on one stream at a time."""

    tiling: DecodeTiling
    window: int
    num_queries: int  # of a pair
    seq_lens: torch.Tensor  # int32 [S]; 0: padding
    query_starts: torch.Tensor  # int32 [S + 1]
    ends: torch.Tensor  # int32 [S + 1]: see DecodePlan
    arrived: torch.Tensor  # int32 [T, num_kv_heads]: parts so far, at a pair's first token; 0 between launches


def queries_of_pair(shape: AttentionShape) -> int:
    """The queries of a pair: as many as make 64 rows, or 32: more sums than of 128 columns fill too many registers.

    The instructions of 64 rows take pairs of FP8 numbers wrongly where there are fewer than 64 of them (Triton 3.6 on
    an H200: other values at each launch, or an illegal access).
    """
    columns = next_power_of_2(shape.head_dim)
    is_narrow = shape.has_fp8_cache and columns < 128
    return max((32 if columns > 128 or is_narrow else 64) // shape.heads_per_kv_head, 1)


def draft_tiling(tiling: DecodeTiling) -> DecodeTiling:
    """How the keys are cut, where decodes are cut by `tiling`."""
    if tiling.num_warps >= 4:
        return tiling
    return replace(tiling, num_warps=4, num_stages=5, programs_per_processor=2)  # the sums would not fit into registers


def plan_draft_attention(
    shape: AttentionShape, tiling: DecodeTiling, seq_lens: torch.Tensor, query_starts: torch.Tensor, num_tokens: int
) -> DraftAttentionPlan:
    """Plan a step of `num_tokens` tokens, with padding. Two launches; does not wait for the device.

    `tiling`: of decodes.
    """
    window, num_seqs, num_queries = shape.window, _num_seqs(seq_lens), queries_of_pair(shape)
    tiling = draft_tiling(tiling)
    ends = plan_shares(seq_lens, shape.num_kv_heads, window, tiling, num_seqs, query_starts, num_queries)
    arrived = torch.zeros((num_tokens, shape.num_kv_heads), dtype=torch.int32, device=seq_lens.device)
    return DraftAttentionPlan(tiling, window, num_queries, seq_lens, query_starts, ends, arrived)


def draft_attention(
    query: torch.Tensor, cache: KeysValues, block_tables: torch.Tensor, plan: DraftAttentionPlan, out: torch.Tensor,
    scale: float, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Compute reference.draft_attention into contiguous `out` [T, H, D]."""
    num_tokens, num_heads, size = out.shape
    key_cache, value_cache = cache
    num_kv_heads, block_size = key_cache.shape[1:3]
    group, tiling = num_heads // num_kv_heads, plan.tiling
    programs, members = tiling.programs_per_processor * num_processors(query.device), plan.num_queries * group
    parts = torch.empty((2 * programs * members, size), dtype=torch.float32, device=query.device)
    part_logs = torch.empty(2 * programs * members, dtype=torch.float32, device=query.device)
    rows, columns = max(next_power_of_2(members), 16), max(next_power_of_2(size), 16)
    early = launches_early(query.device)
    starts_early = early and num_tokens > 64  # see `decode_attention`
    if value_cache.dtype is FP8:
        value_cache = value_cache.view(torch.int16)  # pairs; strides are still in numbers
    _draft_kernel[(programs,)](
        query, key_cache, value_cache, block_tables, plan.seq_lens, plan.query_starts, plan.ends, plan.arrived, out,
        parts, part_logs, query if sinks is None else sinks, len(plan.seq_lens), num_tokens, query.stride(0),
        block_tables.stride(0), key_cache.stride(0), key_cache.stride(1), scale * LOG2_E,
        num_kv_heads, group, size, block_size, plan.window, plan.num_queries, tiling.tile, _num_seqs(plan.seq_lens),
        rows, columns, programs, max(MERGED // (rows * columns), 1),
        "ieee" if query.dtype is torch.float32 else "tf32", tiling.num_stages, tiling.setup, sinks is not None, early,
        num_warps=tiling.num_warps, **early_options(starts_early),
    )  # fmt: skip


def _num_seqs(seq_lens: torch.Tensor) -> int:
    return max(next_power_of_2(len(seq_lens)), _LEAST_SEQS)
