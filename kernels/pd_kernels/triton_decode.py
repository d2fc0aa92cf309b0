# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Paged decode attention: the KV of a step is divided evenly among a fixed number of programs.

The unit of work is one tile of TILE tokens of one (sequence, KV head) pair. All units of a step form one sequence (by
sequence, head, tile), and program p of P takes the p-th equal share, as stream-K does for matrix products (arXiv
2301.03598). So no mix of lengths leaves a multiprocessor idle, and the grid does not depend on lengths: kernels read
them on the device, nothing waits for the host, and a CUDA graph can replay a launch with other lengths. The start of a
pair takes time too. So SETUP units without tokens follow each pair; without them one program could get many short
pairs.

A share may begin and end within a pair. The parts of such a pair go to a workspace, each with the logarithm of its sum
of exponentials. The last program that writes a part of a pair merges all its parts. A program writes at most two parts.
Slot 0 is for the pair that an earlier program began. Slot 1 is for the pair that this program began and did not end.

The query heads that share a KV head are the rows of one matrix product. Maxima, sums and the workspace are float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.fp8_cache import FP8
from pd_kernels.launch_sizes import next_power_of_2, num_processors
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_fp8 import beside_fp8
from pd_kernels.triton_kv_tile import add_sink, add_tile, load_tile, lowest_seen, mean_of, pair_in_cache
from pd_kernels.triton_new_token import ask_for_tile, no_tokens, one_token, take_new_token

if TYPE_CHECKING:
    from pd_kernels.decode_tiling import DecodeTiling
    from pd_kernels.values import KeysValues, NewTokens

LOG2_E = 1.4426950408889634
MERGED = 8192  # most elements of parts that a merging program holds at a time


# Numbers that change from step to step are not specialized on: a variant costs a second or two to compile
@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    seq_lens, query_starts, ends, num_seqs, NUM_KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    SETUP: tl.constexpr, LEAST: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr, PROCESSORS: tl.constexpr,
    SEQS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Write ends[i]: units of one head of the sequences 0..i; after the last: a program's share of all units.

    QUERIES: 0, or the queries of a pair where sequences have several (see `triton_draft_attention`).
    """
    seq = tl.arange(0, SEQS)
    length = tl.load(seq_lens + seq, mask=seq < num_seqs, other=0)
    units = (length + TILE - 1) // TILE + tl.where(length > 0, SETUP, 0)
    pairs, lowest = 1, length - WINDOW
    if QUERIES > 0:
        start = tl.load(query_starts + seq, mask=seq < num_seqs, other=0)
        num_queries = tl.load(query_starts + seq + 1, mask=seq < num_seqs, other=0) - start
        pairs, lowest = (num_queries + QUERIES - 1) // QUERIES, lowest - num_queries + 1
    if WINDOW > 0:
        units -= tl.maximum(lowest, 0) // TILE
    tl.store(ends + seq, tl.cumsum(units * pairs, 0), mask=seq < num_seqs)
    total = tl.sum(units * pairs, 0) * NUM_KV_HEADS
    share = tl.minimum(tl.cdiv(tl.max(units, 0), PARTS), tl.cdiv(total, PROCESSORS))
    tl.store(ends + num_seqs, tl.maximum(tl.maximum(tl.cdiv(total, PROGRAMS), share), LEAST))


@triton.jit
def _attend_part(
    q, top, total, sums, odd, keys, values, table, start, stop, length, lowest, block_stride, scale,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted mean of one head's values over tokens [start, stop), and log2 of its sum of exponentials.

    `top`, `total`, `sums` and `odd` are those of the tokens before: see `no_tokens`.
    """
    HAS_PAIRS: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    for begin in tl.range(start, stop, TILE, num_stages=STAGES):
        k, v, seen = load_tile(
            keys, values, table, begin, length, lowest, block_stride, SIZE, BLOCK_SIZE, WINDOW, TILE, COLUMNS
        )  # fmt: skip
        top, total, sums, odd = add_tile(q, k, v, seen[None, :], top, total, sums, odd, scale, HAS_PAIRS, PRECISION)
    return mean_of(top, total, sums, odd, HAS_PAIRS)


@triton.jit
def merged_parts(
    parts, part_logs, first, last, count, GROUP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    MEMBERS: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Merge the parts [GROUP, SIZE] that programs [first, last] wrote for one pair. -> [MEMBERS, COLUMNS].

    The first `count` rows of the parts were written.
    """
    member, column = tl.arange(0, MEMBERS), tl.arange(0, COLUMNS)
    inside = (member < count)[:, None] & (column < SIZE)[None, :]
    top = tl.full([MEMBERS], -1e30, tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    sums = tl.zeros([MEMBERS, COLUMNS], tl.float32)
    for begin in range(first, last + 1, MERGED):
        program = begin + tl.arange(0, MERGED)
        slot = (2 * program + (program == first).to(tl.int32))[:, None] * GROUP + member[None, :]
        known = (program <= last)[:, None] & (member < count)[None, :]
        log = tl.load(part_logs + slot, mask=known, other=-1e30, cache_modifier=".cg")
        at = slot[:, :, None] * SIZE + column[None, None, :]
        mask = (program <= last)[:, None, None] & inside[None, :, :]
        part = tl.load(parts + at, mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, tl.max(log, 0))
        weight = tl.exp2(log - higher[None, :])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 0)
        sums = sums * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    return sums / total[:, None]


@triton.jit
def _attend_pair(
    q, top, total, sums, odd, keys, values, table, start, length, lowest, first, count, tiles,
    first_program, last_program, counter, target, parts, part_logs, block_stride, scale,
    GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEMBERS: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend tiles [first, first + count) of one (sequence, KV head), which begin at token `start`.

    `top` to `odd`: see `_attend_part`. Programs [first_program, last_program] share the pair.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    mean, log = _attend_part(
        q, top, total, sums, odd, keys, values, table, start, start + count * TILE, length, lowest, block_stride,
        scale, SIZE, BLOCK_SIZE, WINDOW, TILE, COLUMNS, PRECISION, STAGES,
    )  # fmt: skip
    if count == tiles:
        tl.store(target + at, mean.to(target.dtype.element_ty), mask=inside)
    else:
        slot = (2 * tl.program_id(0) + (first == 0).to(tl.int32)) * GROUP
        tl.store(parts + slot * SIZE + at, mean, mask=inside)
        tl.store(part_logs + slot + row, log, mask=row < GROUP)
        tl.debug_barrier()  # the whole part is written before its arrival is counted
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last_program - first_program:
            merged = merged_parts(
                parts, part_logs, first_program, last_program, GROUP, GROUP, SIZE, COLUMNS, MEMBERS, MERGED
            )  # fmt: skip
            member = tl.arange(0, MEMBERS)
            there = (member < GROUP)[:, None] & (column < SIZE)[None, :]
            place = target + member[:, None] * SIZE + column[None, :]
            tl.store(place, merged.to(target.dtype.element_ty), mask=there)
            tl.store(counter, 0)  # for the next layer


@triton.jit
def _clear_empty(
    out, ends, num_seqs, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Set the outputs of sequences of length 0 to 0. The programs share the sequences."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    for seq in range(tl.program_id(0), num_seqs, PROGRAMS):
        before = tl.load(ends + seq - 1, mask=seq > 0, other=0)
        if tl.load(ends + seq) == before:
            rows = out + seq * (NUM_KV_HEADS * GROUP * SIZE)
            for head in range(NUM_KV_HEADS):
                tl.store(rows + head * GROUP * SIZE + at, tl.zeros([ROWS, COLUMNS], out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def _decode_kernel(
    query, query_norm, key_norm, cos, sin, slot_mapping, key_cache, value_cache, block_tables, seq_lens, ends, arrived,
    out, parts, part_logs, sinks, num_seqs, query_stride, table_stride, block_stride, head_stride, scale, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr, MEMBERS: tl.constexpr, MERGED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SETUP: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """If ROTARY is not 0, `query` has keys and values too, and the cache lacks each sequence's last token."""
    HAS_PAIRS: tl.constexpr = key_cache.dtype.element_ty == tl.float8e4nv
    NUM_SUMS: tl.constexpr = COLUMNS // 2 if HAS_PAIRS else COLUMNS
    others_may_start(EARLY)
    program = tl.program_id(0)
    line = tl.load(ends + tl.arange(0, SEQS), mask=tl.arange(0, SEQS) < num_seqs, other=0)
    share = tl.load(ends + num_seqs)
    unit = program * share
    stop = tl.minimum(unit + share, tl.max(line, 0) * NUM_KV_HEADS)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = row[:, None] * SIZE + column[None, :]
    inside = (row < GROUP)[:, None] & (column < SIZE)[None, :]
    while unit < stop:
        over = (line <= unit // NUM_KV_HEADS) & (tl.arange(0, SEQS) < num_seqs)  # sequences that end before the unit
        seq = tl.sum(over.to(tl.int32), 0).to(tl.int64)
        before = tl.max(tl.where(over, line, 0), 0)
        units = tl.min(tl.where(over | (line == 0), 2147483647, line), 0) - before  # of one head
        head = (unit - before * NUM_KV_HEADS) // units
        start = before * NUM_KV_HEADS + head * units  # of the pair
        tiles, first = units - SETUP, unit - start
        count = tl.minimum(tiles - first, stop - unit)
        if count > 0:
            num_stored = tl.load(seq_lens + seq)
            lowest = lowest_seen(num_stored, WINDOW)
            begin = (lowest // TILE + first) * TILE
            keys, values, table = pair_in_cache(
                key_cache, value_cache, block_tables, seq, head, table_stride, head_stride
            )  # fmt: skip
            if ROTARY > 0:
                num_stored -= 1
                ask_for_tile(keys, values, table, begin, num_stored, block_stride, SIZE, BLOCK_SIZE, TILE, EARLY)
                is_last = first + count == tiles
                q, key, value = take_new_token(
                    query, query_norm, key_norm, cos, sin, slot_mapping, key_cache, value_cache, seq, head, is_last,
                    query_stride, block_stride, head_stride, eps,
                    NUM_KV_HEADS, GROUP, SIZE, BLOCK_SIZE, ROWS, COLUMNS, ROTARY, NORM, EARLY,
                )  # fmt: skip
                top, total, sums, odd = one_token(q, key, value, is_last, scale, ROWS, NUM_SUMS, HAS_PAIRS)
            else:
                wait_for_others(EARLY)
                q = tl.load(query + seq * query_stride + head * GROUP * SIZE + at, mask=inside, other=0.0)
                top, total, sums, odd = no_tokens(ROWS, NUM_SUMS)
            if SINKS:
                has_sink = (row < GROUP) & (first + count == tiles)
                top, total, sums, odd = add_sink(sinks, head * GROUP + row, has_sink, top, total, sums, odd)
            if HAS_PAIRS:
                q = beside_fp8(q)
            _attend_pair(
                q, top, total, sums, odd, keys, values, table, begin, num_stored, lowest, first, count, tiles,
                start // share, (start + tiles - 1) // share, arrived + seq * NUM_KV_HEADS + head,
                out + (seq * NUM_KV_HEADS + head) * GROUP * SIZE, parts, part_logs, block_stride, scale,
                GROUP, SIZE, BLOCK_SIZE, WINDOW, TILE, ROWS, COLUMNS, MEMBERS, MERGED, PRECISION, STAGES,
            )  # fmt: skip
        unit = start + units
    wait_for_others(EARLY)
    _clear_empty(out, ends, num_seqs, NUM_KV_HEADS, GROUP, SIZE, ROWS, COLUMNS, PROGRAMS)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The data that the layers of one step share. Use it on one stream at a time."""

    tiling: DecodeTiling
    window: int
    ends: torch.Tensor  # int32 [S + 1]: end of each sequence's units of one head; then a program's share
    arrived: torch.Tensor  # int32 [S, num_kv_heads]: parts so far; 0 between launches
    split_arrived: torch.Tensor | None  # the same for `split_attention`; None: there are too many pairs for it


def plan_decode(seq_lens: torch.Tensor, num_kv_heads: int, window: int, tiling: DecodeTiling) -> DecodePlan:
    """Plan the attention of decodes with lengths `seq_lens` int32 [S]. Two launches; does not wait for the device."""
    num_seqs, processors = len(seq_lens), num_processors(seq_lens.device)
    ends = plan_shares(seq_lens, num_kv_heads, window, tiling, next_power_of_2(num_seqs))
    arrived = torch.zeros((2, num_seqs, num_kv_heads), dtype=torch.int32, device=seq_lens.device)
    at_once = processors if seq_lens.is_cuda else num_seqs * num_kv_heads * tiling.splits  # the interpreter needs none
    splits = tiling.splits_pairs(num_seqs * num_kv_heads, at_once)
    return DecodePlan(tiling, window, ends, arrived[0], arrived[1] if splits else None)


def plan_shares(
    seq_lens: torch.Tensor, num_kv_heads: int, window: int, tiling: DecodeTiling, most_seqs: int,
    query_starts: torch.Tensor | None = None, num_queries: int = 0,
) -> torch.Tensor:  # fmt: skip
    """`DecodePlan.ends`. `most_seqs`: a power of 2. `num_queries`: of a pair, with `query_starts`; 0: each has one."""
    num_seqs, processors = len(seq_lens), num_processors(seq_lens.device)
    ends = torch.empty(num_seqs + 1, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(1,)](
        seq_lens, seq_lens if query_starts is None else query_starts, ends, num_seqs, num_kv_heads, window, tiling.tile,
        tiling.setup, tiling.least, tiling.parts, tiling.programs_per_processor * processors, processors, most_seqs,
        num_queries, num_warps=4,
    )  # fmt: skip
    return ends


def decode_attention(
    query: torch.Tensor,
    cache: KeysValues,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    scale: float,
    new: NewTokens | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute reference.decode_attention into contiguous `out`. A sequence of length 0 (padding) gives zeros.

    With `new`, `query` is `heads` of reference.norm_rope_write. That work is done first; padding is not stored.
    """
    num_seqs, num_heads, size = out.shape
    key_cache, value_cache = cache
    num_kv_heads, block_size = key_cache.shape[1:3]
    group, tiling = num_heads // num_kv_heads, plan.tiling
    programs = tiling.programs_per_processor * num_processors(query.device)
    early = launches_early(query.device)
    # Launched early, programs start where the products before leave room: three on some processors, none on others, but
    # each has an equal share of the keys. A step of 8 sequences of 1k to 15k took 7.2 ms early and 6.2 ordinarily
    # (8B, one H200). Steps gain 1 to 2 percent where those products end soon, as in a small model, and up to 1
    # from 65 sequences on, where the products are cuBLASLt's and let no program start early; so does one sequence
    starts_early = early and (num_seqs == 1 or num_seqs > 64 or (num_seqs > 16 and num_heads <= 16))
    parts = torch.empty((2 * programs * group, size), dtype=torch.float32, device=query.device)
    part_logs = torch.empty(2 * programs * group, dtype=torch.float32, device=query.device)
    columns, members = max(next_power_of_2(size), 16), next_power_of_2(group)
    seqs = next_power_of_2(num_seqs)
    usual = next_power_of_2(programs // (seqs * num_kv_heads) + 1)  # parts of a pair if lengths are equal
    merged = max(min(usual, MERGED // (members * columns)), 1)
    if value_cache.dtype is FP8:
        value_cache = value_cache.view(torch.int16)  # pairs; strides are still in numbers
    token, rotary, eps = [query] * 5, 0, 0.0
    if new is not None:
        norms, rotary = new.norms, 2 * new.cos.shape[1]
        query_norm, key_norm, eps = (query, query, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        token = [query_norm, key_norm, new.cos, new.sin, new.slot_mapping]
    _decode_kernel[(programs,)](
        query, *token, key_cache, value_cache, block_tables, seq_lens, plan.ends, plan.arrived, out, parts, part_logs,
        query if sinks is None else sinks, num_seqs, query.stride(0), block_tables.stride(0), key_cache.stride(0),
        key_cache.stride(1), scale * LOG2_E, eps,
        num_kv_heads, group, size, block_size, plan.window, tiling.tile, seqs,
        max(members, 16), columns, programs, members, merged,
        "ieee" if query.dtype is torch.float32 else "tf32", tiling.num_stages,
        tiling.setup, rotary, new is not None and new.norms is not None, sinks is not None, early,
        num_warps=tiling.num_warps, **early_options(starts_early),
    )  # fmt: skip
