# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False
"""The copier of `gluon_mxfp4_experts`: one warp fills a ring of shared memory with weights, scales and rows.

A step's weights are one run of memory. Sizes of copies are powers of 2: eight blocks are copied, then the last one, and
so are their scales. With the last row of scales come seven of the next step: a swizzle's pattern has eight rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pd_kernels.mxfp4_tiles import BLOCKS, LINES, SHARES, STEP

STAGES = {8: 9, 16: 8, 32: 6, 64: 4, 128: 3}  # of the ring, by the rows of a tile: at most 208 KiB
# Rows that are copied at once: an expert's last tile is rarely full. A tile of many rows is copied whole
AT_ONCE = {8: 8, 16: 8, 32: 8, 64: 16, 128: 128}
FIRST = 8  # blocks of a tile that are copied at once, then the last one
_SHARES: gl.constexpr = gl.constexpr(SHARES)
_BLOCKS: gl.constexpr = gl.constexpr(BLOCKS)
_FIRST: gl.constexpr = gl.constexpr(FIRST)
_LINES: gl.constexpr = gl.constexpr(LINES)
_STEP: gl.constexpr = gl.constexpr(STEP)


@gluon.jit
def tile_of(unit, tiles, num_tiles, num_across, SPLIT: gl.constexpr):
    """A unit's tile, its column of outputs, its part of the inputs; the tile's expert, its first row, its last + 1."""
    part, unit = unit % SPLIT, unit // SPLIT
    tile, across = unit // num_across, unit % num_across
    expert = gl.load(tiles + tile)
    return across, part, expert, gl.load(tiles + num_tiles + tile), gl.load(tiles + 2 * num_tiles + tile)


@gluon.jit
def steps_of(part, num_steps, SPLIT: gl.constexpr):
    share = gl.cdiv(num_steps, SPLIT)
    return part * share, gl.minimum((part + 1) * share, num_steps)


@gluon.jit
def _num_copies(first, end, ROWS: gl.constexpr, AT_ONCE: gl.constexpr):
    """Copies of a tile's rows: those after the expert's last row are left as they are."""
    return gl.minimum(gl.cdiv(end - first, AT_ONCE), ROWS // AT_ONCE)


@gluon.jit
def _bring_weights(weight_tiles, ring, stage, place, num_copies, ROWS: gl.constexpr, AT_ONCE: gl.constexpr):
    value_tiles, last_value_tiles, scale_tiles = weight_tiles
    _x_ring, values, last_values, scales, last_scales, is_full, _is_free = ring
    full = is_full.index(stage)
    for count in gl.static_range(1, ROWS // AT_ONCE + 1):  # a barrier takes no number of bytes that is computed
        if num_copies == count:
            mbarrier.expect(full, _LINES * _STEP // 2 + 2 * _FIRST * 128 + count * AT_ONCE * _STEP * 2)
    value, scale = place * (_BLOCKS * 16), place * _BLOCKS
    tma.async_copy_global_to_shared(value_tiles, [value, 0], full, values.index(stage))
    tma.async_copy_global_to_shared(last_value_tiles, [value + _FIRST * 16, 0], full, last_values.index(stage))
    tma.async_copy_global_to_shared(scale_tiles, [scale, 0], full, scales.index(stage))
    tma.async_copy_global_to_shared(scale_tiles, [scale + _FIRST, 0], full, last_scales.index(stage))


@gluon.jit
def _bring_rows(row_tiles, ring, stage, row, step, num_copies, ROWS: gl.constexpr, AT_ONCE: gl.constexpr):
    x_ring, _values, _last_values, _scales, _last_scales, is_full, _is_free = ring
    full = is_full.index(stage)
    for copy in gl.static_range(ROWS // AT_ONCE):
        if copy < num_copies:
            for share in gl.static_range(_SHARES):
                at = [row + copy * AT_ONCE, step * _STEP + share * 64]
                rows = x_ring.index(stage * _SHARES + share).slice(copy * AT_ONCE, AT_ONCE)
                tma.async_copy_global_to_shared(row_tiles, at, full, rows)


@gluon.jit
def bring(
    given, ring, sizes,
    AHEAD: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr,
):  # fmt: skip
    row_tiles, value_tiles, last_value_tiles, scale_tiles, tiles = given
    weight_tiles = value_tiles, last_value_tiles, scale_tiles
    _x_ring, _values, _last_values, _scales, _last_scales, _is_full, is_free = ring
    num_tiles, num_across, num_steps, _num_outputs, _num_rows, _num_chosen = sizes
    turn, num_early = 0, 0
    if AHEAD:  # the kernel ahead has not ended, and weights do not depend on it
        across, part, expert, first, end = tile_of(gl.program_id(0), tiles, num_tiles, num_across, SPLIT)
        begin, stop = steps_of(part, num_steps, SPLIT)
        num_early = gl.where(expert >= 0, gl.minimum(stop - begin, STAGES), 0)
        for early in range(0, num_early):
            place = (expert * num_across + across) * num_steps + begin + early
            _bring_weights(weight_tiles, ring, early, place, _num_copies(first, end, ROWS, AT_ONCE), ROWS, AT_ONCE)
    gdc_wait()
    gdc_launch_dependents()  # here: the next kernel reads the tiles at once
    for unit in range(gl.program_id(0), num_tiles * num_across * SPLIT, gl.num_programs(0)):
        across, part, expert, first, end = tile_of(unit, tiles, num_tiles, num_across, SPLIT)
        if expert >= 0:
            num_copies = _num_copies(first, end, ROWS, AT_ONCE)
            begin, stop = steps_of(part, num_steps, SPLIT)
            for step in range(begin, stop):
                stage = turn % STAGES
                if turn >= num_early:
                    mbarrier.wait(is_free.index(stage), (turn // STAGES & 1) ^ 1)
                    place = (expert * num_across + across) * num_steps + step
                    _bring_weights(weight_tiles, ring, stage, place, num_copies, ROWS, AT_ONCE)
                _bring_rows(row_tiles, ring, stage, first, step, num_copies, ROWS, AT_ONCE)
                turn += 1
