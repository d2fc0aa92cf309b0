"""Layouts and block runs for tests, in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from pd_connectors.base import CacheDescription
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def full_layout(
    block_size: int = 16, num_kv_heads: int = 1, num_layers: int = 1, head_dim: int = 1, dtype: str = "float32"
) -> BlockLayout:
    """One group of full attention."""
    shape = (num_kv_heads, num_layers, 2, block_size, head_dim)
    return BlockLayout((KVGroup(KVKind.FULL, tuple(range(num_layers)), shape, dtype, block_size),))


def two_groups(block_size: int = 16, num_kv_heads: int = 2, head_dim: int = 16, dtype: str = "float32") -> BlockLayout:
    """Two layers of full attention around one with a sliding window: blocks of different sizes."""
    full = KVGroup(KVKind.FULL, (0, 2), (num_kv_heads, 2, 2, block_size, head_dim), dtype, block_size)
    window = KVGroup(KVKind.WINDOW, (1,), (num_kv_heads, 1, 2, block_size, head_dim), dtype, block_size, window=8)
    return BlockLayout((full, window))


def mixed_heads(block_size: int = 16, head_dim: int = 1) -> BlockLayout:
    """Groups of 2 and 4 heads, and one that every rank holds whole. 4 ranks hold each head of the first one twice."""
    full = KVGroup(KVKind.FULL, (0,), (2, 1, 2, block_size, head_dim), "float32", block_size)
    window = KVGroup(KVKind.WINDOW, (1,), (4, 1, 2, block_size, head_dim), "float32", block_size, window=8)
    latent = KVGroup(KVKind.LATENT, (2,), (1, 1, block_size, head_dim), "float32", block_size, sharded=False)
    return BlockLayout((full, window, latent))


def over(layout: BlockLayout, tp_size: int) -> BlockLayout:
    """The layout on so many ranks."""
    return msgspec.structs.replace(layout, tp_size=tp_size)


def make_cache(layout: BlockLayout, num_blocks: int) -> CacheDescription:
    """One rank's cache of zeros on the CPU."""
    shapes = ((num_blocks, *group.rank_shape(layout.tp_size)) for group in layout.groups)
    tensors = (
        torch.zeros(shape, dtype=DTYPES[group.dtype]) for shape, group in zip(shapes, layout.groups, strict=True)
    )
    return CacheDescription(tuple(tensors), layout, num_blocks)


def runs(first_block: int, block_ids: Sequence[int], num_groups: int = 1) -> tuple[BlockRun, ...]:
    """The same blocks in each group."""
    return (BlockRun(first_block, tuple(block_ids)),) * num_groups
