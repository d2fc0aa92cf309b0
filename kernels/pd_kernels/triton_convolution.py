# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The causal convolution of layers with states: one launch for decodes; else one for outputs and one for states.

States are written after all outputs have been computed, because a sequence may read and write the same slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from pd_kernels.launch_sizes import cdiv
from pd_kernels.state import PIECE
from pd_kernels.triton_dependent_launch import early_options, launches_early, others_may_start, wait_for_others
from pd_kernels.triton_pieces import most_pieces, sequence_of, tokens_of

if TYPE_CHECKING:
    from pd_kernels.state import StateCache, StatePlan

DECODE_CHANNELS = 512  # of a program
PIECE_CHANNELS = 256
# Of a piece at once. With the whole piece a program of 128 channels had 254 registers (sm_90), so a multiprocessor had
# one program, which waited for memory most of the time: 2.8 ms for 65,536 tokens and 8,192 channels. Now 87 to 128
PIECE_ROWS = 8


@triton.jit
def _places(channel, head_stride, KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr):
    """Where a slot has the inputs of channels. KEYS: channels of all queries; VALUES: of a key head's values."""
    value = channel - 2 * KEYS
    head = tl.where(value < 0, channel % KEYS // KEY_DIM, value // VALUES)
    own = tl.where(value < 0, channel // KEYS * KEY_DIM + channel % KEYS % KEY_DIM, 2 * KEY_DIM + value % VALUES)
    return head * head_stride + own * (WIDTH - 1)


@triton.jit
def _keep(
    x, conv, source, slot, end, start, channel, place, inside, x_stride, slot_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the last inputs before token `end` to a slot. Those before `start` are in the source, or are zeros."""
    tap, channel, place = tl.arange(0, triton.next_power_of_2(WIDTH - 1))[None, :], channel[:, None], place[:, None]
    known, at = inside[:, None] & (tap < WIDTH - 1), end - WIDTH + 1 + tap
    old, before = conv + source * slot_stride + place, at - start + WIDTH - 1
    kept = tl.load(x + at * x_stride + channel, mask=known & (at >= start), other=0.0)
    kept += tl.load(old + before, mask=known & (at < start) & (source >= 0), other=0.0)
    tl.debug_barrier()  # the slot may be the source
    tl.store(conv + slot * slot_stride + place + tap, kept, mask=known)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _taps_of(weight, channel, known, WIDTH: tl.constexpr):
    """The weights [channels, taps], by loads of neighbours: one a tap would touch a sector for each channel."""
    tap = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = known[:, None] & (tap < WIDTH)
    return tl.load(weight + channel[:, None] * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _tap(taps, index: tl.constexpr):
    """-> float32 [channels]"""
    return tl.sum(tl.where(tl.arange(0, taps.shape[1])[None, :] == index, taps, 0.0), 1)


@triton.jit
def _begin(
    x, conv, out, taps, shift, source, start, low, high, channel, place, known, num_channels, x_stride, slot_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The outputs of rows [low, high) of a piece that need inputs of before the step. They are fewer than WIDTH."""
    row, known = low + tl.arange(0, triton.next_power_of_2(WIDTH - 1)), known[None, :]
    inside = ((row < high) & (row < start + WIDTH - 1))[:, None] & known
    total, row_at = tl.zeros([row.shape[0], channel.shape[0]], tl.float32), x + row[:, None] * x_stride + channel
    for tap in tl.static_range(WIDTH):
        behind, before = WIDTH - 1 - tap, (row - start + tap)[:, None]
        seen = tl.load(row_at - behind * x_stride, mask=inside & (before >= WIDTH - 1), other=0.0)
        if source >= 0:
            old = conv + source * slot_stride + place[None, :] + before
            seen += tl.load(old, mask=inside & (before < WIDTH - 1), other=0.0)
        total += seen.to(tl.float32) * _tap(taps, tap)[None, :]
    result = _silu(total + shift[None, :]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * num_channels + channel[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["num_seqs"])
def _pieces_kernel(
    x, weight, bias, conv, sources, starts, positions, piece_starts, saves, out, num_seqs, num_channels,
    x_stride, slot_stride, head_stride,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, SAVES: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS: of a round. All rounds of a piece use its weights, and few registers, so that several programs fit."""
    piece, channel = tl.program_id(1), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    if piece >= tl.load(piece_starts + num_seqs):
        return
    known = channel < num_channels
    taps, shift = _taps_of(weight, channel, known, WIDTH), tl.zeros([CHANNELS], tl.float32)
    if BIAS:
        shift = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    sequence = sequence_of(piece_starts, num_seqs, piece)
    base, low, high = tokens_of(starts, positions, piece_starts, sequence, piece, SIZE)
    source, start = tl.load(sources + sequence).to(tl.int64), tl.load(starts + sequence)
    if low < start + WIDTH - 1:
        place = _places(channel, head_stride, KEYS, KEY_DIM, VALUES, WIDTH)
        _begin(
            x, conv, out, taps, shift, source, start, low, high, channel, place, known, num_channels, x_stride,
            slot_stride, WIDTH,
        )  # fmt: skip
    least = tl.maximum(low, start + WIDTH - 1)
    for first in range(0, SIZE, ROWS):
        row = base + first + tl.arange(0, ROWS)
        inside = ((row >= least) & (row < high))[:, None] & known[None, :]
        total, row_at = tl.zeros([ROWS, CHANNELS], tl.float32), x + row[:, None] * x_stride + channel[None, :]
        for tap in tl.static_range(WIDTH):
            seen = tl.load(row_at - (WIDTH - 1 - tap) * x_stride, mask=inside, other=0.0)
            total += seen.to(tl.float32) * _tap(taps, tap)[None, :]
        result = _silu(total + shift[None, :]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * num_channels + channel[None, :], result, mask=inside)
    if SAVES:
        saved = tl.load(saves + piece).to(tl.int64)
        if saved >= 0:
            place = _places(channel, head_stride, KEYS, KEY_DIM, VALUES, WIDTH)
            _keep(x, conv, source, saved, high, start, channel, place, known, x_stride, slot_stride, WIDTH)


@triton.jit
def _states_kernel(
    x, conv, sources, slots, starts, num_channels, x_stride, slot_stride, head_stride,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    sequence, channel = tl.program_id(1), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(starts + sequence).to(tl.int64), tl.load(starts + sequence + 1).to(tl.int64)
    if start < end:
        source, slot = tl.load(sources + sequence).to(tl.int64), tl.load(slots + sequence).to(tl.int64)
        place, known = _places(channel, head_stride, KEYS, KEY_DIM, VALUES, WIDTH), channel < num_channels
        _keep(x, conv, source, slot, end, start, channel, place, known, x_stride, slot_stride, WIDTH)


@triton.jit
def _decode_kernel(
    x, weight, bias, conv, sources, slots, saves, out, num_channels, x_stride, slot_stride, head_stride,
    KEYS: tl.constexpr, KEY_DIM: tl.constexpr, VALUES: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, SAVES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A sequence's row: the state is shifted by one input."""
    others_may_start(EARLY)
    row, channel = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    source, slot, known = tl.load(sources + row).to(tl.int64), tl.load(slots + row).to(tl.int64), channel < num_channels
    total = tl.zeros([CHANNELS], tl.float32)
    place = conv + _places(channel, head_stride, KEYS, KEY_DIM, VALUES, WIDTH)
    old = place + source * slot_stride
    gain = tl.load(weight + channel * WIDTH + WIDTH - 1, mask=known, other=0.0).to(tl.float32)
    wait_for_others(EARLY)
    new = tl.load(x + row * x_stride + channel, mask=known, other=0.0)
    saved = tl.full([], -1, tl.int64)
    if SAVES:
        saved = tl.load(saves + row).to(tl.int64)
    for tap in tl.static_range(WIDTH - 1):
        seen = tl.load(old + tap, mask=known & (source >= 0), other=0.0)
        total += seen.to(tl.float32) * tl.load(weight + channel * WIDTH + tap, mask=known, other=0.0).to(tl.float32)
        if tap > 0:
            tl.debug_barrier()  # the slot may be the source: all have read what is overwritten
            tl.store(place + slot * slot_stride + tap - 1, seen, mask=known)
            tl.store(place + saved * slot_stride + tap - 1, seen, mask=known & (saved >= 0))
    last = place + WIDTH - 2
    tl.debug_barrier()
    tl.store(last + slot * slot_stride, new, mask=known)
    tl.store(last + saved * slot_stride, new, mask=known & (saved >= 0))
    total += new.to(tl.float32) * gain
    if BIAS:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * num_channels + channel, _silu(total).to(out.dtype.element_ty), mask=known)


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: StateCache, plan: StatePlan
) -> torch.Tensor:
    """See StateOps. `weight` is contiguous."""
    num_tokens, num_channels = x.shape
    out = torch.empty((num_tokens, num_channels), dtype=x.dtype, device=x.device)
    width, num_seqs, channels = weight.shape[1], len(plan.slots), DECODE_CHANNELS
    conv, key_dim, weights = cache.conv, cache.recurrent.shape[2], (weight, weight if bias is None else bias)
    strides = x.stride(0), *conv.stride()[:2]
    sizes = conv.shape[1] * key_dim, key_dim, conv.shape[2] - 2 * key_dim, width
    has_saves, saves = plan.saves is not None, plan.sources if plan.saves is None else plan.saves
    if not num_tokens:
        return out
    if plan.is_decode:
        early = launches_early(x.device)
        _decode_kernel[(cdiv(num_channels, channels), num_tokens)](
            x, *weights, conv, plan.sources, plan.slots, saves, out, num_channels, *strides,
            *sizes, channels, bias is not None, has_saves, early, **early_options(early),
        )  # fmt: skip
        return out
    _pieces_kernel[(cdiv(num_channels, PIECE_CHANNELS), most_pieces(plan, num_tokens))](
        x, *weights, conv, plan.sources, plan.starts, plan.positions, plan.piece_starts, saves, out, num_seqs,
        num_channels, *strides, *sizes, PIECE_CHANNELS, bias is not None, has_saves, PIECE, PIECE_ROWS,
    )  # fmt: skip
    _states_kernel[(cdiv(num_channels, channels), num_seqs)](
        x, conv, plan.sources, plan.slots, plan.starts, num_channels, *strides, *sizes, channels
    )
    return out
