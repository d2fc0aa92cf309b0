# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The producer of the prefill kernel for Hopper GPUs: it fills a ring of keys and values in shared memory.

One warp copies queries, keys and values with the tensor memory accelerator, as far ahead as the ring has room. Keys and
values of an FP8 cache are copied to a buffer, and four warps convert them to float16 into the ring.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(128)  # rows of a tile
KEYS = gl.constexpr(128)  # keys of a step
STAGES = gl.constexpr(2)  # stages of the ring
WARPGROUP_ROWS = gl.constexpr(64)  # rows of a warpgroup
_PIECE = gl.constexpr(64)  # keys in one cache block, and columns that the accelerator swizzles together


@gluon.jit
def tile_of(turn, work, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """The program's tile of a turn: most keys first, and every other turn in reverse order for balance.

    Returns KV head, sequence, query row of the first token, tokens of the chunk from there on, position of the first
    token, length of the sequence, steps of KEYS keys. 0 steps: no tile in this turn or later, as padding comes last.
    """
    tiles, num_tiles, query_starts, seq_lens = work
    num_programs = gl.num_programs(0)
    place = gl.program_id(0)
    place = turn * num_programs + gl.where(turn % 2 == 0, place, num_programs - 1 - place)
    there = place < num_tiles * NUM_KV_HEADS
    place = gl.where(there, place, 0)
    head, tile = place % NUM_KV_HEADS, place // NUM_KV_HEADS
    seq, first = gl.load(tiles + tile), gl.load(tiles + num_tiles + tile)
    query_start, length = gl.load(query_starts + seq), gl.load(seq_lens + seq)
    num_queries = gl.load(query_starts + seq + 1) - query_start
    low = length - num_queries + first
    high = gl.minimum(low + ROWS // GROUP, length)
    num_steps = gl.where(there & (first < num_queries), gl.cdiv(high, KEYS), 0)
    return head, seq, query_start + first, num_queries - first, low, length, num_steps


@gluon.jit
def _bring(descriptor, blocks, head, offsets, barrier, ring, stage, SIZE: gl.constexpr):
    """Copy KEYS tokens, from halves of two cache blocks, into a stage in the order that a product reads."""
    BITS: gl.constexpr = ring.dtype.primitive_bitwidth
    pieces: gl.constexpr = gl.NVMMASharedLayout(_PIECE * BITS // 8, BITS, rank=4)
    tile = ring.index(stage)._reinterpret(ring.dtype, [2 * SIZE // _PIECE, 1, 1, _PIECE, _PIECE], pieces)
    mbarrier.expect(barrier, KEYS * SIZE * BITS // 8)
    for column in gl.static_range(SIZE // _PIECE):
        for half in gl.static_range(2):
            at = [blocks[half], head, offsets[half], column * _PIECE]
            tma.async_copy_global_to_shared(descriptor, at, barrier, tile.index(column * 2 + half))


@gluon.jit
def _bring_queries(descriptor, row, head, turn, buffers, full, empty, GROUP: gl.constexpr, SIZE: gl.constexpr):
    for w in gl.static_range(2):
        mbarrier.wait(empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(full.index(w), WARPGROUP_ROWS * SIZE * 2)
        where = [row + w * (WARPGROUP_ROWS // GROUP), head * GROUP, 0]
        tma.async_copy_global_to_shared(descriptor, where, full.index(w), buffers.index(w))


@gluon.jit
def _place(table, begin, length, BLOCK_SIZE: gl.constexpr):
    """The cache blocks, and the offsets in them, of both halves of the KEYS tokens from `begin` on."""
    middle = gl.minimum(begin + _PIECE, length - 1)  # no block for the second half: any will do, masked
    block = gl.load(table + begin // BLOCK_SIZE)
    next_block = gl.load(table + middle // BLOCK_SIZE)
    return (block, next_block), (begin % BLOCK_SIZE, (begin + _PIECE) % BLOCK_SIZE)


@gluon.jit
def _clear(tile, count, SIZE: gl.constexpr):
    """Zero the rows from `count` on: memory after a sequence may be NaN, and 0 * NaN is NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    pieces = tile._reinterpret(tile.dtype, [KEYS * SIZE // 512, 8, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    for eighth in range(count // 8, KEYS // 8):
        filled = (eighth * 8 + row < count)[:, None]
        for column in gl.static_range(SIZE // _PIECE):
            piece = pieces.index(column * (KEYS // 8) + eighth)
            piece.store(gl.where(filled, piece.load(layout), 0.0))


@gluon.jit
def produce(
    given, work, buffers, barriers, _copied,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    query_tiles, key_tiles, value_tiles, block_tables, table_stride = given
    q_buffers, k_ring, v_ring, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, alone = barriers
    turn, at, num_cleared = 0, 0, 0
    head, seq, query_row, _left, _low, length, num_steps = tile_of(0, work, NUM_KV_HEADS, GROUP)
    while num_steps > 0:
        table = block_tables + seq.to(gl.int64) * table_stride
        _bring_queries(query_tiles, query_row, head, turn, q_buffers, q_full, q_empty, GROUP, SIZE)
        for i in range(num_steps):
            begin = (num_steps - 1 - i) * KEYS
            stage, phase = at % STAGES, at // STAGES & 1
            blocks, offsets = _place(table, begin, length, BLOCK_SIZE)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _bring(key_tiles, blocks, head, offsets, k_full.index(stage), k_ring, stage, SIZE)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            if begin + KEYS <= length:
                _bring(value_tiles, blocks, head, offsets, v_full.index(stage), v_ring, stage, SIZE)
            else:
                _bring(value_tiles, blocks, head, offsets, alone.index(0), v_ring, stage, SIZE)
                mbarrier.wait(alone.index(0), num_cleared & 1)
                num_cleared += 1
                _clear(v_ring.index(stage), length - begin, SIZE)
                fence_async_shared()
                mbarrier.arrive(v_full.index(stage), count=1)
            at += 1
        turn += 1
        head, seq, query_row, _left, _low, length, num_steps = tile_of(turn, work, NUM_KV_HEADS, GROUP)


@gluon.jit
def _widen(copied, ring, stage, count, SIZE: gl.constexpr):
    """Convert a copied stage to float16, into a stage of the ring. Rows from `count` on become 0: see `_clear`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    shape: gl.constexpr = [SIZE // _PIECE, KEYS, _PIECE]
    narrow = copied._reinterpret(copied.dtype, shape, gl.NVMMASharedLayout(_PIECE, 8, rank=2))
    wide = ring.index(stage)._reinterpret(ring.dtype, shape, gl.NVMMASharedLayout(128, 16, rank=2))
    filled = (gl.arange(0, KEYS, layout=gl.SliceLayout(1, layout)) < count)[:, None]
    for column in gl.static_range(SIZE // _PIECE):
        numbers = narrow.index(column).load(layout).to(gl.float16)
        wide.index(column).store(gl.where(filled, numbers, 0.0))
    fence_async_shared()


@gluon.jit
def produce_widened(
    given, work, buffers, barriers, copied,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """`produce` of an FP8 cache. `copied` [2, KEYS, SIZE] has one stage of keys, and one of values."""
    query_tiles, key_tiles, value_tiles, block_tables, table_stride = given
    q_buffers, k_ring, v_ring, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, arrived = barriers
    turn, at = 0, 0
    head, seq, query_row, _left, _low, length, num_steps = tile_of(0, work, NUM_KV_HEADS, GROUP)
    while num_steps > 0:
        table = block_tables + seq.to(gl.int64) * table_stride
        _bring_queries(query_tiles, query_row, head, turn, q_buffers, q_full, q_empty, GROUP, SIZE)
        begin = (num_steps - 1) * KEYS
        blocks, offsets = _place(table, begin, length, BLOCK_SIZE)
        _bring(key_tiles, blocks, head, offsets, arrived.index(0), copied, 0, SIZE)
        _bring(value_tiles, blocks, head, offsets, arrived.index(1), copied, 1, SIZE)
        for i in range(num_steps):
            stage, phase, count = at % STAGES, at // STAGES & 1, length - begin
            begin = gl.maximum(begin - KEYS, 0)
            blocks, offsets = _place(table, begin, length, BLOCK_SIZE)
            mbarrier.wait(arrived.index(0), at & 1)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _widen(copied.index(0), k_ring, stage, KEYS, SIZE)
            mbarrier.arrive(k_full.index(stage), count=1)
            if i + 1 < num_steps:
                _bring(key_tiles, blocks, head, offsets, arrived.index(0), copied, 0, SIZE)
            mbarrier.wait(arrived.index(1), at & 1)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            if count < KEYS:
                _widen(copied.index(1), v_ring, stage, count, SIZE)
            else:  # without a mask
                _widen(copied.index(1), v_ring, stage, KEYS, SIZE)
            mbarrier.arrive(v_full.index(stage), count=1)
            if i + 1 < num_steps:
                _bring(value_tiles, blocks, head, offsets, arrived.index(1), copied, 1, SIZE)
            at += 1
        turn += 1
        head, seq, query_row, _left, _low, length, num_steps = tile_of(turn, work, NUM_KV_HEADS, GROUP)
