# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""`sampling_limits.floors` without a sort of the row: four launches of fixed shape, which a CUDA graph can hold.

1. The greatest logit of every group of 32 tokens. This reads the logits once.
2. A lower limit of each row's bound, from its groups alone. The k-th of the greatest logits of groups is one for top k.
   For top p, what lies below the limit may not have more than 1 - p of the probability, if every group were 32 times
   as likely as its best token.
3. All logits from that limit on except -inf, gathered in any order, and for top p the row's mass. This reads the logits
   a second time.
4. The bound itself: a binary search over the gathered logits' bits, by counts for top k and by masses for top p. If
   they did not fit, the search first reads the row several times, until what is between its ends does.

Counts and masses are integers, so the order in which programs and atomics add them does not matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv, next_power_of_2
from pd_kernels.sampling_limits import LOG2_E
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_masks import load_logits, mask_arguments

if TYPE_CHECKING:
    from pd_kernels.values import Draws

_PIECE, _GROUP = 4096, 32  # tokens of a program of the launches over all logits; of a group
_FEW, _GATHERED = 512, 4096  # logits that a search holds in registers
_ROW_TILE = 8192  # tokens at a time of a search that reads the row
_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # low bits that are 0 in all values of the type
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """An int32 in the order of the float32 `value`, without its SHIFT low bits. Both zeros have one key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 of a key (int64)."""
    bits = tl.where(key < 0, ((key + 1) << SHIFT) - 1, key << SHIFT).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(value, top, scale):
    """See sampling_limits.masses_of. -> int64.

    The variate times 2^40 is rounded in two halves of 20 bits: 1.5 * 2^23 + x has the integer next to x in its low
    bits. A conversion of float to int64 takes four times as long.
    """
    share = tl.exp2((value - top) * scale) * 1048576.0
    high = share + 12582912.0
    low = (share - (high - 12582912.0)) * 1048576.0 + 12582912.0
    high_bits = high.to(tl.int32, bitcast=True) - 0x4B400000
    low_bits = low.to(tl.int32, bitcast=True) - 0x4B400000
    return (high_bits.to(tl.int64) << 20) + low_bits.to(tl.int64)


@triton.jit
def _limits_of(temperatures, top_ks, top_ps, min_ps, row, vocab_size):
    """-> temperature, k, p, min p, and whether the bound needs a search (2), only min p (1), or nothing (0)."""
    heat, k = tl.load(temperatures + row), tl.load(top_ks + row)
    p, least = tl.load(top_ps + row), tl.load(min_ps + row)
    kind = tl.where((k < vocab_size) | (p < 1.0), 2, tl.where(least > 0.0, 1, 0))
    return heat, k, p, least, tl.where(heat > 0.0, kind, 0)


@triton.jit
def _load_ranked(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS: tl.constexpr):
    """See sampling_limits.ranked."""
    value = load_logits(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
    return tl.where(value == value, tl.minimum(value, 3.4028234663852886e38), float("-inf"))


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "num_words"])
def _group_tops_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, tops, vocab_size, stride, masks, mask_of_row, num_words,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, _, _, _, kind = _limits_of(temperatures, top_ks, top_ps, min_ps, row, vocab_size)
    if kind != 0:
        group = piece * (PIECE // GROUP) + tl.arange(0, PIECE // GROUP)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        value = _load_ranked(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
        tl.store(tops + row * tl.num_programs(1) * (PIECE // GROUP) + group, tl.max(value, 1))


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps"])
def _lower_limits_kernel(
    temperatures, top_ks, top_ps, min_ps, tops, best, lows, counts, totals, taken, vocab_size, num_groups, num_pieces,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    heat, k, p, _, kind = _limits_of(temperatures, top_ks, top_ps, min_ps, row, vocab_size)
    if kind != 0:
        group = tl.arange(0, GROUPS)
        top = tl.load(tops + row * num_groups + group, mask=group < num_groups, other=float("-inf"))
        greatest = tl.max(top, 0)
        low = float("-inf")
        if (kind == 2) & (greatest > float("-inf")):
            if k < vocab_size:
                low = _below_kth(top, k, greatest)
            else:
                low = _lowest_for_share(top, greatest, heat, p, GROUP)
        tl.store(best + row, greatest)
        tl.store(lows + row, low)
        tl.store(counts + row, 0)
        tl.store(taken + row * num_pieces + group, 0, mask=group < num_pieces)
        tl.store(totals + row, tl.zeros([], tl.int64))


@triton.jit
def _below_kth(tops, k, greatest):
    """A logit that is not above the k-th greatest of `tops`: the start of its 2^-7 of an octave."""
    keys = _key(tops, 16)
    first = _key(tl.full([], float("-inf"), tl.float32), 16)
    lo, hi = first, _key(greatest, 16) + 1
    while hi - lo > 1:
        mid = (lo + hi) >> 1
        enough = tl.sum((keys >= mid).to(tl.int32), 0) >= k
        lo, hi = tl.where(enough, mid, lo), tl.where(enough, hi, mid)
    bits = lo << 16
    return tl.where(lo == first, float("-inf"), (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def _lowest_for_share(tops, greatest, heat, p, GROUP: tl.constexpr):
    """A logit that is not above the bound of top p: below it, the groups have at most (1 - p) / 2 of the probability.

    A half, because rounding at most doubles the integer mass of a token that has any. Below 42 octaves none has.
    """
    share = tl.exp2((tops - greatest) * (_LOG2_E / heat))
    most = 0.49 * (1.0 - p) * tl.sum(share, 0) / GROUP
    near, far = 0.0, 42.0
    for _ in range(10):
        middle = 0.5 * (near + far)
        enough = tl.sum(tl.minimum(share, tl.exp2(-middle)), 0) <= most
        near, far = tl.where(enough, near, middle), tl.where(enough, middle, far)
    return greatest - (far + 0.01) * heat / _LOG2_E


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "num_words"])
def _gather_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, best, lows, counts, totals, taken, gathered, vocab_size, stride,
    masks, mask_of_row, num_words,
    HAS_MASKS: tl.constexpr, PIECE: tl.constexpr, GATHERED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    heat, k, _, _, kind = _limits_of(temperatures, top_ks, top_ps, min_ps, row, vocab_size)
    if kind == 2:
        token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
        value = _load_ranked(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
        # Without banned tokens: where a mask leaves fewer than k tokens, the k-th is -inf, and no search needs the rest
        chosen = (value >= tl.load(lows + row)) & (value > float("-inf"))
        count = tl.sum(chosen.to(tl.int32), 0)
        if count > 0:
            start = tl.atomic_add(counts + row, count, sem="relaxed")
            if start + count <= GATHERED:
                # faster than a prefix sum: there are few
                counter = taken + row * tl.num_programs(1) + tl.program_id(1) + tl.zeros_like(token)
                place = start + tl.atomic_add(counter, 1, mask=chosen, sem="relaxed")
                tl.store(gathered + row * GATHERED + place, value, mask=chosen)
        if k >= vocab_size:
            mass = _mass(value, tl.load(best + row), tl.div_rn(_LOG2_E, heat))
            tl.atomic_add(totals + row, tl.sum(mass, 0), sem="relaxed")


@triton.jit
def _search_few(
    source, count, lo, hi, base, needed, top, scale, MASS: tl.constexpr, SIZE: tl.constexpr, SHIFT: tl.constexpr
):
    """The greatest key in [lo, hi) from which on there is at least the mass (or number) `needed`, or `lo`.

    `source`: `count` <= SIZE logits, among them all with a key in [lo, hi) and none with a greater one. `base`: the
    mass (or number) of the row's tokens with a greater one.
    """
    at = tl.arange(0, SIZE)
    value = tl.load(source + at, mask=at < count, other=float("-inf"))
    key = tl.where(at < count, _key(value, SHIFT), -2147483648)
    weight = (at < count).to(tl.int32)
    if MASS:
        weight = _mass(value, top, scale)
    while hi - lo > 1:
        mid = lo + ((hi - lo) >> 1)
        enough = base + tl.sum(tl.where(key >= mid.to(tl.int32), weight, 0), 0) >= needed
        lo, hi = tl.where(enough, mid, lo), tl.where(enough, hi, mid)
    return lo


@triton.jit
def _above(logits, row, bound, top, scale, vocab_size, stride, masks, mask_of_row, num_words,
           HAS_MASKS: tl.constexpr, MASS: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """The number and the mass (without MASS: the number) of the row's tokens with a key of at least `bound`."""
    count, mass = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int64)
    for start in tl.range(0, vocab_size, TILE, num_stages=3):
        token = start + tl.arange(0, TILE)
        value = _load_ranked(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
        inside = (_key(value, SHIFT) >= bound.to(tl.int32)) & (value > float("-inf"))
        count += inside.to(tl.int32)
        if MASS:
            mass += tl.where(inside, _mass(value, top, scale), 0)
    number = tl.sum(count, 0)
    if MASS:
        return number, tl.sum(mass, 0)
    else:
        return number, number.to(tl.int64)


@triton.jit
def _between(lo, hi, by_value, SHIFT: tl.constexpr):
    """A key inside (lo, hi): in the middle of the values, or of the keys, where lo and hi have other exponents."""
    key = _key(0.5 * _value(lo, SHIFT) + 0.5 * _value(hi, SHIFT), SHIFT).to(tl.int64)
    return tl.where(by_value & (key > lo) & (key < hi), key, lo + ((hi - lo) >> 1))


@triton.jit
def _search(logits, row, source, counter, is_wide, count, lo, needed, top, scale, vocab_size, stride, masks,
            mask_of_row, num_words, HAS_MASKS: tl.constexpr, MASS: tl.constexpr, FEW: tl.constexpr,
            GATHERED: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """The greatest key from which on the row has at least the mass (or number) `needed`. -> int64.

    From `lo` on it has enough, or all: `count` tokens above -inf. They are at `source`, unless `is_wide`.
    """
    hi, base = _key(top, SHIFT).to(tl.int64) + 1, tl.zeros([], tl.int64)
    if is_wide:
        above, by_value = tl.zeros([], tl.int32), True
        while (count - above > GATHERED) & (hi - lo > 1):
            mid = _between(lo, hi, by_value, SHIFT)
            number, weight = _above(logits, row, mid, top, scale, vocab_size, stride, masks, mask_of_row, num_words,
                                    HAS_MASKS, MASS, TILE, SHIFT)  # fmt: skip
            if weight >= needed:
                lo, count = mid, number
            else:
                hi, above, base = mid, number, weight
            by_value = not by_value
        count -= above
        if hi - lo > 1:
            _gather_between(logits, row, lo, hi, source, counter, vocab_size, stride, masks, mask_of_row, num_words,
                            HAS_MASKS, TILE, SHIFT)  # fmt: skip
    if hi - lo > 1:
        if count <= FEW:
            lo = _search_few(source, count, lo, hi, base, needed, top, scale, MASS, FEW, SHIFT)
        else:
            lo = _search_few(source, count, lo, hi, base, needed, top, scale, MASS, GATHERED, SHIFT)
    return lo


@triton.jit
def _gather_between(logits, row, lo, hi, source, counter, vocab_size, stride, masks, mask_of_row, num_words,
                    HAS_MASKS: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """Write the row's logits with keys in [lo, hi) to `source`, in any order. The caller knows that they fit."""
    tl.debug_barrier()  # a search before has read `source`
    tl.store(counter, 0)
    tl.debug_barrier()
    for start in range(0, vocab_size, TILE):
        token = start + tl.arange(0, TILE)
        value = _load_ranked(logits, row, token, vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS)
        key = _key(value, SHIFT)
        chosen = (key >= lo.to(tl.int32)) & (key < hi.to(tl.int32)) & (value > float("-inf"))
        place = tl.atomic_add(counter + tl.zeros_like(token), 1, mask=chosen, sem="relaxed")
        tl.store(source + place, value, mask=chosen)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["temperatures", "top_ks", "top_ps", "min_ps", "num_words"])
def _search_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, best, lows, counts, totals, taken, gathered, floors, num_pieces,
    vocab_size, stride, masks, mask_of_row, num_words, HAS_MASKS: tl.constexpr,
    FEW: tl.constexpr, GATHERED: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    others_may_start(EARLY)
    wait_for_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    heat, k, p, least, kind = _limits_of(temperatures, top_ks, top_ps, min_ps, row, vocab_size)
    floor = float("-inf")
    top = tl.load(best + row, mask=kind != 0, other=float("-inf"))
    if (kind == 2) & (top > float("-inf")):
        count, total = tl.load(counts + row), tl.load(totals + row)
        source, counter = gathered + row * GATHERED, taken + row * num_pieces
        is_wide = count > GATHERED
        scale, lo = tl.div_rn(_LOG2_E, heat), _key(tl.load(lows + row), SHIFT).to(tl.int64)
        if k < vocab_size:
            lo = _search(logits, row, source, counter, is_wide, count, lo, k, top, scale, vocab_size, stride, masks,
                         mask_of_row, num_words, HAS_MASKS, False, FEW, GATHERED, TILE, SHIFT)  # fmt: skip
        if p < 1.0:
            if (k < vocab_size) & is_wide:
                count, total = _above(logits, row, lo, top, scale, vocab_size, stride, masks, mask_of_row,
                                      num_words, HAS_MASKS, True, TILE, SHIFT)  # fmt: skip
            elif k < vocab_size:
                at = tl.arange(0, GATHERED)
                value = tl.load(source + at, mask=at < count, other=float("-inf"))
                inside = (at < count) & (_key(value, SHIFT) >= lo.to(tl.int32))
                total = tl.sum(tl.where(inside, _mass(value, top, scale), 0), 0)
            share = p.to(tl.float64) * total.to(tl.float64)
            needed = tl.maximum(tl.ceil(share).to(tl.int64), 1)
            lo = _search(logits, row, source, counter, is_wide, count, lo, needed, top, scale, vocab_size, stride,
                         masks, mask_of_row, num_words, HAS_MASKS, True, FEW, GATHERED, TILE, SHIFT)  # fmt: skip
        floor = _value(lo, SHIFT)
    if (least > 0.0) & (top > float("-inf")):
        bound = top.to(tl.float64) + heat.to(tl.float64) * tl.log(least.to(tl.float64))
        floor = tl.maximum(floor, bound.to(tl.float32))
    tl.store(floors + row, floor)


def floors(logits: torch.Tensor, draws: Draws) -> torch.Tensor | None:
    """See sampling_limits.floors. -> float32 [R]; None for draws without limits. Never waits for the device."""
    limits = draws.limits
    if limits is None:
        return None
    num_rows, vocab_size = logits.shape
    pieces, device = cdiv(vocab_size, _PIECE), logits.device
    num_groups = pieces * (_PIECE // _GROUP)
    tops = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    gathered = torch.empty((num_rows, _GATHERED), dtype=torch.float32, device=device)
    # One by one: kernels are compiled for tensors that begin at multiples of 16 bytes
    best, lows, found = (torch.empty(num_rows, dtype=torch.float32, device=device) for _ in range(3))
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    taken = torch.empty((num_rows, pieces), dtype=torch.int32, device=device)
    totals = torch.empty(num_rows, dtype=torch.int64, device=device)
    bounds = draws.temperature, limits.top_k, limits.top_p, limits.min_p
    shape, masks = (vocab_size, logits.stride(0)), mask_arguments(draws, counts)
    shift, early = _SHIFT[logits.dtype], launches_early(device)
    options = early_options(early)
    _group_tops_kernel[(num_rows, pieces)](
        logits, *bounds, tops, *shape, *masks, _PIECE, _GROUP, early, num_warps=4, **options
    )
    _lower_limits_kernel[(num_rows,)](
        *bounds, tops, best, lows, counts, totals, taken, vocab_size, num_groups, pieces, _GROUP,
        next_power_of_2(num_groups), early, num_warps=8, **options,
    )  # fmt: skip
    _gather_kernel[(num_rows, pieces)](
        logits, *bounds, best, lows, counts, totals, taken, gathered, *shape, *masks, _PIECE, _GATHERED, early,
        num_warps=8, **options,
    )  # fmt: skip
    _search_kernel[(num_rows,)](
        logits, *bounds, best, lows, counts, totals, taken, gathered, found, pieces, *shape, *masks,
        _FEW, _GATHERED, _ROW_TILE, shift, early, num_warps=16, **options,
    )  # fmt: skip
    return found
