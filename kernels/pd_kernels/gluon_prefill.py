# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""Prefill attention for Hopper GPUs in Gluon: a kernel of specialized warps for large chunks.

A program stays on its multiprocessor and takes one tile after another: 128 query rows (tokens times the group's query
heads) of one KV head. One warp copies queries, keys and values with the tensor memory accelerator into a ring of shared
memory, as far ahead as the ring has room; two warpgroups of 64 rows each compute. While the values of 128 keys are
multiplied, a warpgroup exponentiates the scores of the next keys. The warpgroups take turns at the matrix unit, so that
the softmax of one overlaps the products of the other (FlashAttention-3, arXiv 2407.08608). Keys are visited from the
diagonal to the beginning.

Keys and values of an FP8 cache are widened to float16 on their way into the ring, by four warps instead of the one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pd_kernels.gluon_ring import KEYS, STAGES, WARPGROUP_ROWS, produce, produce_widened, tile_of

_HIDDEN = gl.constexpr(-1e30)  # score of a key that a row does not see
_LOWEST = gl.constexpr(-1e15)  # least maximum of scores; above _HIDDEN, so that hidden keys weigh 0 in every row
_LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _narrow(q, dtype: gl.constexpr):
    """Convert queries [64, SIZE] in shared memory from bfloat16 to float16, see `triton_fp8.beside_fp8`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    wide = gl.minimum(gl.maximum(q.load(layout).to(gl.float32), -65504.0), 65504.0)
    narrow = q._reinterpret(dtype, q.shape, q.layout)
    narrow.store(wide.to(dtype))
    fence_async_shared()
    return narrow


@gluon.jit
def _weigh(scores, top, total, position, begin, scale, MASKED: gl.constexpr):
    """Weights of the keys, highest score and sum of weights so far, and the factor for the previous sums."""
    if MASKED:
        token = begin + gl.arange(0, KEYS, layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(token[None, :] <= position[:, None], scores, _HIDDEN)
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - higher[:, None])
    shrink = gl.exp2(top - higher)
    return weights, shrink, higher, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _multiply_keys(q, k_ring, stage):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    zeros = gl.zeros([WARPGROUP_ROWS, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_values(weights, shrink, sums, v_ring, stage):
    """Start adding the weighted values to the sums.

    Returns the left operand too, because its registers must not be reused before the product is done.
    """
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))
    weights = gl.convert_layout(weights.to(v_ring.dtype), gl.DotOperandLayout(0, sums.type.layout, 2))
    return warpgroup_mma(weights, v_ring.index(stage), sums * shrink[:, None], is_async=True), weights


@gluon.jit
def _take_turn(turns, at, WARPGROUP: gl.constexpr):
    """Wait for the matrix unit: the first warpgroup's turn follows the second's previous one."""
    mbarrier.wait(turns.index(WARPGROUP), (at & 1) ^ (1 - WARPGROUP))


@gluon.jit
def _walk(
    q, k_ring, v_ring, barriers, weights, shrink, top, total, sums, position, scale, at, start, stop,
    WARPGROUP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Attend to steps [start, stop), the last first.

    `weights` belong to the previous step; the values of that step are not yet added.
    """
    _, _, k_full, k_empty, v_full, v_empty, turns, _ = barriers
    for i in range(stop - start):
        before, phase_before = at % STAGES, at // STAGES & 1
        at += 1
        stage = at % STAGES
        mbarrier.wait(k_full.index(stage), at // STAGES & 1)
        _take_turn(turns, at, WARPGROUP)
        scores = _multiply_keys(q, k_ring, stage)
        mbarrier.wait(v_full.index(before), phase_before)
        sums, operand = _add_values(weights, shrink, sums, v_ring, before)
        mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, shrink, top, total = _weigh(scores, top, total, position, (stop - 1 - i) * KEYS, scale, MASKED)
        # Already full. But ptxas moves no instruction across a branch: otherwise the softmax would begin after the sums
        # are done, instead of while they are computed
        mbarrier.wait(v_full.index(before), phase_before)
        sums, operand = warpgroup_mma_wait(0, deps=[sums, operand])
        mbarrier.arrive(v_empty.index(before), count=1)
    return weights, shrink, top, total, sums, at


@gluon.jit
def _add_sink(sinks, first_head, row, top, total, GROUP: gl.constexpr):
    """The sums of weights with one more key, without a value: its score is the head's sink.

    Far above the highest score the weight is infinite, and the row's mean 0.
    """
    return total + gl.exp2(gl.load(sinks + first_head + row % GROUP) * _LOG2_E - top)


@gluon.jit
def _store(
    sums, total, buffer, out, head, query_row, left, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    SIZE: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Store through shared memory, so that whole rows are written."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // SIZE, SIZE // 8], [4, 1], [1, 0])
    row = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, SIZE, layout=gl.SliceLayout(0, layout))
    mean = sums / gl.convert_layout(total, gl.SliceLayout(1, sums.type.layout))[:, None]
    buffer.store(mean.to(buffer.dtype))
    token = WARPGROUP * (WARPGROUP_ROWS // GROUP) + row // GROUP
    at = (query_row + token).to(gl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + row % GROUP
    gl.store(out + at[:, None] * SIZE + column[None, :], buffer.load(layout), mask=(token < left)[:, None])


@gluon.jit
def _consume(
    out, sinks, scale, work, buffers, barriers, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    q_buffers, k_ring, v_ring, out_buffers = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns, _ = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    q = q_buffers.index(WARPGROUP)._reinterpret(
        q_buffers.dtype, [WARPGROUP_ROWS, SIZE], gl.NVMMASharedLayout(128, 16, rank=2)
    )
    row = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    turn, at = 0, 0
    head, _seq, query_row, left, low, _length, num_steps = tile_of(0, work, NUM_KV_HEADS, GROUP)
    while num_steps > 0:
        position = low + (WARPGROUP * WARPGROUP_ROWS + row) // GROUP
        mbarrier.wait(q_full.index(WARPGROUP), turn & 1)
        if q.dtype != k_ring.dtype:
            operand = _narrow(q, k_ring.dtype)
        else:
            operand = q
        mbarrier.wait(k_full.index(at % STAGES), at // STAGES & 1)
        _take_turn(turns, at, WARPGROUP)
        scores = _multiply_keys(operand, k_ring, at % STAGES)
        mbarrier.arrive(turns.index(1 - WARPGROUP), count=1)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(at % STAGES), count=1)
        top = gl.full([WARPGROUP_ROWS], _LOWEST, gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([WARPGROUP_ROWS], gl.float32, gl.SliceLayout(1, layout))
        weights, shrink, top, total = _weigh(scores, top, total, position, (num_steps - 1) * KEYS, scale, True)
        sums = gl.zeros([WARPGROUP_ROWS, SIZE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16]))
        seen = gl.minimum((low + 1) // KEYS, num_steps - 1)  # steps in which all rows see all keys
        weights, shrink, top, total, sums, at = _walk(
            operand, k_ring, v_ring, barriers, weights, shrink, top, total, sums, position, scale, at, seen,
            num_steps - 1, WARPGROUP, True,
        )  # fmt: skip
        weights, shrink, top, total, sums, at = _walk(
            operand, k_ring, v_ring, barriers, weights, shrink, top, total, sums, position, scale, at, 0, seen,
            WARPGROUP, False,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(WARPGROUP), count=1)
        mbarrier.wait(v_full.index(at % STAGES), at // STAGES & 1)
        sums, operand = _add_values(weights, shrink, sums, v_ring, at % STAGES)
        if sinks is not None:
            total = _add_sink(sinks, head * GROUP, row, top, total, GROUP)
        turn += 1  # loads the next tile's numbers during this product
        next_head, _seq, next_row, next_left, low, _length, num_steps = tile_of(turn, work, NUM_KV_HEADS, GROUP)
        sums, operand = warpgroup_mma_wait(0, deps=[sums, operand])
        mbarrier.arrive(v_empty.index(at % STAGES), count=1)
        at += 1
        _store(
            sums, total, out_buffers.index(WARPGROUP), out, head, query_row, left, NUM_KV_HEADS, GROUP, SIZE,
            WARPGROUP,
        )  # fmt: skip
        head, query_row, left = next_head, next_row, next_left


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit(do_not_specialize=["num_tiles", "table_stride"])
def gluon_prefill_kernel(
    query_tiles, key_tiles, value_tiles, out, sinks, block_tables, query_starts, seq_lens, tiles, num_tiles,
    table_stride, scale, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SIZE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Prefill attention of large tiles. The kernel is launched with four warps and starts eight more.

    `scale` is for scores to the base 2; `sinks` are to the base e, None: there are none. The other arguments are those
    of Triton's kernel.
    """
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    IS_FP8: gl.constexpr = key_tiles.dtype == gl.float8e4nv
    wide: gl.constexpr = gl.float16 if IS_FP8 else dtype
    buffers = (
        gl.allocate_shared_memory(
            dtype, [2, WARPGROUP_ROWS // GROUP, GROUP, SIZE], gl.NVMMASharedLayout(128, 16, rank=3)
        ),
        gl.allocate_shared_memory(wide, [STAGES, KEYS, SIZE], layout),
        gl.allocate_shared_memory(wide, [STAGES, KEYS, SIZE], layout),
        gl.allocate_shared_memory(dtype, [2, WARPGROUP_ROWS, SIZE], layout),
    )
    barriers = (
        _barriers(2, 1), _barriers(2, 1), _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(STAGES, 1),
        _barriers(STAGES, 2), _barriers(2, 1), _barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()
    work = (tiles, num_tiles, query_starts, seq_lens)
    given = (query_tiles, key_tiles, value_tiles, block_tables, table_stride)
    copied = buffers  # `produce` does not use it
    if IS_FP8:
        copied = gl.allocate_shared_memory(gl.float8e4nv, [2, KEYS, SIZE], gl.NVMMASharedLayout(64, 8, rank=2))
    gl.warp_specialize(
        [
            (_consume, (out, sinks, scale, work, buffers, barriers, NUM_KV_HEADS, GROUP, SIZE, 0)),
            (_consume, (out, sinks, scale, work, buffers, barriers, NUM_KV_HEADS, GROUP, SIZE, 1)),
            (
                produce_widened if IS_FP8 else produce,
                (given, work, buffers, barriers, copied, NUM_KV_HEADS, GROUP, SIZE, BLOCK_SIZE),
            ),
        ],
        [4, 4 if IS_FP8 else 1],
        [232, 32] if IS_FP8 else [240, 24],
    )
