"""What a sequence holds of the KV cache, and whether it fits into an empty one. Pure: worker and scheduler must agree.

`step_tokens`: tokens that one step computes of the sequence at most.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs

DECODE_TOKENS = 2  # of a decoding sequence: a step that is under way, and the next one
MOST_TOKENS = 1 << 40  # a cache of windows alone has room for any length


def blocks_held(group: KVGroup, num_tokens: int, step_tokens: int) -> int:
    """Blocks of a group that a sequence of `num_tokens` holds at most, until its last token is computed."""
    blocks = -(-num_tokens // group.block_size)
    if group.kind in (KVKind.FULL, KVKind.LATENT):
        return blocks
    seen = group.window if group.kind is KVKind.WINDOW else 1  # a state is read behind the token before the step
    return min(blocks, -(-(seen + step_tokens) // group.block_size) + 1)


def fits(groups: Sequence[KVGroup], slabs: KvSlabs, num_tokens: int, step_tokens: int) -> bool:
    """Whether a sequence of `num_tokens` fits into the cache when nothing else is in it."""
    held = (blocks_held(group, num_tokens, step_tokens) for group in groups)
    return sum(-(-count // most) for count, most in zip(held, slabs.per_slab, strict=True)) <= slabs.num_slabs


def cache_tokens(groups: Sequence[KVGroup], slabs: KvSlabs, step_tokens: int) -> int:
    """The longest sequence that `fits`, in tokens, and at most MOST_TOKENS."""
    return bisect_left(range(MOST_TOKENS), True, key=lambda n: not fits(groups, slabs, n + 1, step_tokens))
