# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The new token of a decode, as the QKV product leaves it: its norms, its rotation, its write, and its own score.

So decode attention needs no launch of `triton_rotary` before it. Rounding is that of `triton_rotary`. The new key and
value are not read back from the cache: programs that share a pair do not wait for the one that writes them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pd_kernels.triton_dependent_launch import wait_for_others
from pd_kernels.triton_fp8 import stored


@triton.jit
def no_tokens(ROWS: tl.constexpr, NUM_SUMS: tl.constexpr):
    """A softmax over nothing yet: highest score, sum of exponentials, weighted sums of even and of odd columns."""
    top = tl.full([ROWS], -1e30, tl.float32)
    nothing = tl.zeros([ROWS, NUM_SUMS], tl.float32)
    return top, tl.zeros([ROWS], tl.float32), nothing, nothing


@triton.jit
def one_token(
    q, key, value, is_there, scale, ROWS: tl.constexpr, NUM_SUMS: tl.constexpr, HAS_PAIRS: tl.constexpr
):  # fmt: skip
    """A softmax over one token if it `is_there`, else over nothing. `value` [1, COLUMNS] is 0 then."""
    top, total, sums, odd = no_tokens(ROWS, NUM_SUMS)
    score = tl.sum(q.to(tl.float32) * key.to(tl.float32), 1) * scale
    top, total = tl.where(is_there, score, top), tl.where(is_there, 1.0, total)
    value = value.to(tl.float32)
    if HAS_PAIRS:
        value, second = tl.split(tl.reshape(value, [1, NUM_SUMS, 2]))
        odd += second
    return top, total, sums + value, odd


@triton.jit
def ask_for(address, num_bytes):
    """Let the L2 cache load bytes at `address`, both multiples of 16; none if `num_bytes` is 0 or less."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred asks, some;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 asks, thread, 0;
        setp.gt.s32 some, $2, 0;
        and.pred asks, asks, some;
        @asks cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r", [address, num_bytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_for_tile(
    keys, values, table, start, num_stored, block_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Let the L2 cache load the tile of old tokens that begins at `start`, while the program waits for its queries.

    Only where the tile lies within a block, and on GPUs with early launches: they have the instruction.
    """
    BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
    if EARLY and BLOCK_SIZE % TILE == 0 and SIZE * BYTES % 16 == 0:
        place = tl.load(table + start // BLOCK_SIZE).to(tl.int64) * block_stride + start % BLOCK_SIZE * SIZE
        num_bytes = tl.minimum(num_stored - start, TILE) * (SIZE * BYTES)
        ask_for((keys + place).to(tl.int64), num_bytes)
        if BYTES == 1:
            place = place // 2  # `values` are pairs
        ask_for((values + place).to(tl.int64), num_bytes)


@triton.jit
def _gains(norm, at, mask, NORM: tl.constexpr):
    """Weights of the columns `at`; without norms a constant that nothing reads."""
    gains = tl.full(at.shape, 1.0, tl.float32)
    if NORM:
        gains = tl.load(norm + at, mask=mask, other=0.0)
    return gains


@triton.jit
def _rotated(
    heads, at, partner, mask, gains, partner_gains, cosine, sine, eps, SIZE: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Heads [ROWS, COLUMNS] at the pointers `heads` [ROWS, 1], in their dtype. See `triton_rotary._rotated`."""
    dtype = heads.dtype.element_ty
    x = tl.load(heads + at, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(heads + partner, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = ((x * scale).to(gains.dtype).to(tl.float32) * gains.to(tl.float32)).to(dtype).to(tl.float32)
        other = (other * scale).to(gains.dtype).to(tl.float32) * partner_gains.to(tl.float32)
        other = other.to(dtype).to(tl.float32)
    return (x * cosine + other * sine).to(dtype)


@triton.jit
def take_new_token(
    heads, query_norm, key_norm, cos, sin, slot_mapping, key_cache, value_cache, seq, head, writes, heads_stride,
    block_stride, head_stride, eps,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rotated queries [ROWS, COLUMNS] of one (sequence, KV head); key (in each row) and value [1, COLUMNS] as stored.

    If the program `writes` it stores both. Otherwise they are 0.
    """
    HALF: tl.constexpr = ROTARY // 2
    ALIGNED: tl.constexpr = 8 if HALF % 8 == 0 else 1
    # All in one layout, the queries': else each of these would pass through shared memory, some after the wait
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = row * 0 + column
    inside, turns, is_low = at < SIZE, at < ROTARY, at < HALF
    angle = tl.where(is_low, at, at - HALF)
    partner = tl.where(turns, tl.where(is_low, at + HALF, at - HALF), at)
    angle = tl.max_contiguous(tl.multiple_of(angle, (1, ALIGNED)), (1, ALIGNED))
    partner = tl.max_contiguous(tl.multiple_of(partner, (1, ALIGNED)), (1, ALIGNED))
    cosine = tl.load(cos + seq * HALF + angle, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + seq * HALF + angle, mask=turns, other=0.0).to(tl.float32)
    sine = tl.where(is_low, -sine, sine)
    q_gains, q_partners = _gains(query_norm, at, inside, NORM), _gains(query_norm, partner, inside, NORM)
    k_gains, k_partners = _gains(key_norm, at, inside, NORM), _gains(key_norm, partner, inside, NORM)
    slot = tl.load(slot_mapping + seq)
    wait_for_others(EARLY)  # angles, slots and weights are older than the launches that are early
    token = heads + seq * heads_stride
    query = token + (head * GROUP + row) * SIZE
    q = _rotated(
        query, at, partner, (row < GROUP) & inside, q_gains, q_partners, cosine, sine, eps, SIZE, NORM
    )  # fmt: skip
    token += (NUM_KV_HEADS * GROUP + head) * SIZE
    key = _rotated(
        token + row * 0, at, partner, inside & writes, k_gains, k_partners, cosine, sine, eps, SIZE, NORM
    )  # fmt: skip
    mask = (column < SIZE) & writes
    value = tl.load(token + NUM_KV_HEADS * SIZE + column, mask=mask, other=0.0)
    key, value = stored(key, key_cache), stored(value, key_cache)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SIZE + head.to(tl.int64) * head_stride
    writes = writes & (slot >= 0)
    tl.store(key_cache + place + at, key, mask=(row == 0) & inside & writes)
    values = value_cache.to(key_cache.dtype, bitcast=True)  # of FP8 it points to pairs
    tl.store(values + place + column, value, mask=mask & writes)
    return q, key, value
