"""Layouts and block runs for tests, in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from pd_connectors.base import CacheDescription
from pd_connectors.prefix_plan import PrefixPlan
from pd_connectors.protocol.layout import BlockLayout, BlockRun, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def full_layout(
    block_size: int = 16, num_kv_heads: int = 1, num_layers: int = 1, head_dim: int = 1, dtype: str = "float32"
) -> BlockLayout:
    """One group of full attention."""
    shape = (num_kv_heads, num_layers, 2, block_size, head_dim)
    return BlockLayout((KVGroup(KVKind.FULL, tuple(range(num_layers)), shape, dtype, block_size),))


def two_groups(
    block_size: int = 16, num_kv_heads: int = 2, head_dim: int = 16, dtype: str = "float32", window: int = 0
) -> BlockLayout:
    """Two layers, and another between them, in groups of different sizes. window: of the other; 0: it has none."""
    full = KVGroup(KVKind.FULL, (0, 2), (num_kv_heads, 2, 2, block_size, head_dim), dtype, block_size)
    kind = KVKind.WINDOW if window else KVKind.FULL
    other = KVGroup(kind, (1,), (num_kv_heads, 1, 2, block_size, head_dim), dtype, block_size, window=window)
    return BlockLayout((full, other))


def mixed_heads(block_size: int = 16, head_dim: int = 1, window: int = 0) -> BlockLayout:
    """Groups of 2 and 4 heads, and one that every rank holds whole. 4 ranks hold each head of the first one twice.

    window: of the second group; 0: it has none.
    """
    full = KVGroup(KVKind.FULL, (0,), (2, 1, 2, block_size, head_dim), "float32", block_size)
    kind = KVKind.WINDOW if window else KVKind.FULL
    other = KVGroup(kind, (1,), (4, 1, 2, block_size, head_dim), "float32", block_size, window=window)
    latent = KVGroup(KVKind.LATENT, (2,), (1, 1, block_size, head_dim), "float32", block_size, sharded=False)
    return BlockLayout((full, other, latent))


FULL = KVGroup(KVKind.FULL, (0, 2), (2, 2, 2, 16, 4), "float32", 16)
WINDOW = KVGroup(KVKind.WINDOW, (1,), (2, 1, 2, 16, 4), "float32", 16, window=24)
LATENT = KVGroup(KVKind.LATENT, (3,), (1, 1, 16, 12), "float32", 16, sharded=False)
STATE = KVGroup(KVKind.STATE, (4,), (2, 1, 40), "float32", 32)
DRAFTS = KVGroup(KVKind.FULL, (5,), (2, 1, 2, 16, 4), "float32", 16, optional=True)
LAYOUTS = {
    "full": BlockLayout((FULL,)),
    "windowed": BlockLayout((FULL, WINDOW)),
    "all windows": BlockLayout((WINDOW,)),
    "hybrid": BlockLayout((FULL, STATE)),
    "latent": BlockLayout((LATENT, WINDOW, STATE)),
    "drafts": BlockLayout((FULL, WINDOW, DRAFTS)),
}


def over(layout: BlockLayout, tp_size: int) -> BlockLayout:
    """The layout on so many ranks."""
    return msgspec.structs.replace(layout, tp_size=tp_size)


def make_cache(layout: BlockLayout, num_blocks: int) -> CacheDescription:
    """One rank's cache of zeros on the CPU."""
    shapes = ((num_blocks, *group.rank_shape(layout.tp_size)) for group in layout.groups)
    tensors = (
        torch.zeros(shape, dtype=DTYPES[group.dtype]) for shape, group in zip(shapes, layout.groups, strict=True)
    )
    return CacheDescription(tuple(tensors), layout)


def shared_cache(layout: BlockLayout, num_blocks: int) -> CacheDescription:
    """One rank's cache of zeros on the CPU, with room for so many blocks of each group, which share one memory."""
    slabs = KvSlabs.of_blocks(layout, num_blocks)
    memory = torch.zeros(slabs.num_bytes, dtype=torch.uint8)
    tensors = []
    for index, group in enumerate(layout.groups):
        numbers, shape = memory.view(DTYPES[group.dtype]), group.rank_shape(layout.tp_size)
        within = torch.empty(shape, device="meta").stride()
        strides = (slabs.stride(index) // numbers.element_size(), *within)
        tensors.append(numbers.as_strided((slabs.num_blocks(index), *shape), strides))
    return CacheDescription(tuple(tensors), layout)


def own_ids(layout: BlockLayout, num_blocks: int) -> tuple[list[int], ...]:
    """Ids of so many blocks of each group in a `shared_cache`, group by group in other slabs."""
    slabs, first, ids = KvSlabs.of_blocks(layout, num_blocks), 0, []
    for count in slabs.per_slab:
        ids.append(list(range(first * count, first * count + num_blocks)))
        first += -(-num_blocks // count)
    return tuple(ids)


def prefix_runs(layout: BlockLayout, first_block: int, num_tokens: int, ids: Sequence[int]) -> tuple[BlockRun, ...]:
    """The blocks that a prefix of so many tokens needs, by group, of an engine that has the first `first_block`.

    ids: of the prompt's blocks from `first_block` on; a group has the same ids, of those that it needs.
    """
    plan, found = PrefixPlan(layout), []
    for group, kind in enumerate(layout.groups):
        assert kind.block_size == layout.block_size
        needed = plan.needed(group, num_tokens, first_block)
        found.append(BlockRun(needed.start, tuple(ids[needed.start - first_block : needed.stop - first_block])))
    return tuple(found)


def handed_runs(layout: BlockLayout, num_tokens: int, ids: Sequence[Sequence[int]]) -> tuple[BlockRun, ...]:
    """The blocks that a handoff of a whole prompt moves. ids: of all blocks of the prompt, by group."""
    spans = [group.handed_over(num_tokens) for group in layout.groups]
    return tuple(BlockRun(span.start, tuple(own[span.start : span.stop])) for span, own in zip(spans, ids, strict=True))


def runs(first_block: int, block_ids: Sequence[int], num_groups: int = 1) -> tuple[BlockRun, ...]:
    """The same blocks in each group."""
    return (BlockRun(first_block, tuple(block_ids)),) * num_groups
