# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Attention of prompts' chunks over latent keys that are expanded: own keys causally, a prefix before them in pieces.

The softmax of a query goes on from piece to piece: each launch but the last leaves its mean and its logarithm, and the
next one begins with them. Short chunks after a prefix attend absorbed, as decodes with drafts do.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pd_kernels.chunk_tiles import cut_chunks
from pd_kernels.latent import ABSORBED_QUERIES, PREFIX_PIECE, LatentRows
from pd_kernels.launch_sizes import next_power_of_2, num_processors
from pd_kernels.triton_decode import LOG2_E
from pd_kernels.values import PrefillTiling

ABSORBED_ROWS = 2048  # queries that attend absorbed at once, about: each head's has two vectors of the latent's size

if TYPE_CHECKING:
    from pd_kernels.values import Ints, PackedSequences


@triton.jit
def _attend_expanded(
    first_q, rest_q, turned, limit, top, total, sums, keys, rope, start, stop, length, key_stride, rope_stride, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, FIRST: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over keys [start, stop). With MASKED a row sees those below its `limit`."""
    for begin in tl.range(start, stop, KEYS, num_stages=STAGES):
        number = begin + tl.arange(0, KEYS)
        there = (number < length)[:, None]
        at = keys + number.to(tl.int64)[:, None] * key_stride
        k = tl.load(at + tl.arange(0, FIRST)[None, :], mask=there, other=0.0)
        r = tl.load(rope + number[:, None] * rope_stride + tl.arange(0, ROPE)[None, :], mask=there, other=0.0)
        v = tl.load(at + NOPE + tl.arange(0, VALUE)[None, :], mask=there, other=0.0)
        scores = tl.dot(first_q, tl.trans(k), input_precision=PRECISION)
        if NOPE > FIRST:
            k = tl.load(at + FIRST + tl.arange(0, NOPE - FIRST)[None, :], mask=there, other=0.0)
            scores = tl.dot(rest_q, tl.trans(k), scores, input_precision=PRECISION)
        scores = tl.dot(turned, tl.trans(r), scores, input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(number[None, :] < limit[:, None], scores, -1e30)
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, None], input_precision=PRECISION)
        top = higher
    return top, total, sums


@triton.jit(do_not_specialize=["num_tiles"])
def _expanded_kernel(
    query, expanded, rope, tiles, means, logs, out, num_tiles, query_stride, head_stride, rope_stride, scale,
    NUM_HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, CARRIES: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head. `tiles`: see `_tiles`. CAUSAL: own keys, the last launch of a layer."""
    REST: tl.constexpr = NOPE - FIRST
    head, tile = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(tiles + tile), tl.load(tiles + num_tiles + tile)
    key, length = tl.load(tiles + 2 * num_tiles + tile), tl.load(tiles + 3 * num_tiles + tile)
    row, value = tl.arange(0, ROWS), tl.arange(0, VALUE)
    there = (row < count)[:, None]
    token = (start + row).to(tl.int64)
    at = query + token[:, None] * query_stride + head * head_stride
    first_q = tl.load(at + tl.arange(0, FIRST)[None, :], mask=there, other=0.0)
    turned = tl.load(at + NOPE + tl.arange(0, ROPE)[None, :], mask=there, other=0.0)
    rest_q = turned
    if REST > 0:
        rest_q = tl.load(at + FIRST + tl.arange(0, REST)[None, :], mask=there, other=0.0)
    KEY_STRIDE: tl.constexpr = NUM_HEADS * (NOPE + VALUE)
    keys = expanded + key.to(tl.int64) * KEY_STRIDE + head * (NOPE + VALUE)
    rope += key.to(tl.int64) * rope_stride
    place = token * NUM_HEADS + head
    top, total = tl.full([ROWS], -1e30, tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE], tl.float32)
    if CARRIES:
        carried = tl.load(tiles + 4 * num_tiles + tile) > 0
        top = tl.load(logs + place, mask=(row < count) & carried, other=-1e30)
        total = tl.where(carried, 1.0, total)
        sums = tl.load(means + place[:, None] * VALUE + value[None, :], mask=there & carried, other=0.0)
    limit, whole = length + row * 0, length // KEYS * KEYS
    if CAUSAL:
        limit, whole = length - count + 1 + row, (length - count + 1) // KEYS * KEYS
    top, total, sums = _attend_expanded(
        first_q, rest_q, turned, limit, top, total, sums, keys, rope, 0, whole, length, KEY_STRIDE, rope_stride, scale,
        NOPE, ROPE, VALUE, FIRST, KEYS, PRECISION, STAGES, False,
    )  # fmt: skip
    top, total, sums = _attend_expanded(
        first_q, rest_q, turned, limit, top, total, sums, keys, rope, whole, length, length, KEY_STRIDE, rope_stride,
        scale, NOPE, ROPE, VALUE, FIRST, KEYS, PRECISION, 1, True,
    )  # fmt: skip
    mean, to = sums / total[:, None], place[:, None] * VALUE + value[None, :]
    if CAUSAL:
        tl.store(out + to, mean.to(out.dtype.element_ty), mask=there)
    else:
        tl.store(means + to, mean, mask=there)
        tl.store(logs + place, top + tl.log2(total), mask=row < count)


@dataclass(frozen=True, slots=True)
class PrefixPiece:
    """Cached tokens of one or several chunks, which are expanded together."""

    blocks: torch.Tensor  # int64 [n]
    offsets: torch.Tensor  # int64 [n]
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpandedRun:
    """Adjacent chunks that attend to expanded keys, as all layers of the step need them."""

    first: int  # query row
    end: int
    tiling: PrefillTiling
    pieces: tuple[PrefixPiece, ...]
    tiles: torch.Tensor  # of own keys


@dataclass(frozen=True, slots=True)
class AbsorbedRun:
    """Adjacent chunks that attend absorbed."""

    first: int  # query row
    end: int
    rows: LatentRows


def plan_chunks(
    packed: PackedSequences, num_heads: int, width: int, block_size: int, dtype: torch.dtype
) -> list[ExpandedRun | AbsorbedRun]:
    """How the chunks of a step attend. Does not wait for the device. `width`: numbers of a head's key and value."""
    lens, ends = packed.host_query_lens, packed.host_seq_lens
    starts = np.concatenate(([0], np.cumsum(lens)))
    is_absorbed = (lens < ABSORBED_QUERIES) & (ends > lens)
    kinds = np.where(is_absorbed, 1 + starts[:-1] // ABSORBED_ROWS, 0)  # 0: expanded
    runs: list[ExpandedRun | AbsorbedRun] = []
    for kind, group in groupby(range(len(lens)), lambda chunk: int(kinds[chunk])):
        chunks = list(group)
        own = slice(chunks[0], chunks[-1] + 1)
        first, end = int(starts[own.start]), int(starts[own.stop])
        tables, counts = packed.block_tables[own], lens[own]
        if kind:
            places = packed.query_starts[own.start : own.stop + 1] - first
            rows = LatentRows(end - first, False, places, packed.seq_lens[own], tables, counts, ends[own])
            runs.append(AbsorbedRun(first, end, rows))
            continue
        tiling = expanded_tiling(dtype, (end - first) * num_heads, width, num_processors(tables.device))
        before = ends[own] - counts
        cuts = counts, before, tiling.rows, tables.device
        pieces = tuple(
            PrefixPiece(*_places(tables, before, piece, block_size), _tiles(*cuts, piece))
            for piece in range(0, int(before.sum()), PREFIX_PIECE)
        )
        runs.append(ExpandedRun(first, end, tiling, pieces, _tiles(*cuts)))
    return runs


def expanded_tiling(dtype: torch.dtype, num_rows: int, width: int, num_processors: int) -> PrefillTiling:
    """Tiling for a GPU with 228 KiB of shared memory per multiprocessor.

    `num_rows`: query tokens times heads. `width`: numbers of a key and a value. Large tiles read less
    from the L2 cache.
    """
    if dtype is torch.float32:
        return PrefillTiling(rows=32, keys=16, num_warps=4, num_stages=1)
    if num_rows < 2 * 128 * num_processors:
        return PrefillTiling(rows=64, keys=64, num_warps=4, num_stages=2)
    return PrefillTiling(rows=128, keys=64 if width <= 320 else 32, num_warps=8, num_stages=3)


def _tiles(counts: Ints, before: Ints, rows: int, device: torch.device, piece: int | None = None) -> torch.Tensor:
    """Tiles of chunks, most keys first, int32 [5, n]: first query row, queries, first key, keys, whether it goes on.

    Keys are own ones, up to that of the last query; or those of a `piece` of the prefixes, which lie one after the
    other, from there on. What goes on: the softmax over the keys before these.
    """
    chunk, first = cut_chunks(counts, counts, 0, rows)
    starts = np.cumsum(counts) - counts
    queries = np.minimum(counts[chunk] - first, rows)
    key, length, carried = starts, first + queries, before > 0
    if piece is not None:
        ends = np.cumsum(before)
        low, high = (np.clip(places, piece, piece + PREFIX_PIECE) for places in (ends - before, ends))
        key, length, carried = low - piece, (high - low)[chunk], low > ends - before
    found = np.stack((starts[chunk] + first, queries, key[chunk], length, carried[chunk]))[:, length > 0]
    found = np.ascontiguousarray(found[:, np.argsort(-found[3], kind="stable")], np.int32)
    return torch.from_numpy(found).to(device, non_blocking=True)


def _places(tables: torch.Tensor, before: Ints, piece: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and offsets of the tokens of a piece."""
    number = np.arange(piece, min(piece + PREFIX_PIECE, int(before.sum())))
    chunk = np.searchsorted(np.cumsum(before), number, side="right")
    position = number - (np.cumsum(before) - before)[chunk]
    moved = torch.from_numpy(np.stack((chunk, position // block_size, position % block_size)))
    chunks, columns, offsets = moved.to(tables.device, non_blocking=True)
    return tables[chunks, columns].long(), offsets


def expanded_prefill(
    query: torch.Tensor, own: torch.Tensor, expand: torch.Tensor, cache: torch.Tensor, run: ExpandedRun, scale: float,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """See LatentOps.prefill. `query`, `own` and `out` are those of the run."""
    (num_tokens, num_heads, size), rank = query.shape, expand.shape[2]
    weight, rope = expand.reshape(-1, rank), own.shape[1] - rank
    nope, value = size - rope, out.shape[2]
    tiling, first = run.tiling, next_power_of_2(nope + 1) // 2
    means = logs = out
    if run.pieces:
        means, logs = (out.new_empty(num_tokens, num_heads, n, dtype=torch.float32) for n in (value, 1))
    for index in range(len(run.pieces) + 1):
        rows, tiles, is_last = own, run.tiles, index == len(run.pieces)
        if not is_last:
            piece = run.pieces[index]
            rows, tiles = cache[piece.blocks, piece.offsets], piece.tiles
        _expanded_kernel[(num_heads, tiles.shape[1])](
            query, F.linear(rows[:, :rank], weight), rows[:, rank:], tiles, means, logs, out, tiles.shape[1],
            *query.stride()[:2], rows.stride(0), scale * LOG2_E,
            num_heads, nope, rope, value, first, tiling.rows, tiling.keys, is_last, bool(run.pieces),
            "ieee" if query.dtype is torch.float32 else "tf32", tiling.num_stages, num_warps=tiling.num_warps,
        )  # fmt: skip
