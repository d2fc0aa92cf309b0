# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""(token, expert) pairs sorted by expert on the device, and cut into tiles of one expert each.

The host does not know how many pairs an expert has, so there are as many tiles as there may be at most. Unused tiles
are marked. Programs count the experts of BLOCK pairs each, then every program adds up all counts and puts its pairs
into their places.

The memory accelerator copies whole tiles. For it, each pair gets a row instead, and the rows of a tile begin at a
multiple of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others

_BLOCK = 256  # pairs of a program: 1,024 take 4 us longer to sort. With many pairs, 512: fewer counts to add

# Pairs that each program counts for itself, without a launch that counts. Measured up to 1,152; a step of 2,304 lost
# 57% with this and other changes (benchmarks/LOG.md), and which of them did it is not known
_MOST_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pair p is the choice p % k of token p // k."""

    order: torch.Tensor  # int32 [pairs], by expert
    tiles: torch.Tensor  # int32 [3, tiles]: the expert, or -1 for an unused tile; first and last + 1 of its pairs


class SortedRows(NamedTuple):
    """The rows of pairs, and SortedPairs."""

    x: torch.Tensor  # [pairs, size], by expert
    order: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlacedPairs:
    """As SortedPairs. The rows of tile t are t * rows to (t + 1) * rows - 1; rows of no pair are after an expert's."""

    rows: torch.Tensor  # int32 [pairs]: of each pair
    experts: torch.Tensor  # int32 [tiles]; -1 for an unused tile


@dataclass(frozen=True, slots=True)
class OwnPairs:
    """Those pairs of a step that this rank computes: of `num_own` consecutive experts from `first` on."""

    chosen: torch.Tensor  # int64 [T, k], contiguous, of all pairs
    first: int
    num_own: int


@triton.jit
def own_expert(expert, first_own, num_own, PART: tl.constexpr):
    """The number of an expert among the weights. PART: -1 for one that another rank has."""
    if PART:
        expert -= first_own
        expert = tl.where((expert >= 0) & (expert < num_own), expert, -1)
    return expert


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    chosen, counts, num_pairs, first_own, num_own,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    wait_for_others(EARLY)
    expert = own_expert(tl.load(chosen + pair, mask=pair < num_pairs, other=0).to(tl.int32), first_own, num_own, PART)
    found = tl.histogram(expert, EXPERTS, mask=(pair < num_pairs) & (expert >= 0))
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_blocks"])
def _place_kernel(
    chosen, counts, order, tiles, num_pairs, num_tiles, num_blocks, first_own, num_own,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, PLACED: tl.constexpr,
    PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PLACED: `order` becomes the row of each pair. PART: pairs of other ranks' experts get none.

    ALL is not 0: there are no counts, and each program counts all pairs, at most ALL.
    """
    others_may_start(EARLY)
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    expert, pair = tl.arange(0, EXPERTS), block * BLOCK + place
    wait_for_others(EARLY)
    known = pair < num_pairs
    mine = own_expert(tl.load(chosen + pair, mask=known, other=0).to(tl.int32), first_own, num_own, PART)
    known = known & (mine >= 0)
    own = tl.histogram(mine, EXPERTS, mask=known)
    total, before = own, tl.zeros([EXPERTS], tl.int32)
    if ALL > 0:
        every = tl.arange(0, ALL)
        others = tl.load(chosen + every, mask=every < num_pairs, other=0).to(tl.int32)
        others = own_expert(others, first_own, num_own, PART)
        counted = (every < num_pairs) & (others >= 0)
        total = tl.histogram(others, EXPERTS, mask=counted)
        before = tl.histogram(others, EXPERTS, mask=counted & (every < block * BLOCK))
    elif num_blocks > 1:
        total = tl.zeros([EXPERTS], tl.int32)
        for other in range(num_blocks):
            count = tl.load(counts + other * EXPERTS + expert)
            total += count
            before += tl.where(other < block, count, 0)
    end = tl.cumsum(total, 0)
    start, needed = end - total, tl.cdiv(total, ROWS)
    last = tl.cumsum(needed, 0)
    key = tl.sort(tl.where(known, mine, EXPERTS) * BLOCK + place)  # pairs that are none come last
    group = tl.minimum(key // BLOCK, EXPERTS - 1)
    first_place = (last - needed) * ROWS if PLACED else start
    shift = tl.gather(first_place + before - (tl.cumsum(own, 0) - own), group, 0)
    there = key < EXPERTS * BLOCK
    if PLACED:
        tl.store(order + block * BLOCK + key % BLOCK, shift + place, mask=there)
    else:
        tl.store(order + shift + place, block * BLOCK + key % BLOCK, mask=there)
    for index in range(block, tl.max(needed, 0), num_blocks):
        tile, first = last - needed + index, start + index * ROWS
        tl.store(tiles + tile, expert, mask=index < needed)
        tl.store(tiles + num_tiles + tile, first, mask=index < needed)
        tl.store(tiles + 2 * num_tiles + tile, tl.minimum(first + ROWS, end), mask=index < needed)
    for tile in range(tl.max(last, 0) + block * BLOCK, num_tiles, num_blocks * BLOCK):
        tl.store(tiles + tile + place, -1, mask=tile + place < num_tiles)


def sort_pairs(
    chosen: torch.Tensor, num_experts: int, rows: int, most: int | None = None, own: OwnPairs | None = None
) -> SortedPairs:
    """Sort the pairs of `chosen` (int64 [T, k], contiguous, T > 0) by expert. Tiles have up to `rows` pairs.

    `most`: pairs that a program sorts, a power of two; None: a number chosen by measurement. `own`: leave out
    all other pairs, and number the experts from the first of these on.
    """
    return SortedPairs(*_place(chosen, num_experts, rows, most, own, is_placed=False))


def place_pairs(
    chosen: torch.Tensor, num_experts: int, rows: int, most: int | None = None, own: OwnPairs | None = None
) -> PlacedPairs:
    """Give each pair a row, by expert, in tiles of `rows` rows, undefined for pairs left out. See `sort_pairs`."""
    placed, tiles = _place(chosen, num_experts, rows, most, own, is_placed=True)
    return PlacedPairs(placed, tiles[0])


def _place(
    chosen: torch.Tensor, num_experts: int, rows: int, most: int | None, own: OwnPairs | None, *, is_placed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_pairs, device, early = chosen.numel(), chosen.device, launches_early(chosen.device)
    num_tiles = num_pairs // rows + min(num_experts, num_pairs)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    most = most or (_BLOCK if num_pairs <= 32768 else 2 * _BLOCK)
    block = max(16, min(most, next_power_of_2(num_pairs)))
    num_blocks, experts = cdiv(num_pairs, block), next_power_of_2(num_experts)
    counts, experts_here = order, (0, 0) if own is None else (own.first, own.num_own)
    every = next_power_of_2(num_pairs) if block < num_pairs <= _MOST_AT_ONCE else 0
    if num_blocks > 1 and not every:
        counts = torch.empty((num_blocks, experts), dtype=torch.int32, device=device)
        _count_kernel[(num_blocks,)](
            chosen, counts, num_pairs, *experts_here, experts, block, own is not None, early,
            num_warps=4, **early_options(early),
        )  # fmt: skip
    _place_kernel[(num_blocks,)](
        chosen, counts, order, tiles, num_pairs, num_tiles, num_blocks, *experts_here, rows, experts, block,
        every, is_placed, own is not None, early, num_warps=8, **early_options(early),
    )  # fmt: skip
    return order, tiles
