"""What a sequence holds of the KV cache, and whether it fits into an empty one.

Pure: worker and scheduler must agree.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs


# Bytes of keys and values in host memory for each of states. A hit needs both, and each is evicted for itself: with the
# wrong share what is left of one finds nothing. Mooncake's prompts have a checkpoint for each 6,100 tokens: of
# Qwen3-Next 150 MB of keys and values for a state of 77
HOST_SLABS = 2
STATE_SLOTS = 2  # of a sequence: it goes on from a checkpoint in a slot of its own, and steps with a grammar need two

LEAST_HOST_UNITS = 2  # of host memory that is a cache: of its blocks no more than 1 / so many are copied ahead


def most_held(group: KVGroup, num_tokens: int) -> int:
    """Blocks of a group that a sequence of so many tokens holds when its prefill begins. Of states: at most."""
    return STATE_SLOTS * (num_tokens > 0) if group.kind is KVKind.STATE else -(-num_tokens // group.block_size)


def decode_blocks(group: KVGroup, num_tokens: int) -> int:
    """Blocks of a group that a decoding sequence of `num_tokens` holds: what its next token or a later one reads.

    At least 1. A sequence that is prefilled begins with `most_held`.
    """
    return max(1, -(-num_tokens // group.block_size) - group.first_block(num_tokens))


def host_unit(groups: Sequence[KVGroup], per_slab: Sequence[int]) -> tuple[int, ...]:
    """Blocks by group of a unit of host memory: one of each, or beside a slab of states HOST_SLABS of each other group.

    Of Qwen3-Next a state has 77 MB and a block of 64 tokens 1.6 MB: with one of each, 100 GB would hold the states of
    1,270 prompts and 81,000 tokens, and a swapped sequence of 8,000 tokens would take as many bytes as 125 states.
    """
    if all(group.kind is not KVKind.STATE for group in groups):
        return (1,) * len(groups)
    return tuple(
        count * (1 if group.kind is KVKind.STATE else HOST_SLABS) for group, count in zip(groups, per_slab, strict=True)
    )


def fits(groups: Sequence[KVGroup], slabs: KvSlabs, num_tokens: int) -> bool:
    """Whether the empty cache has blocks for all of `num_tokens`, of every group at once."""
    needs = (most_held(group, num_tokens) for group in groups)
    return sum(-(-count // most) for count, most in zip(needs, slabs.per_slab, strict=True)) <= slabs.num_slabs


def cache_tokens(groups: Sequence[KVGroup], slabs: KvSlabs) -> int:
    """The longest sequence that `fits`, in tokens."""
    limit = max(slabs.num_blocks(index) * group.block_size for index, group in enumerate(groups))
    return bisect_left(range(limit), True, key=lambda n: not fits(groups, slabs, n + 1))
