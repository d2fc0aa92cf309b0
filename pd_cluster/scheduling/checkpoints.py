"""After which tokens of a sequence its state is kept, so that a later prompt can go on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.scheduling.sequence_room import most_held
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import KVGroup

# Tokens. Of Qwen3-Next (77 MB a state) in 100 GB, shares of prompt tokens that are hits on Mooncake's conversation and
# synthetic traces: 13.1 and 5.8% with prompts' ends alone, 13.9 and 6.2 with branches, 12.4 and 7.7 with each 8,192
# too, 6.1 and 4.3 with ends and each 2,048: a dense grid evicts the KV that it is for
GRID = 8192


def kept(start: int, end: int, num_prompt: int, branch: int, size: int) -> list[int]:
    """The boundaries in (start, end], multiples of `size`, at which the state is kept until memory is short.

    The end of the prompt, from where the next turn goes on, and of all but its last token, from where the same prompt
    does: one prompt in `size` has both. `branch`: as far as the KV of another prompt goes that is the same. And each
    GRID tokens.
    """
    found = {boundary // size * size for boundary in (num_prompt, num_prompt - 1, branch)}
    found.update(range((start // GRID + 1) * GRID, end + 1, GRID))
    return sorted(boundary for boundary in found if start < boundary <= end)


def newest(start: int, end: int, num_prompt: int, size: int) -> int | None:
    """The boundary in (start, end] of an answer that takes the place of the one before it, for the next turn."""
    boundary = end // size * size
    return boundary if boundary > max(start, num_prompt) else None


def most_taken(group: KVGroup, num_tokens: int) -> int:
    """Blocks of a group that a step of so many tokens of a prompt takes at most, with the states that it keeps."""
    ends_and_branch = 3
    num_kept = ends_and_branch + -(-num_tokens // GRID) if group.kind is KVKind.STATE else 0
    return most_held(group, num_tokens) + num_kept
