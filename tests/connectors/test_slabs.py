"""How KV groups share memory: no block beyond it, little waste, aligned strides, and one group as if it were alone."""

from __future__ import annotations

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import MOST_SLAB_BLOCKS, MOST_WASTE, KvSlabs
from tests.connectors.layouts import full_layout, over

SHAPES = st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((16, 48, 64, 80, 1024)), st.integers(1, 6))


def group(shape: tuple[int, ...]) -> KVGroup:
    return KVGroup(KVKind.FULL, (0,), shape, "bfloat16", 16)


LAYOUT = st.builds(lambda shapes: BlockLayout(tuple(map(group, shapes))), st.lists(SHAPES, min_size=2, max_size=3))


@pytest.mark.long
@given(LAYOUT, st.integers(0, 1 << 32))
def test_no_block_lies_beyond_the_memory_or_its_slab(layout: BlockLayout, num_bytes: int) -> None:
    slabs = KvSlabs.in_bytes(layout, num_bytes)
    assert slabs.num_bytes <= num_bytes < slabs.num_bytes + slabs.slab_bytes
    for index, kind in enumerate(layout.groups):
        count, stride = slabs.per_slab[index], slabs.stride(index)
        assert count >= 1
        assert stride >= kind.rank_bytes(1), "blocks do not overlap"
        assert count * stride == slabs.slab_bytes, "slabs begin with a block of any group"
        assert stride % (kind.rank_bytes(1) // kind.shape[0]) == 0, "whole heads: kernels count in them"
        assert slabs.num_blocks(index) == slabs.num_slabs * count


@pytest.mark.long
@given(LAYOUT)
def test_little_of_a_slab_is_wasted(layout: BlockLayout) -> None:
    """Or the slab is as large as slabs may be looked for, and none is better."""
    slabs = KvSlabs.in_bytes(layout, 1 << 40)
    sizes = [kind.rank_bytes(1) for kind in layout.groups]
    waste = max(1 - count * size / slabs.slab_bytes for count, size in zip(slabs.per_slab, sizes, strict=True))
    unit = lcm(*(size // kind.shape[0] for size, kind in zip(sizes, layout.groups, strict=True)))
    assert waste <= MOST_WASTE or slabs.slab_bytes < MOST_SLAB_BLOCKS * max(sizes) + unit


def test_the_slabs_of_a_known_model() -> None:
    """Ten layers with windows for each two of full attention: 5 blocks of the first fit into one slab with one."""
    full, window = (KVGroup(KVKind.FULL, (), (16, layers, 2, 16, 128), "bfloat16", 16) for layers in (10, 52))
    slabs = KvSlabs.in_bytes(BlockLayout((full, window)), 1e10)
    assert slabs.per_slab == (26, 5)
    assert 26 * full.block_bytes == 5 * window.block_bytes == slabs.slab_bytes


@pytest.mark.long
@given(LAYOUT, st.integers(1, 1000))
def test_so_many_blocks_of_every_group_fit_at_once(layout: BlockLayout, num_blocks: int) -> None:
    slabs = KvSlabs.of_blocks(layout, num_blocks)
    assert sum(-(-num_blocks // count) for count in slabs.per_slab) == slabs.num_slabs


@pytest.mark.long
@given(st.integers(1, 4), st.integers(0, 1000), st.sampled_from((1, 2, 4)))
def test_one_group_has_all_memory_without_gaps(heads: int, num_blocks: int, tp_size: int) -> None:
    layout = over(full_layout(num_kv_heads=4 * heads), tp_size)
    slabs = KvSlabs.of_blocks(layout, num_blocks)
    assert slabs == KvSlabs.in_bytes(layout, num_blocks * layout.rank_bytes + layout.rank_bytes - 1)
    assert (slabs.num_blocks(0), slabs.num_bytes) == (num_blocks, num_blocks * layout.rank_bytes)
    assert slabs.stride(0) == layout.rank_bytes
